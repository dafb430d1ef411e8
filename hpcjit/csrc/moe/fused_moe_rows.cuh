// Activations to FP8 before the products of the fused MoE:
//
//   x8[t, i] = e4m3(x[t, i] / s), s = max(max|x|, 1e-10) / 448 over the row or its group of 128, or given
//
// A block has a token; a thread has kVec neighbouring columns at a time.
#pragma once
#include "hpcjit/launch.cuh"
#include "hpcjit/math/reduce.cuh"
#include "hpcjit/ptx/pdl.cuh"
#include "quantization/source.cuh"

namespace hpcjit::moe {

constexpr int kRowThreads = 256, kVec = 8;
constexpr int kScaleGiven = 1, kScaleOfRow = 2,
              kScaleOfGroup = 3;  // Config::kQuantise; 0: x is not quantised

struct QuantiseParams {
  const bf16* x;
  e4m3* out;           // [num_tokens][hidden_size]
  float* scale;        // [num_tokens][groups], written unless it is given
  const float* given;  // [1]
  int64_t x_stride;
  int hidden_size, groups;
};

template <int kMode>
__global__ void __launch_bounds__(kRowThreads) quantise_kernel(const __grid_constant__ QuantiseParams p) {
  __shared__ float scratch[kRowThreads / 32];
  pdl::trigger();
  const int64_t token = blockIdx.x;
  const bf16* x = p.x + token * p.x_stride;
  e4m3* out = p.out + token * p.hidden_size;
  const int vecs = p.hidden_size / kVec;
  pdl::wait();

  float scale = 1.f;
  if constexpr (kMode == kScaleGiven) scale = *p.given;
  if constexpr (kMode == kScaleOfRow) {
    float largest = 0.f;
    for (int v = threadIdx.x; v < vecs; v += kRowThreads) {
      Vec<bf16, kVec> raw;
      float y[kVec];
      raw.load(x + v * kVec);
      raw.to(y);
      largest = quantization::largest_magnitude(y, largest);
    }
    scale = fmaxf(reduce_block<Max, kRowThreads>(largest, scratch), kQuantFloor) / kE4m3Max;
    if (threadIdx.x == 0) p.scale[token] = scale;
  }
  for (int base = 0; base < vecs; base += kRowThreads) {  // whole warps: lanes of a group exchange maxima
    const int v = base + threadIdx.x;
    float y[kVec] = {};
    if (v < vecs) {
      Vec<bf16, kVec> raw;
      raw.load(x + v * kVec);
      raw.to(y);
    }
    if constexpr (kMode == kScaleOfGroup) {
      constexpr int kLanes = 128 / kVec;
      const float largest = reduce_lanes<Max, kLanes>(quantization::largest_magnitude(y));
      scale = fmaxf(largest, kQuantFloor) / kE4m3Max;
      if (v < vecs && v % kLanes == 0) p.scale[token * p.groups + v / kLanes] = scale;
    }
    if (v < vecs) quantization::store_e4m3<kVec, Cache::kDefault>(out + v * kVec, y, 1.f / scale);
  }
}

}  // namespace hpcjit::moe
