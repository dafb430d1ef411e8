// The order of work of the fused mixture of experts: one queue of items for all blocks, taken by tickets.
//
//   gate-up items, tile by tile; then for chunk after chunk of the result's columns the items of down of all tiles, and
//   `lag` chunks later the weighted sums of that chunk's tokens
//
// An item waits only for items of lower tickets, whose blocks run: there is no deadlock, however few blocks run at a time.
// The rows between down and sum lie in a ring of `slots` chunks, few enough to stay in L2: [slot][64 features][row][64].
//
// Counters, all zero before and after: tickets, blocks that have ended, items of gate-up; for each chunk warpgroups that have
// written its rows, and items that have summed them; for each tile items of gate-up that have written its hidden rows.
#pragma once
#include "hpcjit/ptx/global.cuh"
#include "moe/grouped_shape.cuh"

namespace hpcjit::moe {

constexpr int kGateUpItem = 0, kDownItem = 1, kSumItem = 2, kNoItem = 3, kEnd = 4;  // GroupedItem::kind
constexpr int kTokensOfSum = 16;

struct QueueParams {
  uint32_t* counters;
  int chunk;                            // items of down of a tile and chunk
  int chunks, lag, slots;               // lag <= chunks
  int sums;                             // items of a chunk
  int gate_up_features, down_features;  // items of a tile

  __device__ uint32_t* ended() const { return counters + 1; }
  __device__ uint32_t* gate_up_done() const { return counters + 2; }
  __device__ uint32_t* rows_written(int chunk_) const { return counters + 3 + chunk_; }
  __device__ uint32_t* summed(int chunk_) const { return counters + 3 + chunks + chunk_; }
  __device__ uint32_t* hidden_written(int tile) const { return counters + 3 + 2 * chunks + tile; }
  __device__ uint32_t writers(int chunk_, int tiles) const {
    return 2 * tiles * min(chunk, down_features - chunk_ * chunk);
  }
  __device__ int words(int tiles) const { return 3 + 2 * chunks + tiles; }
};

// What `ticket` stands for, without what the tile says.
__device__ __forceinline__ GroupedItem item_of(const QueueParams& q, uint32_t ticket, uint32_t tiles) {
  const uint32_t features = q.gate_up_features, gate_up = tiles * features, chunks = q.chunks;
  GroupedItem item = {};
  if (ticket < gate_up) {
    item.kind = kGateUpItem;
    item.tile = ticket / features;
    item.feature_tile = ticket % features;
    return item;
  }
  ticket -= gate_up;
  const uint32_t products = tiles * q.chunk, sums = q.sums, lead = q.lag * products, both = products + sums;
  const uint32_t middle = lead + (chunks - q.lag) * both;
  int chunk;
  if (ticket < lead) {
    item.kind = kDownItem;
    chunk = ticket / products;
    ticket %= products;
  } else if (ticket < middle) {
    ticket -= lead;
    chunk = ticket / both;
    ticket %= both;
    item.kind = ticket < products ? kDownItem : kSumItem;
    if (item.kind == kSumItem) ticket -= products;
    if (item.kind == kDownItem) chunk += q.lag;
  } else {
    ticket -= middle;
    item.kind = ticket < q.lag * sums ? kSumItem : kEnd;
    chunk = chunks - q.lag + ticket / sums;
    ticket %= sums;
  }
  item.chunk = chunk;
  if (item.kind == kSumItem) item.first = ticket * kTokensOfSum;
  if (item.kind == kDownItem) {
    item.tile = ticket / unsigned(q.chunk);
    item.feature_tile = chunk * q.chunk + ticket % unsigned(q.chunk);
    if (item.feature_tile >= q.down_features) item.kind = kNoItem;
  }
  return item;
}

// One thread's tickets: it holds one item whose tile is on its way, and the ticket after that.
class TicketQueue {
 public:
  __device__ TicketQueue(const QueueParams& q, const uint4* tiles, int num_tiles)
      : q_(q), tiles_(tiles), num_tiles_(num_tiles) {}

  __device__ void start() {
    ticket_ = global::take_ticket(q_.counters);
    find();
  }

  __device__ GroupedItem next() {
    GroupedItem item;
    do {
      item = item_;
      if (item.kind == kGateUpItem || item.kind == kDownItem) {
        item.expert = int(tile_.x);
        item.first = int(tile_.y);
        item.rows = int(tile_.z);
      }
      if (item.kind != kEnd) find();
    } while (item.kind == kNoItem);
    return item;
  }

 private:
  __device__ void find() {
    item_ = item_of(q_, ticket_, num_tiles_);
    if (item_.kind == kGateUpItem || item_.kind == kDownItem) tile_ = tiles_[item_.tile];
    if (item_.kind != kEnd) ticket_ = global::take_ticket(q_.counters);
  }

  const QueueParams& q_;
  const uint4* tiles_;
  int num_tiles_;
  uint32_t ticket_ = 0;
  GroupedItem item_ = {};
  uint4 tile_ = {};
};

}  // namespace hpcjit::moe
