// Who does what: the two cuts of a worker from the live lengths, and the walk over its pieces.
#pragma once
#include <limits.h>

#include "attention/decode_params.cuh"
#include "hpcjit/sched/folded.cuh"

namespace hpcjit::attention {

// The worker that a block is: the last of the axis starts first (decode_join.cuh says why), those without work last, so that
// they hold no multiprocessor back.
__device__ __forceinline__ int own_worker() {
  return int(gridDim.x) - 1 - int(blockIdx.x);
}

// Position: request * table_width + column for a page id, -1 - request for a length.
__device__ __noinline__ void report(long long* fault, int64_t position, int value, int64_t limit) {
  if (atomicAdd(reinterpret_cast<unsigned long long*>(fault), 1ull) != 0) return;
  fault[1] = position;
  fault[2] = value;
  fault[3] = limit;
}

__device__ __forceinline__ bool operator!=(const Request& a, const Request& b) {
  return a.seq_len != b.seq_len || a.q_len != b.q_len || a.q_start != b.q_start;
}

// Lengths are held to what the table can address and rows to those that q has, so that no value can lead outside of
// them. Before pdl::wait() they are a guess and are read through L2: no stale line may stay in L1.
template <class Config>
__device__ __forceinline__ Request request_of(const DecodeParams& p, int b, bool guess) {
  const auto read = [&](const int* x) { return guess ? __ldcg(x) : *x; };
  const int len = max(0, min(read(p.seq_lens + b), int(p.capacity)));
  const int most = int(p.max_q_len), all = int(p.total_q);
  if constexpr (!Config::kRagged) return {len, most, b * most};
  const int begin = max(0, min(read(p.cu_seqlens_q + b), all));
  const int end = max(begin, min(read(p.cu_seqlens_q + b + 1), all));
  return {len, min(end - begin, most), begin};
}

template <class Config>
__device__ __forceinline__ void report_lengths(const DecodeParams& p) {
  for (int b = threadIdx.x; b < p.batch; b += Config::kWarps * 32)
    if (p.seq_lens[b] < 0 || p.seq_lens[b] > p.capacity) report(p.fault, -1 - b, p.seq_lens[b], p.capacity);
}

template <class Config>
__device__ __forceinline__ sched::Tiles tiles_of(const DecodeParams& p, const Request& r) {
  return sched::tiles_of(r.seq_len, r.q_len, Config::kWindow ? int(p.window) : 0, Config::kTile);
}

template <class Config>
__device__ __forceinline__ int cut_step(const DecodeParams& p) {
  return Config::kSchedule == kInvariant ? int(p.splits) : 1;
}

// The requests of a thread. Up to half as many as there are threads, both halves of the block have all of them and a cut to
// find each.
template <class Config>
struct Run {
  static constexpr int kThreads = Shape<Config>::kThreads;
  bool halves;
  int part;  // of the block: 1 for its second half
  int begin;
  int end;

  __device__ __forceinline__ explicit Run(int batch) {
    halves = Config::kWarps > 1 && batch <= kThreads / 2;
    part = halves && int(threadIdx.x) >= kThreads / 2 ? 1 : 0;
    const int each = (batch + kThreads - 1) / kThreads;
    begin = min((int(threadIdx.x) - part * (kThreads / 2)) * each, batch);
    end = min(begin + each, batch);
  }
  __device__ __forceinline__ bool is_of_part(int warp) const {
    return !halves || (warp >= Config::kWarps / 2) == (part == 1);
  }
  __device__ __forceinline__ bool leads() const { return int(threadIdx.x) == part * (kThreads / 2); }
};

template <class Int>
__device__ __forceinline__ Int sum_of_warp(Int x) {
  if constexpr (sizeof(Int) == 4) {
    return __reduce_add_sync(~0u, x);
  } else {
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) x += __shfl_xor_sync(~0u, x, offset);
    return x;
  }
}

// All threads: this worker's cuts and the axis, in shared memory. The thread whose run of requests, of which it has read
// `first`, holds a cut finds it. Two barriers. What comes before the sum of all costs counts: a division takes as long as
// a third of a read of L2.
template <class Config>
__device__ __forceinline__ void find_cuts(const DecodeParams& p, Small<Config>& small, const Run<Config>& run,
                                          const Request& first, const sched::Divisor& workers, bool guess) {
  using Int = typename Config::axis_t;
  const int margin = int(p.margin), heads = int(p.num_kv_heads);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first_count = tiles_of<Config>(p, first).count;
  const bool any = run.begin < run.end;
  Int own = any ? 2 * margin + first_count : 0;
  int longest = any ? first_count : 0;
#pragma unroll 1
  for (int b = run.begin + 1; b < run.end; ++b) {
    const int count = tiles_of<Config>(p, request_of<Config>(p, b, guess)).count;
    own += 2 * margin + count;
    longest = max(longest, count);
  }
  const Int of_warp = sum_of_warp(own);
  longest = __reduce_max_sync(~0u, longest);
  if (lane == 0) {
    small.total[warp] = of_warp;
    small.longest[warp] = longest;
  }
  __syncthreads();
  Int before = 0, total = 0;
#pragma unroll
  for (int w = 0; w < Config::kWarps; ++w) {
    const Int sum = run.is_of_part(w) ? small.total[w] : 0;
    if (w < warp) before += sum;
    total += sum;
    longest = max(longest, small.longest[w]);
  }
  Int up_to = own;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const Int other = __shfl_up_sync(~0u, up_to, offset);
    if (lane >= offset) up_to += other;
  }
  const Int all = heads * total;
  const sched::Axis<Int> axis =
      sched::axis_of<Int>(all, int(p.batch), heads, workers, longest, margin, int(p.least), int(p.whole),
                          int(p.slack), Config::kSchedule == kDynamic ? int(p.less) : 0);
  const Int run_begin = heads * (before + up_to - own), run_end = heads * (before + up_to);
  if (threadIdx.x == 0) small.axis = axis;
#pragma unroll 1
  for (int i = run.part; i < 2; i += run.halves ? 2 : 1) {
    const Int x = sched::cut_position(axis, own_worker() + i);
    if (x >= all && run.leads()) small.cuts[i] = {int(p.batch), 0, 0, all};
    if (x < run_begin || x >= run_end) continue;
    Int start = run_begin;
    Request r = first;
    int b = run.begin, count = first_count;
    while (x - start >= heads * (2 * margin + count)) {
      start += heads * (2 * margin + count);
      r = request_of<Config>(p, ++b, guess);
      count = tiles_of<Config>(p, r).count;
    }
    auto cut = sched::cut_at<Int>(x, b, start, count, margin, cut_step<Config>(p));
    if (cut.head == heads) {
      cut.head = 0;
      ++cut.request;
      r = request_of<Config>(p, min(cut.request, int(p.batch) - 1), guess);
    }
    small.cuts[i] = cut;
    small.of_cut[i] = r;
  }
  __syncthreads();
}

// A run of tiles of one pair that one worker does. Tiles are counted from the request's first live one.
struct Piece {
  int request;
  int head;
  int begin;
  int end;
  int count;  // tiles of the whole pair
};

// The pieces of this worker in order. Every warp walks by itself; a producer walks ahead of its consumer.
template <class Config>
struct Walk {
  using Cut = sched::Cut<typename Config::axis_t>;
  int at_request, at_head, at_tile;
  int end_request, end_head, end_tile;
  Request request;
  sched::Tiles tiles;
  bool beyond;  // a request after the first has been read

  __device__ __forceinline__ void begin(const DecodeParams& p, const Small<Config>& small) {
    beyond = false;
    if constexpr (Config::kSchedule == kStatic) {
      const int worker = own_worker();
      const int pair = worker / int(p.splits), split = worker - pair * int(p.splits);
      at_request = end_request = pair / int(p.num_kv_heads);
      at_head = end_head = pair - at_request * int(p.num_kv_heads);
      load(p, false);
      const int share = (tiles.count + int(p.splits) - 1) / int(p.splits);
      at_tile = min(split * share, tiles.count);
      end_tile = min(at_tile + share, tiles.count);
      // The first piece of an empty pair writes its zeros.
      if (split == 0 && tiles.count == 0) end_head += 1;
    } else {
      const Cut &from = small.cuts[0], &to = small.cuts[1];
      at_request = from.request, at_head = from.head, at_tile = from.tile;
      end_request = to.request, end_head = to.head, end_tile = to.tile;
      request = small.of_cut[0];
      tiles = tiles_of<Config>(p, request);
    }
  }

  __device__ __forceinline__ void load(const DecodeParams& p, bool guess) {
    request = request_of<Config>(p, at_request, guess);
    tiles = tiles_of<Config>(p, request);
  }

  __device__ __forceinline__ bool in_last_pair() const {
    return at_request == end_request && at_head == end_head;
  }

  __device__ __forceinline__ bool ended(const DecodeParams& p) const {
    // Without branches: this is on the way to the first tile.
    const bool in_pair = at_request == end_request & at_head == end_head;
    return at_request > end_request | at_request >= int(p.batch) |
           (at_request == end_request & at_head > end_head) | (in_pair & at_tile >= end_tile);
  }

  // The current piece; false at the end. Pieces of the invariant schedule end at multiples of its step.
  __device__ __forceinline__ bool piece(const DecodeParams& p, Piece& piece) const {
    if (ended(p)) return false;
    int stop = in_last_pair() ? end_tile : tiles.count;
    if constexpr (Config::kSchedule == kInvariant) stop = min(stop, at_tile + cut_step<Config>(p));
    piece = {at_request, at_head, at_tile, stop, tiles.count};
    return true;
  }

  __device__ __forceinline__ void advance(const DecodeParams& p, const Piece& piece, bool guess) {
    at_tile = piece.end;
    if (at_tile < tiles.count || in_last_pair()) return;
    at_tile = 0;
    if (++at_head < p.num_kv_heads) return;
    at_head = 0;
    ++at_request;
    if (ended(p)) return;
    beyond = true;
    load(p, guess);
  }
};

}  // namespace hpcjit::attention
