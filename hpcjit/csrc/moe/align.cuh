// Sorts (token, expert) pairs by expert and pads each expert's run to whole blocks of a grouped matrix product.
//
//   sorted[start[e] ...] = the pairs of e in increasing order, then `numel` up to the next multiple of block_size
//   start[e + 1] = start[e] + the padded count of e;  expert_ids[b] = the expert of sorted[b * block_size]
//   past start[num_experts] = *num_padded: numel in sorted, -1 in expert_ids
//
// Sorting is that of pair_sort.cuh. All of the result is filled with numel and -1 while the ids are on their way, and what
// belongs there is written over it: after a barrier of the block, after one of the cluster that a fence precedes
// (kClustered), or in the next kernel (kCounted).
#pragma once
#include "moe/pair_sort.cuh"

namespace hpcjit::moe {

// Words [0, size) of which this thread writes some, by whole 16 bytes where the address allows.
__device__ __forceinline__ void fill(int32_t* target, int size, int32_t value, int thread, int threads) {
  const int head = min(size, int(-(reinterpret_cast<uintptr_t>(target) / 4) & 3));
  const int vecs = (size - head) / 4;
  if (thread < head) target[thread] = value;
  for (int i = head + 4 * vecs + thread; i < size; i += threads) target[i] = value;
  int4* body = reinterpret_cast<int4*>(target + head);
#pragma unroll 4
  for (int i = thread; i < vecs; i += threads) body[i] = make_int4(value, value, value, value);
}

template <class Config>
__device__ __forceinline__ void fill_results(const AlignParams& p) {
  const int thread = int(blockIdx.x) * Config::kThreads + int(threadIdx.x);
  const int threads = int(p.blocks) * Config::kThreads;
  fill(p.sorted_token_ids, int(p.sorted_size), int(p.numel), thread, threads);
  fill(p.expert_ids, int(p.expert_ids_size), -1, thread, threads);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
    align_count_kernel(const __grid_constant__ AlignParams p) {
  extern __shared__ uint4 shared[];
  int32_t* count = reinterpret_cast<int32_t*>(shared);
  for (int e = threadIdx.x; e < 2 * pair_columns(int(p.num_experts)); e += Config::kThreads) count[e] = 0;
  __syncthreads();
  pdl::wait();
  pdl::trigger();  // not before: the next kernel looks at the ids, which are there now
  if constexpr (Config::kFilled) fill_results<Config>(p);
  count_pairs<Config>(p, count);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
    align_place_kernel(const __grid_constant__ AlignParams p) {
  extern __shared__ uint4 shared[];
  pdl::trigger();
  PairSort<Config> sort(p, shared);
  if constexpr (!Config::kCounted) pdl::wait();  // else in find_places; what wrote the ids is done by now
  sort.load(0, sort.expert);
  if constexpr (!Config::kCounted) fill_results<Config>(p);
  sort.template find_places<true>(int(p.block_size));
  sort.each_place([&](int pair, int at) {
    if (at >= 0) p.sorted_token_ids[at] = pair;
  });
  sort.each_expert([&](int expert, int first, int tiles, int lane, int lanes) {
    for (int i = lane; i < tiles; i += lanes) p.expert_ids[first + i] = expert;
  });
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.num_tokens_post_padded = sort.start[sort.experts];
}

template <class Config>
struct Align {
  using Params = AlignParams;
  using Sort = PairSort<Config>;

  static cudaError_t prepare() {
    const auto kernel = align_place_kernel<Config>;
    cudaError_t status = cudaSuccess;
    if constexpr (Config::kCounted) {
      cudaFuncAttributes attributes;
      status = cudaFuncGetAttributes(&attributes, align_count_kernel<Config>);
    }
    if (Config::kClustered && status == cudaSuccess) status = allow_large_cluster(kernel);
    if (status != cudaSuccess) return status;
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                Sort::smem_bytes(Sort::kMaxExperts));
  }

  static cudaError_t launch(const Params& p, cudaStream_t stream) {
    const int experts = int(p.num_experts);
    LaunchShape shape = {p.blocks, Config::kThreads, 8 * pair_columns(experts), Config::kPdl};
    if constexpr (Config::kCounted) {
      const cudaError_t error = hpcjit::launch(align_count_kernel<Config>, shape, stream, p);
      if (error != cudaSuccess) return error;
    }
    shape.smem_bytes = Sort::smem_bytes(experts);
    if (Config::kClustered) shape.cluster = int(p.blocks);
    return hpcjit::launch(align_place_kernel<Config>, shape, stream, p);
  }
};

}  // namespace hpcjit::moe
