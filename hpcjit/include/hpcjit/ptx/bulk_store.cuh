// From shared memory to global memory as one copy, and matrices of 16-bit elements from registers to shared memory (SM 9.0).
#pragma once
#include <stdint.h>

namespace hpcjit::bulk_store {

// `bytes` as they lie: both addresses and the size are multiples of 16. What threads wrote to shared memory must have been
// fenced (`copy::fence_async`) by them, before a barrier.
__device__ __forceinline__ void start(void* target, uint32_t source, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target), "r"(source),
               "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// This thread's copies have read what they copy.
__device__ __forceinline__ void wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// This thread's copies are complete, and what they wrote is visible to it.
__device__ __forceinline__ void wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Four 8 x 8 matrices, each transposed: lane l holds of matrix i its row l / 4, columns 2 (l % 4) and the next; its column
// l % 8 of matrix l / 8 becomes the 16 bytes at `target` of lane l.
__device__ __forceinline__ void matrices_transposed(uint32_t target, const uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(target),
               "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

}  // namespace hpcjit::bulk_store
