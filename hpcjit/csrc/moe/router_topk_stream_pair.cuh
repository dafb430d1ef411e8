// Router GEMM for few tokens and their gate by two kernels; see moe/router_topk_pair.cuh.
#pragma once
#include "moe/router_topk_pair.cuh"
#include "moe/router_topk_stream.cuh"

namespace hpcjit::moe {

template <class Config>
__global__ void __launch_bounds__(gemm::StreamShape<Config>::kThreads, Config::kBlocksPerSm)
    router_rows_stream_kernel(const __grid_constant__ RouterTopkStreamParams p) {
  StreamRows<Config> sink{p};
  gemm::router_stream<Config>(p, sink);
}

template <class Config>
struct RowsStream {
  static cudaError_t prepare() {
    return gemm::prepare_router_stream<Config>(router_rows_stream_kernel<Config>);
  }

  static cudaError_t launch(const RouterTopkStreamParams& p, cudaStream_t stream) {
    return hpcjit::launch(router_rows_stream_kernel<Config>, gemm::router_stream_launch<Config>(p), stream,
                          p);
  }
};

template <class Config>
struct RouterTopkStreamPair
    : RouterTopkPair<Config, RouterTopkStreamParams, gemm::RouterStream<Config>, RowsStream<Config>> {};

}  // namespace hpcjit::moe
