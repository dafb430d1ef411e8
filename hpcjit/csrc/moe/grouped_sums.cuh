// The main loop of the grouped product, of one warpgroup; see grouped.cuh.
//
// The sums of a tile of up to 128 tokens stay in registers, those of 256 in two passes over each stage. How many columns a
// product has follows from the rows of the tile.
#pragma once
#include "hpcjit/ptx/mbarrier.cuh"
#include "hpcjit/ptx/wgmma_shared.cuh"
#include "moe/grouped_shape.cuh"

namespace hpcjit::moe {

// A thread's sums: value[pass][4 j + i] is of row (i < 2 ? g : g + 8) of its warp's 16, column 8 j + 2 t + i % 2.
template <class Config, bool kGateUp>
class GroupedSums {
  using Shape = GroupedShape<Config>;
  using weight_t = typename Config::weight_t;
  static constexpr int kParts = Shape::parts(kGateUp), kSteps = 4 / kParts;  // steps of 32 bytes of K
  static constexpr bool kScaled = Shape::kScaled, kByGroup = Shape::by_group(kGateUp);

 public:
  static constexpr int kSums = Shape::kColumns / 2, kPasses = Shape::kPasses;
  using Ring = GroupedRing<Shape::kStages>;
  float value[kPasses][kSums];

  // `scales` of all stages.
  __device__ GroupedSums(const float* scales, int group, int lane)
      : scales_(scales), group_(group), lane_(lane) {}

  // Over all stages of an item with `rows` rows.
  __device__ __forceinline__ void accumulate(Ring& ring, int depth, int rows) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) value[pass][i] = 0.f;
    }
#pragma unroll 1
    for (int k = 0; k < depth; k += Shape::kStageK) {
      mbarrier::wait(ring.full(), ring.parity);
      const uint32_t stage = ring.data + ring.stage * Shape::kStageBytes;
      const float* scales = scales_ + ring.stage * Shape::kScaleFloats;
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass)
        multiply_rows(pass, stage, scales, k, depth, rows - pass * Shape::kColumns);
      if constexpr (kScaled && !kByGroup)
        if (k + Shape::kStageK >= depth) scale_rows(scales);
      __syncwarp();  // all lanes have read the scales
      if (lane_ == 0) mbarrier::arrive(ring.empty());
      ring.advance();
    }
  }

 private:
  __device__ __forceinline__ void multiply_rows(int pass, uint32_t stage, const float* scales, int k,
                                                int depth, int rows) {
    if constexpr (Shape::kColumns < 96) {
      multiply_stage<Shape::kColumns>(pass, stage, scales, k, depth);
    } else {
      if (rows <= 0) return;
      if (rows <= 32) return multiply_stage<32>(pass, stage, scales, k, depth);
      if (rows <= 64) return multiply_stage<64>(pass, stage, scales, k, depth);
      if (Shape::kColumns > 96 && rows <= 96) return multiply_stage<96>(pass, stage, scales, k, depth);
      multiply_stage<Shape::kColumns>(pass, stage, scales, k, depth);
    }
  }

  template <int kColumns>
  __device__ __forceinline__ void multiply_stage(int pass, uint32_t stage, const float* scales, int k,
                                                 int depth) {
    const uint64_t weights = wgmma::descriptor<kRowBytes>(stage + group_ * (kWeightBytes / 2));
    const uint64_t rows =
        wgmma::descriptor<kRowBytes>(stage + kWeightBytes + pass * Shape::kColumns * kRowBytes);
    float (&total)[kColumns / 2] = reinterpret_cast<float (&)[kColumns / 2]>(value[pass]);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (part > 0 && k + part * (Shape::kStageK / kParts) >= depth) break;
      if constexpr (kScaled) {
        float sums[kColumns / 2];
        multiply<kColumns>(sums, weights, rows, part * kSteps, false);
        promote<kColumns>(total, sums, scales, pass, part);
      } else {
        multiply<kColumns>(total, weights, rows, 0, k > 0);
      }
    }
  }

  template <int kColumns>
  __device__ __forceinline__ void multiply(float (&sums)[kColumns / 2], uint64_t weights, uint64_t rows,
                                           int begin, bool add) {
    wgmma::hold(sums);
    wgmma::fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int step = 2 * (begin + i);  // in units of 16 bytes
      wgmma::SharedProduct<weight_t, kColumns>::run(sums, weights + step, rows + step, add || i > 0);
    }
    wgmma::commit();
    wgmma::wait<0>();
    wgmma::hold(sums);
  }

  // FP8 sums leave the tensor cores, which keep some 14 bits of them, and are scaled: by row, and by block of weights.
  template <int kColumns>
  __device__ __forceinline__ void promote(float (&total)[kColumns / 2], const float (&sums)[kColumns / 2],
                                          const float* scales, int pass, int part) {
    float2 weight = make_float2(1.f, 1.f);
    if constexpr (Config::kQuant == kQuantBlock)
      weight = *reinterpret_cast<const float2*>(scales + Shape::kScaleFloats - 4);
    const float* own = scales + part * Shape::kTokens + pass * Shape::kColumns + 2 * (lane_ % 4);
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      float2 row = make_float2(1.f, 1.f);
      if constexpr (kByGroup) row = *reinterpret_cast<const float2*>(own + 8 * j);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float scale = i % 2 ? row.y : row.x;
        if constexpr (Config::kQuant == kQuantBlock) scale *= kGateUp && i / 2 ? weight.y : weight.x;
        total[4 * j + i] =
            kByGroup ? fmaf(sums[4 * j + i], scale, total[4 * j + i]) : total[4 * j + i] + sums[4 * j + i];
      }
    }
  }

  __device__ __forceinline__ void scale_rows(const float* scales) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const float* own = scales + pass * Shape::kColumns + 2 * (lane_ % 4);
#pragma unroll
      for (int j = 0; j < kSums / 4; ++j) {
        const float2 row = *reinterpret_cast<const float2*>(own + 8 * j);
#pragma unroll
        for (int i = 0; i < 4; ++i) value[pass][4 * j + i] *= i % 2 ? row.y : row.x;
      }
    }
  }

  const float* scales_;
  int group_, lane_;
};

}  // namespace hpcjit::moe
