// Activations in fp32. kPrecise is for fp32 tensors; 16-bit tensors round away what the fast form loses
// (relative error below 2^-18 for |x| < 64, where the 16-bit result has not yet vanished).
#pragma once
#include <cuda_runtime.h>

namespace hpcjit {

enum class Activation { kNone, kSilu, kGelu, kGeluTanh };

// 1 / (1 + exp(-argument)) times x, without overflow: exp(-argument) = inf gives x * 0. The fast form gives that from 2^126 on,
// and an exponential below 2^-126 would not change the sum: so neither handles subnormals.
template <bool kPrecise>
__device__ __forceinline__ float times_sigmoid(float x, float argument) {
  if constexpr (kPrecise) return x / (1.f + expf(-argument));
  float e, r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(argument * -1.4426950408889634f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.f + e));
  return x * r;
}

template <Activation kKind, bool kPrecise>
__device__ __forceinline__ float activate(float x) {
  if constexpr (kKind == Activation::kSilu) {
    return times_sigmoid<kPrecise>(x, x);
  } else if constexpr (kKind == Activation::kGelu) {
    return 0.5f * x * (1.f + erff(x * 0.70710678118654752f));
  } else if constexpr (kKind == Activation::kGeluTanh) {
    // 0.5 (1 + tanh(u)) = 1 / (1 + exp(-2u)) with u = sqrt(2/pi) (x + 0.044715 x^3)
    return times_sigmoid<kPrecise>(x, 1.5957691216057308f * (x + 0.044715f * x * x * x));
  } else {
    return x;
  }
}

}  // namespace hpcjit
