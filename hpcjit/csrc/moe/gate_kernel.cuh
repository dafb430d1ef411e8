// The gate of many tokens: a warp for each. See moe/gate.cuh for the mathematics.
//
// kPrefetch (few tokens) pulls the row into L2 while the predecessor still runs; that reads nothing. kHasValid: rows from
// *num_valid_tokens on are padding; their logits are not read after that is known, and they get id -1 with weight 0.
// Shared memory: a list of 32 candidates per warp.
#pragma once
#include <type_traits>

#include "hpcjit/launch.cuh"
#include "hpcjit/ptx/pdl.cuh"
#include "hpcjit/ptx/prefetch.cuh"
#include "moe/gate.cuh"

namespace hpcjit::moe {

struct GateParams {
  const void* logits;
  const float* bias;
  const int32_t* num_valid_tokens;
  float* weights;
  int32_t* ids;
  int64_t num_tokens;
  int64_t num_experts;
  int64_t logits_stride;
  int64_t weights_stride;
  int64_t ids_stride;
  double softcap;
  double scaling_factor;
};

// Of a row, in elements. Unless kWide, the rows and their strides are 32-bit: one instruction.
template <class Config>
__device__ __forceinline__ int64_t row_offset(int64_t row, int64_t stride) {
  return Config::kWide ? row * stride : int64_t(uint64_t(uint32_t(row)) * uint32_t(stride));
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    gate_kernel(const __grid_constant__ GateParams p) {
  using logits_t = typename Config::logits_t;
  __shared__ CandidateList lists[Config::kThreads / 32];

  pdl::trigger_at<Config::kTrigger, pdl::kAtStart>();
  const int lane = threadIdx.x % 32;
  using row_t = std::conditional_t<Config::kWide, int64_t, uint32_t>;
  const int64_t token = row_t(blockIdx.x) * (Config::kThreads / 32) + threadIdx.x / 32;
  if (token >= p.num_tokens) return;
  const logits_t* logits =
      static_cast<const logits_t*>(p.logits) + row_offset<Config>(token, p.logits_stride);
  if constexpr (Config::kPrefetch) {
    constexpr int kLine = 128 / int(sizeof(logits_t));
    if (lane * kLine < p.num_experts) prefetch_l2(logits + lane * kLine);  // 32 lines: 1024 fp32
  }
  pdl::wait();
  float* weights = p.weights + row_offset<Config>(token, p.weights_stride);
  int32_t* ids = p.ids + row_offset<Config>(token, p.ids_stride);
  if (Config::kHasValid && token >= *p.num_valid_tokens) {
    gate_padding<Config>(lane, weights, ids);
  } else {
    const GateInputs inputs = {p.bias, int(p.num_experts), float(p.softcap), float(p.scaling_factor)};
    gate_row<Config>(lane, logits, inputs, weights, ids, lists[threadIdx.x / 32]);
  }
  pdl::trigger_at<Config::kTrigger, pdl::kAtEnd>();
}

template <class Config>
struct Gate {
  using Params = GateParams;

  static cudaError_t prepare() {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, gate_kernel<Config>);
  }

  static cudaError_t launch(const Params& p, cudaStream_t stream) {
    const int64_t blocks = ceil_div(p.num_tokens, Config::kThreads / 32);
    return hpcjit::launch(gate_kernel<Config>, {blocks, Config::kThreads, 0, Config::kPdl}, stream, p);
  }
};

}  // namespace hpcjit::moe
