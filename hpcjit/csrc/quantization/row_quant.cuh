// FP8 quantisation with one scale per row, of a tensor or of a gated activation of it:
//
//   y = input                        or  f(input[:, :hidden_size]) * input[:, hidden_size:]   (kActivation)
//   scale[t] = max(max_i |y[t, i]|, 1e-10) / 448
//   output[t, i] = e4m3(y[t, i] / scale[t])
//
// kRowThreads threads share a row: a block, or one warp of a block of several rows. With kVecsPerThread > 0
// the row stays in registers; with 0 it is read twice and may have any size. NaN elements stay NaN and do not
// enter the maximum. Shared memory: one float per warp, written and read once. kPrefetchRow (plain rows of whole
// 16 bytes): each row is pulled into L2 by one request while the predecessor still runs, which reads nothing.
#pragma once
#include "hpcjit/launch.cuh"
#include "hpcjit/math/activation.cuh"
#include "hpcjit/math/reduce.cuh"
#include "hpcjit/ptx/pdl.cuh"
#include "hpcjit/ptx/prefetch.cuh"
#include "hpcjit/tile/vec.cuh"

namespace hpcjit::quantization {

struct RowQuantParams {
  const void* input;
  void* output;
  float* scale;
  int64_t num_tokens;
  int64_t hidden_size;  // of the output
  int64_t input_stride;
  int64_t output_stride;
};

template <class Config>
struct QuantRow {
  using input_t = typename Config::input_t;
  static constexpr int kVec = Config::kVec;
  static constexpr Activation kKind = Activation(Config::kActivation);
  static constexpr Cache kIn = Config::kStreamIn ? Cache::kStream : Cache::kDefault;
  static constexpr Cache kOut = Config::kStreamOut ? Cache::kStream : Cache::kDefault;

  const input_t* input;
  e4m3* output;
  int hidden_size;
  int lane;

  __device__ int offset(int i) const { return (lane + i * Config::kRowThreads) * kVec; }

  struct Raw {
    Vec<input_t, kVec> value, up;
  };

  __device__ Raw load(int i) const {
    Raw raw;
    raw.value.template load<kIn>(input + offset(i));
    if constexpr (kKind != Activation::kNone) raw.up.template load<kIn>(input + hidden_size + offset(i));
    return raw;
  }

  __device__ static void compute(const Raw& raw, float (&y)[kVec]) {
    raw.value.to(y);
    if constexpr (kKind != Activation::kNone) {
      float u[kVec];
      raw.up.to(u);
#pragma unroll
      for (int j = 0; j < kVec; ++j) y[j] = activate<kKind, sizeof(input_t) == 4>(y[j]) * u[j];
    }
  }

  __device__ static float largest(const float (&y)[kVec], float so_far) {
#pragma unroll
    for (int j = 0; j < kVec; ++j) so_far = fmaxf(so_far, fabsf(y[j]));
    return so_far;
  }

  __device__ void store(int i, const float (&y)[kVec], float inverse_scale) const {
    float scaled[kVec];
#pragma unroll
    for (int j = 0; j < kVec; ++j) scaled[j] = y[j] * inverse_scale;
    Vec<e4m3, kVec> q;
    q.from(scaled);
    q.template store<kOut>(output + offset(i));
  }
};

template <class Config>
__device__ __forceinline__ float row_scale(float largest, float* scratch) {
  largest = reduce_block<Max, Config::kRowThreads>(largest, scratch);
  return fmaxf(largest, kQuantFloor) / kE4m3Max;
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    row_quant_kernel(const __grid_constant__ RowQuantParams p) {
  using Row = QuantRow<Config>;
  constexpr int kRows = Config::kThreads / Config::kRowThreads;
  constexpr int kVec = Config::kVec;
  static_assert(kRows == 1 || Config::kRowThreads == 32, "several rows per block: one warp each");
  __shared__ float scratch[Config::kRowThreads / 32];

  pdl::trigger_at<Config::kTrigger, pdl::kAtStart>();
  const int64_t index = int64_t(blockIdx.x) * kRows + threadIdx.x / Config::kRowThreads;
  const int lane = threadIdx.x % Config::kRowThreads;
  const int num_vecs = int(p.hidden_size / kVec);
  const Row row{static_cast<const typename Config::input_t*>(p.input) + index * p.input_stride,
                static_cast<e4m3*>(p.output) + index * p.output_stride, int(p.hidden_size), lane};
  if constexpr (Config::kPrefetchRow) {
    if (lane == 0 && index < p.num_tokens)
      prefetch_l2(row.input, uint32_t(p.hidden_size * sizeof(typename Config::input_t)));
  }
  pdl::wait();
  if (index >= p.num_tokens) return;

  float scale;
  if constexpr (Config::kVecsPerThread > 0) {
    constexpr int kVecs = Config::kVecsPerThread;
    typename Row::Raw raw[kVecs];
    constexpr bool kPacked = Row::kKind == Activation::kNone && sizeof(typename Row::input_t) * kVec % 4 == 0;
    float y[kPacked ? 1 : kVecs][kVec];
    auto inside = [&](int i) { return Config::kExact || lane + i * Config::kRowThreads < num_vecs; };
#pragma unroll
    for (int i = 0; i < kVecs; ++i)
      if (inside(i)) raw[i] = row.load(i);
    pdl::trigger_at<Config::kTrigger, pdl::kAfterLoads>();
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      if (!inside(i)) continue;
      Row::compute(raw[i], y[kPacked ? 0 : i]);
      largest = Row::largest(y[kPacked ? 0 : i], largest);
    }
    scale = row_scale<Config>(largest, scratch);
    const float inverse_scale = 1.f / scale;
#pragma unroll
    for (int i = 0; i < kVecs; ++i)
      if (inside(i)) {
        if constexpr (kPacked) {
          raw[i].value.forget();
          Row::compute(raw[i], y[0]);
        }
        row.store(i, y[kPacked ? 0 : i], inverse_scale);
      }
  } else {
    float largest = 0.f, y[kVec];
    for (int i = 0; lane + i * Config::kRowThreads < num_vecs; ++i) {
      Row::compute(row.load(i), y);
      largest = Row::largest(y, largest);
    }
    scale = row_scale<Config>(largest, scratch);
    const float inverse_scale = 1.f / scale;
    for (int i = 0; lane + i * Config::kRowThreads < num_vecs; ++i) {
      Row::compute(row.load(i), y);
      row.store(i, y, inverse_scale);
    }
  }
  if (lane == 0) p.scale[index] = scale;
  pdl::trigger_at<Config::kTrigger, pdl::kAtEnd>();
}

template <class Config>
struct RowQuant {
  using Params = RowQuantParams;

  static cudaError_t prepare() {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, row_quant_kernel<Config>);
  }

  static cudaError_t launch(const Params& p, cudaStream_t stream) {
    const int64_t blocks = ceil_div(p.num_tokens, Config::kThreads / Config::kRowThreads);
    return hpcjit::launch(row_quant_kernel<Config>, {blocks, Config::kThreads, 0, Config::kPdl}, stream, p);
  }
};

}  // namespace hpcjit::quantization
