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
                  (2 * expert + box) * b_.p.intermediate_size + feature, k * Shape::kChunks, ring_.full());
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
    for (uint32_t item; (item = items_.next(lane_)) < end;) {
      if (item < gate_up)
        copy_gate_up(item);
      else
        copy_down();
    }
    // All counters this block waits for have been seen, and its last ticket has been drawn.
    if (lane_ == 0 && global::arrive_last(b_.p.counters + 1, gridDim.x)) {
      b_.p.counters[0] = 0;
      for (uint32_t i = 0; i < b_.num_tiles; ++i) b_.p.counters[2 + i] = 0;
    }
  }

 private:
  __device__ uint32_t claim(uint32_t bytes) {
    mbarrier::wait(ring_.empty(), ring_.parity ^ 1);
    if (lane_ == 0) mbarrier::arrive_expecting(ring_.full(), bytes);
    __syncwarp();
    return b_.base + Shape::kRing + ring_.stage * Shape::kStageBytes + Shape::kWeightBytes;
  }

  __device__ void copy_gate_up(uint32_t item) {
    const MonoTile tile = b_.tile(item / b_.features());
    const uint8_t* row = nullptr;
    if (lane_ < tile.rows)
      row = static_cast<const uint8_t*>(b_.p.x) +
            b_.token_of(tile.first + lane_) * b_.p.x_stride * Shape::kBytes;
    const int chunks = b_.gate_up_chunks();
    for (int k = 0; k < chunks; k += Shape::kChunks) {
      const uint32_t bytes = min(chunks - k, Shape::kChunks) * Shape::kChunk;
      const uint32_t target = claim(bytes * tile.rows) + lane_ * Shape::kRowPitch;
      if (lane_ < tile.rows) tma::load_bytes(target, row + k * Shape::kChunk, bytes, ring_.full());
      ring_.advance();
    }
  }

  __device__ void copy_down() {
    const uint32_t slots = b_.down_slots(), parts = b_.down_parts();
    for (uint32_t slot = 0; slot < slots; slot += Shape::kSlots) {
      const uint32_t count = min(slots - slot, uint32_t(Shape::kSlots));
      uint32_t rows = 0, scales = 0;
      for (uint32_t i = 0; i < count; ++i) {
        const uint32_t bytes = row_bytes((slot + i) % parts), n = b_.tile((slot + i) / parts).rows;
        rows += bytes * n;
        scales += scale_bytes(bytes) * n;
      }
      const uint32_t target = claim(rows + scales);
      for (uint32_t i = 0; i < count; ++i)
        copy_slot(target + i * Shape::kSlotRows, (slot + i) / parts, (slot + i) % parts);
      ring_.advance();
    }
  }

  __device__ uint32_t row_bytes(uint32_t part) const {
    return min(b_.p.intermediate_size - int(part) * Shape::kDownK, Shape::kDownK) * Shape::kBytes;
  }
  // Of the scales that belong to so many bytes of a row.
  static __device__ uint32_t scale_bytes(uint32_t bytes) {
    return Shape::kScaled ? bytes / Shape::kFeatures * 4 : 0;
  }

  __device__ void copy_slot(uint32_t target, uint32_t index, uint32_t part) {
    const MonoTile tile = b_.tile(index);
    const uint32_t tokens = (tile.rows + 7) / 8;  // warps that write rows of a tile, for each of its features
    if (index >= ready_) {
      while (global::load_acquire(b_.p.counters + 2 + index) < tokens * b_.features()) {
      }
      global::fence_async();
      ready_ = index + 1;
    }
    if (lane_ >= tile.rows) return;
    const int64_t row = tile.first + lane_;
    const uint32_t bytes = row_bytes(part);
    const uint8_t* hidden = static_cast<const uint8_t*>(b_.p.hidden) +
                            (row * b_.p.intermediate_size + int(part) * Shape::kDownK) * Shape::kBytes;
    tma::load_bytes(target + lane_ * Shape::kHiddenPitch, hidden, bytes, ring_.full());
    if constexpr (Shape::kScaled)
      tma::load_bytes(target + Shape::kRows * Shape::kHiddenPitch + lane_ * Shape::kScalePitch,
                      b_.p.hidden_scale + row * b_.features() + part * (Shape::kDownK / Shape::kFeatures),
                      scale_bytes(bytes), ring_.full());
  }

  const MonoBlock<Config>& b_;
  int lane_;
  uint32_t ready_ = 0;  // tiles whose hidden rows are known to be there
  MonoItems<Config> items_;
  MonoRing<Shape::kStages> ring_;
};

}  // namespace hpcjit::moe
