// Scatter the keys and values of new tokens into a paged cache.
//
//   key_cache[slot / page_size, slot % page_size, h, :] = key[t, h, :]        slot = slot_mapping[t];
//   likewise values with an e4m3 cache: e4m3(key[t, h, :] / k_scale[h])
//
// Cache axes are addressed by three strides, so NHD, HND and views of a joint tensor are one kernel. Keys
// come first in the grid, values behind them; each side is one flat list of vectors, kVecsPerThread of them
// per thread, kThreads apart, with the loads of all and of their slots in flight together. Without scales
// bits are copied, whatever they mean. A token with a negative slot writes nothing; neither does one past
// num_slots, which debug mode reports: the first thread to count it fills the record. No shared memory. Two
// tokens must not share a slot: which one stays is undefined.
#pragma once
#include "hpcjit/launch.cuh"
#include "hpcjit/ptx/pdl.cuh"
#include "hpcjit/tile/vec.cuh"

namespace hpcjit::kvcache {

struct ReshapeAndCacheParams {
  const void* key;
  const void* value;
  void* key_cache;
  void* value_cache;
  const void* slot_mapping;
  const float* k_scale;  // null: 1
  const float* v_scale;
  long long* fault;  // null, or {count, position, value, limit} of slots past the end
  double k_factor;   // multiplies k_scale
  double v_factor;
  int64_t num_tokens;
  int64_t num_heads;
  int64_t page_size;
  int64_t num_slots;
  int64_t key_dim;
  int64_t key_token_stride;
  int64_t key_head_stride;
  int64_t key_cache_page_stride;
  int64_t key_cache_slot_stride;
  int64_t key_cache_head_stride;
  int64_t k_scale_stride;
  int64_t value_dim;
  int64_t value_token_stride;
  int64_t value_head_stride;
  int64_t value_cache_page_stride;
  int64_t value_cache_slot_stride;
  int64_t value_cache_head_stride;
  int64_t v_scale_stride;
};

struct Side {  // keys or values
  const void* source;
  void* cache;
  const float* scale;
  float factor;
  int64_t dim, token_stride, head_stride, page_stride, slot_stride, cache_head_stride, scale_stride;
};

__device__ __forceinline__ Side side_of(const ReshapeAndCacheParams& p, bool keys) {
  if (keys)
    return {p.key,
            p.key_cache,
            p.k_scale,
            float(p.k_factor),
            p.key_dim,
            p.key_token_stride,
            p.key_head_stride,
            p.key_cache_page_stride,
            p.key_cache_slot_stride,
            p.key_cache_head_stride,
            p.k_scale_stride};
  return {p.value,
          p.value_cache,
          p.v_scale,
          float(p.v_factor),
          p.value_dim,
          p.value_token_stride,
          p.value_head_stride,
          p.value_cache_page_stride,
          p.value_cache_slot_stride,
          p.value_cache_head_stride,
          p.v_scale_stride};
}

__device__ __forceinline__ void report(long long* fault, int64_t token, int64_t slot, int64_t limit) {
  if (atomicAdd(reinterpret_cast<unsigned long long*>(fault), 1ull) != 0) return;
  fault[1] = token;
  fault[2] = slot;
  fault[3] = limit;
}

template <class Config>
__host__ __device__ __forceinline__ int64_t blocks_of(const ReshapeAndCacheParams& p, int64_t dim) {
  constexpr int kChunk = Config::kThreads * Config::kVecsPerThread;
  return (p.num_tokens * p.num_heads * (dim / Config::kVec) + kChunk - 1) / kChunk;
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
    reshape_and_cache_kernel(const __grid_constant__ ReshapeAndCacheParams p) {
  using input_t = typename Config::input_t;
  using cache_t = typename Config::cache_t;
  using slot_t = typename Config::slot_t;
  constexpr int kVec = Config::kVec;
  constexpr int kVecs = Config::kVecsPerThread;
  constexpr bool kConvert = sizeof(cache_t) != sizeof(input_t);

  pdl::trigger();
  const int64_t key_blocks = blocks_of<Config>(p, p.key_dim);
  const bool keys = blockIdx.x < key_blocks;
  const Side side = side_of(p, keys);
  const uint32_t head_vecs = uint32_t(side.dim / kVec);
  const uint32_t token_vecs = head_vecs * uint32_t(p.num_heads);
  const int64_t first = (blockIdx.x - (keys ? 0 : key_blocks)) * int64_t(Config::kThreads * kVecs);
  const int64_t first_token = first / token_vecs;
  const uint32_t first_vec = uint32_t(first - first_token * token_vecs);
  int64_t token[kVecs];
  uint32_t head[kVecs], vec[kVecs];
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const uint32_t flat = first_vec + threadIdx.x + i * Config::kThreads;
    const uint32_t token_step = flat / token_vecs;
    const uint32_t rest = flat - token_step * token_vecs;
    token[i] = first_token + token_step;
    head[i] = rest / head_vecs;
    vec[i] = rest - head[i] * head_vecs;
  }
  pdl::wait();

  int64_t slot[kVecs];
  Vec<input_t, kVec> raw[kVecs];
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    slot[i] = -1;
    if (token[i] >= p.num_tokens) continue;
    slot[i] = static_cast<const slot_t*>(p.slot_mapping)[token[i]];
    raw[i].template load<Cache::kStream>(static_cast<const input_t*>(side.source) +
                                         token[i] * side.token_stride + head[i] * side.head_stride +
                                         int64_t(vec[i]) * kVec);
  }
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    if (slot[i] < 0) continue;
    if (slot[i] >= p.num_slots) {
      if (p.fault != nullptr && keys && head[i] == 0 && vec[i] == 0)
        report(p.fault, token[i], slot[i], p.num_slots);
      continue;
    }
    // A division in 64 bits costs as much as all the rest; caches of more than 2^32 slots pay for it.
    const int64_t page =
        p.num_slots >> 32 ? slot[i] / p.page_size : uint32_t(slot[i]) / uint32_t(p.page_size);
    cache_t* target = static_cast<cache_t*>(side.cache) + page * side.page_stride +
                      (slot[i] - page * p.page_size) * side.slot_stride + head[i] * side.cache_head_stride +
                      int64_t(vec[i]) * kVec;
    if constexpr (kConvert) {
      const float scale =
          side.scale == nullptr ? side.factor : side.factor * side.scale[head[i] * side.scale_stride];
      const float inverse_scale = 1.f / scale;
      float y[kVec];
      raw[i].to(y);
#pragma unroll
      for (int j = 0; j < kVec; ++j) y[j] *= inverse_scale;
      Vec<cache_t, kVec> q;
      q.from(y);
      q.store(target);
    } else {
      raw[i].store(reinterpret_cast<input_t*>(target));
    }
  }
}

template <class Config>
struct ReshapeAndCache {
  using Params = ReshapeAndCacheParams;

  static cudaError_t prepare() {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, reshape_and_cache_kernel<Config>);
  }

  static cudaError_t launch(const Params& p, cudaStream_t stream) {
    const int64_t blocks = blocks_of<Config>(p, p.key_dim) + blocks_of<Config>(p, p.value_dim);
    return hpcjit::launch(reshape_and_cache_kernel<Config>, {blocks, Config::kThreads, 0, Config::kPdl},
                          stream, p);
  }
};

}  // namespace hpcjit::kvcache
