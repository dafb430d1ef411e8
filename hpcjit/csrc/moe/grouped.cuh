// Grouped product of a mixture of experts: out[r] = rows[r] * weights[expert of r]^T, rows sorted by expert (plan.cuh).
//
//   kGateUp: rows are gathered, out is act(gate) * up, in bf16 or e4m3 with a scale for each row and 64 features
//   else:    out is the product, in partial_t
//
// Weights are the rows of a product (A), up to kTokens rows of an expert its columns (B), so that few rows waste little. An
// item is such a tile of rows and 64 features (kGateUp: of gate and of up, in the same thread) or 128. The warps behind the
// first two warpgroups copy to a ring of kStages in shared memory, 128 bytes of K each: a box of weights, the rows, their
// scales (full and empty barriers), and run ahead into the next item while the others finish theirs. Each of the two
// warpgroups multiplies 64 rows of weights with all rows of the tile; one scales and adds while the other's products run.
// They read neither scales nor the plan from global memory, which would take longer than an item of down. Two blocks of
// down share an SM where they fit.
//
// FP8 sums leave the tensor cores after 512 of K, or where scales change (128, 64 of the hidden activation), and are scaled
// and added in fp32.
//
// Shared memory: ring, 1024-byte aligned: kStages x (weights [128][128 B], rows [kTokens][128 B], all swizzled); rows to be
// written; beside the ring kStages x (the item, or that there are no more; scales of rows [parts][kTokens] and of weights,
// fp32); barriers; the block's own plan. A full barrier counts the thread that asks for boxes and all that copy
// (grouped_load.cuh); an empty one the warps that compute, whose products have completed by then.
//
// This file: a launch of one product. Which items there are says a plan (grouped_plan.cuh).
#pragma once
#include "hpcjit/ptx/pdl.cuh"
#include "hpcjit/ptx/registers.cuh"
#include "moe/grouped_load.cuh"
#include "moe/grouped_store.cuh"

namespace hpcjit::moe {

// Dynamic shared memory from a multiple of 1024 on.
__device__ __forceinline__ uint8_t* grouped_memory(uint8_t* raw) {
  return raw + (1024 - copy::shared_address(raw) % 1024) % 1024;
}

template <class Config, bool kGateUp>
__device__ __forceinline__ void init_ring(GroupedRing<Config, kGateUp> ring) {
  using Shape = GroupedShape<Config, kGateUp>;
  for (; ring.parity == 0; ring.advance()) {
    mbarrier::init(ring.full(), Shape::kArrivals);
    mbarrier::init(ring.empty(), Shape::kComputing / 32);
  }
}

template <class Config, bool kGateUp>
__device__ __forceinline__ void grouped_compute(const GroupedParams& p, GroupedRing<Config, kGateUp> ring) {
  using Shape = GroupedShape<Config, kGateUp>;
  const GroupedPlace<kGateUp> place(threadIdx.x);
#pragma unroll 1
  for (int rows; next_item(ring, rows);) {
    with_columns<Shape::kTokens>(rows, [&](auto columns) {
      constexpr int n = columns / 2;
      GroupedSums<Config, kGateUp, columns> sums(place);
      const GroupedItem item = sums.run(ring, p.depth);
      if constexpr (kGateUp)
        HiddenStore<Config, n>(p, item, place, ring.staged()).run(sums.value);
      else
        RowStore<Config, n>(p, item, place, ring.staged() + place.group * Shape::kPartialBytes)
            .run(sums.value);
    });
  }
}

// The warps that copy, `thread` counts theirs.
template <class Config, bool kGateUp>
__device__ __forceinline__ void grouped_copy(const GroupedParams& p, const GroupedPlan<Config, kGateUp>& plan,
                                             const CUtensorMap& weights, const CUtensorMap& rows,
                                             const GroupedRing<Config, kGateUp>& ring, int thread) {
  using Shape = GroupedShape<Config, kGateUp>;
  if (thread < 32)
    BoxLoader<Config, kGateUp>(p, plan, weights, rows, ring).run();
  else if constexpr (Shape::kRowWarps > 0)
    if (thread < 32 * Shape::kCopyWarps) RowLoader<Config, kGateUp>(p, plan, ring, thread - 32).run();
}

template <class Config, bool kGateUp>
__global__ void __launch_bounds__(GroupedShape<Config, kGateUp>::kThreads,
                                  GroupedShape<Config, kGateUp>::kPerSm)
    grouped_kernel(const __grid_constant__ GroupedParams p, const __grid_constant__ CUtensorMap weights,
                   const __grid_constant__ CUtensorMap rows) {
  using Shape = GroupedShape<Config, kGateUp>;
  extern __shared__ uint8_t raw[];
  uint8_t* smem = grouped_memory(raw);
  const GroupedRing<Config, kGateUp> ring{copy::shared_address(smem)};
  GroupedPlan<Config, kGateUp> plan(p, smem);
  plan.clear();
  if (threadIdx.x == 0) {
    init_ring(ring);
    mbarrier::fence_init();
  }
  if (threadIdx.x == Shape::kComputing) {
    tma::prefetch_map(&weights);
    if constexpr (!kGateUp) tma::prefetch_map(&rows);
  }
  __syncthreads();
  plan.find();
  if (threadIdx.x >= Shape::kComputing) {
    if constexpr (Shape::kRaises) release_registers<Shape::kCopying>();
    grouped_copy<Config, kGateUp>(p, plan, weights, rows, ring, int(threadIdx.x) - Shape::kComputing);
  } else {
    if constexpr (Shape::kRaises) claim_registers<Shape::kRaised>();
    pdl::wait();
    plan.publish();
    pdl::trigger();  // not before: a dependent looks at the plan, which is there now
    grouped_compute<Config, kGateUp>(p, ring);
  }
}

template <class Config, bool kGateUp>
struct GroupedLaunch {
  using Shape = GroupedShape<Config, kGateUp>;

  static cudaError_t prepare() {
    return cudaFuncSetAttribute(grouped_kernel<Config, kGateUp>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                Shape::kSmem);
  }

  // `weights` [experts][features, kGateUp: twice][depth]; `num_rows` of p.rows, unless they are gathered; `blocks`: as many
  // as can run at a time, or as there are items.
  static cudaError_t launch(const GroupedParams& p, const void* weights, int64_t num_rows, int64_t blocks,
                            cudaStream_t stream) {
    CUtensorMap map, rows = {};
    cudaError_t status = encode_weights<Config, kGateUp>(map, weights, p.num_experts, p.features, p.depth);
    if (!kGateUp && status == cudaSuccess)
      status = encode_rows<Config>(rows, p.rows, num_rows, p.depth, p.row_stride);
    if (status != cudaSuccess) return status;
    const LaunchShape shape = {blocks, Shape::kThreads, Shape::kSmem, Config::kPdl};
    return hpcjit::launch(grouped_kernel<Config, kGateUp>, shape, stream, p, map, rows);
  }
};

}  // namespace hpcjit::moe
