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
// FP8 sums leave the tensor cores after 512 of K, or where scales change (128, 64 of the hidden activation), and are scaled
// and added in fp32.
//
// Shared memory: ring, 1024-byte aligned: kStages x (weights [128][128 B], rows [kTokens][128 B], all swizzled); rows to be
// written; scales kStages x (rows [parts][kTokens], weights [2], [2] unused) fp32; barriers. A full barrier counts
// the thread that asks for boxes and all that copy (grouped_load.cuh); an empty one the warps that compute, whose products
// have completed by then.
//
// This file: a launch of one product. Blocks take items in turn; how many there are stands in memory.
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
    mbarrier::init(ring.barriers + 16 * i, 1 + 128);
    mbarrier::init(ring.barriers + 16 * i + 8, 8);
  }
}

template <class Config, bool kGateUp>
__device__ __forceinline__ void grouped_compute(const GroupedParams& p, uint8_t* smem) {
  using Shape = GroupedShape<Config>;
  const GroupedPlace<kGateUp> place = {int(threadIdx.x) / 128, int(threadIdx.x) / 32 % 4,
                                       int(threadIdx.x) % 32};
  auto ring = grouped_ring<Shape>(smem);
  GroupedSums<Config, kGateUp> sums(reinterpret_cast<const float*>(smem + Shape::kScales), place.group,
                                    place.lane);
  uint8_t* staged = smem + Shape::kStagedAt;
  GroupedWalk walk(p);
  GroupedItem item;
  while (walk.next(item)) {
    const FeatureScales<Config, kGateUp> scales(p, item, place);
    sums.accumulate(ring, p.depth, item.rows);
    scales.apply(sums.value);
    if constexpr (kGateUp)
      HiddenStore<Config, Shape::kTokens / 2>(p, item, place, staged).run(sums.value);
    else
      store_rows<Config>(p, item, place, staged + place.group * Shape::kPartialBytes, sums.value);
  }
}

// Weights towards L2 that a block will need first, while the launch before it runs. For gate-up a guess, since the plan is
// being made then: blocks share out the experts in the order of the pairs, not what each will need, but what all will. Ids
// are read around L1, where a line would stay as it was then; if they are not there yet, something else is fetched, of an
// expert that exists. For down the plan is there. One thread of each warp that copies calls it.
template <class Config, bool kGateUp>
__device__ __forceinline__ void prefetch_first(const GroupedParams& p, const CUtensorMap& weights, int warp) {
  constexpr int kStageK = GroupedShape<Config>::kStageK;
  const int tile = blockIdx.x / unsigned(p.feature_tiles),
            feature_tile = blockIdx.x % unsigned(p.feature_tiles);
  uint32_t expert = ~0u;
  if constexpr (kGateUp) {
    if (p.guessed_columns == 0 || tile >= p.num_pairs) return;
    const int token = tile / p.top_k, k = tile % p.top_k;
    expert = uint32_t(__ldcg(p.topk_ids + int64_t(token) * p.ids_stride + k)) - uint32_t(p.expert_offset);
  } else {
    if (p.guessed_columns == 0 || tile >= __ldcg(p.num_tiles)) return;
    expert = __ldcg(p.tiles + tile).x;
  }
  if (expert >= uint32_t(p.num_experts)) return;
  const int end = min(p.depth, p.guessed_columns);
#pragma unroll 1
  for (int column = warp * kStageK; column < end; column += 4 * kStageK)
    prefetch_weights<kGateUp>(weights, column, int(expert), feature_tile, p.features);
}

template <class Config, bool kGateUp>
__global__ void __launch_bounds__(GroupedShape<Config>::kThreads, 1)
    grouped_kernel(const __grid_constant__ GroupedParams p, const __grid_constant__ CUtensorMap weights,
                   const __grid_constant__ CUtensorMap rows) {
  using Shape = GroupedShape<Config>;
  extern __shared__ uint8_t raw[];
  uint8_t* smem = grouped_memory(raw);
  if (threadIdx.x == 0) {
    init_ring<Shape>(grouped_ring<Shape>(smem));
    mbarrier::fence_init();
  }
  if (threadIdx.x == Shape::kComputing) {
    tma::prefetch_map(&weights);
    if constexpr (!kGateUp) tma::prefetch_map(&rows);
  }
  __syncthreads();
  if (threadIdx.x >= Shape::kComputing && threadIdx.x % 32 == 0)
    prefetch_first<Config, kGateUp>(p, weights, (int(threadIdx.x) - Shape::kComputing) / 32);
  __syncwarp();
  pdl::wait();
  pdl::trigger();  // not before: a dependent looks at the plan, which is there now

  if (threadIdx.x >= Shape::kComputing) {
    if constexpr (Shape::kRaises) release_registers<Shape::kCopying>();
    if constexpr (!kGateUp) global::fence_async();  // rows may have been written by threads
    GroupedLoader<Config> loader(grouped_ring<Shape>(smem));
    GroupedWalk walk(p);
    GroupedItem item;
    while (walk.next(item)) loader.template load<kGateUp>(p, weights, rows, item);
  } else {
    if constexpr (Shape::kRaises) claim_registers<Shape::kRaised>();
    grouped_compute<Config, kGateUp>(p, smem);
  }
}

template <class Config, bool kGateUp>
struct GroupedLaunch {
  using Shape = GroupedShape<Config>;

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
