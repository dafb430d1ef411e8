// Grouped product of a mixture of experts: out[r] = rows[r] * weights[expert of r]^T, rows sorted by expert (plan.cuh).
//
//   kGateUp: rows are gathered, out is act(gate) * up, in bf16 or e4m3 with a scale for each row and 64 features
//   else:    out is the product, in partial_t
//
// Weights are the rows of a product (A), up to kTokens rows of an expert its columns (B), so that few rows waste little. An
// item is such a tile of rows and 64 features (kGateUp: of gate and of up, in the same thread) or 128. Blocks take items in
// turn; how many there are stands in memory. The last warpgroup copies to a ring of kStages in shared memory, 128 bytes of
// K each: two boxes of weights, the rows, their scales (full and empty barriers). It runs ahead into the next item while
// the others finish theirs. Each of kGroups warpgroups multiplies 64 rows of the tile with both boxes.
//
// FP8 sums leave the tensor cores after 128 of K (64 of the hidden activation) and are scaled and added in fp32.
//
// Shared memory: ring, 1024-byte aligned: kStages x (weights 2 x [64][128 B], rows [kTokens][128 B], all swizzled); scales
// kStages x (rows [kParts][kTokens], weights [2], [2] unused) fp32; kGateUp: rows to be written, maxima; barriers. A full
// barrier counts the thread that asks for the weights and the four warps that copy rows (grouped_load.cuh); an empty one
// the warps that compute, whose products have completed by then.
#pragma once
#include "hpcjit/launch.cuh"
#include "hpcjit/ptx/pdl.cuh"
#include "hpcjit/ptx/registers.cuh"
#include "hpcjit/tensor_map.cuh"
#include "moe/grouped_load.cuh"
#include "moe/grouped_store.cuh"

namespace hpcjit::moe {

template <class Config, bool kGateUp>
__device__ __forceinline__ void grouped_compute(
    const GroupedParams& p, const GroupedRing<GroupedShape<Config, kGateUp>::kStages>& ring, uint8_t* smem) {
  using Shape = GroupedShape<Config, kGateUp>;
  using Sums = GroupedSums<Config, kGateUp>;
  const GroupedPlace place{int(threadIdx.x) / 128, int(threadIdx.x) / 32 % 4, int(threadIdx.x) % 32};
  const int stages = (p.depth + Shape::kStageK - 1) / Shape::kStageK;
  Sums sums(ring, reinterpret_cast<const float*>(smem + Shape::kScales), place.group, place.lane);
  GroupedWalk walk(p);
  GroupedItem item;
  while (walk.next(item)) {
    const bool live = place.group * Shape::kColumns < item.rows;
    GroupedRowScales<Config, kGateUp> scales;
    scales.load(p, item, place);
    sums.accumulate(stages, live);
    if (!live) continue;
    scales.apply(sums.value);
    if constexpr (kGateUp)
      HiddenStore<Config, Sums::kSums>(p, item, place, smem).run(sums.value);
    else
      store_rows<Config>(p, item, place, sums.value);
  }
}

// Weights towards L2, before pdl::wait(). What is looked at for that is read around L1, where a line would stay as it was
// then; if it is not there yet, something else is fetched, of an expert that exists.
//
// kGateUp: the plan is being made. Blocks share out the experts in the order of the pairs: not what each will need, but
// what all will. Otherwise the plan is there, and a block fetches the weights of its first item.
template <bool kGateUp>
__device__ __forceinline__ uint32_t expert_ahead(const GroupedParams& p, uint32_t tile) {
  if constexpr (kGateUp) {
    if (tile >= uint32_t(p.num_pairs)) return ~0u;
    const uint32_t token = tile / unsigned(p.top_k), k = tile % unsigned(p.top_k);
    return uint32_t(__ldcg(p.topk_ids + token * p.ids_stride + k)) - uint32_t(p.expert_offset);
  } else {
    return int(tile) < __ldcg(p.num_tiles) ? __ldcg(p.tiles + tile).x : ~0u;
  }
}

// One thread of each warp that copies calls it.
template <class Config, bool kGateUp>
__device__ __forceinline__ void prefetch_weights(const GroupedParams& p, const CUtensorMap& map, int warp) {
  using Shape = GroupedShape<Config, kGateUp>;
  if (kGateUp && p.guessed_stages == 0) return;
  const int tile = blockIdx.x / unsigned(p.feature_tiles),
            feature_tile = blockIdx.x % unsigned(p.feature_tiles);
  const uint32_t expert = expert_ahead<kGateUp>(p, tile);
  if (expert >= uint32_t(p.num_experts)) return;
  const GroupedItem item = {int(expert), 0, 0, feature_tile};
  const int end = min(p.depth, (kGateUp ? p.guessed_stages : Shape::kStages) * Shape::kStageK);
#pragma unroll 1
  for (int k = warp * Shape::kStageK; k < end; k += 4 * Shape::kStageK)
    for (int box = 0; box < 2; ++box) tma::prefetch_box(&map, k, weight_row<kGateUp>(p, item, box));
}

template <class Config, bool kGateUp>
__global__ void __launch_bounds__(GroupedShape<Config, kGateUp>::kThreads, Config::kBlocksPerSm)
    grouped_kernel(const __grid_constant__ GroupedParams p, const __grid_constant__ CUtensorMap map) {
  using Shape = GroupedShape<Config, kGateUp>;
  using Ring = GroupedRing<Shape::kStages>;
  extern __shared__ uint8_t raw[];
  uint8_t* smem = raw + (1024 - copy::shared_address(raw) % 1024) % 1024;
  const uint32_t base = copy::shared_address(smem);
  const Ring ring{base, base + Shape::kBarriers};

  if (threadIdx.x == 0) {
    for (int i = 0; i < Shape::kStages; ++i) {
      mbarrier::init(ring.barriers + 16 * i, 1 + 4);
      mbarrier::init(ring.barriers + 16 * i + 8, 4 * Shape::kGroups);
    }
    mbarrier::fence_init();
  }
  if (threadIdx.x == Shape::kComputing) tma::prefetch_map(&map);
  __syncthreads();
  if (threadIdx.x >= Shape::kComputing && threadIdx.x % 32 == 0)
    prefetch_weights<Config, kGateUp>(p, map, (int(threadIdx.x) - Shape::kComputing) / 32);
  __syncwarp();
  pdl::wait();
  pdl::trigger();  // not before: a dependent looks at the plan, which is there now

  if (threadIdx.x >= Shape::kComputing) {
    if constexpr (Shape::kRaises) release_registers<Shape::kCopying>();
    GroupedLoader<Config, kGateUp>(p, map, ring).run();
  } else {
    if constexpr (Shape::kRaises) claim_registers<Shape::kRaised>();
    grouped_compute<Config, kGateUp>(p, ring, smem);
  }
}

template <class Config, bool kGateUp>
struct GroupedLaunch {
  using Shape = GroupedShape<Config, kGateUp>;

  static cudaError_t prepare() {
    return cudaFuncSetAttribute(grouped_kernel<Config, kGateUp>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                Shape::kSmem);
  }

  // `weights` [experts][features, kGateUp: twice][depth]; `blocks`: as many as can run at a time, or as there are items.
  static cudaError_t launch(const GroupedParams& p, const void* weights, int64_t blocks,
                            cudaStream_t stream) {
    constexpr bool kFp8 = Shape::kScaled;
    constexpr int kBytes = kFp8 ? 1 : 2;
    const Matrix matrix = {weights, int64_t(p.num_experts) * p.features * (kGateUp ? 2 : 1), p.depth,
                           int64_t(p.depth) * kBytes};
    CUtensorMap map;
    const cudaError_t status =
        encode_tensor_map<kFp8 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kBytes>(
            map, matrix, kBoxRows, Shape::kStageK);
    if (status != cudaSuccess) return status;
    const LaunchShape shape = {blocks, Shape::kThreads, Shape::kSmem, Config::kPdl};
    return hpcjit::launch(grouped_kernel<Config, kGateUp>, shape, stream, p, map);
  }
};

}  // namespace hpcjit::moe
