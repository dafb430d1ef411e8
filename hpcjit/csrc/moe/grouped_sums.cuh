// The main loop of the grouped product, of one warpgroup; see grouped.cuh.
//
// How many columns a product has follows from the rows of the tile (`with_columns`), whatever tiles may have. Products of
// several stages that share their scales run one behind the other: a stage is handed back when the next one's products have
// been started.
#pragma once
#include <type_traits>

#include "hpcjit/ptx/mbarrier.cuh"
#include "hpcjit/ptx/wgmma_shared.cuh"
#include "moe/grouped_shape.cuh"

namespace hpcjit::moe {

// Calls f with the number of columns, as a type, that a tile of so many rows is multiplied with.
template <int kTokens, class F>
__device__ __forceinline__ void with_columns(int rows, F f) {
  if constexpr (kTokens == 192) {
    if (rows <= 64) return f(std::integral_constant<int, 64>());
    if (rows <= 128) return f(std::integral_constant<int, 128>());
    if (rows <= 160) return f(std::integral_constant<int, 160>());
  } else if constexpr (kTokens == 128) {
    if (rows <= 32) return f(std::integral_constant<int, 32>());
    if (rows <= 64) return f(std::integral_constant<int, 64>());
    if (rows <= 96) return f(std::integral_constant<int, 96>());
  } else {
    if constexpr (kTokens > 16)
      if (rows <= 16) return f(std::integral_constant<int, 16>());
    if constexpr (kTokens > 32)
      if (rows <= 32) return f(std::integral_constant<int, 32>());
  }
  f(std::integral_constant<int, kTokens>());
}

// Whether the ring has come to an item, and how many rows it has.
template <class Ring>
__device__ __forceinline__ bool next_item(const Ring& ring, int& rows) {
  mbarrier::wait(ring.full(), ring.parity);
  rows = ring.item()->rows;
  const bool found = ring.item()->feature_tile != kNoItem;
  __syncwarp();  // all lanes have read the item: its stage may be handed back
  return found;
}

// A thread's sums: value[4 j + i] is of row (i < 2 ? g : g + 8) of its warp's 16, column 8 j + 2 t + i % 2.
template <class Config, bool kGateUp, int kColumns>
class GroupedSums {
  using Shape = GroupedShape<Config, kGateUp>;
  using weight_t = typename Config::weight_t;
  static constexpr int kParts = Shape::kParts, kSteps = 4 / kParts;  // steps of 32 bytes of K
  static constexpr bool kScaled = Shape::kScaled, kByGroup = Shape::kByGroup;
  // FP8 sums leave the tensor cores, which keep some 14 bits of them, after so many stages, or where scales change.
  static constexpr int kChain = 4;

 public:
  static constexpr int kSums = kColumns / 2;
  using Ring = GroupedRing<Config, kGateUp>;
  float value[kSums];

  __device__ explicit GroupedSums(const GroupedPlace<kGateUp>& place) : place_(place) {}

  // Over all stages of the item that the ring has come to, which is returned.
  __device__ __forceinline__ GroupedItem run(Ring& ring, int depth) {
    const Ring last = accumulate(ring, depth);
    if constexpr (kScaled && !kByGroup) scale_rows(last);
    scale_features(last);
    const GroupedItem item = *last.item();
    hand_back(last);
    return item;
  }

 private:
  // Returns the last stage, which is left to be handed back.
  __device__ __forceinline__ Ring accumulate(Ring& ring, int depth) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) value[i] = 0.f;
    wgmma::hold(value);
    Ring last = ring;
    if constexpr (kByGroup) {
#pragma unroll 1
      for (int left = depth;; left -= Shape::kStageK) {
        wait_full(ring);
        multiply_groups(ring, left);
        last = ring;
        ring.advance();
        if (left <= Shape::kStageK) return last;
        hand_back(last);
      }
    } else {
      int stages = (depth + Shape::kStageK - 1) / Shape::kStageK;
      add_chains<kChain>(ring, last, stages, false);
      add_chains<1>(ring, last, stages, depth >= kChain * Shape::kStageK);
      return last;
    }
  }

  // As many chains of kStages stages as are left.
  template <int kStages>
  __device__ __forceinline__ void add_chains(Ring& ring, Ring& last, int& stages, [[maybe_unused]] bool add) {
#pragma unroll 1
    while (stages >= kStages) {
      if constexpr (kScaled) {
        float sums[kSums];
        last = multiply_chain<kStages>(sums, ring, false);
#pragma unroll
        for (int i = 0; i < kSums; ++i) value[i] += sums[i];
      } else {
        last = multiply_chain<kStages>(value, ring, add);
        add = true;
      }
      stages -= kStages;
      if (stages > 0) hand_back(last);
    }
  }

  // Gathered rows have been written by threads.
  __device__ __forceinline__ void wait_full(const Ring& ring) const {
    mbarrier::wait(ring.full(), ring.parity);
    if constexpr (kGateUp) copy::fence_async();
  }

  __device__ __forceinline__ void hand_back(const Ring& ring) const {
    __syncwarp();  // all lanes have read the scales, and the item
    mbarrier::arrive_if(place_.lane == 0, ring.empty());
  }

  // Products of kStages stages, of which the last, which is returned, is left to be handed back.
  template <int kStages>
  __device__ __forceinline__ Ring multiply_chain(float (&sums)[kSums], Ring& ring, bool add) const {
    Ring last = ring;
    wgmma::hold(sums);
#pragma unroll
    for (int k = 0; k < kStages; ++k) {
      wait_full(ring);
      wgmma::fence();
      start<4>(sums, ring, 0, k > 0 || add);
      wgmma::commit();
      if (k > 0) {
        wgmma::wait<1>();
        mbarrier::arrive_if(place_.lane == 0, last.empty());
      }
      last = ring;
      ring.advance();
    }
    wgmma::wait<0>();
    wgmma::hold(sums);
    return last;
  }

  // A stage whose rows have scales of their own, for each part of it; `left` is what of K is left.
  __device__ __forceinline__ void multiply_groups(const Ring& ring, int left) {
    constexpr int kTogether = kColumns * Shape::kPerSm <= 64 ? kParts : 1;
#pragma unroll
    for (int first = 0; first < kParts; first += kTogether) {
      if (first > 0 && left <= first * (Shape::kStageK / kParts)) break;
      float sums[kTogether][kSums];
#pragma unroll
      for (int part = 0; part < kTogether; ++part) wgmma::hold(sums[part]);
      wgmma::fence();
#pragma unroll
      for (int part = 0; part < kTogether; ++part)
        start<kSteps>(sums[part], ring, (first + part) * kSteps, false);
      wgmma::commit();
      wgmma::wait<0>();
#pragma unroll
      for (int part = 0; part < kTogether; ++part) {
        wgmma::hold(sums[part]);
        promote(sums[part], ring, first + part);
      }
    }
  }

  template <int kNumber>
  __device__ __forceinline__ void start(float (&sums)[kSums], const Ring& ring, int begin, bool add) const {
    const uint32_t stage = ring.stage_data();
    const uint64_t weights = wgmma::descriptor<kRowBytes>(stage + place_.group * (kWeightBytes / 2));
    const uint64_t rows = wgmma::descriptor<kRowBytes>(stage + kWeightBytes);
#pragma unroll
    for (int i = 0; i < kNumber; ++i) {
      const int step = 2 * (begin + i);  // in units of 16 bytes
      wgmma::SharedProduct<weight_t, kColumns>::run(sums, weights + step, rows + step, add || i > 0);
    }
  }

  __device__ __forceinline__ const float* side_of(const Ring& ring) const {
    return Ring::template at<float>(ring.side());
  }
  __device__ __forceinline__ const float* row_scales_of(const Ring& ring, int part) const {
    return side_of(ring) + Shape::kItemFloats + part * Shape::kTokens + 2 * (place_.lane % 4);
  }
  __device__ __forceinline__ const float* weight_scales_of(const Ring& ring) const {
    return side_of(ring) + Shape::kSideFloats - Shape::kWeightScales;
  }

  // Scaled by row, and by block of weights.
  __device__ __forceinline__ void promote(const float (&sums)[kSums], const Ring& ring, int part) {
    float2 weight = make_float2(1.f, 1.f);
    if constexpr (Config::kQuant == kQuantBlock)
      weight = *reinterpret_cast<const float2*>(weight_scales_of(ring));
    const float* own = row_scales_of(ring, part);
#pragma unroll
    for (int j = 0; j < kSums / 4; ++j) {
      const float2 row = *reinterpret_cast<const float2*>(own + 8 * j);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float scale = i % 2 ? row.y : row.x;
        if constexpr (Config::kQuant == kQuantBlock) scale *= kGateUp && i / 2 ? weight.y : weight.x;
        value[4 * j + i] = fmaf(sums[4 * j + i], scale, value[4 * j + i]);
      }
    }
  }

  // By the scale of the row, times that of all weights where there is one.
  __device__ __forceinline__ void scale_rows(const Ring& ring) {
    const float* own = row_scales_of(ring, 0);
    const float weight = Config::kQuant == kQuantTensor ? weight_scales_of(ring)[0] : 1.f;
#pragma unroll
    for (int j = 0; j < kSums / 4; ++j) {
      float2 row = *reinterpret_cast<const float2*>(own + 8 * j);
      if constexpr (Config::kQuant == kQuantTensor) row = make_float2(row.x * weight, row.y * weight);
#pragma unroll
      for (int i = 0; i < 4; ++i) value[4 * j + i] *= i % 2 ? row.y : row.x;
    }
  }

  // FP8 without blocks of weights: by a scale of all of them, where rows had theirs along K, or of a thread's two features.
  __device__ __forceinline__ void scale_features(const Ring& ring) {
    if constexpr ((Config::kQuant == kQuantTensor && kByGroup) || Config::kQuant == kQuantChannel) {
      const float* own = weight_scales_of(ring);
      float scale[2] = {own[0], own[0]};
      if constexpr (Config::kQuant == kQuantChannel) {
        scale[0] = own[place_.feature(0)];
        scale[1] = own[kGateUp ? kHidden + place_.feature(0) : place_.feature(2)];
      }
#pragma unroll
      for (int i = 0; i < kSums; ++i) value[i] *= scale[i % 4 / 2];
    }
  }

  const GroupedPlace<kGateUp>& place_;
};

}  // namespace hpcjit::moe
