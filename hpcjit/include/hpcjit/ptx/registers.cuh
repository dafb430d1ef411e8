// Registers handed from a warpgroup that copies to those that compute (SM 9.0a). All four warps of a warpgroup call it;
// the counts of a block's warps must add up to no more than it was launched with.
#pragma once

namespace hpcjit {

template <int kRegisters>
__device__ __forceinline__ void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void claim_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace hpcjit
