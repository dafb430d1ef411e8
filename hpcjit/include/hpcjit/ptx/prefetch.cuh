// Hints that move lines towards the SM without reading them. A prefetch into L2 is never wrong, even of
// memory that a predecessor is still writing: L2 is where its stores land. So it may stand before
// pdl::wait().
#pragma once
#include <stdint.h>

namespace hpcjit {

__device__ __forceinline__ void prefetch_l2(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// So many bytes, a multiple of 16 at a multiple of 16, by one request; nothing below SM 9.0, which has none.
__device__ __forceinline__ void prefetch_l2(const void* p, uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
#endif
}

// Into L1, where nothing keeps a line fresh: only of what is final, so never before pdl::wait().
__device__ __forceinline__ void prefetch_l1(const void* p) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(p));
}

}  // namespace hpcjit
