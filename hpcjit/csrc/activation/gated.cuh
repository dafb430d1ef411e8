// Gated activations: output[t, i] = f(input[t, i]) * input[t, hidden_size + i], f = SiLU, GELU (erf) or GELU
// (tanh).
//
// The output is one flat list of vectors; each thread makes kVecsPerThread of them, kThreads apart, all loads
// first. The arithmetic is fp32 and rounds once. No shared memory, no ordering between threads.
#pragma once
#include "hpcjit/launch.cuh"
#include "hpcjit/math/activation.cuh"
#include "hpcjit/ptx/pdl.cuh"
#include "hpcjit/tile/vec.cuh"

namespace hpcjit::activation {

struct GatedParams {
  const void* input;
  void* output;
  int64_t num_tokens;
  int64_t hidden_size;  // of the output; a row of the input has twice as many
  int64_t input_stride;
  int64_t output_stride;
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads) gated_kernel(const __grid_constant__ GatedParams p) {
  using input_t = typename Config::input_t;
  constexpr int kVec = Config::kVec;
  constexpr int kVecs = Config::kVecsPerThread;
  constexpr Activation kKind = Activation(Config::kActivation);
  constexpr Cache kIn = Config::kStreamIn ? Cache::kStream : Cache::kDefault;
  constexpr Cache kOut = Config::kStreamOut ? Cache::kStream : Cache::kDefault;

  pdl::trigger_at<Config::kTrigger, pdl::kAtStart>();
  const uint32_t row_vecs = uint32_t(p.hidden_size / kVec);
  const int64_t first = int64_t(blockIdx.x) * (Config::kThreads * kVecs);
  const int64_t first_row = first / row_vecs;
  const uint32_t first_vec = uint32_t(first - first_row * row_vecs);
  const input_t* source[kVecs];
  input_t* target[kVecs];
  bool inside[kVecs];
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const uint32_t vec = first_vec + threadIdx.x + i * Config::kThreads;
    const uint32_t row_step = vec / row_vecs;
    const int64_t row = first_row + row_step;
    const int64_t column = int64_t(vec - row_step * row_vecs) * kVec;
    inside[i] = row < p.num_tokens;
    source[i] = static_cast<const input_t*>(p.input) + row * p.input_stride + column;
    target[i] = static_cast<input_t*>(p.output) + row * p.output_stride + column;
  }
  pdl::wait();

  Vec<input_t, kVec> gate[kVecs], up[kVecs];
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    if (!inside[i]) continue;
    gate[i].template load<kIn>(source[i]);
    up[i].template load<kIn>(source[i] + p.hidden_size);
  }
  pdl::trigger_at<Config::kTrigger, pdl::kAfterLoads>();
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    if (!inside[i]) continue;
    float g[kVec], u[kVec];
    gate[i].to(g);
    up[i].to(u);
#pragma unroll
    for (int j = 0; j < kVec; ++j) g[j] = activate<kKind, sizeof(input_t) == 4>(g[j]) * u[j];
    Vec<input_t, kVec> y;
    y.from(g);
    y.template store<kOut>(target[i]);
  }
  pdl::trigger_at<Config::kTrigger, pdl::kAtEnd>();
}

template <class Config>
struct Gated {
  using Params = GatedParams;

  static cudaError_t prepare() {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, gated_kernel<Config>);
  }

  static cudaError_t launch(const Params& p, cudaStream_t stream) {
    const int64_t vecs = p.num_tokens * (p.hidden_size / Config::kVec);
    const int64_t blocks = ceil_div(vecs, Config::kThreads * Config::kVecsPerThread);
    return hpcjit::launch(gated_kernel<Config>, {blocks, Config::kThreads, 0, Config::kPdl}, stream, p);
  }
};

}  // namespace hpcjit::activation
