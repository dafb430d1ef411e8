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

// Weights of the block's first item towards L2. It reads the plan before pdl::wait(), around L1, where a line would stay as
// it was then; a plan that is not there yet only means that something else is fetched, of an expert that exists.
template <class Config, bool kGateUp>
__device__ __forceinline__ void prefetch_weights(const GroupedParams& p, const CUtensorMap& map) {
  using Shape = GroupedShape<Config, kGateUp>;
  const uint32_t tile = blockIdx.x / unsigned(p.feature_tiles),
                 feature = blockIdx.x % unsigned(p.feature_tiles);
  if (int(tile) >= __ldcg(p.num_tiles)) return;
  const uint32_t expert = __ldcg(p.tiles + tile).x;
  if (expert >= uint32_t(p.num_experts)) return;
  const int row = int(expert) * p.features + int(feature) * Shape::kFeatures;
  for (int k = 0; k < p.depth && k < Shape::kStages * Shape::kStageK; k += Shape::kStageK)
    for (int box = 0; box < 2; ++box) tma::prefetch_box(&map, k, row + box * kBoxRows);
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
  if (threadIdx.x == Shape::kComputing) {
    tma::prefetch_map(&map);
    if constexpr (!kGateUp) prefetch_weights<Config, kGateUp>(p, map);
  }
  __syncthreads();
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
