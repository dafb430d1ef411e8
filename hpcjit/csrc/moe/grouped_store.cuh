// What becomes of the sums of the grouped product; see grouped.cuh. A thread's columns are tokens, its rows features.
#pragma once
#include "hpcjit/math/activation.cuh"
#include "hpcjit/ptx/global.cuh"
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
class RowStore {
  using row_t = typename Config::partial_t;
  static constexpr int kOfPiece = 16 / int(sizeof(row_t)), kPieces = 64 / kOfPiece;
  // Of a step: a multiple of eight, so that a thread's pieces are swapped alike.
  static constexpr int kRowsAtOnce = 128 / kPieces;
  static constexpr int kSteps = 2 * n / kRowsAtOnce, kTogether = kSteps < 4 ? kSteps : 4;

 public:
  __device__ RowStore(const GroupedParams& p, const GroupedItem& item, const GroupedPlace<false>& place,
                      uint8_t* staged)
      : p_(p), item_(item), place_(place), staged_(staged) {
    const int thread = place.warp * 32 + place.lane, piece = thread % kPieces;
    first_ = thread / kPieces;
    feature_ = item.feature_tile * kWeightRows + place.group * 64 + piece * kOfPiece;
    source_ = staged + first_ * 64 * sizeof(row_t) + ((piece ^ (first_ & 7)) << 4);
  }

  __device__ __forceinline__ void run(const float (&value)[n]) {
    named_barrier::sync<128>(1 + place_.group);  // the rows before these have left shared memory
    stage_rows<row_t>(staged_, place_, value);
    named_barrier::sync<128>(1 + place_.group);
    out_ = static_cast<row_t*>(p_.out) + (item_.first + first_) * p_.out_stride + feature_;
    const bool whole = feature_ + kOfPiece <= p_.features &&
                       (reinterpret_cast<uintptr_t>(p_.out) | p_.out_stride * sizeof(row_t)) % 16 == 0;
    if (whole)
      write_pieces();
    else
      write_elements();
  }

 private:
  __device__ const uint8_t* source(int step) const {
    return source_ + step * (kRowsAtOnce * 64 * int(sizeof(row_t)));
  }
  __device__ row_t* out(int step) const { return out_ + step * kRowsAtOnce * p_.out_stride; }
  __device__ bool live(int step) const { return first_ + step * kRowsAtOnce < item_.rows; }

  // Several are read before the first is written.
  __device__ __forceinline__ void write_pieces() const {
#pragma unroll
    for (int first = 0; first < kSteps; first += kTogether) {
      if (!live(first)) return;
      uint4 piece[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) piece[i] = *reinterpret_cast<const uint4*>(source(first + i));
#pragma unroll
      for (int i = 0; i < kTogether; ++i)
        if (live(first + i)) global::store_16(out(first + i), piece[i]);
    }
  }

  __device__ __forceinline__ void write_elements() const {
#pragma unroll 1
    for (int step = 0; live(step); ++step)
#pragma unroll 1
      for (int i = 0; i < kOfPiece && feature_ + i < p_.features; ++i)
        out(step)[i] = reinterpret_cast<const row_t*>(source(step))[i];
  }

  const GroupedParams& p_;
  const GroupedItem& item_;
  const GroupedPlace<false>& place_;
  uint8_t* staged_;
  const uint8_t* source_;
  row_t* out_;
  int first_, feature_;
};

// The activation of gate and up, and its way through shared memory to rows in global memory: bf16, or e4m3 with a scale for
// each row and 64 features, whose maximum the eight warps find together.
//
// Staged are lines of 128 bytes with all features of the item: of one token in bf16, of two in e4m3, whose codes alternate,
// since a matrix's elements have 16 bits. Their 16-byte pieces are swapped by the line's number.
template <class Config, int n>
class HiddenStore {
  using Shape = GroupedShape<Config, true>;
  using weight_t = typename Config::weight_t;
  static constexpr int kColumns = 2 * n, kValues = n / 2;      // of the tile, of a thread
  static constexpr int kTogether = kValues < 8 ? kValues : 8;  // activated, of up to 32 columns
  static constexpr bool kCodes = sizeof(weight_t) == 1;

 public:
  __device__ HiddenStore(const GroupedParams& p, const GroupedItem& item, const GroupedPlace<true>& place,
                         uint8_t* staged)
      : p_(p), item_(item), place_(place), staged_(staged) {
    maxima_ = reinterpret_cast<float*>(staged + Shape::kHiddenBytes);
  }

  // By all threads of both warpgroups; what was staged before has left shared memory when they meet.
  __device__ __forceinline__ void run(const float (&value)[n]) {
    float h[kValues];  // h[2 j + i]: column 8 j + 2 t + i
    float scale = 0.f;
    activate_all(value, h);
    if constexpr (Shape::kScaled) {
      named_barrier::sync<256>(kBothGroups);
      scale = find_scale();
    }
    named_barrier::sync<256>(kBothGroups);
    if constexpr (Shape::kScaled) quantise(h);
    stage(h);
    named_barrier::sync<256>(kBothGroups);
    if constexpr (Shape::kScaled) store_scale(scale);
    write();
  }

 private:
  __device__ int thread() const { return place_.group * 128 + place_.warp * 32 + place_.lane; }
  __device__ int column(int i) const { return 8 * (i / 2) + 2 * (place_.lane % 4) + i % 2; }

  // Columns past the end of the tile are left out, 32 at a time. Features past the end are 0 or NaN, their weights being
  // zeros: neither counts in a maximum.
  __device__ __forceinline__ void activate_all(const float (&value)[n], float (&h)[kValues]) const {
    float largest[kValues / kTogether];
#pragma unroll
    for (int part = 0; part < kValues / kTogether; ++part) {
      const int first = part * kTogether;
      largest[part] = 0.f;
#pragma unroll
      for (int i = 0; i < kTogether; ++i) h[first + i] = 0.f;
      if (4 * first >= item_.rows) continue;
#pragma unroll
      for (int i = 0; i < kTogether; ++i) h[first + i] = activated(value, first + i);
      if constexpr (Shape::kScaled) largest[part] = largest_of(h, first);
    }
    if constexpr (Shape::kScaled) {
      float* maxima = maxima_ + (place_.group * 4 + place_.warp) * kColumns + column(kept());
#pragma unroll
      for (int part = 0; part < kValues / kTogether; ++part) maxima[4 * kTogether * part] = largest[part];
    }
  }

  __device__ __forceinline__ float activated(const float (&value)[n], int i) const {
    float weight = 1.f;
    if constexpr (Config::kWeightsOnInput) weight = topk_weight(column(i));
    const int at = i / 2 * 4 + i % 2;
    const float gate = value[at] * weight, up = value[at + 2] * weight;
    return activate<Activation(Config::kActivation), false>(gate) * up;
  }

  __device__ float topk_weight(int r) const {
    if (r >= item_.rows) return 0.f;
    const int pair = p_.sorted[item_.first + r];
    return p_.topk_weights[pair / p_.top_k * p_.weights_stride + pair % p_.top_k];
  }

  // The columns of a lane are halved: it keeps and gets those of one half. NaN is left only where all are.
  template <int kLeft, int kLanes>
  __device__ __forceinline__ void halve(float (&largest)[kTogether]) const {
    if constexpr (kLeft == 0) {  // one is left
      largest[0] = fmaxf(largest[0], __shfl_xor_sync(0xffffffffu, largest[0], kLanes));
    } else {
      const bool upper = place_.lane & kLanes;
#pragma unroll
      for (int i = 0; i < kLeft; ++i) {
        const float low = largest[i], high = largest[i + kLeft];
        const float got = __shfl_xor_sync(0xffffffffu, upper ? low : high, kLanes);
        largest[i] = fmaxf(fabsf(upper ? high : low), fabsf(got));
      }
    }
  }

  // Of the column that the lane keeps, over the eight lanes that have it.
  __device__ __forceinline__ float largest_of(const float (&h)[kValues], int first) const {
    float largest[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) largest[i] = h[first + i];
    halve<kTogether / 2, 4>(largest);
    halve<kTogether / 4, 8>(largest);
    halve<kTogether / 8, 16>(largest);
    return largest[0];
  }

  // Of which of kTogether values' columns a lane gets the maximum.
  __device__ int kept() const {
    const int lane = place_.lane;
    return (lane / 4 % 2 * 4 + lane / 8 % 2 * 2 + lane / 16) * kTogether / 8;
  }

  // Of a thread's column, over all warps.
  __device__ __forceinline__ float find_scale() {
    const int column = thread();
    if (column >= item_.rows) return 0.f;
    float largest = maxima_[column];
#pragma unroll
    for (int warp = 1; warp < 8; ++warp) largest = fmaxf(largest, maxima_[warp * kColumns + column]);
    const float scale = fmaxf(largest, kQuantFloor) / kE4m3Max;
    maxima_[8 * kColumns + column] = 1.f / scale;
    return scale;
  }

  __device__ __forceinline__ void store_scale(float scale) const {
    if (thread() < item_.rows)
      p_.out_scale[int64_t(item_.first + thread()) * p_.out_scale_stride + item_.feature_tile] = scale;
  }

  // All scales are read before anything is staged, which might be the same memory, as far as the compiler knows.
  __device__ __forceinline__ void quantise(float (&h)[kValues]) const {
#pragma unroll
    for (int i = 0; i < kValues; i += 2) {
      const float2 inverse = *reinterpret_cast<const float2*>(maxima_ + 8 * kColumns + column(i));
      h[i] *= inverse.x;
      h[i + 1] *= inverse.y;
    }
  }

  // Line 8 m + r is of column r of matrix m: bf16, of token 8 m + r; e4m3, see first_token.
  __device__ __forceinline__ void stage(const float (&h)[kValues]) const {
    constexpr int kOfWord = 4 / int(sizeof(weight_t)), kWords = kValues / kOfWord;
    constexpr int kMatrices = kWords % 4 == 0 ? 4 : kWords % 2 == 0 ? 2 : 1;
    const int piece = place_.group * 4 + place_.warp, line = place_.lane;
    const uint32_t target = copy::shared_address(staged_) + line * 128 + ((piece ^ (line & 7)) << 4);
#pragma unroll
    for (int first = 0; first < kWords; first += kMatrices) {
      uint32_t words[kMatrices];
#pragma unroll
      for (int m = 0; m < kMatrices; ++m) words[m] = packed(h, (first + m) * kOfWord);
      store_matrices_transposed(target + first * 8 * 128, words);
    }
  }

  // Of two columns, or four.
  __device__ static uint32_t packed(const float (&h)[kValues], int i) {
    if constexpr (kCodes)
      return pack2_e4m3(h[i], h[i + 1]) | uint32_t(pack2_e4m3(h[i + 2], h[i + 3])) << 16;
    else
      return pack2<weight_t>(h[i], h[i + 1]);
  }

  // Of the two in a line of codes. A lane's word of a matrix has columns 16 m + 2 t, the next, and those 8 further.
  __device__ static int first_token(int line) { return line / 8 * 16 + line % 2 * 8 + line % 8 / 2 * 2; }

  __device__ uint4 staged(int line, int piece) const {
    return *reinterpret_cast<const uint4*>(staged_ + line * 128 + ((piece ^ (line & 7)) << 4));
  }

  __device__ __forceinline__ void write() const {
    constexpr int kPieces = kCodes ? 4 : 8, kLines = 256 / kPieces;
    const int piece = thread() % kPieces, first = thread() / kPieces;
    const int feature = item_.feature_tile * kHidden + piece * (kHidden / kPieces);
    if (feature >= p_.features) return;
    weight_t* out = static_cast<weight_t*>(p_.out) + int64_t(item_.first) * p_.out_stride + feature;
    if constexpr (kCodes) {
#pragma unroll
      for (int line = first; line < first + kColumns / 2; line += kLines) {
        const int token = first_token(line);  // of a line that there is, if it is below item_.rows
        if (token < item_.rows) write_two(out, token, staged(line, 2 * piece), staged(line, 2 * piece + 1));
      }
    } else {
#pragma unroll
      for (int line = first; line < first + kColumns; line += kLines)
        if (line < item_.rows) write_piece(out, line, staged(line, piece));
    }
  }

  // 16 features of a token and the next one.
  __device__ __forceinline__ void write_two(weight_t* out, int token, const uint4& a, const uint4& b) const {
    constexpr uint32_t kEven = 0x6420, kOdd = 0x7531;  // bytes of two words
    const auto pick = [&](uint32_t bytes) {
      return make_uint4(__byte_perm(a.x, a.y, bytes), __byte_perm(a.z, a.w, bytes),
                        __byte_perm(b.x, b.y, bytes), __byte_perm(b.z, b.w, bytes));
    };
    write_piece(out, token, pick(kEven));
    if (token + 1 < item_.rows) write_piece(out, token + 1, pick(kOdd));
  }

  __device__ void write_piece(weight_t* out, int token, const uint4& piece) const {
    global::store_16(out + token * p_.out_stride, piece);
  }

  const GroupedParams& p_;
  const GroupedItem& item_;
  const GroupedPlace<true>& place_;
  uint8_t* staged_;
  float* maxima_;
};

}  // namespace hpcjit::moe
