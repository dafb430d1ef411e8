// Element types and their conversions to and from fp32.
//
// These replace cuda_bf16.h and cuda_fp8.h, whose parsing alone costs a second of every first call.
// Conversions round to nearest even; fp8 saturates to +-448 and keeps NaN.
#pragma once
#include <cuda_runtime.h>
#include <stdint.h>

namespace hpcjit {

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};
struct e4m3 {
  uint8_t bits;
};
using fp32 = float;
using int32 = int32_t;
using int64 = int64_t;

constexpr float kE4m3Max = 448.f;
// Smallest max|x| that a dynamic scale is made from: an all-zero row gets a tiny positive scale and zeros,
// not 0 / 0.
constexpr float kQuantFloor = 1e-10f;

__device__ __forceinline__ float to_float(float x) {
  return x;
}
__device__ __forceinline__ float to_float(bf16 x) {
  return __uint_as_float(uint32_t(x.bits) << 16);
}
__device__ __forceinline__ float to_float(fp16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}

// Two elements at once: `lo` lands in the lower half, as memory order wants.
template <class T>
__device__ __forceinline__ uint32_t pack2(float lo, float hi);
template <>
__device__ __forceinline__ uint32_t pack2<bf16>(float lo, float hi) {
  uint32_t y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}
template <>
__device__ __forceinline__ uint32_t pack2<fp16>(float lo, float hi) {
  uint32_t y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
__device__ __forceinline__ uint16_t pack2_e4m3(float lo, float hi) {
  uint16_t y;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(hi), "f"(lo));
  return y;
}
#else
// SM80 and SM86 have no fp8 conversion: round the bits. From 2^-6 on, half a step less one (plus the last bit
// kept, for ties to even) is added below the three bits of fraction that stay, and a carry moves into the
// exponent, as it should. Below, the grid has the step 2^-9, which is one ulp of 2^14: the sum's low bits are
// the code.
__device__ __forceinline__ uint8_t round_e4m3(float x) {
  const uint32_t bits = __float_as_uint(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7f;  // NaN
  const uint32_t code = magnitude < 0x3c800000u
                            ? __float_as_uint(__uint_as_float(magnitude) + 16384.f) - 0x46800000u
                            : ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
  return uint8_t(((bits >> 24) & 0x80u) | (code < 0x7eu ? code : 0x7eu));
}
__device__ __forceinline__ uint16_t pack2_e4m3(float lo, float hi) {
  return uint16_t(round_e4m3(lo) | (uint16_t(round_e4m3(hi)) << 8));
}
#endif

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) {
  return bf16{uint16_t(pack2<bf16>(x, 0.f))};
}
template <>
__device__ __forceinline__ fp16 from_float<fp16>(float x) {
  return fp16{uint16_t(pack2<fp16>(x, 0.f))};
}
template <>
__device__ __forceinline__ e4m3 from_float<e4m3>(float x) {
  return e4m3{uint8_t(pack2_e4m3(x, 0.f))};
}

}  // namespace hpcjit
