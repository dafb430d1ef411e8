// Sorts (token, expert) pairs by expert and pads each expert's run to whole blocks of a grouped matrix product.
//
//   pair i belongs to expert e = ids[i] - first_id, or expert_map[that] (kHasMap); to none unless 0 <= e < num_experts
//   sorted[start[e] ...] = the pairs of e in increasing order, then `numel` up to the next multiple of block_size
//   start[e + 1] = start[e] + the padded count of e;  expert_ids[b] = the expert of sorted[b * block_size]
//   past start[num_experts] = *num_padded: numel in sorted, -1 in expert_ids
//
// The pairs are cut into a chunk per block, and that into a stretch per warp. Every block adds up, for each expert, the
// counts of earlier chunks and of all; a kernel that runs before it (kCounted: more than one block) left them in the
// workspace. It then counts its own stretches, sums up over experts to get the starts, and each warp places its pairs
// in order: of equal experts within 32 pairs the lowest lane first. Nothing depends on the order in which threads
// run: atomics only count. The blocks share out what is left: padding, the tail, expert_ids.
//
// Shared memory, in int32: starts [num_experts + 1], earlier and filled [num_experts], and next [kWarps][num_experts],
// the counts of the stretches, which become positions. Workspace: int32 [blocks][num_experts].
#pragma once
#include "hpcjit/launch.cuh"
#include "hpcjit/ptx/pdl.cuh"

namespace hpcjit::moe {

struct AlignParams {
  const int32_t* topk_ids;
  const int32_t* expert_map;
  int32_t* sorted_token_ids;
  int32_t* expert_ids;
  int32_t* num_tokens_post_padded;
  void* workspace;
  int64_t numel;
  int64_t top_k;
  int64_t ids_stride;
  int64_t num_ids;  // of the ids that count: num_experts, or the length of expert_map
  int64_t num_experts;
  int64_t block_size;
  int64_t sorted_size;
  int64_t expert_ids_size;
  int64_t blocks;
  int64_t first_id;
};

template <class Config>
struct AlignBlock {
  static constexpr int kThreads = Config::kThreads;
  static constexpr int kWarps = kThreads / 32;

  const AlignParams& p;
  int chunk_begin, chunk_end;  // pairs of this block

  __device__ explicit AlignBlock(const AlignParams& p) : p(p) {
    // Whole groups of 32 for each warp.
    const int64_t step = (p.numel + p.blocks * kThreads - 1) / (p.blocks * kThreads) * kThreads;
    chunk_begin = int(min(p.numel, int64_t(blockIdx.x) * step));
    chunk_end = int(min(p.numel, (int64_t(blockIdx.x) + 1) * step));
  }

  // The expert of a pair, or -1.
  __device__ int expert_of(int i) const {
    const int64_t at = Config::kStrided ? i / int(p.top_k) * p.ids_stride + i % int(p.top_k) : i;
    int id = int(uint32_t(p.topk_ids[at]) - uint32_t(p.first_id));
    if (uint32_t(id) >= uint32_t(p.num_ids)) return -1;
    if constexpr (Config::kHasMap) id = p.expert_map[id];
    return uint32_t(id) < uint32_t(p.num_experts) ? id : -1;
  }

  // The stretch of the chunk that a warp places.
  __device__ int stretch(int warp) const {
    const int each = (chunk_end - chunk_begin + kThreads - 1) / kThreads * 32;
    return min(chunk_end, chunk_begin + warp * each);
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
    align_count_kernel(const __grid_constant__ AlignParams p) {
  extern __shared__ int32_t count[];
  pdl::trigger();
  const int experts = int(p.num_experts);
  for (int e = threadIdx.x; e < experts; e += Config::kThreads) count[e] = 0;
  __syncthreads();
  pdl::wait();
  const AlignBlock<Config> block(p);
  for (int i = block.chunk_begin + threadIdx.x; i < block.chunk_end; i += Config::kThreads) {
    const int e = block.expert_of(i);
    if (e >= 0) atomicAdd(count + e, 1);
  }
  __syncthreads();
  int32_t* target = static_cast<int32_t*>(p.workspace) + int64_t(blockIdx.x) * experts;
  for (int e = threadIdx.x; e < experts; e += Config::kThreads) target[e] = count[e];
}

template <class Config>
struct AlignPlace : AlignBlock<Config> {
  using Base = AlignBlock<Config>;
  using Base::kThreads, Base::kWarps, Base::p;
  static constexpr int kPerThread = Config::kPerThread;  // experts

  int experts, warp, lane;
  int32_t* start;    // [experts + 1], of the runs
  int32_t* earlier;  // [experts], pairs in earlier chunks
  int32_t* filled;   // [experts], pairs in all chunks, then where they end
  int32_t* next;     // [kWarps][experts]

  __device__ AlignPlace(const AlignParams& p, int32_t* shared)
      : Base(p),
        experts(int(p.num_experts)),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32),
        start(shared),
        earlier(start + experts + 1),
        filled(earlier + experts),
        next(filled + experts) {}

  __device__ void clear() {
    for (int i = threadIdx.x; i < (2 + kWarps) * experts; i += kThreads) earlier[i] = 0;
  }

  __device__ void count_stretches() {
    const int end = this->stretch(warp + 1);
    for (int i = this->stretch(warp) + lane; i < end; i += 32) {
      const int e = this->expert_of(i);
      if (e >= 0) atomicAdd(next + warp * experts + e, 1);
    }
  }

  // What the count kernel found. Where threads outnumber the experts, rows of threads share out the chunks.
  __device__ void count_chunks() {
    const int rows = max(kThreads / experts, 1), row = threadIdx.x / experts;
    if (experts <= kThreads && row >= rows) return;
    for (int e = experts <= kThreads ? threadIdx.x % experts : threadIdx.x; e < experts; e += kThreads) {
      const int32_t* count = static_cast<const int32_t*>(p.workspace) + e;
      int before = 0, all = 0;
#pragma unroll 8
      for (int b = experts <= kThreads ? row : 0; b < int(p.blocks); b += rows) {
        const int n = count[int64_t(b) * experts];
        before += b < int(blockIdx.x) ? n : 0;
        all += n;
      }
      atomicAdd(earlier + e, before);
      atomicAdd(filled + e, all);
    }
  }

  // Sum over this thread of the block and those before it.
  __device__ int block_prefix_sum(int x) const {
    __shared__ int32_t sums[32];
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int before = __shfl_up_sync(0xffffffffu, x, offset);
      x += lane >= offset ? before : 0;
    }
    if (lane == 31) sums[warp] = x;
    __syncthreads();
    int before = lane < warp ? sums[lane] : 0;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) before += __shfl_xor_sync(0xffffffffu, before, offset);
    return x + before;
  }

  // Turns counts into positions. Each thread has kPerThread neighbouring experts.
  __device__ void find_starts() {
    const int first = threadIdx.x * kPerThread, size = int(p.block_size);
    int all[kPerThread], padded[kPerThread], sum = 0;
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int e = first + j;
      all[j] = 0;
      if (e < experts) {
        if constexpr (Config::kCounted) {
          all[j] = filled[e];
        } else {
          for (int w = 0; w < kWarps; ++w) all[j] += next[w * experts + e];
        }
      }
      padded[j] = (all[j] + size - 1) / size * size;
      sum += padded[j];
    }
    int at = block_prefix_sum(sum) - sum;
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int e = first + j;
      if (e >= experts) break;
      start[e] = at;
      filled[e] = at + all[j];
      int position = at + earlier[e];
      for (int w = 0; w < kWarps; ++w) {
        const int n = next[w * experts + e];
        next[w * experts + e] = position;
        position += n;
      }
      at += padded[j];
      if (e == experts - 1) start[experts] = at;
    }
  }

  __device__ void place() {
    const int end = this->stretch(warp + 1);
    for (int base = this->stretch(warp); base < end; base += 32) {
      const int i = base + lane;
      const int e = i < end ? this->expert_of(i) : -1;
      const uint32_t same = __match_any_sync(0xffffffffu, e);
      const int rank = __popc(same & ((1u << lane) - 1));
      int32_t* position = next + warp * experts + max(e, 0);
      const int at = *position;
      __syncwarp();  // all have read before the first of each expert moves on
      if (e >= 0) {
        p.sorted_token_ids[at + rank] = i;
        if (rank == 0) *position = at + __popc(same);
      }
      __syncwarp();
    }
  }

  // The last expert whose run starts at or before a position below start[experts]: those before it are empty.
  __device__ int expert_at(int position) const {
    int low = 0, high = experts;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (start[middle] <= position ? low : high) = middle;
    }
    return low;
  }

  // The expert of every block of the result, and the padding in it: a lane finds it, the warp writes it.
  __device__ void finish_blocks() const {
    const int total = start[experts], size = int(p.block_size);
    const int64_t first = (int64_t(blockIdx.x) * kWarps + warp) * 32;
    for (int64_t base = first; base < p.expert_ids_size; base += p.blocks * kThreads) {
      const int64_t b = base + lane, at = b * size;
      const int e = at < total ? expert_at(int(at)) : -1;
      if (b < p.expert_ids_size) p.expert_ids[b] = e;
      const int end = e < 0 ? 0 : int(at) + size, pad = e < 0 ? 0 : max(int(at), filled[e]);
      for (uint32_t open = __ballot_sync(0xffffffffu, pad < end); open; open &= open - 1) {
        const int source = __ffs(open) - 1;
        const int stop = __shfl_sync(0xffffffffu, end, source);
        for (int i = __shfl_sync(0xffffffffu, pad, source) + lane; i < stop; i += 32)
          p.sorted_token_ids[i] = int(p.numel);
      }
    }
  }

  // What follows the last run.
  __device__ void finish_tail() const {
    const int total = start[experts];
    const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    if (thread == 0) *p.num_tokens_post_padded = total;
    for (int64_t i = total + thread; i < p.sorted_size; i += p.blocks * kThreads)
      p.sorted_token_ids[i] = int(p.numel);
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
    align_place_kernel(const __grid_constant__ AlignParams p) {
  extern __shared__ int32_t shared[];
  pdl::trigger();
  AlignPlace<Config> block(p, shared);
  block.clear();
  __syncthreads();
  pdl::wait();
  if constexpr (Config::kCounted) block.count_chunks();
  block.count_stretches();
  __syncthreads();
  block.find_starts();
  __syncthreads();
  block.place();
  block.finish_blocks();
  block.finish_tail();
}

template <class Config>
struct Align {
  using Params = AlignParams;
  static constexpr int kMaxExperts = Config::kThreads > 512 ? 512 : 1024;  // shared memory for SM 8.6 too

  static int place_bytes(int experts) { return (experts * (Config::kThreads / 32 + 3) + 1) * 4; }

  static cudaError_t prepare() {
    cudaFuncAttributes attributes;
    if constexpr (Config::kCounted) {
      const cudaError_t error = cudaFuncGetAttributes(&attributes, align_count_kernel<Config>);
      if (error != cudaSuccess) return error;
    }
    return cudaFuncSetAttribute(align_place_kernel<Config>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                place_bytes(kMaxExperts));
  }

  static cudaError_t launch(const Params& p, cudaStream_t stream) {
    const int experts = int(p.num_experts);
    if constexpr (Config::kCounted) {
      const LaunchShape shape = {p.blocks, Config::kThreads, experts * 4, Config::kPdl};
      const cudaError_t error = hpcjit::launch(align_count_kernel<Config>, shape, stream, p);
      if (error != cudaSuccess) return error;
    }
    const LaunchShape shape = {p.blocks, Config::kThreads, place_bytes(experts), Config::kPdl};
    return hpcjit::launch(align_place_kernel<Config>, shape, stream, p);
  }
};

}  // namespace hpcjit::moe
