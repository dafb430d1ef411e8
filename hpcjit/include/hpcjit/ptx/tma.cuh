// Bulk copies into shared memory: boxes of a tensor, described by a tensor map, and plain bytes (SM 9.0). One thread issues a copy;
// what lies outside the tensor arrives as zeros and counts in the bytes.
#pragma once
#include <stdint.h>

namespace hpcjit::tma {

__device__ __forceinline__ void prefetch_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Box at (column, row); `barrier` counts its bytes.
__device__ __forceinline__ void load(uint32_t target, const void* map, int column, int row,
                                     uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
      "[%4];" ::"r"(target),
      "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// Box of a map with three dimensions.
__device__ __forceinline__ void load(uint32_t target, const void* map, int column, int row, int depth,
                                     uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(target),
      "l"(map), "r"(column), "r"(row), "r"(depth), "r"(barrier)
      : "memory");
}

// With four.
__device__ __forceinline__ void load(uint32_t target, const void* map, int column, int row, int third,
                                     int fourth, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, "
      "%5}], "
      "[%6];" ::"r"(target),
      "l"(map), "r"(column), "r"(row), "r"(third), "r"(fourth), "r"(barrier)
      : "memory");
}

// `bytes` as they lie: both addresses and the size are multiples of 16.
__device__ __forceinline__ void load_bytes(uint32_t target, const void* source, uint32_t bytes,
                                           uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// To the same place of every block of the cluster in `mask`; each one's own barrier counts the bytes.
__device__ __forceinline__ void load_to(uint16_t mask, uint32_t target, const void* map, int column, int row,
                                        uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(target),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(mask)
      : "memory");
}

}  // namespace hpcjit::tma
