// Decode attention over a paged KV cache: a few query rows per request, work cut by the live lengths.
//
//   out[i] = sum_t softmax_t(scale * q[i] . k[t]) v[t]      t: the tokens that row i may see
//
// Every block finds its share of all (request, KV head) pairs from the lengths alone (decode_work.cuh). Warps
// form teams; each team streams its tiles through a ring of its own in shared memory (decode_load.cuh) and keeps
// maximum, sum and O in registers (decode_tile.cuh). At the end of a piece the teams join, then the blocks that
// share a pair (decode_merge.cuh, decode_join.cuh).
//
// Shared memory: rings | scales of tokens | sums | queries of many rows | Small (maxima, cuts). Ordering: a warp waits
// for its own copies of a tile, then for its team; that barrier also says that all have read the tile before, whose
// stage is filled next.
// Nothing that a predecessor may have written is used before pdl::wait(); what is read earlier guides prefetches into L2
// and, once that is over, the first copies, which are made anew if it has changed.
#pragma once
#include "attention/decode_load.cuh"
#include "attention/decode_merge.cuh"
#include "hpcjit/launch.cuh"
#include "hpcjit/ptx/pdl.cuh"

namespace hpcjit::attention {

template <class Config>
__device__ __forceinline__ void wait_for_predecessor() {
  pdl::wait();
  if constexpr (Config::kTrigger == pdl::kAfterLoads) pdl::trigger();
}

// From the lengths to the copies of the first tiles and the queries of the first piece; false if there is none. Before
// pdl::wait() cuts, tiles and page ids are a guess. After it they are used at once, and what they rest on is read again
// meanwhile: each thread has the first of its run of requests at hand; with one per thread that and the page ids show
// whether anything has changed. If so, all begins anew. What the producer has read beyond its first request would not be
// covered, so nothing is copied on the strength of that.
template <class Config>
__device__ __forceinline__ bool begin_work(const DecodeParams& p, const Smem<Config>& smem, int team,
                                           int first_row, Producer<Config>& producer, Walk<Config>& walk,
                                           Piece& piece, Queries<Config>& queries, uint64_t policy) {
  constexpr int kAhead = Producer<Config>::kAhead;
  Small<Config>& small = smem.small();
  const int batch = int(p.batch);
  const Run<Config> run(batch);
  const int first = min(run.begin, batch - 1);
  const bool early = Config::kEarly && Config::kSchedule != kStatic && p.fault == nullptr;
  if (!early) wait_for_predecessor<Config>();
  Request own = request_of<Config>(p, first, early);
  const sched::Divisor workers(int(gridDim.x));
#pragma unroll 1
  for (bool guess = early;; guess = false) {
    if constexpr (Config::kSchedule != kStatic) find_cuts<Config>(p, small, run, own, workers, guess);
    producer.begin(p, small, team, guess);
    walk.begin(p, small);
    const bool any = walk.piece(p, piece);
    if (any) queries.aim(p, walk.request, piece.head, first_row);
    Request now = own;
    int guessed[kAhead], pages[kAhead];
    if (guess) {
      const bool covered = !__syncthreads_or(int(run.end - run.begin > 1 || producer.walk.beyond));
      hint_tile<Config>(p, producer.asked[0]);
      if (any && threadIdx.x / 32 == Config::kWarps - 1)
        touch_queries<Config>(p, walk.request, piece.head, [](const void* row) { prefetch_l2(row); });
      wait_for_predecessor<Config>();
      now = request_of<Config>(p, first, false);
      if (!covered) {
        own = now;
        continue;
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        guessed[i] = producer.asked[i].page;
        pages[i] = producer.asked[i].page_now();
      }
    }
    if (any) queries.fetch();
#pragma unroll 1
    for (int stage = 0; stage < Config::kStages - 1; ++stage)
      start_copies<Config>(p, producer, smem, team, stage, policy);
    if (!guess) return any;
    bool changed = now != own;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) changed |= pages[i] != guessed[i];
    if (!__syncthreads_or(int(changed))) return any;
    own = now;
    copy::wait<0>();
    __syncthreads();  // the stages are free again
  }
}

// Each launch has its parameters in memory that no SM has seen; a line that is missing stops the instruction that
// names it. The warps fetch all lines at once, before they are needed.
template <class Config>
__device__ __forceinline__ void touch_params(const DecodeParams& p, Small<Config>& small) {
  constexpr int kLines = int(sizeof(DecodeParams) + 63) / 64;
  const int warp = threadIdx.x / 32;
  int sum = 0;
  for (int line = warp; line < kLines; line += Config::kWarps)
    sum += reinterpret_cast<const int*>(&p)[line * 16];
  if (threadIdx.x % 32 == 0) small.touched[warp] = sum;
}

template <class Config>
__global__ void __launch_bounds__(Config::kWarps * 32, Config::kBlocksPerSm)
    decode_kernel(const __grid_constant__ DecodeParams p) {
  using S = Shape<Config>;
  extern __shared__ __align__(128) unsigned char dynamic_smem[];
  const Smem<Config> smem{dynamic_smem};
  Small<Config>& small = smem.small();
  const int warp = threadIdx.x / 32;
  const int team = warp / Config::kRowGroups, first_row = warp % Config::kRowGroups * S::kWarpRows;

  pdl::trigger_at<Config::kTrigger, pdl::kAtStart>();
  touch_params<Config>(p, small);
  const uint64_t policy = copy::evict_first();
  Producer<Config> producer;
  Walk<Config> walk;
  Piece piece;
  Queries<Config> queries;
  bool more = begin_work<Config>(p, smem, team, first_row, producer, walk, piece, queries, policy);
  if (p.fault != nullptr && blockIdx.x == 0) report_lengths<Config>(p);

  State<Config> state;
  int tile = team, stage = 0, free_stage = Config::kStages - 1;
#pragma unroll 1
  while (more) {
    const Request r = walk.request;
    open<Config>(p, state, smem, queries, piece.head);
    if (threadIdx.x == 0) small.share = share_of<Config>(p, small, piece);
    if constexpr (Config::kSchedule == kInvariant) tile = team;
#pragma unroll 1
    for (; tile < piece.end - piece.begin; tile += S::kTeams) {
      copy::wait<Config::kStages - 2>();
      wait_for_team<Config>(team);
      start_copies<Config>(p, producer, smem, team, free_stage, policy);
      attend<Config>(p, state, smem, r, first_row, smem.stage(team, stage), smem.scales(team, stage),
                     (walk.tiles.first + piece.begin + tile) * Config::kTile);
      free_stage = stage;
      stage = stage + 1 == Config::kStages ? 0 : stage + 1;
    }
    tile -= piece.end - piece.begin;
    wait_for_team<Config>(team);  // all have read the stage that takes the sums
    close<Config>(p, state, smem, r, piece, team, first_row, free_stage);
    walk.advance(p, piece, false);
    more = walk.piece(p, piece);
    if (more) {
      queries.aim(p, walk.request, piece.head, first_row);
      queries.fetch();
    }
  }
  pdl::trigger_at<Config::kTrigger, pdl::kAtEnd>();
}

template <class Config>
struct Decode {
  using Params = DecodeParams;
  static_assert(kSmemBytes<Config> <= kMostSmemBytes, "ring_of leaves too little room for Small");

  static cudaError_t prepare() {
    return cudaFuncSetAttribute(decode_kernel<Config>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                kSmemBytes<Config>);
  }

  static cudaError_t launch(const Params& p, cudaStream_t stream) {
    const int64_t blocks = Config::kSchedule == kStatic ? p.batch * p.num_kv_heads * p.splits : p.workers;
    return hpcjit::launch(decode_kernel<Config>,
                          {blocks, Config::kWarps * 32, kSmemBytes<Config>, Config::kPdl}, stream, p);
  }
};

}  // namespace hpcjit::attention
