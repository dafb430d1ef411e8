// Where pairs (token, expert) go when they are sorted by expert, stably: the part that align.cuh and plan.cuh share.
//
//   pair i belongs to expert e = ids[i] - first_id, or expert_map[that] (kHasMap); to none unless 0 <= e < num_experts
//   its place = start[e] + how many pairs before i belong to e
//
// The pairs are cut into a stretch of neighbours per block, and that into one per warp. Step by step:
//   1. A warp ranks 32 pairs at once: each lane sets its bit in the mask of (warp, expert), and the bits below its own
//      are the pairs before it. The count of (warp, expert) carries on from one 32 to the next.
//   2. A thread has two neighbouring experts, side by side in one word: it turns their counts into sums over earlier
//      warps, and has the block's totals.
//   3. Totals of other blocks, if there are any: from the blocks of the cluster, each of which sends its totals to all
//      (kClustered: the grid is one cluster), or from a kernel before this one (kCounted), through the workspace.
//   4. A scan over experts gives the starts.
// Nothing depends on the order in which threads run, and no block waits for one that may not have started.
//
// Shared memory: the arrays of `PairSort`. Workspace with kCounted: int32 [blocks][2 * columns].
#pragma once
#include <type_traits>

#include "hpcjit/launch.cuh"
#include "hpcjit/ptx/cluster.cuh"
#include "hpcjit/ptx/mbarrier.cuh"
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

constexpr uint32_t kWholeWarp = 0xffffffffu;
constexpr int kMaxClusterBlocks = 16;

// Code for a GPU without clusters, where nothing that is kClustered can be launched.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kHasClusters = false;
#else
constexpr bool kHasClusters = true;
#endif

// Words with the counts of two experts; whole warps of them.
__host__ __device__ __forceinline__ int pair_columns(int num_experts) {
  return (num_experts + 63) / 64 * 32;
}

// The pairs of a block and of its warps.
template <class Config>
struct PairStretch {
  static constexpr int kThreads = Config::kThreads, kWarps = kThreads / 32;

  const AlignParams& p;
  int warp, lane;
  int rounds;  // of 32 pairs, for each warp
  int first;   // pair of this lane

  __device__ explicit PairStretch(const AlignParams& p)
      : p(p), warp(threadIdx.x / 32), lane(threadIdx.x % 32) {
    const uint32_t at_once = uint32_t(p.blocks) * kThreads;
    rounds = int((uint32_t(p.numel) + at_once - 1) / at_once);
    first = (int(blockIdx.x) * kWarps + warp) * rounds * 32 + lane;
  }

  // The id of a pair as it is stored.
  __device__ int id_of(int i) const {
    const int64_t at = Config::kStrided ? i / int(p.top_k) * p.ids_stride + i % int(p.top_k) : i;
    return p.topk_ids[at];
  }

  // The expert of an id, or -1.
  __device__ int expert_of(int id) const {
    id = int(uint32_t(id) - uint32_t(p.first_id));
    if (uint32_t(id) >= uint32_t(p.num_ids)) return -1;
    if constexpr (Config::kHasMap) id = p.expert_map[id];
    return uint32_t(id) < uint32_t(p.num_experts) ? id : -1;
  }

  __device__ bool has(int round) const { return round < rounds && pair(round) < int(p.numel); }

  // The ids of this lane's pairs in the rounds from `round` on.
  template <int kCount>
  __device__ __forceinline__ void load(int round, int (&id)[kCount]) const {
#pragma unroll
    for (int j = 0; j < kCount; ++j) id[j] = has(round + j) ? id_of(pair(round + j)) : 0;
  }

  // Their experts, -1 for none.
  template <int kCount>
  __device__ __forceinline__ void find_experts(int round, int (&id)[kCount]) const {
#pragma unroll
    for (int j = 0; j < kCount; ++j) id[j] = has(round + j) ? expert_of(id[j]) : -1;
  }

  __device__ int pair(int round) const { return first + 32 * round; }
};

template <class Config>
struct PairSort : PairStretch<Config> {
  using Base = PairStretch<Config>;
  using Base::p, Base::warp, Base::lane, Base::rounds, Base::kThreads, Base::kWarps;
  static constexpr bool kCounted = Config::kCounted, kClustered = Config::kClustered && kHasClusters;
  static constexpr int kAtOnce = 4;                                 // rounds; all there are, unless kCounted
  static constexpr int kMaxExperts = kThreads == 512 ? 1024 : 512;  // two for each thread, and shared memory
  // A block of several rounds after rounds may have more pairs than 16 bits count.
  using count_t = std::conditional_t<kCounted, uint32_t, uint16_t>;
  using word_t = std::conditional_t<kCounted, uint64_t, uint32_t>;
  static constexpr int kBits = 8 * sizeof(count_t);

  int experts, columns;
  int expert[kAtOnce];    // of the pairs of the latest rounds
  int rank[kAtOnce];      // how many of the expert's pairs the warp has before
  int before[2], all[2];  // of this thread's experts: pairs in earlier blocks, and in all
  uint32_t* masks;        // [kWarps][2 * columns]
  count_t* counts;        // [kWarps][2 * columns], then sums over earlier warps
  word_t* totals;         // kClustered: [blocks][columns]; kCounted: int32 before and all, [2 * columns] each
  int32_t* offset;        // [2 * columns]: where the block's pairs of an expert go
  int32_t* start;         // [2 * columns + 1]: of the experts' runs
  int32_t* tile_start;    // [2 * columns + 1]

  static constexpr int kMaskBytes = Config::kMatch ? 0 : 4;
  static constexpr int kClearedBytes = 2 * kWarps * (kMaskBytes + int(sizeof(count_t))) + (kCounted ? 16 : 0);
  static constexpr int kTotalBytes = kClustered ? 4 * kMaxClusterBlocks : 0;

  static int smem_bytes(int num_experts) {
    return pair_columns(num_experts) * (kClearedBytes + kTotalBytes + 24) + 32;
  }

  __device__ PairSort(const AlignParams& p, uint4* memory)
      : Base(p), experts(int(p.num_experts)), columns(pair_columns(experts)) {
    masks = reinterpret_cast<uint32_t*>(memory);
    counts = reinterpret_cast<count_t*>(masks + (Config::kMatch ? 0 : 2 * kWarps * columns));
    totals = reinterpret_cast<word_t*>(counts + 2 * kWarps * columns);
    const int total_bytes = columns * ((kCounted ? 16 : 0) + kTotalBytes);
    offset = reinterpret_cast<int32_t*>(reinterpret_cast<char*>(totals) + total_bytes);
    start = offset + 2 * columns;
    tile_start = start + 2 * columns + 4;
    for (int i = threadIdx.x; i < columns * kClearedBytes / 16; i += kThreads)
      memory[i] = make_uint4(0, 0, 0, 0);
    if constexpr (kClustered) open_cluster();
    __syncthreads();
  }

  // --- ranks ----------------------------------------------------------------------------------------------------------

  // The lanes with this lane's expert.
  __device__ __forceinline__ uint32_t peers(uint32_t* mask, int e) const {
    if constexpr (Config::kMatch) return __match_any_sync(kWholeWarp, e);
    if (e >= 0) atomicOr(mask, 1u << lane);
    __syncwarp();
    return e >= 0 ? *mask : 0;
  }

  // Ranks what was loaded.
  __device__ void rank_pairs(int round) {
    this->find_experts(round, expert);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (round + j >= rounds) break;
      const int e = expert[j], at = warp * 2 * columns + max(e, 0);
      const uint32_t same = peers(masks + at, e), below = same & ((1u << lane) - 1);
      const int earlier = counts[at];
      rank[j] = earlier + __popc(below);
      __syncwarp();  // all have read before the first of each expert writes
      if (e >= 0 && below == 0) {
        counts[at] = count_t(earlier + __popc(same));
        if constexpr (!Config::kMatch) masks[at] = 0;
      }
      __syncwarp();
    }
  }

  // --- totals ---------------------------------------------------------------------------------------------------------

  // The totals of this thread's experts over the block, in one word.
  __device__ word_t sum_warps() {
    constexpr int kBatch = kWarps < 16 ? kWarps : kCounted ? 8 : 16;
    word_t* column = reinterpret_cast<word_t*>(counts) + threadIdx.x;
    word_t sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; w += kBatch) {
      word_t n[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) n[j] = column[(w + j) * columns];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        column[(w + j) * columns] = sum;
        sum += n[j];
      }
    }
    return sum;
  }

  __device__ void add(word_t total, bool is_before) {
    const int n[2] = {int(count_t(total)), int(total >> kBits)};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      all[j] += n[j];
      if (is_before) before[j] += n[j];
    }
  }

  __device__ static uint32_t* arrived() {
    __shared__ uint64_t barrier;
    return reinterpret_cast<uint32_t*>(&barrier);
  }

  __device__ static uint32_t shared_address(const void* x) { return uint32_t(__cvta_generic_to_shared(x)); }

  // Before the first __syncthreads(): says that this block's memory may be written.
  __device__ void open_cluster() {
    if (threadIdx.x == 0) {
      mbarrier::init(shared_address(arrived()), 1);
      mbarrier::fence_init();
      mbarrier::arrive_expecting(shared_address(arrived()), 4 * columns * uint32_t(p.blocks));
    }
    cluster::arrive_relaxed();
  }

  // A warp sends its 128 bytes of totals to every block: a quarter of it to one, four blocks at a time.
  __device__ void share_totals(word_t total) {
    cluster::wait();
    if constexpr (Config::kFilled) cluster::arrive();  // for each_place
    word_t* own = totals + blockIdx.x * columns + warp * 32;
    if (int(threadIdx.x) < columns) own[lane] = total;
    __syncwarp();
    if (int(threadIdx.x) < columns) {
      const uint32_t source = shared_address(own + lane % 8 * 4), barrier = shared_address(arrived());
      const float4 quad = reinterpret_cast<const float4*>(own)[lane % 8];
      for (int r = lane / 8; r < int(p.blocks); r += 4)
        cluster::store4_async(cluster::map(source, r), quad, cluster::map(barrier, r));
    }
    mbarrier::wait_in_cluster(shared_address(arrived()), 0);
    if (int(threadIdx.x) >= columns) return;
#pragma unroll 4
    for (int r = 0; r < int(p.blocks); ++r) add(totals[r * columns + threadIdx.x], r < int(blockIdx.x));
  }

  // Threads that outnumber the columns share out the blocks.
  __device__ void read_totals() {
    int32_t* sums = reinterpret_cast<int32_t*>(totals);
    const int rows = kThreads / columns, row = int(threadIdx.x) / columns,
              column = int(threadIdx.x) % columns;
    if (row < rows) {
      const word_t* source = static_cast<const word_t*>(p.workspace) + column;
#pragma unroll 8
      for (int b = row; b < int(p.blocks); b += rows) add(source[int64_t(b) * columns], b < int(blockIdx.x));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        atomicAdd(sums + 2 * column + j, before[j]);
        atomicAdd(sums + 2 * (columns + column) + j, all[j]);
      }
    }
    __syncthreads();
    if (int(threadIdx.x) >= columns) return;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      before[j] = sums[2 * threadIdx.x + j];
      all[j] = sums[2 * (columns + threadIdx.x) + j];
    }
  }

  // Counts become sums over earlier warps; then `before` and `all`. After a __syncthreads() behind the ranks.
  __device__ void find_totals() {
    const word_t total = int(threadIdx.x) < columns ? sum_warps() : 0;
    before[0] = before[1] = all[0] = all[1] = 0;
    if constexpr (kClustered) {
      share_totals(total);
    } else if constexpr (kCounted) {
      pdl::wait();
      read_totals();
    } else {
      add(total, false);
    }
  }

  // --- starts ---------------------------------------------------------------------------------------------------------

  // Sum over this thread of the block and those before it.
  __device__ int64_t block_prefix_sum(int64_t x) const {
    __shared__ int64_t sums[32];
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int64_t earlier = __shfl_up_sync(kWholeWarp, x, distance);
      x += lane >= distance ? earlier : 0;
    }
    if (lane == 31) sums[warp] = x;
    __syncthreads();
    int64_t earlier = lane < warp ? sums[lane] : 0;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
      earlier += __shfl_xor_sync(kWholeWarp, earlier, distance);
    return x + earlier;
  }

  // start, offset and tile_start, for all to read. An expert has tiles of up to `tile_rows` entries; with kPadded, of
  // exactly so many.
  template <bool kPadded>
  __device__ void find_starts(int tile_rows) {
    int tiles[2], rows[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      tiles[j] = (all[j] + tile_rows - 1) / tile_rows;
      rows[j] = kPadded ? tiles[j] * tile_rows : all[j];
    }
    const int64_t own = (int64_t(tiles[0] + tiles[1]) << 32) + rows[0] + rows[1];
    const int64_t sum = block_prefix_sum(own) - own;
    int row = int(sum), tile = int(sum >> 32);
    if (int(threadIdx.x) < columns) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int e = 2 * threadIdx.x + j;
        start[e] = row;
        tile_start[e] = tile;
        offset[e] = row + before[j];
        row += rows[j];
        tile += tiles[j];
      }
      if (int(threadIdx.x) == columns - 1) {
        start[2 * columns] = row;
        tile_start[2 * columns] = tile;
      }
    }
    __syncthreads();
  }

  // --- places ---------------------------------------------------------------------------------------------------------

  // Everything up to the starts, after load(0, expert).
  template <bool kPadded>
  __device__ void find_places(int tile_rows) {
    rank_pairs(0);
    if constexpr (kCounted) {
      for (int round = kAtOnce; round < rounds; round += kAtOnce) {
        this->load(round, expert);
        rank_pairs(round);
      }
    }
    __syncthreads();
    find_totals();
    find_starts<kPadded>(tile_rows);
    if constexpr (kClustered && Config::kFilled) cluster::wait();
  }

  // Calls f(pair, its place or -1) for the pairs of this lane.
  template <class F>
  __device__ void each_place(F f) {
    if (!kCounted || rounds <= kAtOnce) {
      place_ranked(0, true, f);
    } else {
      for (int round = 0; round < rounds; round += kAtOnce) {
        this->load(round, expert);
        rank_pairs(round);  // from the sums over earlier warps on
        place_ranked(round, false, f);
      }
    }
  }

  template <class F>
  __device__ __forceinline__ void place_ranked(int round, bool within_warp, F f) {
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int i = this->pair(round + j), e = expert[j];
      if (round + j >= rounds || i >= int(p.numel)) break;
      int at = -1;
      if (e >= 0) at = offset[e] + rank[j] + (within_warp ? int(counts[warp * 2 * columns + e]) : 0);
      f(i, at);
    }
  }

  // Lanes of this thread's group and the grid's groups share out tiles: f(expert, its first tile, how many, lane, lanes).
  template <class F>
  __device__ void each_expert(F f) const {
    constexpr int kLanes = 8;
    const int group = (int(blockIdx.x) * kThreads + int(threadIdx.x)) / kLanes;
    for (int e = group; e < experts; e += int(p.blocks) * kThreads / kLanes)
      f(e, tile_start[e], tile_start[e + 1] - tile_start[e], lane % kLanes, kLanes);
  }
};

// The totals of every block, for kernels that are kCounted.
template <class Config>
__device__ void count_pairs(const AlignParams& p, int32_t* count) {
  constexpr int kAtOnce = 4;
  const PairStretch<Config> stretch(p);
  for (int round = 0; round < stretch.rounds; round += kAtOnce) {
    int expert[kAtOnce];
    stretch.load(round, expert);
    stretch.find_experts(round, expert);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (expert[j] >= 0) atomicAdd(count + expert[j], 1);
  }
  __syncthreads();
  const int size = 2 * pair_columns(int(p.num_experts));
  int32_t* target = static_cast<int32_t*>(p.workspace) + int64_t(blockIdx.x) * size;
  for (int e = threadIdx.x; e < size; e += Config::kThreads) target[e] = count[e];
}

}  // namespace hpcjit::moe
