// RMSNorm of every head of the queries and the keys, in place:
//
//   q[t, h, :] = q[t, h, :] * rsqrt(mean(q[t, h, :]^2) + eps) * q_weight        likewise k with k_weight
//
// The heads of a token, queries first, and of all tokens are one list. kLanes neighbouring lanes of a warp
// share a head and take kHeadsPerGroup of them, all loads first. With kVecsPerLane > 0 a head stays in
// registers; with 0 it is read twice and may have any size. Arithmetic is fp32; sums travel by shuffles in a
// fixed order, so bits repeat. No shared memory: a thread writes only elements that it alone reads.
#pragma once
#include "hpcjit/launch.cuh"
#include "hpcjit/math/reduce.cuh"
#include "hpcjit/ptx/pdl.cuh"
#include "hpcjit/ptx/prefetch.cuh"
#include "hpcjit/tile/vec.cuh"

namespace hpcjit::layernorm {

struct QkNormParams {
  void* q;
  void* k;
  const void* q_weight;
  const void* k_weight;
  int64_t num_tokens;
  int64_t num_q_heads;
  int64_t num_k_heads;
  int64_t head_dim;
  int64_t q_token_stride;
  int64_t q_head_stride;
  int64_t k_token_stride;
  int64_t k_head_stride;
  double eps;
};

template <class Config>
struct Head {
  using input_t = typename Config::input_t;
  using weight_t = typename Config::weight_t;
  static constexpr int kVec = Config::kVec;

  input_t* data;  // null: past the end
  const weight_t* weight;
  int lane;
  int num_vecs;

  __device__ void locate(const QkNormParams& p, int64_t token, uint32_t head) {
    const bool query = head < p.num_q_heads;
    const int64_t offset = query ? token * p.q_token_stride + head * p.q_head_stride
                                 : token * p.k_token_stride + (head - p.num_q_heads) * p.k_head_stride;
    data = token < p.num_tokens ? static_cast<input_t*>(query ? p.q : p.k) + offset : nullptr;
    weight = static_cast<const weight_t*>(query ? p.q_weight : p.k_weight);
  }

  __device__ int offset(int i) const { return (lane + i * Config::kLanes) * kVec; }
  __device__ bool has(int i) const {
    return data != nullptr && (Config::kExact || lane + i * Config::kLanes < num_vecs);
  }

  __device__ static float squares(const Vec<input_t, kVec>& raw) {
    float x[kVec], sum = 0.f;
    raw.to(x);
#pragma unroll
    for (int j = 0; j < kVec; ++j) sum += x[j] * x[j];
    return sum;
  }

  __device__ void finish(int i, const Vec<input_t, kVec>& raw, const Vec<weight_t, kVec>& raw_weight,
                         float rstd) {
    float x[kVec], w[kVec];
    raw.to(x);
    raw_weight.to(w);
#pragma unroll
    for (int j = 0; j < kVec; ++j) x[j] *= rstd * w[j];
    Vec<input_t, kVec> y;
    y.from(x);
    y.store(data + offset(i));
  }
};

template <class Config>
__device__ __forceinline__ void normalise_resident(const QkNormParams& p,
                                                   Head<Config> (&head)[Config::kHeadsPerGroup]) {
  constexpr int kHeads = Config::kHeadsPerGroup, kVecs = Config::kVecsPerLane;
  Vec<typename Config::input_t, Config::kVec> raw[kHeads][kVecs];
  Vec<typename Config::weight_t, Config::kVec> weight[kHeads][kVecs];
#pragma unroll
  for (int h = 0; h < kHeads; ++h)
#pragma unroll
    for (int i = 0; i < kVecs; ++i)
      if (head[h].has(i)) raw[h][i].load(head[h].data + head[h].offset(i));
#pragma unroll
  for (int h = 0; h < kHeads; ++h)
#pragma unroll
    for (int i = 0; i < kVecs; ++i)
      if (head[h].has(i)) weight[h][i].load(head[h].weight + head[h].offset(i));
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kVecs; ++i)
      if (head[h].has(i)) sum += Head<Config>::squares(raw[h][i]);
    sum = reduce_lanes<Add, Config::kLanes>(sum);  // every lane of the warp takes part
    const float rstd = rsqrtf(sum / float(p.head_dim) + float(p.eps));
#pragma unroll
    for (int i = 0; i < kVecs; ++i)
      if (head[h].has(i)) head[h].finish(i, raw[h][i], weight[h][i], rstd);
  }
}

template <class Config>
__device__ __forceinline__ void normalise_streamed(const QkNormParams& p, Head<Config>& head) {
  Vec<typename Config::input_t, Config::kVec> raw;
  Vec<typename Config::weight_t, Config::kVec> weight;
  float sum = 0.f;
  for (int i = 0; head.has(i); ++i) {
    raw.load(head.data + head.offset(i));
    sum += Head<Config>::squares(raw);
  }
  sum = reduce_lanes<Add, Config::kLanes>(sum);
  const float rstd = rsqrtf(sum / float(p.head_dim) + float(p.eps));
  for (int i = 0; head.has(i); ++i) {
    raw.load(head.data + head.offset(i));
    weight.load(head.weight + head.offset(i));
    head.finish(i, raw, weight, rstd);
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads) qk_norm_kernel(const __grid_constant__ QkNormParams p) {
  constexpr int kGroups = Config::kThreads / Config::kLanes;
  constexpr int kHeads = Config::kHeadsPerGroup;
  static_assert(Config::kVecsPerLane > 0 || (kHeads == 1 && !Config::kExact), "a streamed head has any size");

  pdl::trigger();
  const int lane = threadIdx.x % Config::kLanes;
  const uint32_t token_heads = uint32_t(p.num_q_heads + p.num_k_heads);
  const int64_t first = int64_t(blockIdx.x) * (kGroups * kHeads);
  const int64_t first_token = first / token_heads;
  const uint32_t first_head = uint32_t(first - first_token * token_heads);
  Head<Config> head[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const uint32_t flat = first_head + threadIdx.x / Config::kLanes + h * kGroups;
    const uint32_t token_step = flat / token_heads;
    head[h].lane = lane;
    head[h].num_vecs = int(p.head_dim / Config::kVec);
    head[h].locate(p, first_token + token_step, flat - token_step * token_heads);
  }
  if (head[0].data != nullptr && lane < head[0].num_vecs) prefetch_l2(head[0].weight + head[0].offset(0));
  pdl::wait();

  if constexpr (Config::kVecsPerLane > 0) {
    normalise_resident<Config>(p, head);
  } else {
    normalise_streamed<Config>(p, head[0]);
  }
}

template <class Config>
struct QkNorm {
  using Params = QkNormParams;

  static cudaError_t prepare() {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, qk_norm_kernel<Config>);
  }

  static cudaError_t launch(const Params& p, cudaStream_t stream) {
    const int64_t heads = p.num_tokens * (p.num_q_heads + p.num_k_heads);
    const int64_t blocks = ceil_div(heads, Config::kThreads / Config::kLanes * Config::kHeadsPerGroup);
    return hpcjit::launch(qk_norm_kernel<Config>, {blocks, Config::kThreads, 0, Config::kPdl}, stream, p);
  }
};

}  // namespace hpcjit::layernorm
