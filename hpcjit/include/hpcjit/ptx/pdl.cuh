// Programmatic dependent launch. Rules kept by every kernel here: wait() before the first read of anything a
// predecessor may have written and before the first write of anything it may still read; trigger() where
// measurement says. It is safe anywhere, because a dependent's own wait() returns only after this grid has
// finished and flushed its writes. One exception: a dependent of the same operator may read before its wait()
// what was complete when this grid's wait() returned, or what this grid wrote and fenced (__threadfence) before
// its own trigger, around L1 and if every block of this grid triggers after that (down after gate-up in
// moe/fused_moe.cuh, the places after the counts in moe/pair_sort.cuh). Early hides the dependent's launch, which
// is what counts for a small kernel; in a large one, blocks that wait for their turn take room from blocks that
// work. Both are no-ops when the launch did not ask for it.
#pragma once

namespace hpcjit::pdl {

__device__ __forceinline__ void wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void trigger() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" :::);
#endif
}

// Where a kernel triggers (Config::kTrigger): a point calls trigger_at<the chosen one, itself>().
constexpr int kAtStart = 0, kAfterLoads = 1, kAtEnd = 2;

template <int kChosen, int kHere>
__device__ __forceinline__ void trigger_at() {
  if constexpr (kChosen == kHere) trigger();
}

}  // namespace hpcjit::pdl
