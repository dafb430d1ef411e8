// The main loop of the grouped product, of one warpgroup; see grouped.cuh.
//
// How many columns a product has follows from the rows of the tile. Products of several stages that share their scales run
// one behind the other: a stage is handed back when the next one's products have been started.
#pragma once
#include "hpcjit/ptx/mbarrier.cuh"
#include "hpcjit/ptx/wgmma_shared.cuh"
#include "moe/grouped_shape.cuh"

namespace hpcjit::moe {

// A thread's sums: value[4 j + i] is of row (i < 2 ? g : g + 8) of its warp's 16, column 8 j + 2 t + i % 2.
template <class Config, bool kGateUp>
class GroupedSums {
  using Shape = GroupedShape<Config>;
  using weight_t = typename Config::weight_t;
  static constexpr int kParts = Shape::parts(kGateUp), kSteps = 4 / kParts;  // steps of 32 bytes of K
  static constexpr bool kScaled = Shape::kScaled, kByGroup = Shape::by_group(kGateUp);
  // FP8 sums leave the tensor cores, which keep some 14 bits of them, after so many stages, or where scales change.
  static constexpr int kChain = 4;

 public:
  static constexpr int kSums = Shape::kTokens / 2;
  using Ring = GroupedRing<Shape::kStages>;
  float value[kSums];

  // `scales` of all stages.
  __device__ GroupedSums(const float* scales, int group, int lane)
      : scales_(scales), group_(group), lane_(lane) {}

  // Over all stages of an item with `rows` rows.
  __device__ __forceinline__ void accumulate(Ring& ring, int depth, int rows) {
    const int stages = (depth + Shape::kStageK - 1) / Shape::kStageK;
    if constexpr (Shape::kTokens < 128) {
      accumulate<Shape::kTokens>(ring, depth, stages);
    } else {
      if (rows <= 32) return accumulate<32>(ring, depth, stages);
      if (rows <= 64) return accumulate<64>(ring, depth, stages);
      if (rows <= 96) return accumulate<96>(ring, depth, stages);
      accumulate<128>(ring, depth, stages);
    }
  }

 private:
  template <int kColumns>
  __device__ __forceinline__ void accumulate(Ring& ring, int depth, int stages) {
    auto& total = reinterpret_cast<float (&)[kColumns / 2]>(value);
#pragma unroll
    for (int i = 0; i < kSums; ++i) value[i] = 0.f;
    wgmma::hold(value);
    if constexpr (kByGroup) {
#pragma unroll 1
      for (int k = 0; k < stages; ++k) {
        wait_full(ring);
        multiply_groups<kColumns>(total, ring, depth - k * Shape::kStageK);
        hand_back(ring);
        ring.advance();
      }
    } else {
      bool add = false;
#pragma unroll 1
      for (; stages >= kChain; stages -= kChain, add = true)
        add_chain<kColumns, kChain>(total, ring, stages == kChain, add);
#pragma unroll 1
      for (; stages > 0; --stages, add = true) add_chain<kColumns, 1>(total, ring, stages == 1, add);
    }
  }

  template <int kColumns, int kStages>
  __device__ __forceinline__ void add_chain(float (&total)[kColumns / 2], Ring& ring, bool is_last,
                                            bool add) {
    if constexpr (kScaled) {
      float sums[kColumns / 2];
      const Ring last = multiply_chain<kColumns, kStages>(sums, ring, false);
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) total[i] += sums[i];
      if (is_last) scale_rows(total, last);
      hand_back(last);
    } else {
      hand_back(multiply_chain<kColumns, kStages>(total, ring, add));
    }
  }

  // Gathered rows have been written by threads.
  __device__ __forceinline__ void wait_full(const Ring& ring) const {
    mbarrier::wait(ring.full(), ring.parity);
    if constexpr (kGateUp) copy::fence_async();
  }

  __device__ __forceinline__ void hand_back(const Ring& ring) const {
    __syncwarp();  // all lanes have read the scales
    mbarrier::arrive_if(lane_ == 0, ring.empty());
  }

  // Products of kStages stages, of which the last, which is returned, is left to be handed back.
  template <int kColumns, int kStages>
  __device__ __forceinline__ Ring multiply_chain(float (&sums)[kColumns / 2], Ring& ring, bool add) const {
    Ring last = ring;
    wgmma::hold(sums);
#pragma unroll
    for (int k = 0; k < kStages; ++k) {
      wait_full(ring);
      wgmma::fence();
      start<kColumns, 4>(sums, ring, 0, k > 0 || add);
      wgmma::commit();
      if (k > 0) {
        wgmma::wait<1>();
        mbarrier::arrive_if(lane_ == 0, last.empty());
      }
      last = ring;
      ring.advance();
    }
    wgmma::wait<0>();
    wgmma::hold(sums);
    return last;
  }

  // A stage whose rows have scales of their own, for each part of it; `left` is what of K is left.
  template <int kColumns>
  __device__ __forceinline__ void multiply_groups(float (&total)[kColumns / 2], const Ring& ring,
                                                  int left) const {
    constexpr int kTogether = kColumns <= 64 ? kParts : 1;
#pragma unroll
    for (int first = 0; first < kParts; first += kTogether) {
      if (first > 0 && left <= first * (Shape::kStageK / kParts)) break;
      float sums[kTogether][kColumns / 2];
#pragma unroll
      for (int part = 0; part < kTogether; ++part) wgmma::hold(sums[part]);
      wgmma::fence();
#pragma unroll
      for (int part = 0; part < kTogether; ++part)
        start<kColumns, kSteps>(sums[part], ring, (first + part) * kSteps, false);
      wgmma::commit();
      wgmma::wait<0>();
#pragma unroll
      for (int part = 0; part < kTogether; ++part) {
        wgmma::hold(sums[part]);
        promote<kColumns>(total, sums[part], ring, first + part);
      }
    }
  }

  template <int kColumns, int kNumber>
  __device__ __forceinline__ void start(float (&sums)[kColumns / 2], const Ring& ring, int begin,
                                        bool add) const {
    const uint32_t stage = ring.data + ring.stage * Shape::kStageBytes;
    const uint64_t weights = wgmma::descriptor<kRowBytes>(stage + group_ * (kWeightBytes / 2));
    const uint64_t rows = wgmma::descriptor<kRowBytes>(stage + kWeightBytes);
#pragma unroll
    for (int i = 0; i < kNumber; ++i) {
      const int step = 2 * (begin + i);  // in units of 16 bytes
      wgmma::SharedProduct<weight_t, kColumns>::run(sums, weights + step, rows + step, add || i > 0);
    }
  }

  __device__ __forceinline__ const float* scales_of(const Ring& ring) const {
    return scales_ + ring.stage * Shape::kScaleFloats;
  }

  // Scaled by row, and by block of weights.
  template <int kColumns>
  __device__ __forceinline__ void promote(float (&total)[kColumns / 2], const float (&sums)[kColumns / 2],
                                          const Ring& ring, int part) const {
    const float* scales = scales_of(ring);
    float2 weight = make_float2(1.f, 1.f);
    if constexpr (Config::kQuant == kQuantBlock)
      weight = *reinterpret_cast<const float2*>(scales + Shape::kScaleFloats - 4);
    const float* own = scales + part * Shape::kTokens + 2 * (lane_ % 4);
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const float2 row = *reinterpret_cast<const float2*>(own + 8 * j);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float scale = i % 2 ? row.y : row.x;
        if constexpr (Config::kQuant == kQuantBlock) scale *= kGateUp && i / 2 ? weight.y : weight.x;
        total[4 * j + i] = fmaf(sums[4 * j + i], scale, total[4 * j + i]);
      }
    }
  }

  template <int n>
  __device__ __forceinline__ void scale_rows(float (&total)[n], const Ring& ring) const {
    const float* own = scales_of(ring) + 2 * (lane_ % 4);
#pragma unroll
    for (int j = 0; j < n / 4; ++j) {
      const float2 row = *reinterpret_cast<const float2*>(own + 8 * j);
#pragma unroll
      for (int i = 0; i < 4; ++i) total[4 * j + i] *= i % 2 ? row.y : row.x;
    }
  }

  const float* scales_;
  int group_, lane_;
};

}  // namespace hpcjit::moe
