// Barriers of some of a block's warps. Number 0 is __syncthreads' own.
#pragma once

namespace hpcjit::named_barrier {

// Waits until kThreads threads, whole warps, have arrived at barrier `id`, 1 to 15.
template <int kThreads>
__device__ __forceinline__ void sync(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

}  // namespace hpcjit::named_barrier
