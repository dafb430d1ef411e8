// What the gate of a token asks of one warp: ordered keys, exponentials, and lists that lanes fill together.
#pragma once
#include "hpcjit/types.cuh"

namespace hpcjit::moe {

constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr uint32_t kStruckOut = 0, kNanKey = 1, kMinusInfinityKey = 0x007fffffu;

// Larger float, larger key; -inf maps above kNanKey. Not of NaN.
__device__ __forceinline__ uint32_t number_key(float x) {
  const uint32_t u = __float_as_uint(x + 0.f);  // -0 becomes +0: they tie
  return u ^ (uint32_t(int32_t(u) >> 31) | 0x80000000u);
}

__device__ __forceinline__ uint32_t order_key(float x) {
  return x == x ? number_key(x) : kNanKey;
}

// Inverse of number_key.
__device__ __forceinline__ float keyed_value(uint32_t key) {
  return __uint_as_float(key ^ (uint32_t(int32_t(~key) >> 31) | 0x80000000u));
}

// exp(x - largest), with 1 for the largest itself (inf - inf) and 0 for NaN and where no logit is above -inf.
__device__ __forceinline__ float exponential(float x, float largest) {
  if (x == largest) return largest == -INFINITY ? 0.f : 1.f;
  const float e = __expf(x - largest);
  return e == e ? e : 0.f;
}

__device__ __forceinline__ float exp2_approx(float x) {
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x));
  return e;
}

// The same where both are ordinary; NaN otherwise. Below 2^-126 it is 0, which no sum that holds a 1 notices.
__device__ __forceinline__ float quick_exponential(float x, float largest) {
  return exp2_approx((x - largest) * 1.4426950408889634f);
}

__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / (1 + exp(-x)) to about 2^-22 in absolute terms; 0 below 2^-126. NaN stays NaN.
__device__ __forceinline__ float quick_sigmoid(float x) {
  return reciprocal_approx(1.f + exp2_approx(x * -1.4426950408889634f));
}

// 1 / x to a rounding, for x of at least 2^-100.
__device__ __forceinline__ float reciprocal(float x) {
  const float y = reciprocal_approx(x);
  return __fmaf_rn(y, __fmaf_rn(-x, y, 1.f), y);
}

// The same to 2^-22 of itself: what the product with log2(e) loses is put back. 0 for NaN.
__device__ __forceinline__ float sigmoid(float x) {
  const float y = fminf(fmaxf(x, -88.f), 88.f);  // exp(88) is finite, its inverse below 2^-126
  const float t = y * -1.4426950408889634f;
  const float rest = __fmaf_rn(y, -1.9259629911e-8f, __fmaf_rn(y, -1.4426950408889634f, -t));
  const float e = exp2_approx(t);
  return reciprocal(1.f + __fmaf_rn(e * rest, 0.6931471805599453f, e));
}

// x / sum to a rounding, for a sum that is not negative; 0 for one of 0.
__device__ __forceinline__ float divided(float x, float sum) {
  if (sum < 1e-30f) return sum > 0.f ? x / sum : 0.f;  // the inverse might overflow
  const float y = reciprocal(sum), quotient = x * y;
  return __fmaf_rn(__fmaf_rn(-sum, quotient, x), y, quotient);
}

// The larger, or NaN if one of them is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float x;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
  return x;
}

// Sum over this lane and those below it.
__device__ __forceinline__ int prefix_sum(int x) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2)
    asm volatile(
        "{\n.reg .b32 r;\n.reg .pred p;\nshfl.sync.up.b32 r|p, %0, %1, 0, 0xffffffff;\n@p add.s32 %0, %0, "
        "r;\n}"
        : "+r"(x)
        : "r"(offset));
  return x;
}

// These three are one predicate and what it guards; the compiler makes branches and selections of them.

// count + 1 where x >= bound.
__device__ __forceinline__ int count_if_reached(int count, float x, float bound) {
  asm("{\n.reg .pred p;\nsetp.ge.f32 p, %1, %2;\n@p add.s32 %0, %0, 1;\n}"
      : "+r"(count)
      : "f"(x), "f"(bound));
  return count;
}

// count + 1 where a > b.
__device__ __forceinline__ int count_if_greater(int count, float a, float b) {
  asm("{\n.reg .pred p;\nsetp.gt.f32 p, %1, %2;\n@p add.s32 %0, %0, 1;\n}" : "+r"(count) : "f"(a), "f"(b));
  return count;
}

// Where x >= bound, stores `id` at a shared address, which moves on.
__device__ __forceinline__ void append_if_reached(uint32_t& address, int id, float x, float bound) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ge.f32 p, %2, %3;\n@p st.shared.b32 [%0], %1;\n@p add.u32 %0, %0, 4;\n}"
      : "+r"(address)
      : "r"(id), "f"(x), "f"(bound)
      : "memory");
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return uint32_t(__cvta_generic_to_shared(p));
}

}  // namespace hpcjit::moe
