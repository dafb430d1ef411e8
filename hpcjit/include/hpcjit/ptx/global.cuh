// Global memory: words by which the blocks of a grid find each other, and what C++ has no word for.
#pragma once
#include <stdint.h>

namespace hpcjit::global {

// What was written before another thread's add_release is seen after a load_acquire that sees its addition.
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* word) {
  uint32_t x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(word) : "memory");
  return x;
}
__device__ __forceinline__ void add_release(uint32_t* word, uint32_t x) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(word), "r"(x) : "memory");
}

// The word before one was added. It orders nothing.
__device__ __forceinline__ uint32_t take_ticket(uint32_t* word) {
  uint32_t x;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(x) : "l"(word) : "memory");
  return x;
}

// Arrives at a word that counts up to `arrivals` and then starts again at zero. Whether this arrival was the last; if so,
// it comes after all others.
__device__ __forceinline__ bool arrive_last(uint32_t* word, uint32_t arrivals) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(word), "r"(arrivals - 1)
               : "memory");
  return before == arrivals - 1;
}

// Words that are zero until they are written, and so say themselves whether they have been: 0 is written as -0. There is no
// fence and no second read; memory only has to write a word as a whole. Accesses are relaxed ones of the GPU's scope,
// which go to L2. Who reads the words puts the zeros back.
__device__ __forceinline__ float not_zero(float x) {
  return __float_as_uint(x) == 0 ? -0.f : x;
}
__device__ __forceinline__ void pass(float* target, float x) {
  asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(target), "f"(not_zero(x)) : "memory");
}
__device__ __forceinline__ void pass(float* target, const float2& x) {
  asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1, %2};" ::"l"(target), "f"(not_zero(x.x)),
               "f"(not_zero(x.y))
               : "memory");
}
__device__ __forceinline__ void pass(float* target, const float4& x) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(target), "f"(not_zero(x.x)),
               "f"(not_zero(x.y)), "f"(not_zero(x.z)), "f"(not_zero(x.w))
               : "memory");
}
__device__ __forceinline__ void load_relaxed(const float* source, float2& x) {
  asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];"
               : "=f"(x.x), "=f"(x.y)
               : "l"(source)
               : "memory");
}
__device__ __forceinline__ void load_relaxed(const float* source, float4& x) {
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(source)
               : "memory");
}
__device__ __forceinline__ bool is_passed(const float2& x) {
  return __float_as_uint(x.x) != 0 && __float_as_uint(x.y) != 0;
}
// Whether the words of all of x[...][j] are. A chain for each of four words: compares one after the other would take longer.
template <int kCount, int kQuads>
__device__ __forceinline__ bool are_passed(const float4 (&x)[kCount][kQuads], int j) {
  uint32_t least[4] = {~0u, ~0u, ~0u, ~0u};
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    least[0] = min(least[0], __float_as_uint(x[i][j].x));
    least[1] = min(least[1], __float_as_uint(x[i][j].y));
    least[2] = min(least[2], __float_as_uint(x[i][j].z));
    least[3] = min(least[3], __float_as_uint(x[i][j].w));
  }
  return min(min(least[0], least[1]), min(least[2], least[3])) != 0;
}

// By one access; the compiler may cut an assignment of a uint4 into words.
__device__ __forceinline__ void store_16(void* target, const uint4& x) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(x.x), "r"(x.y), "r"(x.z),
               "r"(x.w)
               : "memory");
}

// Between what threads wrote to global memory and asynchronous copies (TMA, bulk) that read it: by the thread that wrote,
// before its release, and by the one that copies, after its acquire.
__device__ __forceinline__ void fence_async() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace hpcjit::global
