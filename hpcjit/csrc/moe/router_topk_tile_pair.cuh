// Router GEMM for many tokens and their gate by two kernels; see moe/router_topk_pair.cuh.
#pragma once
#include "moe/router_topk_pair.cuh"
#include "moe/router_topk_tile.cuh"

namespace hpcjit::moe {

template <class Config>
__global__ void __launch_bounds__(gemm::RouterTileShape<Config>::kThreads, Config::kBlocksPerSm)
    router_rows_tile_kernel(const __grid_constant__ RouterTopkTileParams p,
                            const __grid_constant__ CUtensorMap x_map,
                            const __grid_constant__ CUtensorMap weight_map,
                            const __grid_constant__ CUtensorMap low_map) {
  gemm::router_tile<Config, TileRows<Config>>(p, x_map, weight_map, low_map);
}

template <class Config>
struct RowsTile {
  static constexpr int kSmem = gemm::RouterTileShape<Config>::kSmem;

  static cudaError_t prepare() {
    return gemm::prepare_router_tile<Config>(router_rows_tile_kernel<Config>, kSmem);
  }

  static cudaError_t launch(const RouterTopkTileParams& p, cudaStream_t stream) {
    return gemm::launch_router_tile<Config>(router_rows_tile_kernel<Config>, kSmem, p, stream);
  }
};

template <class Config>
struct RouterTopkTilePair
    : RouterTopkPair<Config, RouterTopkTileParams, gemm::RouterTile<Config>, RowsTile<Config>> {};

}  // namespace hpcjit::moe
