// A mixture of experts in one launch, for few tokens, bound by how fast the weights of the chosen experts are read:
//
//   plan     every block finds out for itself who goes to which expert                          mono_plan.cuh
//   gate-up  hidden[row] = act(gate) * up, an item for each tile of rows and 16 features        mono_gate_up.cuh
//   down     out[token] = sum of weight * hidden[row] * w2^T, an item for each kColumns features mono_down.cuh
//
// A block of each SM takes items in the order of a ticket counter. Two of its warps copy to a ring of kStages in shared
// memory, one weights (TMA), one rows (mono_load.cuh), and run ahead of those that compute: through items, and from
// gate-up into down, where only rows wait for what other blocks have yet to write (a counter for each tile of rows);
// weights of down are on their way by then. A block waits only for items with lower tickets, which running blocks have, so it
// never matters how many blocks run at a time, or what else does.
//
// Sums: K and experts in a fixed order, whichever block has an item. FP8 is multiplied as fp16, which holds every code, with
// fp32 sums. The hidden activation is rounded to bf16, or to e4m3 with a scale for each row and 16 features.
//
// Shared memory: sums (of the warps in gate-up, of tokens in down), tables of the plan, tickets, barriers, and the ring,
// 1024-byte aligned. A stage of gate-up: gate and up, each [8 chunks][16][128 B], swizzled; rows [kRows][1024 B], padded.
// Of down: kSlots x [4 chunks][kColumns][64 B], swizzled; kSlots x hidden rows [kRows][kHiddenRow]. A full barrier counts the
// thread that copies weights and the 32 that copy rows.
#pragma once
#include "hpcjit/launch.cuh"
#include "hpcjit/ptx/pdl.cuh"
#include "hpcjit/ptx/prefetch.cuh"
#include "hpcjit/tensor_map.cuh"
#include "moe/fused_moe_rows.cuh"
#include "moe/mono_down.cuh"
#include "moe/mono_gate_up.cuh"
#include "moe/mono_load.cuh"
#include "moe/mono_plan.cuh"

namespace hpcjit::moe {

template <class Config>
__device__ __forceinline__ void mono_compute(const MonoBlock<Config>& block, int warp, int lane) {
  MonoItems<Config> items(block);
  MonoRing<MonoShape<Config>::kStages> ring{block.base + MonoShape<Config>::kBarriersAt};
  MonoGateUp<Config> gate_up(block, warp, lane);
  const uint32_t first_down = block.gate_up_items(), end = block.items();
  uint32_t item = items.next(lane);
  for (; item < first_down; item = items.next(lane)) gate_up.run(item, ring);
  gate_up.drain();  // down takes their memory
  MonoDown<Config> down(block, warp, lane);
  for (; item < end; item = items.next(lane)) down.run(item - first_down, ring);
}

template <class Config>
__device__ __forceinline__ void mono_init_barriers(const MonoBlock<Config>& block) {
  using Shape = MonoShape<Config>;
  for (int i = 0; i < Shape::kStages; ++i) {
    mbarrier::init(block.base + Shape::kBarriersAt + 16 * i, 1 + 32);
    mbarrier::init(block.base + Shape::kBarriersAt + 16 * i + 8, Shape::kComputing);
  }
  for (int i = 0; i < Shape::kItems; ++i) {
    mbarrier::init(block.base + Shape::kItemBarriersAt + 16 * i, 1);
    mbarrier::init(block.base + Shape::kItemBarriersAt + 16 * i + 8,
                   Shape::kGroups * Shape::kComputing + 1 + Shape::kFinishing);
  }
  for (int i = 0; i < 2; ++i) {
    mbarrier::init(block.base + Shape::kSumBarriersAt + 16 * i, Shape::kGroups * Shape::kComputing);
    mbarrier::init(block.base + Shape::kSumBarriersAt + 16 * i + 8, 1);
  }
  mbarrier::fence_init();
}

// Weights that will be needed, to L2 while the plan is made: blocks share out the choices, and neighbours a choice's expert.
template <class Config>
__device__ __forceinline__ void mono_prefetch(const MonoParams& p) {
  const uint32_t pairs = p.num_tokens * p.top_k, pair = blockIdx.x % pairs, share = blockIdx.x / pairs;
  const uint32_t e =
      uint32_t(p.topk_ids[pair / p.top_k * p.ids_stride + pair % p.top_k]) - uint32_t(p.expert_offset);
  const int64_t size = int64_t(2) * p.intermediate_size * p.hidden_size * MonoShape<Config>::kBytes;
  const int64_t begin = int64_t(share) * p.prefetch_bytes;
  if (e < uint32_t(p.num_experts) && begin < size)
    prefetch_l2(static_cast<const uint8_t*>(p.w13) + e * size + begin,
                uint32_t(min(int64_t(p.prefetch_bytes), size - begin)));
}

template <class Config>
__global__ void __launch_bounds__(MonoShape<Config>::kThreads, 1)
    mono_kernel(const __grid_constant__ MonoParams p, const __grid_constant__ CUtensorMap w13,
                const __grid_constant__ CUtensorMap w2) {
  using Shape = MonoShape<Config>;
  extern __shared__ uint8_t raw[];
  MonoBlock<Config> block(p, raw + (1024 - copy::shared_address(raw) % 1024) % 1024);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool draws = warp == Shape::kCopiesWeights && lane == 0;

  MonoPlan<Config> plan(block);
  plan.clear();
  if (draws) {
    mono_init_barriers(block);
    tma::prefetch_map(&w13);
    tma::prefetch_map(&w2);
  }
  __syncthreads();
  pdl::wait();
  pdl::trigger();
  uint32_t ticket = 0;
  if (draws) {
    ticket = global::take_ticket(p.counters);
    if (p.prefetch_bytes > 0) mono_prefetch<Config>(p);
  }
  block.num_tiles = plan.find_tiles();
  __syncthreads();
  if (warp == Shape::kCopiesWeights) {
    if (draws) MonoWeights<Config>(block, w13, w2).run(ticket);
    return;
  }
  constexpr int kOthers = Shape::kThreads - 32;
  plan.template place_pairs<kOthers>(warp < Shape::kCopiesWeights ? threadIdx.x : threadIdx.x - 32);
  named_barrier::sync<kOthers>(2);
  if (warp < Shape::kCopiesWeights)
    mono_compute(block, warp, lane);
  else if (warp == Shape::kCopiesRows)
    MonoRows<Config>(block).run();
  else
    MonoHidden<Config>(block, warp - Shape::kFirstFinishing).run();
}

struct FusedMoeMonoParams {
  const void* x;
  const float* x_scale;
  const void* w13;
  const float* w13_scale;
  const void* w2;
  const float* w2_scale;
  const int32_t* topk_ids;
  const float* topk_weights;
  const void* shared_output;
  void* out;
  uint8_t* workspace;
  uint32_t* counters;
  int64_t num_tokens;
  int64_t top_k;
  int64_t num_experts;
  int64_t expert_offset;
  int64_t hidden_size;
  int64_t intermediate_size;
  int64_t x_stride;
  int64_t x_scale_token_stride;
  int64_t x_scale_group_stride;
  int64_t ids_stride;
  int64_t weights_stride;
  int64_t shared_stride;
  int64_t out_stride;
  int64_t blocks;
  int64_t prefetch_bytes;
  int64_t at_x;        // e4m3 [num_tokens][hidden_size]
  int64_t at_x_scale;  // fp32 [num_tokens][groups]
  int64_t at_hidden;
};

template <class Config>
struct FusedMoeMono {
  using Params = FusedMoeMonoParams;
  using Shape = MonoShape<Config>;

  static cudaError_t prepare() {
    cudaFuncAttributes attributes;
    if constexpr (Config::kQuantise != 0) {
      const cudaError_t status = cudaFuncGetAttributes(&attributes, quantise_kernel<Config::kQuantise>);
      if (status != cudaSuccess) return status;
    }
    return cudaFuncSetAttribute(mono_kernel<Config>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                Shape::kSmem);
  }

  static cudaError_t quantise(const Params& p, cudaStream_t stream) {
    if constexpr (Config::kQuantise == 0) return cudaSuccess;
    QuantiseParams q = {};
    q.x = static_cast<const bf16*>(p.x);
    q.out = reinterpret_cast<e4m3*>(p.workspace + p.at_x);
    q.scale = reinterpret_cast<float*>(p.workspace + p.at_x_scale);
    q.given = p.x_scale;
    q.x_stride = p.x_stride;
    q.hidden_size = int(p.hidden_size);
    q.groups = int(p.x_scale_token_stride);
    return hpcjit::launch(quantise_kernel<Config::kQuantise>, {p.num_tokens, kRowThreads, 0, Config::kPdl},
                          stream, q);
  }

  static MonoParams parameters(const Params& p) {
    constexpr bool kOwnCodes = Config::kQuantise != 0, kOwnScales = Config::kQuantise > kScaleGiven;
    MonoParams m = {};
    m.x = kOwnCodes ? p.workspace + p.at_x : p.x;
    m.x_stride = kOwnCodes ? p.hidden_size : p.x_stride;
    m.x_scale = kOwnScales ? reinterpret_cast<const float*>(p.workspace + p.at_x_scale) : p.x_scale;
    m.x_scale_token_stride = p.x_scale_token_stride;
    m.x_scale_group_stride = p.x_scale_group_stride;
    m.w13 = p.w13;
    m.prefetch_bytes = int(p.prefetch_bytes);
    m.w13_scale = p.w13_scale;
    m.w2_scale = p.w2_scale;
    m.topk_ids = p.topk_ids;
    m.topk_weights = p.topk_weights;
    m.shared_output = static_cast<const bf16*>(p.shared_output);
    m.out = static_cast<bf16*>(p.out);
    m.hidden = p.workspace + p.at_hidden;
    m.counters = p.counters;
    m.ids_stride = p.ids_stride;
    m.weights_stride = p.weights_stride;
    m.shared_stride = p.shared_stride;
    m.out_stride = p.out_stride;
    m.num_tokens = int(p.num_tokens);
    m.top_k = int(p.top_k);
    m.num_experts = int(p.num_experts);
    m.expert_offset = int(p.expert_offset);
    m.hidden_size = int(p.hidden_size);
    m.intermediate_size = int(p.intermediate_size);
    return m;
  }

  // Of [experts][rows][columns], in chunks of `chunk` columns.
  static cudaError_t encode(CUtensorMap& map, const void* weights, int64_t rows, int64_t columns,
                            int box_rows, int chunk, int chunks) {
    const Matrix matrix = {weights, rows, columns, columns * Shape::kBytes};
    constexpr auto kType = Shape::kScaled ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    return encode_chunked_map<kType, Shape::kBytes>(map, matrix, box_rows, chunk, chunks);
  }

  static cudaError_t launch(const Params& p, cudaStream_t stream) {
    CUtensorMap w13, w2;
    cudaError_t status = encode(w13, p.w13, p.num_experts * 2 * p.intermediate_size, p.hidden_size,
                                Shape::kFeatures, Shape::kChunkK, Shape::kChunks);
    if (status == cudaSuccess)
      status = encode(w2, p.w2, p.num_experts * p.hidden_size, p.intermediate_size, Shape::kColumns,
                      Shape::kDownChunkK, Shape::kDownChunks);
    if (status == cudaSuccess) status = quantise(p, stream);
    if (status != cudaSuccess) return status;
    const LaunchShape shape = {p.blocks, Shape::kThreads, Shape::kSmem, Config::kPdl};
    return hpcjit::launch(mono_kernel<Config>, shape, stream, parameters(p), w13, w2);
  }
};

}  // namespace hpcjit::moe
