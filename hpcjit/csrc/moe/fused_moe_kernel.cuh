// The fused mixture of experts behind its plan, in one launch: blocks take items of gate-up, of down and of the weighted sum
// from one queue (grouped_queue.cuh).
//
// The warpgroup that copies takes the tickets, passes items on through a ring of kItems in shared memory, and waits for what
// an item reads: for hidden rows of a tile, and for all rows of a chunk. It is ahead of the others by what fits the rings.
// Before it may wait it announces all stages that are under way, since the others' work may be what it waits for.
//
// Rows of down leave by a bulk copy of each warpgroup, started by its first thread, which counts them as written when it
// starts the next item; nothing that its block waits for until then needs them. A slot of rows is overwritten when the sums
// of the chunk before have read it. Hidden rows are written by threads: a barrier, then a release by one of them.
#pragma once
#include "hpcjit/ptx/pdl.cuh"
#include "hpcjit/ptx/registers.cuh"
#include "moe/grouped.cuh"
#include "moe/grouped_queue.cuh"
#include "moe/grouped_sum.cuh"

namespace hpcjit::moe {

struct FusedKernelParams {
  GroupedParams gate_up, down;
  SumParams sum;
  QueueParams queue;
  // For the guess which weights a block will need first, and columns of them that are fetched on it.
  const int32_t* topk_ids;
  int64_t ids_stride;
  int num_pairs, expert_offset, guessed_columns;
};

// Items that a block's warps pass on; how many have been taken says where a thread is.
template <class Config>
struct ItemRing {
  static constexpr int kItems = GroupedShape<Config>::kItems;
  GroupedItem* items;
  uint32_t barriers, taken = 0;

  __device__ explicit ItemRing(uint8_t* smem)
      : items(reinterpret_cast<GroupedItem*>(smem + GroupedShape<Config>::kItemsAt)),
        barriers(copy::shared_address(smem + GroupedShape<Config>::kItemBarriers)) {}
  __device__ GroupedItem& item() const { return items[taken % kItems]; }
  __device__ uint32_t full() const { return barriers + taken % kItems * 16; }
  __device__ uint32_t empty() const { return full() + 8; }
  __device__ uint32_t parity() const { return taken / kItems % 2; }
};

// Waits until a word has reached `count`.
__device__ __forceinline__ void wait_for(const uint32_t* word, uint32_t count) {
  while (global::load_acquire(word) < count) {
  }
}

template <class Config>
class FusedLoader {
  using Shape = GroupedShape<Config>;
  static constexpr int kCopyingWarps = 4;  // number of the barrier

 public:
  __device__ FusedLoader(const FusedKernelParams& p, uint8_t* smem)
      : p_(p),
        num_tiles_(*p.down.num_tiles),
        first_(threadIdx.x == Shape::kComputing),
        items_(smem),
        loader_(grouped_ring<Shape>(smem)),
        queue_(p.queue, p.down.tiles, num_tiles_) {}

  __device__ void run(const CUtensorMap& w13, const CUtensorMap& w2) {
    if (first_) queue_.start();
    for (;;) {
      const GroupedItem item = pass_on();
      if (item.kind == kEnd) break;
      if (item.kind == kGateUpItem) loader_.template load<true>(p_.gate_up, w13, item, [] {});
      if (item.kind == kDownItem)
        loader_.template load<false>(p_.down, w2, item, [&] { wait_for_hidden(item.tile); });
    }
    loader_.flush();
  }

 private:
  __device__ __forceinline__ GroupedItem pass_on() {
    if (!by_all(mbarrier::done(items_.empty(), items_.parity() ^ 1))) {
      loader_.flush();
      mbarrier::wait(items_.empty(), items_.parity() ^ 1);
    }
    if (first_) items_.item() = next();
    named_barrier::sync<128>(kCopyingWarps);
    const GroupedItem item = items_.item();
    if (first_) mbarrier::arrive(items_.full());
    ++items_.taken;
    return item;
  }

  // By the first thread.
  __device__ GroupedItem next() {
    GroupedItem item = queue_.next();
    if (item.kind == kSumItem)
      item.ready =
          global::load_acquire(p_.queue.rows_written(item.chunk)) >= p_.queue.writers(item.chunk, num_tiles_);
    return item;
  }

  __device__ __forceinline__ void wait_for_hidden(int tile) {
    if (all_hidden_) return;
    const uint32_t features = p_.queue.gate_up_features;
    const uint32_t written = global::load_acquire(p_.queue.gate_up_done());
    const uint32_t* word = p_.queue.hidden_written(tile);
    if (!by_all(global::load_acquire(word) >= features)) {
      loader_.flush();
      wait_for(word, features);
    }
    all_hidden_ = by_all(written >= features * num_tiles_);
  }

  // Of the threads of a warp, which stay together.
  __device__ static bool by_all(bool x) { return __ballot_sync(0xffffffffu, x) == 0xffffffffu; }

  const FusedKernelParams& p_;
  int num_tiles_;
  bool first_, all_hidden_ = false;
  ItemRing<Config> items_;
  GroupedLoader<Config> loader_;
  TicketQueue queue_;  // of the first thread
};

template <class Config>
class FusedConsumer {
  using Shape = GroupedShape<Config>;
  using row_t = typename Config::partial_t;

 public:
  __device__ FusedConsumer(const FusedKernelParams& p, uint8_t* smem)
      : p_(p), smem_(smem), items_(smem), ring_(grouped_ring<Shape>(smem)) {
    if (is_first()) state() = {-1, -1};
  }

  __device__ void run() {
    for (;;) {
      mbarrier::wait(items_.full(), items_.parity());
      const GroupedItem& item = items_.item();
      if (item.kind == kEnd) break;
      if (item.kind == kGateUpItem) gate_up(item);
      if (item.kind == kDownItem) down(item);
      if (item.kind == kSumItem) sum(item);
      __syncwarp();
      if (threadIdx.x % 32 == 0) mbarrier::arrive(items_.empty());
      ++items_.taken;
    }
    count_rows();
    end();
  }

 private:
  template <bool kGateUp>
  __device__ static GroupedPlace<kGateUp> place() {
    return {int(threadIdx.x) / 128, int(threadIdx.x) / 32 % 4, int(threadIdx.x) % 32};
  }

  __device__ const float* scales() const { return reinterpret_cast<const float*>(smem_ + Shape::kScales); }

  __device__ __forceinline__ void gate_up(const GroupedItem& item) {
    const auto place = this->place<true>();
    GroupedSums<Config, true> sums(scales(), place.group, place.lane);
    sums.accumulate(ring_, p_.gate_up.depth, item.rows);
    scale_features<Config>(p_.gate_up, item, place, sums.value);
#pragma unroll
    for (int pass = 0; pass < Shape::kPasses; ++pass)
      if (pass * Shape::kColumns < item.rows)
        HiddenStore<Config, Shape::kColumns / 2>(p_.gate_up, item, place, smem_ + Shape::kStagedAt,
                                                 pass * Shape::kColumns)
            .run(sums.value[pass]);
    named_barrier::sync<256>(kBothGroups);
    if (threadIdx.x == 0) {
      global::add_release(p_.queue.hidden_written(item.tile), 1);
      global::add_release(p_.queue.gate_up_done(), 1);
    }
  }

  __device__ __forceinline__ void down(const GroupedItem& item) {
    const auto place = this->place<false>();
    GroupedSums<Config, false> sums(scales(), place.group, place.lane);
    sums.accumulate(ring_, p_.down.depth, item.rows);
    scale_features<Config>(p_.down, item, place, sums.value);
    count_rows();
    if (is_first()) wait_for_slot(item.chunk);
#pragma unroll
    for (int pass = 0; pass < Shape::kPasses; ++pass)
      if (pass * Shape::kColumns < item.rows) store(item, place, pass * Shape::kColumns, sums.value[pass]);
    if (is_first()) state().uncounted = item.chunk;
  }

  template <int n>
  __device__ __forceinline__ void store(const GroupedItem& item, const GroupedPlace<false>& place,
                                        int first_token, const float (&value)[n]) {
    uint8_t* staged = smem_ + Shape::kStagedAt + place.group * Shape::kPartialBytes;
    if (is_first()) bulk_store::wait_read();
    named_barrier::sync<128>(1 + place.group);
    stage_rows<row_t>(staged, place, item.first + first_token, value);
    copy::fence_async();
    named_barrier::sync<128>(1 + place.group);
    if (!is_first() || item.feature_tile * kWeightRows + place.group * 64 >= p_.down.features) return;
    const QueueParams& q = p_.queue;
    const int slot = item.chunk % unsigned(q.slots),
              feature = (slot * q.chunk + item.feature_tile % unsigned(q.chunk)) * 2;
    row_t* out = static_cast<row_t*>(p_.sum.rows) +
                 (int64_t(feature + place.group) * p_.sum.num_rows + item.first + first_token) * 64;
    bulk_store::start(out, copy::shared_address(staged),
                      min(item.rows - first_token, n * 2) * 64 * int(sizeof(row_t)));
  }

  __device__ __forceinline__ void sum(const GroupedItem& item) {
    const QueueParams& q = p_.queue;
    count_rows();
    if (!item.ready) wait_for(q.rows_written(item.chunk), q.writers(item.chunk, *p_.down.num_tiles));
    TokenSum<Config>(p_.sum, q, item).run();
    if (q.slots >= q.chunks) return;
    named_barrier::sync<256>(kBothGroups);
    if (threadIdx.x == 0) global::add_release(q.summed(item.chunk), 1);
  }

  __device__ bool is_first() const { return threadIdx.x % 128 == 0; }

  // What the first thread of a warpgroup keeps in mind, in shared memory, since registers are few.
  struct State {
    int uncounted;  // chunk of the rows that it wrote last, or -1
    int summed;     // up to this chunk all sums are known to be made
  };
  __device__ State& state() const {
    return reinterpret_cast<State*>(smem_ + Shape::kStateAt)[threadIdx.x / 128];
  }

  // Rows that this warpgroup wrote last are there.
  __device__ __forceinline__ void count_rows() {
    if (!is_first() || state().uncounted < 0) return;
    bulk_store::wait();
    global::add_release(p_.queue.rows_written(state().uncounted), 1);
    state().uncounted = -1;
  }

  // By the first thread: the sums of the chunk that lay there have been made.
  __device__ __forceinline__ void wait_for_slot(int chunk) {
    const int before = chunk - p_.queue.slots;
    if (before <= state().summed) return;
    wait_for(p_.queue.summed(before), p_.queue.sums);
    global::fence_async();
    state().summed = before;
  }

  // The last block leaves all counters at zero.
  __device__ __forceinline__ void end() {
    const QueueParams& q = p_.queue;
    bool* last = reinterpret_cast<bool*>(smem_ + Shape::kStagedAt);
    named_barrier::sync<256>(kBothGroups);
    if (threadIdx.x == 0) *last = global::arrive_last(q.ended(), gridDim.x);
    named_barrier::sync<256>(kBothGroups);
    if (!*last) return;
    const int words = q.words(*p_.down.num_tiles);
    for (int i = threadIdx.x; i < words; i += 256) q.counters[i] = 0;
  }

  const FusedKernelParams& p_;
  uint8_t* smem_;
  ItemRing<Config> items_;
  GroupedRing<Shape::kStages> ring_;
};

// Weights of gate-up towards L2 while the plan is being made: blocks share out the experts in the order of the pairs, not
// what each will need, but what all will. Ids are read around L1, where a line would stay as it was then; if they are not
// there yet, something else is fetched, of an expert that exists. One thread of each warp that copies calls it.
template <class Config>
__device__ __forceinline__ void guess_weights(const FusedKernelParams& p, const CUtensorMap& w13, int warp) {
  constexpr int kStageK = GroupedShape<Config>::kStageK;
  const int features = p.queue.gate_up_features;
  const int pair = blockIdx.x / unsigned(features), feature_tile = blockIdx.x % unsigned(features);
  if (p.guessed_columns == 0 || pair >= p.num_pairs) return;
  const int token = pair / p.gate_up.top_k, k = pair % p.gate_up.top_k;
  const uint32_t expert =
      uint32_t(__ldcg(p.topk_ids + int64_t(token) * p.ids_stride + k)) - uint32_t(p.expert_offset);
  if (expert >= uint32_t(p.gate_up.num_experts)) return;
  const int end = min(p.gate_up.depth, p.guessed_columns);
#pragma unroll 1
  for (int column = warp * kStageK; column < end; column += 4 * kStageK)
    prefetch_weights<true>(w13, column, int(expert), feature_tile, p.gate_up.features);
}

template <class Config>
__global__ void __launch_bounds__(GroupedShape<Config>::kThreads, Config::kBlocksPerSm)
    fused_moe_kernel(const __grid_constant__ FusedKernelParams p, const __grid_constant__ CUtensorMap w13,
                     const __grid_constant__ CUtensorMap w2) {
  using Shape = GroupedShape<Config>;
  extern __shared__ uint8_t raw[];
  uint8_t* smem = grouped_memory(raw);
  if (threadIdx.x == 0) {
    init_ring<Shape>(grouped_ring<Shape>(smem));
    const ItemRing<Config> items(smem);
    for (int i = 0; i < Shape::kItems; ++i) {
      mbarrier::init(items.barriers + 16 * i, 1);
      mbarrier::init(items.barriers + 16 * i + 8, 8);
    }
    mbarrier::fence_init();
  }
  if (threadIdx.x == Shape::kComputing) {
    tma::prefetch_map(&w13);
    tma::prefetch_map(&w2);
  }
  __syncthreads();
  if (threadIdx.x >= Shape::kComputing && threadIdx.x % 32 == 0)
    guess_weights<Config>(p, w13, (int(threadIdx.x) - Shape::kComputing) / 32);
  __syncwarp();
  pdl::wait();
  pdl::trigger();

  if (threadIdx.x >= Shape::kComputing) {
    if constexpr (Shape::kRaises) release_registers<Shape::kCopying>();
    FusedLoader<Config>(p, smem).run(w13, w2);
  } else {
    if constexpr (Shape::kRaises) claim_registers<Shape::kRaised>();
    FusedConsumer<Config>(p, smem).run();
  }
}

}  // namespace hpcjit::moe
