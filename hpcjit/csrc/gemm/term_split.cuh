// An fp32 weight as a sum of 16-bit terms, each the nearest to what the ones before it left.
//
// bf16: two terms leave at most 2^-17 of the weight, three nothing (but for weights below 2^-110). fp16: the second term
// is scaled by 2^11, so that it does not sink below fp16's range; two leave at most 2^-22, or 2^-36 absolutely.
// A weight that is infinite, NaN or beyond the largest 16-bit value gives an infinity or NaN in the terms and NaN in every
// sum of products with them, never a wrong number.
#pragma once
#include "hpcjit/types.cuh"

namespace hpcjit::gemm {

constexpr float kFp16LowScale = 2048.f;

__device__ __forceinline__ float low_half(uint32_t pair, bf16) {
  return __uint_as_float(pair << 16);
}
__device__ __forceinline__ float high_half(uint32_t pair, bf16) {
  return __uint_as_float(pair & 0xffff0000u);
}
__device__ __forceinline__ float low_half(uint32_t pair, fp16) {
  return to_float(fp16{uint16_t(pair)});
}
__device__ __forceinline__ float high_half(uint32_t pair, fp16) {
  return to_float(fp16{uint16_t(pair >> 16)});
}

// Terms of two neighbouring weights.
template <class T, int kTerms>
__device__ __forceinline__ void split_pair(float a, float b, uint32_t (&terms)[kTerms]) {
#pragma unroll
  for (int i = 0; i < kTerms; ++i) {
    terms[i] = pack2<T>(a, b);
    if (i + 1 == kTerms) break;
    a -= low_half(terms[i], T{});
    b -= high_half(terms[i], T{});
    if constexpr (sizeof(T) == 2 && !__is_same(T, bf16)) {
      a *= kFp16LowScale;
      b *= kFp16LowScale;
    }
  }
}

}  // namespace hpcjit::gemm
