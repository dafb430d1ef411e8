// Router GEMM and its gate by two kernels that one call launches: gemm/router_*.cuh, then a warp for each token.
//
// Logits go to `out` where they are wanted, else to the workspace, and moe/gate_kernel.cuh reads them behind its
// pdl::wait(). Or (kPolled) they go to rows that say themselves what has been written (moe/router_gate.cuh), and the gate
// need not wait until the product has ended. It starts when every block of the product has called trigger(), so whatever
// it waits for runs. They call it behind their pdl::wait(): the rows are nobody else's by then, and what came before
// has ended, so bias and outputs are the gate's to use. The gate calls pdl::wait() last, to end after the product, as
// dependents of its own expect.
#pragma once
#include <type_traits>

#include "moe/gate_kernel.cuh"
#include "moe/router_gate.cuh"

namespace hpcjit::moe {

// Config of gate_kernel.cuh.
template <class Config>
struct PairedGate : GateOf<Config> {
  static constexpr int kThreads = Config::kGateThreads, kMinBlocks = Config::kGateBlocks;
  static constexpr int kTrigger = Config::kGateTrigger;
  static constexpr bool kHasValid = Config::kHasValid, kWide = Config::kGateWide,
                        kPrefetch = Config::kGatePrefetch;
  static constexpr bool kPdl = Config::kPdl;
};

template <class Config>
__global__ void __launch_bounds__(Config::kGateThreads, Config::kGateBlocks)
    polled_gate_kernel(const __grid_constant__ RouterGateParams p, int64_t num_tokens, int64_t num_experts) {
  constexpr int kWarps = Config::kGateThreads / 32;
  __shared__ CandidateList lists[kWarps];
  __shared__ float4 staged[kWarps][PassedRow<Config>::kStaged / 4];
  pdl::trigger_at<Config::kGateTrigger, pdl::kAtStart>();
  const int warp = threadIdx.x / 32;
  const int64_t token = int64_t(blockIdx.x) * kWarps + warp;
  if (token < num_tokens)
    gate_passed<Config>(p, num_experts, token, 1, token + 1, reinterpret_cast<float*>(staged[warp]),
                        lists[warp]);
  pdl::trigger_at<Config::kGateTrigger, pdl::kAtEnd>();
  pdl::wait();
}

// Product: what launches the product alone. Passing: what launches it with rows for results.
template <class Config, class Params_, class Product, class Passing>
struct RouterTopkPair {
  using Params = Params_;
  using Gate = moe::Gate<PairedGate<Config>>;

  static cudaError_t prepare() {
    if constexpr (!Config::kPolled) {
      const cudaError_t status = Product::prepare();
      return status == cudaSuccess ? Gate::prepare() : status;
    } else {
      const cudaError_t status = Passing::prepare();
      cudaFuncAttributes attributes;
      return status == cudaSuccess ? cudaFuncGetAttributes(&attributes, polled_gate_kernel<Config>) : status;
    }
  }

  static cudaError_t launch(const Params& p, cudaStream_t stream) {
    if constexpr (Config::kPolled) {
      const cudaError_t status = Passing::launch(p, stream);
      if (status != cudaSuccess) return status;
      const int64_t blocks = ceil_div(p.num_tokens, Config::kGateThreads / 32);
      const LaunchShape shape = {blocks, Config::kGateThreads, 0, Config::kPdl};
      return hpcjit::launch(polled_gate_kernel<Config>, shape, stream, p.gate, p.num_tokens, p.num_experts);
    } else {
      Params product = p;
      if (product.out == nullptr) product.out = p.gate.workspace;
      const cudaError_t status = Product::launch(product, stream);
      return status == cudaSuccess ? Gate::launch(gate_params(product), stream) : status;
    }
  }

  static GateParams gate_params(const Params& p) {
    GateParams gate = {};
    gate.logits = p.out;
    gate.bias = p.gate.bias;
    gate.num_valid_tokens = p.gate.num_valid_tokens;
    gate.weights = p.gate.weights;
    gate.ids = p.gate.ids;
    gate.num_tokens = p.num_tokens;
    gate.num_experts = p.num_experts;
    gate.logits_stride = p.out_stride;
    gate.weights_stride = p.gate.weights_stride;
    gate.ids_stride = p.gate.ids_stride;
    gate.scaling_factor = p.gate.scaling_factor;
    return gate;
  }
};

}  // namespace hpcjit::moe
