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
