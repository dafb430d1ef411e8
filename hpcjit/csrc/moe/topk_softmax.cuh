// Softmax over the experts of each token and its top-k.
//
//   x = logits                       or  softcap * tanh(logits / softcap)      (softcap > 0)
//   p = softmax(x) in fp32
//   ids = the top_k largest of x     or  of p + bias                           (kHasBias; bias steers the
//   choice only) weights = p[ids]                 or  p[ids] / sum(p[ids])                  (renormalize)
//
// One warp per token. Lane l holds the kPerLane experts l * kPerLane ... as order-preserving 32-bit keys, so
// that the lowest lane among equals holds the lowest expert. A round is: best key of the lane, redux.max over
// lanes, ballot for the lowest lane that has it, strike the key out. NaN logits get the smallest key of a
// real expert and p = 0; a struck-out or padding key is smaller still, so ids are always distinct and in
// range. Lane i keeps winner i
// and reads its logit again for the weight: top_k <= 32 costs no registers. No shared memory. With every
// logit -inf or NaN all weights are 0.
#pragma once
#include "hpcjit/launch.cuh"
#include "hpcjit/math/reduce.cuh"
#include "hpcjit/ptx/pdl.cuh"
#include "hpcjit/tile/vec.cuh"

namespace hpcjit::moe {

struct TopkSoftmaxParams {
  const void* logits;
  const float* bias;
  float* weights;
  int32_t* ids;
  int64_t num_tokens;
  int64_t num_experts;
  int64_t logits_stride;
  int64_t weights_stride;
  int64_t ids_stride;
  int64_t top_k;
  int64_t renormalize;
  double softcap;
};

constexpr uint32_t kStruckOut = 0, kNanKey = 1;

// Larger float, larger key; -inf maps above kNanKey.
__device__ __forceinline__ uint32_t order_key(float x) {
  if (x != x) return kNanKey;
  const uint32_t u = __float_as_uint(x + 0.f);  // -0 becomes +0: they tie
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}

__device__ __forceinline__ float max_lanes(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
    topk_softmax_kernel(const __grid_constant__ TopkSoftmaxParams p) {
  using logits_t = typename Config::logits_t;
  constexpr int kPerLane = Config::kPerLane;
  constexpr int kVec = Config::kVec;
  constexpr uint32_t kAll = 0xffffffffu;

  pdl::trigger();
  const int lane = threadIdx.x % 32;
  const int64_t token = int64_t(blockIdx.x) * (Config::kThreads / 32) + threadIdx.x / 32;
  const int num_experts = int(p.num_experts);
  const int first = lane * kPerLane;
  pdl::wait();
  if (token >= p.num_tokens) return;

  const logits_t* row = static_cast<const logits_t*>(p.logits) + token * p.logits_stride;
  const float cap = float(p.softcap);
  auto capped = [&](float logit) { return cap > 0.f ? cap * tanhf(logit / cap) : logit; };
  float x[kPerLane];
  uint32_t key[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; i += kVec) {
    const bool inside = first + i < num_experts;  // kVec divides num_experts
    float v[kVec];
#pragma unroll
    for (int j = 0; j < kVec; ++j) v[j] = -INFINITY;
    if (inside) {
      Vec<logits_t, kVec> raw;
      raw.load(row + first + i);
      raw.to(v);
    }
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      key[i + j] = inside ? order_key(v[j]) : kStruckOut;
      x[i + j] = inside ? capped(v[j]) : -INFINITY;  // padding weighs nothing
    }
  }

  float largest = -INFINITY;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) largest = fmaxf(largest, x[i]);
  largest = max_lanes(largest);
  // exp(x - largest), with 1 for the largest itself (inf - inf) and 0 for NaN and for a row without a finite
  // logit.
  auto exponential = [&](float value) {
    if (value == largest) return largest == -INFINITY ? 0.f : 1.f;
    const float e = __expf(value - largest);
    return e == e ? e : 0.f;
  };
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) total += exponential(x[i]);
  total = reduce_lanes<Add>(total);
  const float inverse_total = total > 0.f ? 1.f / total : 0.f;

  if constexpr (Config::kHasBias) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (first + i >= num_experts) continue;
      const float score = x[i] == x[i] ? exponential(x[i]) * inverse_total + p.bias[first + i] : x[i];
      key[i] = order_key(score);
    }
  }

  int winner = 0;
  const int top_k = int(p.top_k);
  for (int k = 0; k < top_k; ++k) {
    uint32_t best = key[0];
    int slot = 0;
#pragma unroll
    for (int i = 1; i < kPerLane; ++i)
      if (key[i] > best) {
        best = key[i];
        slot = i;
      }
    const uint32_t top = __reduce_max_sync(kAll, best);
    const int source = __ffs(__ballot_sync(kAll, best == top)) - 1;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      if (lane == source && i == slot) key[i] = kStruckOut;
    const int id = __shfl_sync(kAll, first + slot, source);
    if (lane == k) winner = id;
  }
  float weight = lane < top_k ? exponential(capped(to_float(row[winner]))) * inverse_total : 0.f;
  if (p.renormalize) {
    const float sum = reduce_lanes<Add>(weight);
    weight = sum > 0.f ? weight / sum : 0.f;
  }
  if (lane < top_k) {
    p.weights[token * p.weights_stride + lane] = weight;
    p.ids[token * p.ids_stride + lane] = winner;
  }
}

template <class Config>
struct TopkSoftmax {
  using Params = TopkSoftmaxParams;

  static cudaError_t prepare() {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, topk_softmax_kernel<Config>);
  }

  static cudaError_t launch(const Params& p, cudaStream_t stream) {
    const int64_t blocks = ceil_div(p.num_tokens, Config::kThreads / 32);
    return hpcjit::launch(topk_softmax_kernel<Config>, {blocks, Config::kThreads, 0, Config::kPdl}, stream,
                          p);
  }
};

}  // namespace hpcjit::moe
