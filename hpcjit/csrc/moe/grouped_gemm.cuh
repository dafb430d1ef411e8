// The grouped product by itself: out[r] = x[r] * weight[expert of r]^T for the rows of given tiles; see grouped.cuh.
#pragma once
#include "moe/grouped.cuh"

namespace hpcjit::moe {

struct GroupedGemmParams {
  const void* x;
  const float* x_scale;
  const void* weight;
  const float* weight_scale;
  const uint4* tiles;
  const int32_t* num_tiles;
  void* out;
  int64_t num_rows;
  int64_t num_experts;
  int64_t depth;
  int64_t features;
  int64_t x_stride;
  int64_t x_scale_row_stride;
  int64_t x_scale_group_stride;
  int64_t out_stride;
  int64_t blocks;
  int64_t most_tiles;
};

template <class Config>
struct GroupedGemm {
  using Params = GroupedGemmParams;
  using Launch = GroupedLaunch<Config, false>;

  static cudaError_t prepare() { return Launch::prepare(); }

  static cudaError_t launch(const Params& p, cudaStream_t stream) {
    GroupedParams g = {};
    g.tiles = p.tiles;
    g.num_tiles = p.num_tiles;
    g.rows = p.x;
    g.row_stride = p.x_stride;
    g.row_scale = p.x_scale;
    g.scale_row_stride = p.x_scale_row_stride;
    g.scale_group_stride = p.x_scale_group_stride;
    g.weight_scale = p.weight_scale;
    g.num_experts = int(p.num_experts);
    g.depth = int(p.depth);
    g.scale_groups = int(ceil_div(p.depth, kScaleBlock));
    g.features = int(p.features);
    g.feature_tiles = int(ceil_div(p.features, kWeightRows));
    g.most_tiles = int(p.most_tiles);
    g.out = p.out;
    g.out_stride = p.out_stride;
    return Launch::launch(g, p.weight, p.num_rows, p.blocks, stream);
  }
};

}  // namespace hpcjit::moe
