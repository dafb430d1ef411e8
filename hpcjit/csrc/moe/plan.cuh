// The plan of a grouped product: pairs (token, expert) sorted by expert, cut into tiles of rows of one expert.
//
//   sorted[r] = the pair of row r: those of expert 0 in increasing order, then those of expert 1, ...
//   position[pair] = its row, or -1 for a pair of no expert here
//   tiles[j] = {expert, first row, rows, 0}, rows <= tile_rows, in the order of the rows;  *num_tiles = how many
//
// Sorting is that of pair_sort.cuh. All blocks know all starts, so they share out the tiles.
#pragma once
#include "moe/align.cuh"

namespace hpcjit::moe {

struct PlanOut {
  int32_t* position;
  uint4* tiles;
  int32_t* num_tiles;
  int tile_rows;
};

// What pair_sort.cuh asks of a config.
template <class Config>
struct PlanAlign {
  static constexpr int kThreads = Config::kPlanThreads;
  static constexpr bool kCounted = Config::kPlanCounted, kClustered = Config::kPlanClustered;
  static constexpr bool kMatch = Config::kPlanMatch, kStrided = Config::kIdsStrided;
  static constexpr bool kHasMap = false, kFilled = false, kPdl = Config::kPdl;
};

template <class Config>
__global__ void __launch_bounds__(Config::kPlanThreads)
    plan_kernel(const __grid_constant__ AlignParams p, const __grid_constant__ PlanOut out) {
  extern __shared__ uint4 shared[];
  using Sort = PairSort<PlanAlign<Config>>;
  Sort sort(p, shared);
  if constexpr (!Sort::kCounted) {
    pdl::wait();
    pdl::trigger();  // not before: a dependent may look at the ids, which are there now
  }
  sort.load(0, sort.expert);
  sort.template find_places<false>(out.tile_rows);
  if constexpr (Sort::kCounted) pdl::trigger();
  sort.each_place([&](int pair, int at) {
    if (at >= 0) p.sorted_token_ids[at] = pair;
    out.position[pair] = at;
  });
  sort.each_expert([&](int expert, int first, int tiles, int lane, int lanes) {
    const int row = sort.start[expert], end = sort.start[expert + 1];
    for (int i = lane; i < tiles; i += lanes) {
      const int at = row + i * out.tile_rows;
      out.tiles[first + i] = make_uint4(expert, at, min(out.tile_rows, end - at), 0);
    }
  });
  if (blockIdx.x == 0 && threadIdx.x == 0) *out.num_tiles = sort.tile_start[sort.experts];
}

template <class Config>
struct PlanLaunch {
  using Sort = PairSort<PlanAlign<Config>>;

  static cudaError_t prepare() {
    const auto kernel = plan_kernel<Config>;
    cudaError_t status = cudaSuccess;
    if constexpr (Config::kPlanCounted) {
      cudaFuncAttributes attributes;
      status = cudaFuncGetAttributes(&attributes, align_count_kernel<PlanAlign<Config>>);
    }
    if (Config::kPlanClustered && status == cudaSuccess) status = allow_large_cluster(kernel);
    if (status != cudaSuccess) return status;
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                Sort::smem_bytes(Sort::kMaxExperts));
  }

  static cudaError_t launch(const AlignParams& p, const PlanOut& out, cudaStream_t stream) {
    const int experts = int(p.num_experts);
    LaunchShape shape = {p.blocks, Config::kPlanThreads, 8 * pair_columns(experts), Config::kPdl};
    if constexpr (Config::kPlanCounted) {
      const cudaError_t error = hpcjit::launch(align_count_kernel<PlanAlign<Config>>, shape, stream, p);
      if (error != cudaSuccess) return error;
    }
    shape.smem_bytes = Sort::smem_bytes(experts);
    if (Config::kPlanClustered) shape.cluster = int(p.blocks);
    return hpcjit::launch(plan_kernel<Config>, shape, stream, p, out);
  }
};

struct PlanParams {
  const int32_t* topk_ids;
  int32_t* sorted_pairs;
  int32_t* positions;
  uint4* tiles;
  int32_t* num_tiles;
  void* workspace;
  int64_t numel;
  int64_t top_k;
  int64_t ids_stride;
  int64_t num_experts;
  int64_t expert_offset;
  int64_t tile_rows;
  int64_t plan_blocks;
};

// The plan by itself.
template <class Config>
struct Plan {
  using Params = PlanParams;

  static cudaError_t prepare() { return PlanLaunch<Config>::prepare(); }

  static cudaError_t launch(const Params& p, cudaStream_t stream) {
    AlignParams a = {};
    a.topk_ids = p.topk_ids;
    a.sorted_token_ids = p.sorted_pairs;
    a.workspace = p.workspace;
    a.numel = p.numel;
    a.top_k = p.top_k;
    a.ids_stride = p.ids_stride;
    a.num_ids = a.num_experts = p.num_experts;
    a.block_size = 1;
    a.blocks = p.plan_blocks;
    a.first_id = p.expert_offset;
    return PlanLaunch<Config>::launch(a, {p.positions, p.tiles, p.num_tiles, int(p.tile_rows)}, stream);
  }
};

}  // namespace hpcjit::moe
