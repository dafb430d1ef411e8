// Asynchronous copies from global to shared memory by the threads themselves (SM 8.0).
#pragma once
#include <stdint.h>

namespace hpcjit::copy {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return uint32_t(__cvta_generic_to_shared(p));
}

// Cache policy for data that is read once: it should be the first to leave L2.
__device__ __forceinline__ uint64_t evict_first() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Copies 16 bytes around L1. Where not `live` nothing is read and zeros are written.
__device__ __forceinline__ void async_16(uint32_t target, const void* source, bool live, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(target), "l"(source),
               "r"(live ? 16 : 0), "l"(policy)
               : "memory");
}

__device__ __forceinline__ void async_16(uint32_t target, const void* source, bool live) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(live ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void async_4(uint32_t target, const void* source, bool live) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(target), "l"(source), "r"(live ? 4 : 0)
               : "memory");
}

// Before an asynchronous copy reads what this thread wrote to shared memory; a barrier must follow.
__device__ __forceinline__ void fence_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Closes a group of this thread's copies, and waits until at most kPending younger groups are under way.
__device__ __forceinline__ void commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace hpcjit::copy
