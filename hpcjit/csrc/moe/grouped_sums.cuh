// The main loop of the grouped product, of one warpgroup; see grouped.cuh.
#pragma once
#include "hpcjit/ptx/mbarrier.cuh"
#include "hpcjit/ptx/wgmma_shared.cuh"
#include "moe/grouped_shape.cuh"

namespace hpcjit::moe {

// A thread's sums: value[box][4 j + i] is of row (i < 2 ? g : g + 8) of its warp's 16, column 8 j + 2 t + i % 2.
template <class Config, bool kGateUp>
class GroupedSums {
  using Shape = GroupedShape<Config, kGateUp>;
  using Product = wgmma::SharedProduct<typename Config::weight_t, Shape::kColumns>;
  static constexpr int kSteps = 4 / Shape::kParts;  // of 32 bytes of K
  static constexpr bool kScaled = Shape::kScaled;

 public:
  static constexpr int kSums = Product::kSums;
  using Ring = GroupedRing<Shape::kStages>;
  float value[2][kSums];

  __device__ GroupedSums(const Ring& ring, const float* scales, int group, int lane)
      : ring_(ring), scales_(scales), group_(group), lane_(lane) {}

  // Over `stages` of the ring. Where no row of the warpgroup is live it only hands the stages back.
  __device__ __forceinline__ void accumulate(int stages, bool live) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) value[0][i] = value[1][i] = 0.f;
    for (int k = 0; k < stages; ++k) {
      mbarrier::wait(ring_.full(), ring_.parity);
      if (live) multiply_stage(k > 0);
      __syncwarp();  // all lanes have read the scales
      if (lane_ == 0) mbarrier::arrive(ring_.empty());
      ring_.advance();
    }
  }

 private:
  __device__ __forceinline__ void multiply_stage(bool add) {
    const uint32_t stage = ring_.data + ring_.stage * Shape::kStageBytes;
    const uint64_t first = wgmma::descriptor<kRowBytes>(stage);
    const uint64_t second = wgmma::descriptor<kRowBytes>(stage + kBoxBytes);
    const uint64_t rows =
        wgmma::descriptor<kRowBytes>(stage + 2 * kBoxBytes + group_ * Shape::kColumns * kRowBytes);
#pragma unroll
    for (int part = 0; part < Shape::kParts; ++part) {
      if constexpr (kScaled) {
        float sums[2][kSums];
        multiply(sums, first, second, rows, part * kSteps, false);
        promote(sums, part);
      } else {
        multiply(value, first, second, rows, 0, add);
      }
    }
  }

  __device__ __forceinline__ void multiply(float (&sums)[2][kSums], uint64_t first, uint64_t second,
                                           uint64_t rows, int begin, bool add) {
    wgmma::hold(sums[0]);
    wgmma::hold(sums[1]);
    wgmma::fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int step = 2 * (begin + i);  // in units of 16 bytes
      Product::run(sums[0], first + step, rows + step, add || i > 0);
      Product::run(sums[1], second + step, rows + step, add || i > 0);
    }
    wgmma::commit();
    wgmma::wait<0>();
    wgmma::hold(sums[0]);
    wgmma::hold(sums[1]);
  }

  // FP8 sums leave the tensor cores, which keep some 14 bits of them, and are scaled: by row, and by block of weights.
  __device__ __forceinline__ void promote(const float (&sums)[2][kSums], int part) {
    const float* scales = scales_ + ring_.stage * Shape::kScaleFloats;
    const float* own = scales + part * Shape::kTokens + group_ * Shape::kColumns + 2 * (lane_ % 4);
    float2 weight = make_float2(1.f, 1.f);
    if constexpr (Config::kQuant == kQuantBlock)
      weight = *reinterpret_cast<const float2*>(scales + Shape::kParts * Shape::kTokens);
#pragma unroll
    for (int j = 0; j < kSums / 4; ++j) {
      const float2 row = *reinterpret_cast<const float2*>(own + 8 * j);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float scale = i % 2 ? row.y : row.x;
        value[0][4 * j + i] += sums[0][4 * j + i] * (scale * weight.x);
        value[1][4 * j + i] += sums[1][4 * j + i] * (scale * weight.y);
      }
    }
  }

  Ring ring_;
  const float* scales_;  // of all stages
  int group_, lane_;
};

}  // namespace hpcjit::moe
