// Operands of 16-bit products out of shared memory, and what scales the sums; see mono.cuh.
//
// A step is 32 bytes of K. As fp8 it is two k16 of fp16: lane 4 g + t finds codes 4 t .. 4 t + 3 of 16 in a word, and puts
// them where the instruction expects k 2 t, 2 t + 1, 2 t + 8, 2 t + 9, of weights and rows alike.
#pragma once
#include "hpcjit/ptx/mma.cuh"
#include "moe/mono_shape.cuh"

namespace hpcjit::moe {

template <class weight_t>
struct MonoFragments;

template <>
struct MonoFragments<e4m3> {
  static constexpr int kProducts = 2;  // of a step
  using operand_t = fp16;

  // `word`: rows g and g + 8 of the first 16 bytes, then of the second.
  static __device__ __forceinline__ void weights(const uint32_t (&word)[4], uint32_t (&a)[2][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) mma::e4m3x4_to_fp16(word[i], a[i / 2][i % 2], a[i / 2][i % 2 + 2]);
  }
  static __device__ __forceinline__ void rows(const uint32_t (&word)[2], uint32_t (&b)[2][2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) mma::e4m3x4_to_fp16(word[i], b[i][0], b[i][1]);
  }
};

template <>
struct MonoFragments<bf16> {
  static constexpr int kProducts = 1;
  using operand_t = bf16;

  static __device__ __forceinline__ void weights(const uint32_t (&word)[4], uint32_t (&a)[1][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[0][i] = word[i];
  }
  static __device__ __forceinline__ void rows(const uint32_t (&word)[2], uint32_t (&b)[1][2]) {
    b[0][0] = word[0];
    b[0][1] = word[1];
  }
};

}  // namespace hpcjit::moe
