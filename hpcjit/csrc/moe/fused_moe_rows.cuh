// The ends of the fused MoE: activations to FP8 before the products, and the weighted sum of a token's rows after them.
//
//   quantise: x8[t, i] = e4m3(x[t, i] / s), s = max(max|x|, 1e-10) / 448 over the row or its group of 128, or given
//   combine:  out[t] = sum over k of weight[t, k] * row[position[t, k]] + shared[t], in the order of k, in fp32;
//             a pair without a row (position -1) is not read
//
// A block has a token, or a piece of one; a thread has kVec neighbouring columns at a time.
#pragma once
#include "hpcjit/launch.cuh"
#include "hpcjit/math/reduce.cuh"
#include "hpcjit/ptx/pdl.cuh"
#include "quantization/source.cuh"

namespace hpcjit::moe {

constexpr int kRowThreads = 256, kVec = 8;
constexpr int kScaleGiven = 1, kScaleOfRow = 2,
              kScaleOfGroup = 3;  // Config::kQuantise; 0: x is not quantised

struct QuantiseParams {
  const bf16* x;
  e4m3* out;           // [num_tokens][hidden_size]
  float* scale;        // [num_tokens][groups], written unless it is given
  const float* given;  // [1]
  int64_t x_stride;
  int hidden_size, groups;
};

template <int kMode>
__global__ void __launch_bounds__(kRowThreads) quantise_kernel(const __grid_constant__ QuantiseParams p) {
  __shared__ float scratch[kRowThreads / 32];
  pdl::trigger();
  const int64_t token = blockIdx.x;
  const bf16* x = p.x + token * p.x_stride;
  e4m3* out = p.out + token * p.hidden_size;
  const int vecs = p.hidden_size / kVec;
  pdl::wait();

  float scale = 1.f;
  if constexpr (kMode == kScaleGiven) scale = *p.given;
  if constexpr (kMode == kScaleOfRow) {
    float largest = 0.f;
    for (int v = threadIdx.x; v < vecs; v += kRowThreads) {
      Vec<bf16, kVec> raw;
      float y[kVec];
      raw.load(x + v * kVec);
      raw.to(y);
      largest = quantization::largest_magnitude(y, largest);
    }
    scale = fmaxf(reduce_block<Max, kRowThreads>(largest, scratch), kQuantFloor) / kE4m3Max;
    if (threadIdx.x == 0) p.scale[token] = scale;
  }
  for (int base = 0; base < vecs; base += kRowThreads) {  // whole warps: lanes of a group exchange maxima
    const int v = base + threadIdx.x;
    float y[kVec] = {};
    if (v < vecs) {
      Vec<bf16, kVec> raw;
      raw.load(x + v * kVec);
      raw.to(y);
    }
    if constexpr (kMode == kScaleOfGroup) {
      constexpr int kLanes = 128 / kVec;
      const float largest = reduce_lanes<Max, kLanes>(quantization::largest_magnitude(y));
      scale = fmaxf(largest, kQuantFloor) / kE4m3Max;
      if (v < vecs && v % kLanes == 0) p.scale[token * p.groups + v / kLanes] = scale;
    }
    if (v < vecs) quantization::store_e4m3<kVec, Cache::kDefault>(out + v * kVec, y, 1.f / scale);
  }
}

struct CombineParams {
  const void* rows;         // [rows][hidden_size] of row_t
  const int32_t* position;  // [num_tokens][top_k]
  const float* weights;
  const bf16* shared;
  bf16* out;
  int64_t weights_stride, shared_stride, out_stride;
  int hidden_size, top_k;
};

// As many blocks an SM as registers allow: a block waits for memory twice.
template <class Config>
__global__ void __launch_bounds__(kRowThreads, Config::kWeightsOnInput ? 3 : 4)
    combine_kernel(const __grid_constant__ CombineParams p) {
  using row_t = typename Config::partial_t;
  constexpr int kBatch = 8;
  pdl::trigger();
  const int pieces = (p.hidden_size + kRowThreads * kVec - 1) / (kRowThreads * kVec);
  const int64_t token = blockIdx.x / unsigned(pieces);
  const int64_t column = int64_t(blockIdx.x % unsigned(pieces) * kRowThreads + threadIdx.x) * kVec;
  pdl::wait();
  if (column >= p.hidden_size) return;
  const row_t* rows = static_cast<const row_t*>(p.rows) + column;
  const int32_t* position = p.position + token * p.top_k;
  const float* weights = p.weights + token * p.weights_stride;

  float total[kVec] = {};
#pragma unroll 1
  for (int first = 0; first < p.top_k; first += kBatch) {
    Vec<row_t, kVec> raw[kBatch];
    int row[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) row[j] = first + j < p.top_k ? position[first + j] : -1;
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
      if (row[j] >= 0) raw[j].load(rows + int64_t(row[j]) * p.hidden_size);
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (row[j] < 0) continue;
      const float weight = Config::kWeightsOnInput ? 1.f : weights[first + j];
      float value[kVec];
      raw[j].to(value);
#pragma unroll
      for (int i = 0; i < kVec; ++i) total[i] += weight * value[i];
    }
  }
  if constexpr (Config::kHasShared) {
    Vec<bf16, kVec> raw;
    float value[kVec];
    raw.load(p.shared + token * p.shared_stride + column);
    raw.to(value);
#pragma unroll
    for (int i = 0; i < kVec; ++i) total[i] += value[i];
  }
  Vec<bf16, kVec> result;
  result.from(total);
  result.store(p.out + token * p.out_stride + column);
}

}  // namespace hpcjit::moe
