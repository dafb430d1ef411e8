// Barriers in shared memory that count arrivals and the bytes of asynchronous copies (SM 9.0).
//
// A barrier's phases alternate; wait(parity) returns once the phase of that parity has completed, so the first wait on
// what producers fill takes 0, and the first wait on what consumers free takes 1, which a fresh barrier passes at once.
#pragma once
#include <stdint.h>

namespace hpcjit::mbarrier {

__device__ __forceinline__ void init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to asynchronous copies and to the cluster; a block or cluster barrier must follow.
__device__ __forceinline__ void fence_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at the barrier at the same offset in block `rank` of the cluster. It orders no memory beyond this block: enough
// to hand back a buffer whose reads have completed, and a release for the cluster costs a fence.
__device__ __forceinline__ void arrive_at(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// Where `yes`; without a branch, which must not stand between products of a warpgroup and their wait.
__device__ __forceinline__ void arrive_if(bool yes, uint32_t barrier) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "setp.ne.b32 p, %1, 0;\n"
      "@p mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];\n}" ::"r"(barrier),
      "r"(int(yes))
      : "memory");
}

// One arrival, counted among those of the phase, once this thread's cp.async copies so far (copy.cuh) have been written.
__device__ __forceinline__ void arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// One arrival, and the phase also waits for that many bytes.
__device__ __forceinline__ void arrive_expecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// The phase also waits for that many bytes.
__device__ __forceinline__ void expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ bool done(uint32_t barrier, uint32_t parity) {
  uint32_t yes;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(yes)
      : "r"(barrier), "r"(parity)
      : "memory");
  return yes != 0;
}

__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
  while (!done(barrier, parity)) {
  }
}
// For a phase that other blocks of the cluster complete with data, which is then seen.
__device__ __forceinline__ void wait_in_cluster(uint32_t barrier, uint32_t parity) {
  uint32_t yes = 0;
  while (!yes) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(yes)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
}

}  // namespace hpcjit::mbarrier
