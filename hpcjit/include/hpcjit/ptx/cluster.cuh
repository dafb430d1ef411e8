// Blocks of a cluster: their barrier, and writes to each other's shared memory (SM 9.0).
//
// arrive_relaxed() orders no memory: it says who has started and who is done; arrive() does, and costs a fence of the whole
// GPU. Data goes by copies and stores that an mbarrier of the receiver counts. A block must not end while another may still read
// its memory or write to it: arrive_relaxed() after the last such access, and wait() before the end.
#pragma once
#include <stdint.h>

namespace hpcjit::cluster {

__device__ __forceinline__ void arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Where `address` of this block's shared memory lies in that of block `rank`.
__device__ __forceinline__ uint32_t map(uint32_t address, uint32_t rank) {
  uint32_t y;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(y) : "r"(address), "r"(rank));
  return y;
}

// Counts 16 bytes at `mapped_barrier`, which lies in the same block as `mapped`, when they have arrived.
__device__ __forceinline__ void store4_async(uint32_t mapped, float4 x, uint32_t mapped_barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
          mapped),
      "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(mapped_barrier)
      : "memory");
}

// Copies shared memory of this block, a multiple of 16 bytes, to `mapped`; `mapped_barrier` in the same block counts them.
__device__ __forceinline__ void copy_async(uint32_t mapped, uint32_t source, uint32_t bytes,
                                           uint32_t mapped_barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          mapped),
      "r"(source), "r"(bytes), "r"(mapped_barrier)
      : "memory");
}

}  // namespace hpcjit::cluster
