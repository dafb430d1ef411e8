// Grouped product of a mixture of experts: out[r] = rows[r] * weights[expert of r]^T, rows sorted by expert (plan.cuh).
//
//   kGateUp: rows are gathered, out is act(gate) * up, in bf16 or e4m3 with a scale for each row and 64 features
//   else:    out is the product, in partial_t
//
// Weights are the rows of a product (A), up to kTokens rows of an expert its columns (B), so that few rows waste little. An
// item is such a tile of rows and 64 features (kGateUp: of gate and of up, in the same thread) or 128. The last warpgroup
// copies to a ring of kStages in shared memory, 128 bytes of K each: a box of weights, the rows, their scales (full and empty
// barriers). It runs ahead into the next item while the others finish theirs. Each of those two multiplies 64 rows of
// weights with all rows of the tile; one scales and adds while the other's products run.
//
// FP8 sums leave the tensor cores after 128 of K (64 of the hidden activation) and are scaled and added in fp32.
//
// Shared memory: ring, 1024-byte aligned: kStages x (weights [128][128 B], rows [kTokens][128 B], all swizzled); rows to be
// written; scales kStages x (rows [parts][kTokens], weights [2], [2] unused) fp32; items; barriers. A full barrier counts
// the thread that asks for the weights and the four warps that copy rows (grouped_load.cuh); an empty one the warps that
// compute, whose products have completed by then.
//
// This file: the product by itself. Blocks take items in turn; how many there are stands in memory.
#pragma once
#include "hpcjit/ptx/pdl.cuh"
#include "hpcjit/ptx/registers.cuh"
#include "moe/grouped_load.cuh"
#include "moe/grouped_store.cuh"

namespace hpcjit::moe {

template <class Shape>
__device__ __forceinline__ GroupedRing<Shape::kStages> grouped_ring(uint8_t* smem) {
  const uint32_t base = copy::shared_address(smem);
  return {base, base + Shape::kBarriers};
}

// Dynamic shared memory from a multiple of 1024 on.
__device__ __forceinline__ uint8_t* grouped_memory(uint8_t* raw) {
  return raw + (1024 - copy::shared_address(raw) % 1024) % 1024;
}

template <class Shape>
__device__ __forceinline__ void init_ring(const GroupedRing<Shape::kStages>& ring) {
  for (int i = 0; i < Shape::kStages; ++i) {
    mbarrier::init(ring.barriers + 16 * i, 1 + 4);
    mbarrier::init(ring.barriers + 16 * i + 8, 8);
  }
}

template <class Config>
__device__ __forceinline__ void grouped_compute(const GroupedParams& p, uint8_t* smem) {
  using Shape = GroupedShape<Config>;
  const GroupedPlace<false> place = {int(threadIdx.x) / 128, int(threadIdx.x) / 32 % 4,
                                     int(threadIdx.x) % 32};
  auto ring = grouped_ring<Shape>(smem);
  GroupedSums<Config, false> sums(reinterpret_cast<const float*>(smem + Shape::kScales), place.group,
                                  place.lane);
  uint8_t* staged = smem + Shape::kStagedAt + place.group * Shape::kPartialBytes;
  GroupedWalk walk(p);
  GroupedItem item;
  while (walk.next(item)) {
    sums.accumulate(ring, p.depth, item.rows);
    scale_features<Config>(p, item, place, sums.value);
#pragma unroll
    for (int pass = 0; pass < Shape::kPasses; ++pass)
      if (pass * Shape::kColumns < item.rows)
        store_rows<Config>(p, item, place, staged, pass * Shape::kColumns, sums.value[pass]);
  }
}

template <class Config>
__global__ void __launch_bounds__(GroupedShape<Config>::kThreads, Config::kBlocksPerSm)
    grouped_kernel(const __grid_constant__ GroupedParams p, const __grid_constant__ CUtensorMap map) {
  using Shape = GroupedShape<Config>;
  extern __shared__ uint8_t raw[];
  uint8_t* smem = grouped_memory(raw);
  if (threadIdx.x == 0) {
    init_ring<Shape>(grouped_ring<Shape>(smem));
    mbarrier::fence_init();
  }
  if (threadIdx.x == Shape::kComputing) tma::prefetch_map(&map);
  __syncthreads();
  pdl::wait();
  pdl::trigger();

  if (threadIdx.x >= Shape::kComputing) {
    if constexpr (Shape::kRaises) release_registers<Shape::kCopying>();
    GroupedLoader<Config> loader(grouped_ring<Shape>(smem));
    GroupedWalk walk(p);
    GroupedItem item;
    while (walk.next(item)) loader.template load<false>(p, map, item, [] {});
    loader.flush();
  } else {
    if constexpr (Shape::kRaises) claim_registers<Shape::kRaised>();
    grouped_compute<Config>(p, smem);
  }
}

template <class Config>
struct GroupedLaunch {
  using Shape = GroupedShape<Config>;

  static cudaError_t prepare() {
    return cudaFuncSetAttribute(grouped_kernel<Config>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                Shape::kSmem);
  }

  // `weights` [experts][features][depth]; `blocks`: as many as can run at a time, or as there are items.
  static cudaError_t launch(const GroupedParams& p, const void* weights, int64_t blocks,
                            cudaStream_t stream) {
    CUtensorMap map;
    const cudaError_t status =
        encode_weights<Config, false>(map, weights, p.num_experts, p.features, p.depth);
    if (status != cudaSuccess) return status;
    const LaunchShape shape = {blocks, Shape::kThreads, Shape::kSmem, Config::kPdl};
    return hpcjit::launch(grouped_kernel<Config>, shape, stream, p, map);
  }
};

}  // namespace hpcjit::moe
