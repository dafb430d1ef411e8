// The two warps that copy; see mono.cuh. Neither waits for the warps that compute but for room in the ring.
#pragma once
#include "hpcjit/ptx/global.cuh"
#include "hpcjit/ptx/tma.cuh"
#include "moe/mono_shape.cuh"

namespace hpcjit::moe {

// Draws the block's tickets and copies weights. One thread does.
template <class Config>
class MonoWeights {
  using Shape = MonoShape<Config>;

 public:
  __device__ MonoWeights(const MonoBlock<Config>& block, const CUtensorMap& w13, const CUtensorMap& w2)
      : b_(block),
        w13_(w13),
        w2_(w2),
        ring_{block.base + Shape::kBarriersAt},
        items_{block.base + Shape::kItemBarriersAt},
        tickets_(block.template at<uint32_t>(Shape::kTicketsAt)) {}

  // `ticket`: the first one.
  __device__ void run(uint32_t ticket) {
    const uint32_t items = b_.items(), gate_up = b_.gate_up_items();
    while (true) {
      hand_on(ticket);
      if (ticket >= items) return;  // and draw no other: the last block sets the counter back
      const uint32_t next = global::take_ticket(b_.p.counters);
      if (ticket < gate_up)
        copy_gate_up(ticket);
      else
        copy_down(ticket - gate_up);
      ticket = next;
    }
  }

 private:
  __device__ void hand_on(uint32_t ticket) {
    mbarrier::wait(items_.empty(), items_.parity ^ 1);
    tickets_[items_.stage] = ticket;
    mbarrier::arrive(items_.full());
    items_.advance();
  }

  // The address of a free stage, whose barrier expects `bytes`.
  __device__ uint32_t claim(uint32_t bytes) {
    mbarrier::wait(ring_.empty(), ring_.parity ^ 1);
    mbarrier::arrive_expecting(ring_.full(), bytes);
    return b_.base + Shape::kRing + ring_.stage * Shape::kStageBytes;
  }

  __device__ void copy_gate_up(uint32_t item) {
    const int expert = b_.tile(item / b_.features()).expert;
    const int feature = int(item % b_.features()) * Shape::kFeatures;
    for (int k = 0; k < b_.gate_up_stages(); ++k) {
      const uint32_t stage = claim(2 * Shape::kGateUpBox);
#pragma unroll
      for (int box = 0; box < 2; ++box)
        tma::load(stage + box * Shape::kGateUpBox, &w13_, 0,
                  (2 * expert + box) * b_.p.intermediate_size + feature,
                  b_.gate_up_stage(feature, k) * Shape::kChunks, ring_.full());
      ring_.advance();
    }
  }

  __device__ void copy_down(uint32_t item) {
    const uint32_t slots = b_.down_slots(), parts = b_.down_parts();
    for (uint32_t slot = 0; slot < slots; slot += Shape::kSlots) {
      const int count = int(min(slots - slot, uint32_t(Shape::kSlots)));
      const uint32_t stage = claim(count * Shape::kDownBox);
      for (int i = 0; i < count; ++i) {
        const int expert = b_.tile((slot + i) / parts).expert;
        tma::load(stage + i * Shape::kDownBox, &w2_, 0,
                  expert * b_.p.hidden_size + int(item) * Shape::kColumns,
                  int((slot + i) % parts) * Shape::kDownChunks, ring_.full());
      }
      ring_.advance();
    }
  }

  const MonoBlock<Config>& b_;
  const CUtensorMap &w13_, &w2_;
  MonoRing<Shape::kStages> ring_;
  MonoRing<Shape::kItems> items_;
  uint32_t* tickets_;
};

// Copies rows: of x, gathered, and of the hidden activation, once all of a tile's have been written.
template <class Config>
class MonoRows {
  using Shape = MonoShape<Config>;
  using weight_t = typename Config::weight_t;

 public:
  __device__ explicit MonoRows(const MonoBlock<Config>& block)
      : b_(block), lane_(threadIdx.x % 32), items_(block), ring_{block.base + Shape::kBarriersAt} {}

  __device__ void run() {
    const uint32_t gate_up = b_.gate_up_items(), end = b_.items();
    uint32_t item;
    while ((item = items_.next(lane_)) < gate_up) copy_gate_up(item);
    copy::fence_async();  // what this warp wrote there itself is overwritten by bulk copies from now on
    for (; item < end; item = items_.next(lane_)) copy_down();
    // All counters this block waits for have been seen, and its last ticket has been drawn.
    if (lane_ == 0 && global::arrive_last(b_.p.counters + 1, gridDim.x)) {
      b_.p.counters[0] = 0;
      for (uint32_t i = 0; i < b_.num_tiles; ++i) b_.p.counters[2 + i] = 0;
    }
  }

 private:
  // The address of rows in a free stage.
  __device__ uint32_t claim() {
    mbarrier::wait(ring_.empty(), ring_.parity ^ 1);
    return b_.base + Shape::kRing + ring_.stage * Shape::kStageBytes + Shape::kWeightBytes;
  }

  __device__ void copy_gate_up(uint32_t item) {
    const TokenTile tile = b_.tile(item / b_.features());
    const int feature = int(item % b_.features()) * Shape::kFeatures;
    for (int k = 0; k < b_.gate_up_stages(); ++k) {
      const int chunk = b_.gate_up_stage(feature, k) * Shape::kChunks;
      const int bytes = min(b_.gate_up_chunks() - chunk, Shape::kChunks) * Shape::kChunk;
      copy_rows(tile, chunk * Shape::kChunk, bytes, claim());
      mbarrier::arrive_after_copies(ring_.full());
      ring_.advance();
    }
  }

  __device__ __forceinline__ void copy_rows(const TokenTile& tile, int first, int bytes, uint32_t target) {
    constexpr int kPieces = Shape::kChunks * Shape::kChunk / 512;  // of a row, by all lanes
    const uint8_t* x = static_cast<const uint8_t*>(b_.p.x) + first + lane_ * 16;
#pragma unroll 4
    for (int r = 0; r < tile.rows; ++r) {
      const uint8_t* row = x + b_.token_of(tile.first + r) * b_.p.x_stride * Shape::kBytes;
#pragma unroll
      for (int i = 0; i < kPieces; ++i)
        if (lane_ * 16 + i * 512 < bytes)
          copy::async_16(target + r * Shape::kRowPitch + lane_ * 16 + i * 512, row + i * 512, true);
    }
  }

  __device__ void copy_down() {
    const uint32_t slots = b_.down_slots(), parts = b_.down_parts();
    for (uint32_t slot = 0; slot < slots; slot += Shape::kSlots) {
      const uint32_t target = claim();
      // Lane i copies the rows of slot i: they follow each other in memory.
      const uint32_t own = slot + lane_;
      const bool live = lane_ < Shape::kSlots && own < slots;
      const TokenTile tile = b_.tile(live ? own / parts : 0);
      const uint32_t bytes = live ? tile.rows * Shape::kHiddenRow : 0;
      await(min(slot + Shape::kSlots, slots) - 1, parts);
      if (bytes > 0) {
        mbarrier::expect(ring_.full(), bytes);
        tma::load_bytes(target + lane_ * Shape::kSlotRows, b_.hidden_row(own % parts, tile.first), bytes,
                        ring_.full());
      }
      mbarrier::arrive(ring_.full());
      ring_.advance();
    }
  }

  // Until the hidden rows of the tiles up to that of `slot` are there. Lanes look at as many tiles.
  __device__ void await(uint32_t slot, uint32_t parts) {
    const uint32_t index = slot / parts;
    while (index >= ready_) {
      const uint32_t own = ready_ + lane_;
      const bool done = own < b_.num_tiles && global::load_acquire(b_.p.counters + 2 + own) == b_.features();
      const uint32_t missing = __ballot_sync(0xffffffffu, !done);
      ready_ += missing == 0 ? 32 : __ffs(missing) - 1;
      __syncwarp();  // what one lane has acquired, others copy
      global::fence_async();
    }
  }

  const MonoBlock<Config>& b_;
  int lane_;
  uint32_t ready_ = 0;  // tiles whose hidden rows are known to be there
  MonoItems<Config> items_;
  MonoRing<Shape::kStages> ring_;
};

}  // namespace hpcjit::moe
