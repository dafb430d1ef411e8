// What becomes of the sums of the grouped product; see grouped.cuh. A thread's columns are tokens, its rows features.
#pragma once
#include "hpcjit/math/activation.cuh"
#include "hpcjit/ptx/named_barrier.cuh"
#include "moe/grouped_sums.cuh"

namespace hpcjit::moe {

// The thread's place in a tile of 64 features and kColumns tokens.
struct GroupedPlace {
  int group, warp, lane;
  __device__ int feature(int i) const { return 16 * warp + lane / 4 + (i & 2) * 4; }  // of sum i
  __device__ int column(int i) const { return 8 * (i / 4) + 2 * (lane % 4) + (i & 1); }
};

// FP8 without blocks: the scales of the thread's four rows, [box][first, second].
template <class Config, bool kGateUp>
struct GroupedRowScales {
  static constexpr bool kUsed = Config::kQuant == kQuantTensor || Config::kQuant == kQuantChannel;
  float scale[2][2] = {{1.f, 1.f}, {1.f, 1.f}};

  __device__ void load(const GroupedParams& p, const GroupedItem& item, const GroupedPlace& place) {
    if constexpr (kUsed) {
#pragma unroll
      for (int box = 0; box < 2; ++box) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
          scale[box][half] = p.weight_scale[index(p, item, place, box, half)];
      }
    }
  }

  __device__ static int64_t index(const GroupedParams& p, const GroupedItem& item, const GroupedPlace& place,
                                  int box, int half) {
    if constexpr (Config::kQuant == kQuantTensor) return item.expert;
    const int tile = kGateUp ? item.feature_tile : item.feature_tile * 2 + box;
    const int feature = min(tile * kBoxRows + place.feature(2 * half), p.features - 1);
    const int64_t matrix = kGateUp ? int64_t(item.expert) * 2 + box : item.expert;
    return matrix * p.features + feature;
  }

  template <int n>
  __device__ void apply(float (&value)[2][n]) const {
    if constexpr (kUsed) {
#pragma unroll
      for (int i = 0; i < n; ++i) {
        value[0][i] *= scale[0][i % 4 / 2];
        value[1][i] *= scale[1][i % 4 / 2];
      }
    }
  }
};

// Rows of the result, written as they lie in registers: eight lanes have neighbouring features of a token.
template <class Config, int n>
__device__ __forceinline__ void store_rows(const GroupedParams& p, const GroupedItem& item,
                                           const GroupedPlace& place, const float (&value)[2][n]) {
  using row_t = typename Config::partial_t;
  constexpr int kColumns = n * 2;
  const int first = place.group * kColumns;
  row_t* out = static_cast<row_t*>(p.out) + int64_t(item.first + first) * p.out_stride;
#pragma unroll
  for (int i = 0; i < n; ++i) {
    if (first + place.column(i) >= item.rows) continue;
    row_t* row = out + place.column(i) * p.out_stride;
#pragma unroll
    for (int box = 0; box < 2; ++box) {
      const int feature = (item.feature_tile * 2 + box) * kBoxRows + place.feature(i);
      if (feature < p.features) row[feature] = from_float<row_t>(value[box][i]);
    }
  }
}

// The activation of gate and up, and its way through shared memory to rows in global memory: bf16, or e4m3 with a scale for
// each row and 64 features, whose maximum the four warps find together.
template <class Config, int n>
class HiddenStore {
  using Shape = GroupedShape<Config, true>;
  using weight_t = typename Config::weight_t;
  static constexpr int kColumns = Shape::kColumns;

 public:
  __device__ HiddenStore(const GroupedParams& p, const GroupedItem& item, const GroupedPlace& place,
                         uint8_t* smem)
      : p_(p), item_(item), place_(place), first_(place.group * kColumns) {
    staged_ = smem + Shape::kStagedAt + first_ * Shape::kStagedPitch;
    maxima_ = reinterpret_cast<float*>(smem + Shape::kMaximaAt) + place.group * 4 * kColumns;
  }

  // Destroys `value`. All threads of the warpgroup call it.
  __device__ __forceinline__ void run(float (&value)[2][n]) {
    activate_all(value);
    if constexpr (Shape::kScaled) share_maxima(value[0]);
    named_barrier::sync<128>(1 + place_.group);  // also: the rows before these have left shared memory
    if constexpr (Shape::kScaled) scale_all(value[0]);
    weight_t* staged = reinterpret_cast<weight_t*>(staged_);
#pragma unroll
    for (int i = 0; i < n; ++i)
      staged[place_.column(i) * (Shape::kStagedPitch / int(sizeof(weight_t))) + place_.feature(i)] =
          from_float<weight_t>(value[0][i]);
    named_barrier::sync<128>(1 + place_.group);
    write();
  }

 private:
  __device__ __forceinline__ void activate_all(float (&value)[2][n]) {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      float weight = 1.f;
      if constexpr (Config::kWeightsOnInput) weight = topk_weight(first_ + place_.column(i));
      const float gate = value[0][i] * weight, up = value[1][i] * weight;
      const bool live = item_.feature_tile * kHidden + place_.feature(i) < p_.features;
      value[0][i] = live ? activate<Activation(Config::kActivation), false>(gate) * up : 0.f;
    }
  }

  __device__ float topk_weight(int r) const {
    if (r >= item_.rows) return 0.f;
    const int pair = p_.sorted[item_.first + r];
    return p_.topk_weights[pair / p_.top_k * p_.weights_stride + pair % p_.top_k];
  }

  __device__ __forceinline__ void share_maxima(const float (&h)[n]) {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      if (i & 2) continue;
      float largest = fmaxf(fabsf(h[i]), fabsf(h[i + 2]));  // fmaxf drops NaN
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2)
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
      if (place_.lane < 4) maxima_[place_.warp * kColumns + place_.column(i)] = largest;
    }
  }

  __device__ __forceinline__ void scale_all(float (&h)[n]) {
    const bool writes = place_.warp == 0 && place_.lane < 4;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      if (i & 2) continue;
      const int column = place_.column(i);
      float largest = maxima_[column];
#pragma unroll
      for (int warp = 1; warp < 4; ++warp) largest = fmaxf(largest, maxima_[warp * kColumns + column]);
      const float scale = fmaxf(largest, kQuantFloor) / kE4m3Max;
      const float inverse = 1.f / scale;
      h[i] *= inverse;
      h[i + 2] *= inverse;
      if (writes && first_ + column < item_.rows)
        p_.out_scale[int64_t(item_.first + first_ + column) * p_.out_scale_stride + item_.feature_tile] =
            scale;
    }
  }

  __device__ __forceinline__ void write() const {
    constexpr int kPerChunk = 16 / int(sizeof(weight_t)), kChunks = kHidden / kPerChunk;
    const int thread = place_.warp * 32 + place_.lane;
    const int feature = item_.feature_tile * kHidden + thread % kChunks * kPerChunk;
    if (feature >= p_.features) return;
    weight_t* out = static_cast<weight_t*>(p_.out) + feature;
    for (int r = thread / kChunks; r < kColumns && first_ + r < item_.rows; r += 128 / kChunks)
      *reinterpret_cast<uint4*>(out + int64_t(item_.first + first_ + r) * p_.out_stride) =
          *reinterpret_cast<const uint4*>(staged_ + r * Shape::kStagedPitch + thread % kChunks * 16);
  }

  const GroupedParams& p_;
  const GroupedItem& item_;
  const GroupedPlace& place_;
  int first_;
  uint8_t* staged_;
  float* maxima_;
};

}  // namespace hpcjit::moe
