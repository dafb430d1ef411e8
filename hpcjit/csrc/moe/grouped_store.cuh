// What becomes of the sums of the grouped product; see grouped.cuh. A thread's columns are tokens, its rows features.
#pragma once
#include "hpcjit/math/activation.cuh"
#include "hpcjit/ptx/named_barrier.cuh"
#include "hpcjit/ptx/store_matrix.cuh"
#include "moe/grouped_sums.cuh"

namespace hpcjit::moe {

constexpr int kBothGroups = 3;  // barrier of the warpgroups that compute; each one's own is 1 + its number

// Results of 64 features of a warpgroup to shared memory: [token][64], the 16-byte pieces of each 128 bytes of a row swapped
// by the row's number, so that those of eight rows lie in different banks.
template <class row_t, int n>
__device__ __forceinline__ void stage_rows(uint8_t* staged, const GroupedPlace<false>& place,
                                           const float (&value)[n]) {
  if constexpr (sizeof(row_t) == 2) {
    const uint32_t base = copy::shared_address(staged);
    const int token = place.lane % 8 + place.lane / 16 * 8, piece = 2 * place.warp + place.lane / 8 % 2;
    const uint32_t target = base + token * 128 + ((piece ^ (token & 7)) << 4);
#pragma unroll
    for (int i = 0; i < n; i += 8) {
      uint32_t packed[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) packed[j] = pack2<row_t>(value[i + 2 * j], value[i + 2 * j + 1]);
      store_matrices_transposed(target + i * 2 * 128, packed);
    }
  } else {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const int token = place.column(i), feature = place.feature(i) % 64;
      const int piece = (feature / 4) ^ (token & 7);
      reinterpret_cast<float*>(staged)[token * 64 + piece * 4 + feature % 4] = value[i];
    }
  }
}

// Rows of the result to where the caller wants them, whole lines at a time. By all threads of a warpgroup.
template <class Config, int n>
__device__ __forceinline__ void store_rows(const GroupedParams& p, const GroupedItem& item,
                                           const GroupedPlace<false>& place, uint8_t* staged,
                                           const float (&value)[n]) {
  using row_t = typename Config::partial_t;
  constexpr int kOfPiece = 16 / int(sizeof(row_t)), kPieces = 64 / kOfPiece;
  named_barrier::sync<128>(1 + place.group);  // the rows before these have left shared memory
  stage_rows<row_t>(staged, place, value);
  named_barrier::sync<128>(1 + place.group);
  const int thread = place.warp * 32 + place.lane, piece = thread % kPieces;
  const int feature = item.feature_tile * kWeightRows + place.group * 64 + piece * kOfPiece;
  row_t* out = static_cast<row_t*>(p.out) + int64_t(item.first) * p.out_stride + feature;
  const bool whole = feature + kOfPiece <= p.features &&
                     (reinterpret_cast<uintptr_t>(p.out) | p.out_stride * sizeof(row_t)) % 16 == 0;
  for (int r = thread / kPieces; r < item.rows; r += 128 / kPieces) {
    const uint8_t* source = staged + r * 64 * sizeof(row_t) + ((piece ^ (r & 7)) << 4);
    if (whole) {
      *reinterpret_cast<uint4*>(out + r * p.out_stride) = *reinterpret_cast<const uint4*>(source);
    } else {
      for (int i = 0; i < kOfPiece && feature + i < p.features; ++i)
        out[r * p.out_stride + i] = reinterpret_cast<const row_t*>(source)[i];
    }
  }
}

// The activation of gate and up, and its way through shared memory to rows in global memory: bf16, or e4m3 with a scale for
// each row and 64 features, whose maximum the eight warps find together.
template <class Config, int n>
class HiddenStore {
  using Shape = GroupedShape<Config, true>;
  using weight_t = typename Config::weight_t;
  static constexpr int kColumns = 2 * n;

 public:
  __device__ HiddenStore(const GroupedParams& p, const GroupedItem& item, const GroupedPlace<true>& place,
                         uint8_t* staged)
      : p_(p), item_(item), place_(place), staged_(staged) {
    maxima_ = reinterpret_cast<float*>(staged + Shape::kHiddenBytes);
  }

  // By all threads of both warpgroups; what was staged before has left shared memory when they meet.
  __device__ __forceinline__ void run(const float (&value)[n]) {
    float h[n / 2];  // h[2 j + i]: column 8 j + 2 t + i
    activate_all(value, h);
    if constexpr (Shape::kScaled) {
      share_maxima(h);
      named_barrier::sync<256>(kBothGroups);
      find_scale();
    }
    named_barrier::sync<256>(kBothGroups);
    stage(h);
    named_barrier::sync<256>(kBothGroups);
    write();
  }

 private:
  __device__ int column(int i) const { return 8 * (i / 2) + 2 * (place_.lane % 4) + i % 2; }

  __device__ __forceinline__ void activate_all(const float (&value)[n], float (&h)[n / 2]) {
    const bool live = item_.feature_tile * kHidden + place_.feature(0) < p_.features;
#pragma unroll
    for (int i = 0; i < n / 2; ++i) {
      float weight = 1.f;
      if constexpr (Config::kWeightsOnInput) weight = topk_weight(column(i));
      const int at = i / 2 * 4 + i % 2;
      const float gate = value[at] * weight, up = value[at + 2] * weight;
      h[i] = live ? activate<Activation(Config::kActivation), false>(gate) * up : 0.f;
    }
  }

  __device__ float topk_weight(int r) const {
    if (r >= item_.rows) return 0.f;
    const int pair = p_.sorted[item_.first + r];
    return p_.topk_weights[pair / p_.top_k * p_.weights_stride + pair % p_.top_k];
  }

  // A step of it halves the columns of a lane: it keeps and gets those of one half. Where that begins.
  template <int kLeft, int kLanes>
  __device__ __forceinline__ int halve(float (&largest)[n / 2]) const {
    if constexpr (kLeft == 0) {  // one is left
      largest[0] = fmaxf(largest[0], __shfl_xor_sync(0xffffffffu, largest[0], kLanes));
      return 0;
    }
    const bool upper = place_.lane & kLanes;
#pragma unroll
    for (int i = 0; i < kLeft; ++i) {
      const float low = largest[i], high = largest[i + kLeft];
      largest[i] = fmaxf(upper ? high : low, __shfl_xor_sync(0xffffffffu, upper ? low : high, kLanes));
    }
    return upper ? kLeft : 0;
  }

  // Of each column, over the eight lanes that have it.
  __device__ __forceinline__ void share_maxima(const float (&h)[n / 2]) {
    float largest[n / 2];
#pragma unroll
    for (int i = 0; i < n / 2; ++i) largest[i] = fmaxf(fabsf(h[i]), 0.f);  // fmaxf drops NaN
    // Of h, whose maximum is largest[0] then.
    const int first = halve<n / 4, 4>(largest) + halve<n / 8, 8>(largest) + halve<n / 16, 16>(largest);
    float* maxima = maxima_ + (place_.group * 4 + place_.warp) * kColumns;
#pragma unroll
    for (int i = 0; i < Shape::max(n / 16, 1); ++i) maxima[column(first + i)] = largest[i];
  }

  // A thread's column, over all warps.
  __device__ __forceinline__ void find_scale() {
    const int column = threadIdx.x;
    if (column >= kColumns) return;
    float largest = maxima_[column];
#pragma unroll
    for (int warp = 1; warp < 8; ++warp) largest = fmaxf(largest, maxima_[warp * kColumns + column]);
    const float scale = fmaxf(largest, kQuantFloor) / kE4m3Max;
    maxima_[8 * kColumns + column] = 1.f / scale;
    if (column < item_.rows)
      p_.out_scale[int64_t(item_.first + column) * p_.out_scale_stride + item_.feature_tile] = scale;
  }

  __device__ __forceinline__ void stage(float (&h)[n / 2]) {
    constexpr int kPitch = Shape::kHiddenPitch / int(sizeof(weight_t));
    weight_t* staged = reinterpret_cast<weight_t*>(staged_) + place_.feature(0);
#pragma unroll
    for (int i = 0; i < n / 2; ++i) {
      if constexpr (Shape::kScaled) h[i] *= maxima_[8 * kColumns + column(i)];
      staged[column(i) * kPitch] = from_float<weight_t>(h[i]);
    }
  }

  __device__ __forceinline__ void write() const {
    constexpr int kOfPiece = 16 / int(sizeof(weight_t)), kPieces = kHidden / kOfPiece;
    const int thread = place_.group * 128 + place_.warp * 32 + place_.lane;
    const int feature = item_.feature_tile * kHidden + thread % kPieces * kOfPiece;
    if (feature >= p_.features) return;
    weight_t* out = static_cast<weight_t*>(p_.out) + feature;
    for (int r = thread / kPieces; r < item_.rows; r += 256 / kPieces)
      *reinterpret_cast<uint4*>(out + int64_t(item_.first + r) * p_.out_stride) =
          *reinterpret_cast<const uint4*>(staged_ + r * Shape::kHiddenPitch + thread % kPieces * 16);
  }

  const GroupedParams& p_;
  const GroupedItem& item_;
  const GroupedPlace<true>& place_;
  uint8_t* staged_;
  float* maxima_;
};

}  // namespace hpcjit::moe
