// The plan of a grouped product: pairs (token, expert) sorted by expert, cut into tiles of rows of one expert.
//
//   sorted[r] = the pair of row r: those of expert 0 in increasing order, then those of expert 1, ...
//   position[pair] = its row, or -1 for a pair of no expert here
//   tiles[j] = {expert, first row, rows, 0}, rows <= tile_rows, in the order of the rows;  *num_tiles = how many
//
// Sorting is that of align.cuh, with blocks of one entry: stable, and independent of the order in which threads run. All
// blocks know all starts, so they share out the tiles.
#pragma once
#include "moe/align.cuh"

namespace hpcjit::moe {

struct PlanOut {
  int32_t* position;
  uint4* tiles;
  int32_t* num_tiles;
  int tile_rows;
};

// What align.cuh asks of a config.
template <class Config>
struct PlanAlign {
  static constexpr int kThreads = Config::kPlanThreads, kPerThread = Config::kPlanPerThread;
  static constexpr bool kCounted = Config::kPlanCounted, kStrided = Config::kIdsStrided, kHasMap = false;
  static constexpr bool kPdl = Config::kPdl;
};

template <class Config>
struct PlanPlace : AlignPlace<PlanAlign<Config>> {
  using Base = AlignPlace<PlanAlign<Config>>;
  using Base::Base, Base::kThreads, Base::p, Base::experts, Base::lane, Base::warp, Base::next, Base::start;
  using Base::earlier;  // once the starts are known: where an expert's tiles end

  __device__ void place(const PlanOut& out) {
    const int end = this->stretch(warp + 1);
    for (int base = this->stretch(warp); base < end; base += 32) {
      const int i = base + lane;
      const int e = i < end ? this->expert_of(i) : -1;
      const uint32_t same = __match_any_sync(0xffffffffu, e);
      const int rank = __popc(same & ((1u << lane) - 1));
      int32_t* position = next + warp * experts + max(e, 0);
      const int at = *position + rank;
      __syncwarp();  // all have read before the first of each expert moves on
      if (e >= 0) p.sorted_token_ids[at] = i;
      if (e >= 0 && rank == 0) *position = at + __popc(same);
      if (i < end) out.position[i] = e >= 0 ? at : -1;
      __syncwarp();
    }
  }

  __device__ void count_tiles(int tile_rows) {
    const int first = threadIdx.x * Base::kPerThread;
    int sum = 0;
#pragma unroll
    for (int j = 0; j < Base::kPerThread; ++j)
      if (first + j < experts) sum += tiles_of(first + j, tile_rows);
    int at = this->block_prefix_sum(sum) - sum;
#pragma unroll
    for (int j = 0; j < Base::kPerThread; ++j)
      if (first + j < experts) earlier[first + j] = at += tiles_of(first + j, tile_rows);
  }

  __device__ int tiles_of(int e, int tile_rows) const {
    return (start[e + 1] - start[e] + tile_rows - 1) / tile_rows;
  }

  __device__ void write_tiles(const PlanOut& out) const {
    const int total = earlier[experts - 1];
    const int thread = blockIdx.x * kThreads + threadIdx.x;
    if (thread == 0) *out.num_tiles = total;
    for (int j = thread; j < total; j += int(p.blocks) * kThreads) {
      int low = -1, high = experts - 1;  // the first expert whose tiles end behind j
      while (high - low > 1) {
        const int middle = (low + high) / 2;
        (earlier[middle] > j ? high : low) = middle;
      }
      const int within = j - (high > 0 ? earlier[high - 1] : 0);
      const int first = start[high] + within * out.tile_rows;
      out.tiles[j] = make_uint4(high, first, min(out.tile_rows, start[high + 1] - first), 0);
    }
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kPlanThreads)
    plan_kernel(const __grid_constant__ AlignParams p, const __grid_constant__ PlanOut out) {
  extern __shared__ int32_t shared[];
  PlanPlace<Config> block(p, shared);
  block.clear();
  __syncthreads();
  pdl::wait();
  pdl::trigger();  // not before: a dependent may look at the ids, which are there now
  if constexpr (Config::kPlanCounted) block.count_chunks();
  block.count_stretches();
  __syncthreads();
  block.find_starts();
  __syncthreads();
  block.place(out);
  block.count_tiles(out.tile_rows);
  __syncthreads();
  block.write_tiles(out);
}

template <class Config>
struct PlanLaunch {
  using Place = Align<PlanAlign<Config>>;

  static cudaError_t prepare() {
    cudaFuncAttributes attributes;
    if constexpr (Config::kPlanCounted) {
      const cudaError_t error = cudaFuncGetAttributes(&attributes, align_count_kernel<PlanAlign<Config>>);
      if (error != cudaSuccess) return error;
    }
    return cudaFuncSetAttribute(plan_kernel<Config>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                Place::place_bytes(512));
  }

  static cudaError_t launch(const AlignParams& p, const PlanOut& out, cudaStream_t stream) {
    const int experts = int(p.num_experts);
    LaunchShape shape = {p.blocks, Config::kPlanThreads, experts * 4, Config::kPdl};
    if constexpr (Config::kPlanCounted) {
      const cudaError_t error = hpcjit::launch(align_count_kernel<PlanAlign<Config>>, shape, stream, p);
      if (error != cudaSuccess) return error;
    }
    shape.smem_bytes = Place::place_bytes(experts);
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
