// Decode attention over a paged KV cache: a few query rows per request, work cut by the live lengths.
//
//   out[i] = sum_t softmax_t(scale * q[i] . k[t]) v[t]      t: the tokens that row i may see
//
// Every block finds its share of all (request, KV head) pairs from the lengths alone (decode_work.cuh). Warps
// form teams; each team streams its tiles through a ring of its own in shared memory (decode_load.cuh) and keeps
// maximum, sum and O in registers (decode_tile.cuh). At the end of a piece the teams join, then the blocks that
// share a pair (decode_merge.cuh).
//
// Shared memory: rings | scales of tokens | sums | queries of many rows | Small (maxima, cuts). Ordering: a warp waits
// for its own copies of a tile, then for its team; that barrier also says that all have read the tile before, whose
// stage is filled next.
// Nothing that a predecessor may have written is used before pdl::wait(); what is read earlier only guides
// prefetches into L2.
#pragma once
#include "attention/decode_load.cuh"
#include "attention/decode_merge.cuh"
#include "hpcjit/launch.cuh"
#include "hpcjit/ptx/pdl.cuh"

namespace hpcjit::attention {

// Before and after pdl::wait(): the cuts, in shared memory, and the producer's first tiles. Each thread has the first
// of its run of requests at hand; with one per thread that shows whether what was found out before the wait still
// holds after it. What the producer has read beyond its first request would not be covered by that, so it starts anew
// then. Page ids are read again in any case.
template <class Config>
__device__ __forceinline__ void prepare(const DecodeParams& p, Small<Config>& small,
                                        Producer<Config>& producer, int team) {
  constexpr int kThreads = Shape<Config>::kThreads;
  const int batch = int(p.batch), run = (batch + kThreads - 1) / kThreads;
  const int begin = min(int(threadIdx.x) * run, batch), end = min(begin + run, batch);
  const int first = min(begin, batch - 1);
  const bool early = Config::kEarly && Config::kSchedule != kStatic && p.fault == nullptr;
  Request own = {};
  if (early) own = request_of<Config>(p, first, true);
#pragma unroll 1
  for (bool guess = early;; guess = false) {
    if (!guess) {
      pdl::wait();
      if constexpr (Config::kTrigger == pdl::kAfterLoads) pdl::trigger();
      const Request now = request_of<Config>(p, first, false);
      bool changed = true;
      if (early) {
#pragma unroll
        for (Tile<Config>& tile : producer.asked) tile.ask_page(p, false);
        changed = run > 1 || now != own || producer.walk.beyond;
      }
      own = now;
      if (!__syncthreads_or(int(changed))) return;
    }
    if constexpr (Config::kSchedule != kStatic) find_cuts<Config>(p, small, begin, end, own, guess);
    producer.begin(p, small, team, guess);
    if (!guess) return;
    hint_tile<Config>(p, producer.asked[0]);
    if (threadIdx.x / 32 == Config::kWarps - 1 && small.cuts[0].request < batch)
      touch_queries<Config>(p, small.of_cut[0], small.cuts[0].head,
                            [](const void* row) { prefetch_l2(row); });
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
  Producer<Config> producer;
  prepare<Config>(p, small, producer, team);
  if (p.fault != nullptr && blockIdx.x == 0) report_lengths<Config>(p);

  const uint64_t policy = copy::evict_first();
#pragma unroll 1
  for (int stage = 0; stage < Config::kStages - 1; ++stage)
    start_copies<Config>(p, producer, smem, team, stage, policy);

  Walk<Config> walk;
  walk.begin(p, small);
  State<Config> state;
  Piece piece;
  int tile = team, stage = 0, free_stage = Config::kStages - 1;
#pragma unroll 1
  while (walk.piece(p, piece)) {
    const Request r = walk.request;
    open<Config>(p, state, smem, r, piece.head, first_row);
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
  }
  pdl::trigger_at<Config::kTrigger, pdl::kAtEnd>();
}

template <class Config>
struct Decode {
  using Params = DecodeParams;

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
