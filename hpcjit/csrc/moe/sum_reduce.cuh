// Sums the results of a token's experts.
//
//   out[t] = scaling_factor * sum over k of x[t, k]      or  of weights[t, k] * x[t, k]   (kHasWeights)
//
// in fp32, in the order of k. With kHasPositions x[t, k] is row positions[t, k] of x, with kHasShared shared[t] is added.
// A pair whose weight is 0, or whose position is negative, is not read: it may never have been written. A thread has
// kVec neighbouring columns of a token and loads kBatch pairs at once; a block lies within one token.
#pragma once
#include "hpcjit/launch.cuh"
#include "hpcjit/ptx/pdl.cuh"
#include "hpcjit/tile/vec.cuh"

namespace hpcjit::moe {

struct SumReduceParams {
  const void* x;
  const int32_t* positions;
  const float* weights;
  const void* shared;
  void* out;
  int64_t num_tokens;
  int64_t top_k;
  int64_t hidden_size;
  int64_t token_stride;  // 0 with positions
  int64_t pair_stride;   // with positions: of a row
  int64_t positions_stride;
  int64_t weights_stride;
  int64_t shared_stride;
  int64_t out_stride;
  double scaling_factor;
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
    sum_reduce_kernel(const __grid_constant__ SumReduceParams p) {
  using input_t = typename Config::input_t;
  constexpr int kVec = Config::kVec, kBatch = Config::kBatch;
  constexpr Cache kCache = Config::kStream ? Cache::kStream : Cache::kDefault;

  pdl::trigger_at<Config::kTrigger, pdl::kAtStart>();
  const int blocks_per_token = int((p.hidden_size + Config::kThreads * kVec - 1) / (Config::kThreads * kVec));
  const int64_t token = blockIdx.x / unsigned(blocks_per_token);
  const int64_t column =
      int64_t(blockIdx.x % unsigned(blocks_per_token) * Config::kThreads + threadIdx.x) * kVec;
  if (column >= p.hidden_size) return;
  const input_t* x = static_cast<const input_t*>(p.x) + token * p.token_stride + column;
  const int32_t* positions = p.positions + token * p.positions_stride;
  const float* weights = p.weights + token * p.weights_stride;
  const int top_k = int(p.top_k);
  pdl::wait();

  float total[kVec] = {};
#pragma unroll 1
  for (int first = 0; first < top_k; first += kBatch) {
    Vec<input_t, kVec> raw[kBatch];
    float weight[kBatch];
    int row[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int k = first + j;
      weight[j] = k < top_k ? 1.f : 0.f;
      row[j] = k;
      if constexpr (Config::kHasWeights) weight[j] = k < top_k ? weights[k] : 0.f;
      if constexpr (Config::kHasPositions) row[j] = k < top_k ? positions[k] : -1;
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (row[j] < 0) weight[j] = 0.f;
      if (weight[j] != 0.f) raw[j].template load<kCache>(x + int64_t(row[j]) * p.pair_stride);
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (weight[j] == 0.f) continue;
      float value[kVec];
      raw[j].to(value);
#pragma unroll
      for (int i = 0; i < kVec; ++i)
        total[i] = Config::kHasWeights ? total[i] + weight[j] * value[i] : total[i] + value[i];
    }
  }
#pragma unroll
  for (int i = 0; i < kVec; ++i) total[i] *= float(p.scaling_factor);
  if constexpr (Config::kHasShared) {
    Vec<input_t, kVec> raw;
    float value[kVec];
    raw.load(static_cast<const input_t*>(p.shared) + token * p.shared_stride + column);
    raw.to(value);
#pragma unroll
    for (int i = 0; i < kVec; ++i) total[i] += value[i];
  }
  Vec<input_t, kVec> result;
  result.from(total);
  result.store(static_cast<input_t*>(p.out) + token * p.out_stride + column);
  pdl::trigger_at<Config::kTrigger, pdl::kAtEnd>();
}

template <class Config>
struct SumReduce {
  using Params = SumReduceParams;

  static cudaError_t prepare() {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, sum_reduce_kernel<Config>);
  }

  static cudaError_t launch(const Params& p, cudaStream_t stream) {
    const int64_t blocks = p.num_tokens * ceil_div(p.hidden_size, Config::kThreads * Config::kVec);
    return hpcjit::launch(sum_reduce_kernel<Config>, {blocks, Config::kThreads, 0, Config::kPdl}, stream, p);
  }
};

}  // namespace hpcjit::moe
