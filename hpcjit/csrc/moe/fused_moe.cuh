// A mixture of experts, from activations and routing to the weighted sum, in a chain of dependent launches:
//
//   quantise  x to FP8 (kQuantise)                                                   fused_moe_rows.cuh
//   plan      pairs sorted by expert, tiles of rows of one expert                    plan.cuh, one or two launches, or none:
//                                                          blocks of gate-up find it (kOwnExperts)   grouped_plan.cuh
//   gate-up   hidden[r] = act(gate) * up, rows gathered from x                       grouped.cuh
//   down      row[r] = hidden[r] * w2^T                                              grouped.cuh
//   combine   out[t] = sum of weight * row over the token's pairs, + shared_output   fused_moe_rows.cuh
//
// Each waits for the one before it (pdl::wait), which had waited for its own predecessor, so all earlier results are there
// as well. Down reads the plan and asks for weights before it waits: gate-up triggers only when it has waited for the plan, or
// written it.
// Nothing is read by the host: grids depend on shapes alone. All that passes from one to the next lies in the workspace, at
// the offsets `at_...`; none of it needs to be cleared.
#pragma once
#include "moe/fused_moe_rows.cuh"
#include "moe/grouped.cuh"
#include "moe/plan.cuh"

namespace hpcjit::moe {

struct FusedMoeParams {
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
  int64_t plan_blocks;
  int64_t most_tiles;
  int64_t gate_up_blocks;
  int64_t down_blocks;
  int64_t at_counts;        // int32, of plan_blocks
  int64_t at_sorted;        // int32 [pairs]
  int64_t at_position;      // int32 [pairs]
  int64_t at_tiles;         // uint4: how many, then the tiles
  int64_t at_x;             // e4m3 [num_tokens][hidden_size]
  int64_t at_x_scale;       // fp32 [num_tokens][groups]
  int64_t at_hidden;        // [pairs][intermediate_size]
  int64_t at_hidden_scale;  // fp32 [pairs][groups of 64]
  int64_t at_rows;          // [pairs][hidden_size]
};

template <class Config>
struct FusedMoe {
  using Params = FusedMoeParams;
  static constexpr bool kOwnPlan = Config::kOwnExperts > 0;
  static_assert(!kOwnPlan || !Config::kWeightsOnInput);  // there is no list of sorted pairs then

  static cudaError_t prepare() {
    cudaFuncAttributes attributes;
    cudaError_t status = cudaSuccess;
    if constexpr (!kOwnPlan) status = PlanLaunch<Config>::prepare();
    if constexpr (Config::kQuantise != 0)
      if (status == cudaSuccess)
        status = cudaFuncGetAttributes(&attributes, quantise_kernel<Config::kQuantise>);
    if (status != cudaSuccess) return status;
    status = cudaFuncGetAttributes(&attributes, combine_kernel<Config>);
    if (status == cudaSuccess) status = GroupedLaunch<Config, true>::prepare();
    return status == cudaSuccess ? GroupedLaunch<Config, false>::prepare() : status;
  }

  template <class T>
  static T* at(const Params& p, int64_t offset) {
    return reinterpret_cast<T*>(p.workspace + offset);
  }

  static int32_t& num_tiles(const Params& p) { return *at<int32_t>(p, p.at_tiles); }

  static cudaError_t quantise(const Params& p, cudaStream_t stream) {
    QuantiseParams q = {};
    q.x = static_cast<const bf16*>(p.x);
    q.out = at<e4m3>(p, p.at_x);
    q.scale = at<float>(p, p.at_x_scale);
    q.given = p.x_scale;
    q.x_stride = p.x_stride;
    q.hidden_size = int(p.hidden_size);
    q.groups = int(p.x_scale_token_stride);
    return hpcjit::launch(quantise_kernel<Config::kQuantise>, {p.num_tokens, kRowThreads, 0, Config::kPdl},
                          stream, q);
  }

  static cudaError_t plan(const Params& p, cudaStream_t stream) {
    AlignParams a = {};
    a.topk_ids = p.topk_ids;
    a.sorted_token_ids = at<int32_t>(p, p.at_sorted);
    a.workspace = at<int32_t>(p, p.at_counts);
    a.numel = p.num_tokens * p.top_k;
    a.top_k = p.top_k;
    a.ids_stride = p.ids_stride;
    a.num_ids = a.num_experts = p.num_experts;
    a.block_size = 1;
    a.blocks = p.plan_blocks;
    a.first_id = p.expert_offset;
    uint4* tiles = at<uint4>(p, p.at_tiles);
    const PlanOut out = {at<int32_t>(p, p.at_position), tiles + 1, &num_tiles(p), Config::kTokens};
    return PlanLaunch<Config>::launch(a, out, stream);
  }

  // What both products have in common.
  static GroupedParams grouped(const Params& p) {
    GroupedParams g = {};
    uint4* tiles = at<uint4>(p, p.at_tiles);
    g.tiles = tiles + 1;
    g.num_tiles = &num_tiles(p);
    g.sorted = at<int32_t>(p, p.at_sorted);
    g.topk_weights = p.topk_weights;
    g.weights_stride = p.weights_stride;
    g.top_k = int(p.top_k);
    g.num_experts = int(p.num_experts);
    g.most_tiles = int(p.most_tiles);
    return g;
  }

  static GroupedParams gate_up(const Params& p) {
    constexpr bool kOwnCodes = Config::kQuantise != 0, kOwnScales = Config::kQuantise > kScaleGiven;
    GroupedParams g = grouped(p);
    g.rows = kOwnCodes ? at<void>(p, p.at_x) : p.x;
    g.row_stride = kOwnCodes ? p.hidden_size : p.x_stride;
    g.row_scale = kOwnScales ? at<float>(p, p.at_x_scale) : p.x_scale;
    g.scale_row_stride = p.x_scale_token_stride;
    g.scale_group_stride = p.x_scale_group_stride;
    g.weight_scale = p.w13_scale;
    g.depth = int(p.hidden_size);
    g.scale_groups = int(ceil_div(p.hidden_size, kScaleBlock));
    g.features = int(p.intermediate_size);
    g.feature_tiles = int(ceil_div(p.intermediate_size, kHidden));
    g.out = at<void>(p, p.at_hidden);
    g.out_stride = p.intermediate_size;
    g.out_scale = at<float>(p, p.at_hidden_scale);
    g.out_scale_stride = g.feature_tiles;
    uint4* tiles = at<uint4>(p, p.at_tiles);
    g.own = {p.topk_ids,   tiles + 1,         &num_tiles(p),       at<int32_t>(p, p.at_position),
             p.ids_stride, int(p.num_tokens), int(p.expert_offset)};
    return g;
  }

  static GroupedParams down(const Params& p) {
    GroupedParams g = grouped(p);
    g.rows = at<void>(p, p.at_hidden);
    g.row_stride = p.intermediate_size;
    g.row_scale = at<float>(p, p.at_hidden_scale);
    g.scale_groups = int(ceil_div(p.intermediate_size, kHidden));
    g.scale_row_stride = g.scale_groups;
    g.scale_group_stride = 1;
    g.weight_scale = p.w2_scale;
    g.depth = int(p.intermediate_size);
    g.features = int(p.hidden_size);
    g.feature_tiles = int(ceil_div(p.hidden_size, kWeightRows));
    g.out = at<void>(p, p.at_rows);
    g.out_stride = p.hidden_size;
    return g;
  }

  static cudaError_t combine(const Params& p, cudaStream_t stream) {
    CombineParams c = {};
    c.rows = at<void>(p, p.at_rows);
    c.position = at<int32_t>(p, p.at_position);
    c.weights = p.topk_weights;
    c.shared = static_cast<const bf16*>(p.shared_output);
    c.out = static_cast<bf16*>(p.out);
    c.weights_stride = p.weights_stride;
    c.shared_stride = p.shared_stride;
    c.out_stride = p.out_stride;
    c.hidden_size = int(p.hidden_size);
    c.top_k = int(p.top_k);
    const int64_t blocks = p.num_tokens * ceil_div(p.hidden_size, kRowThreads * kVec);
    return hpcjit::launch(combine_kernel<Config>, {blocks, kRowThreads, 0, Config::kPdl}, stream, c);
  }

  static cudaError_t launch(const Params& p, cudaStream_t stream) {
    cudaError_t status = cudaSuccess;
    if constexpr (Config::kQuantise != 0) status = quantise(p, stream);
    if constexpr (!kOwnPlan)
      if (status == cudaSuccess) status = plan(p, stream);
    if (status != cudaSuccess) return status;
    const GroupedParams first = gate_up(p);
    GroupedParams second = down(p);
    second.planned = true;  // gate-up lets it start when the plan is there
    status = GroupedLaunch<Config, true>::launch(first, p.w13, 0, p.gate_up_blocks, stream);
    if (status == cudaSuccess)
      status =
          GroupedLaunch<Config, false>::launch(second, p.w2, p.num_tokens * p.top_k, p.down_blocks, stream);
    return status == cudaSuccess ? combine(p, stream) : status;
  }
};

}  // namespace hpcjit::moe
