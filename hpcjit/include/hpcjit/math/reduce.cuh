// Reductions over lanes, warps and blocks in a fixed order: the same inputs give the same bits.
#pragma once
#include <cuda_runtime.h>
#include <stdint.h>

namespace hpcjit {

struct Add {
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
  static constexpr float kIdentity = 0.f;
};
struct Max {  // of non-negative values; NaN operands are ignored
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
  static constexpr float kIdentity = 0.f;
};

// Over aligned groups of kLanes neighbouring lanes; every lane gets the result.
template <class Op, int kLanes = 32>
__device__ __forceinline__ float reduce_lanes(float x, Op op = Op()) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) x = op(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
}

// Over kThreads consecutive threads (whole warps) that all call it. `scratch` holds kThreads / 32 floats of
// their own; one barrier only, so the caller must not reuse the scratch before another barrier has passed.
template <class Op, int kThreads>
__device__ __forceinline__ float reduce_block(float x, float* scratch, Op op = Op()) {
  constexpr int kWarps = kThreads / 32;
  x = reduce_lanes<Op>(x, op);
  if constexpr (kWarps == 1) return x;
  const int lane = threadIdx.x % 32;
  if (lane == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  // Every warp reduces the partial sums itself: no second barrier, no broadcast.
  constexpr int kPadded = kWarps <= 2 ? 2 : kWarps <= 4 ? 4 : kWarps <= 8 ? 8 : kWarps <= 16 ? 16 : 32;
  const int i = lane % kPadded;
  x = i < kWarps ? scratch[i] : Op::kIdentity;
  return reduce_lanes<Op, kPadded>(x, op);
}

}  // namespace hpcjit
