// The warps of the grouped product that copy; see grouped.cuh.
//
// Weights, and rows that lie behind each other, come by TMA, asked for by one thread, which also says whose item a stage is.
// Gathered rows (kGateUp) come by 16-byte copies, eight to a row, each placed where TMA's 128-byte swizzle would put it;
// scales by 4-byte ones. These copies arrive at the stage's barrier by themselves, so nobody waits for them here, and those who
// multiply what they have written fence it for the tensor cores. Rows past the end of a tile: what the ring holds there, NaN
// too, meets only columns that nobody writes.
#pragma once
#include "hpcjit/ptx/global.cuh"
#include "hpcjit/ptx/mbarrier.cuh"
#include "hpcjit/ptx/pdl.cuh"
#include "moe/grouped_map.cuh"
#include "moe/grouped_plan.cuh"

namespace hpcjit::moe {

// What comes by TMA, and whose item a stage is. A warp walks, its first lane copies.
template <class Config, bool kGateUp>
class BoxLoader {
  using Shape = GroupedShape<Config, kGateUp>;

 public:
  using Ring = GroupedRing<Config, kGateUp>;
  using Plan = GroupedPlan<Config, kGateUp>;

  __device__ BoxLoader(const GroupedParams& p, const Plan& plan, const CUtensorMap& weights,
                       const CUtensorMap& rows, const Ring& ring)
      : p_(p), plan_(plan), weights_(weights), rows_(rows), ring_(ring) {
    stages_ = (p.depth + Shape::kStageK - 1) / Shape::kStageK;
  }

  // From the start of the launch. Where the plan was there when the launch before this one, which writes the rows, let this
  // one start, the first weights are asked for while that one ends.
  __device__ __forceinline__ void run() {
    GroupedItem item;
    if (p_.planned) {
      Ring ring = ring_;
      bool more = true;
      for (auto walk = plan_.walk(); __shfl_sync(~0u, more, 0) && walk.next(item);)
        if (leads()) more = begin(item, ring);
    }
    pdl::wait();
    if constexpr (!kGateUp) global::fence_async();  // rows may have been written by threads
    for (auto walk = plan_.walk(); walk.next(item);)
      if (leads()) load(item);
    if (leads()) {
      mbarrier::wait(ring_.empty(), ring_.parity ^ 1);
      ring_.item()->feature_tile = kNoItem;
      mbarrier::arrive(ring_.full());
    }
  }

 private:
  __device__ static bool leads() { return threadIdx.x % 32 == 0; }

  // Asks for the weights of one of the first items, as far as the ring has room. Whether there is more.
  __device__ __forceinline__ bool begin(const GroupedItem& item, Ring& ring) {
#pragma unroll 1
    for (int k = 0; k < stages_; ++k, ++asked_) {
      if (asked_ == Shape::kStages) return false;
      ask_for_weights(item, k, ring);
      ring.advance();
    }
    return asked_ < Shape::kStages;
  }

  __device__ __forceinline__ void load(const GroupedItem& item) {
#pragma unroll 1
    for (int k = 0; k < stages_; ++k) {
      if (asked_ > 0) {
        --asked_;
      } else {
        mbarrier::wait(ring_.empty(), ring_.parity ^ 1);
        ask_for_weights(item, k, ring_);
      }
      if constexpr (!kGateUp) ask_for_rows(item, k);
      ring_.advance();
    }
  }

  // Says too how many bytes the stage will get, rows included.
  __device__ __forceinline__ void ask_for_weights(const GroupedItem& item, int k, const Ring& ring) const {
    const int boxes = kGateUp ? 0 : (item.rows + Shape::kRowBox - 1) / Shape::kRowBox;
    *ring.item() = item;
    mbarrier::arrive_expecting(ring.full(), kWeightBytes + boxes * Shape::kRowBox * kRowBytes);
    load_weights<kGateUp>(ring.stage_data(), weights_, k * Shape::kStageK, item.expert, item.feature_tile,
                          p_.features, ring.full());
  }

  __device__ __forceinline__ void ask_for_rows(const GroupedItem& item, int k) const {
    const uint32_t target = ring_.stage_data() + kWeightBytes;
    for (int r = 0; r < item.rows; r += Shape::kRowBox)
      tma::load(target + r * kRowBytes, &rows_, k * Shape::kStageK, item.first + r, ring_.full());
  }

  const GroupedParams& p_;
  const Plan& plan_;
  const CUtensorMap &weights_, &rows_;
  Ring ring_;
  int stages_, asked_ = 0;  // stages from the ring's place on whose weights have been asked for
};

// Scales, by kThreads threads.
template <class Config, bool kGateUp, int kThreads>
class ScaleLoader {
  using Shape = GroupedShape<Config, kGateUp>;
  static constexpr int kRowsOfThread = (Shape::kTokens + kThreads - 1) / kThreads;

 public:
  __device__ ScaleLoader(const GroupedParams& p, int thread) : p_(p), thread_(thread) {}

  // Rows of `row_scale` are looked up once for an item, where they are gathered.
  template <class F>
  __device__ __forceinline__ void begin(const GroupedItem& item, F source_row) {
#pragma unroll
    for (int j = 0; j < kRowsOfThread; ++j) {
      const int r = thread_ + kThreads * j;
      if (Shape::kScaled && r < item.rows) row_[j] = source_row(r);
    }
  }

  __device__ __forceinline__ void copy(const GroupedRing<Config, kGateUp>& ring, const GroupedItem& item,
                                       int k, bool is_last) const {
    if constexpr (Shape::kScaled) {
      if (Shape::kByGroup || is_last) copy_of_rows(ring.side() + Shape::kItemFloats * 4, item, k);
      if (Config::kQuant == kQuantBlock || is_last)
        copy_of_weights(ring.side() + (Shape::kSideFloats - Shape::kWeightScales) * 4, item, k);
    }
  }

 private:
  // Of groups past the end they are zero.
  __device__ __forceinline__ void copy_of_rows(uint32_t target, const GroupedItem& item, int k) const {
#pragma unroll(kGateUp ? kRowsOfThread : 1)
    for (int j = 0; j < kRowsOfThread; ++j) {
      const int r = thread_ + kThreads * j;
      if (r >= item.rows) continue;
      const int row = kGateUp ? row_[j] : item.first + r;
      const float* source = p_.row_scale + row * p_.scale_row_stride;
#pragma unroll
      for (int part = 0; part < Shape::kParts; ++part) {
        const int group = k * Shape::kParts + part;
        const bool live = group < p_.scale_groups;
        copy::async_4(target + (part * Shape::kTokens + r) * 4,
                      source + (live ? group : 0) * p_.scale_group_stride, live);
      }
    }
  }

  __device__ __forceinline__ void copy_of_weights(uint32_t target, const GroupedItem& item, int k) const {
    if constexpr (Config::kQuant == kQuantTensor) {
      if (thread_ == 0) copy::async_4(target, p_.weight_scale + item.expert, true);
    } else if constexpr (Config::kQuant == kQuantBlock) {
      if (thread_ < 2) copy::async_4(target + thread_ * 4, block_scale(item, thread_) + k, true);
    } else {
#pragma unroll 1
      for (int i = thread_; i < kWeightRows; i += kThreads)
        copy::async_4(target + i * 4, feature_scale(item, i), true);
    }
  }

  // Of row i of an item's weights; past the end, of some other.
  __device__ const float* feature_scale(const GroupedItem& item, int i) const {
    const int feature = item.feature_tile * (kGateUp ? kHidden : kWeightRows) + (kGateUp ? i % kHidden : i);
    const int64_t matrix = kGateUp ? item.expert * 2 + i / kHidden : item.expert;
    return p_.weight_scale + matrix * p_.features + min(feature, p_.features - 1);
  }

  // The scales along K of the block of weights; kGateUp: of gate (0) or up (1).
  __device__ const float* block_scale(const GroupedItem& item, int half) const {
    const int blocks = (p_.features + kScaleBlock - 1) / kScaleBlock;
    const int along = (p_.depth + kScaleBlock - 1) / kScaleBlock;
    if constexpr (kGateUp)
      return p_.weight_scale + (int64_t(item.expert * 2 + half) * blocks + item.feature_tile / 2) * along;
    return p_.weight_scale + (int64_t(item.expert) * blocks + item.feature_tile) * along;
  }

  const GroupedParams& p_;
  int thread_;
  int row_[kGateUp ? kRowsOfThread : 1];
};

// Gathered rows (kGateUp) and scales, by kRowWarps warps. `thread` counts their threads.
template <class Config, bool kGateUp>
class RowLoader {
  using Shape = GroupedShape<Config, kGateUp>;
  using weight_t = typename Config::weight_t;
  static constexpr int kThreads = 32 * Shape::kRowWarps, kRowsAtOnce = kThreads / 8;
  static constexpr int kRowsOfThread = kGateUp ? Shape::kTokens / kRowsAtOnce : 1;

 public:
  using Ring = GroupedRing<Config, kGateUp>;
  using Plan = GroupedPlan<Config, kGateUp>;

  __device__ RowLoader(const GroupedParams& p, const Plan& plan, const Ring& ring, int thread)
      : p_(p), plan_(plan), ring_(ring), scales_(p, thread), thread_(thread) {}

  __device__ __forceinline__ void run() {
    pdl::wait();
    const int stages = (p_.depth + Shape::kStageK - 1) / Shape::kStageK;
    GroupedItem item;
    for (auto walk = plan_.walk(); walk.next(item);) {
      if constexpr (kGateUp) find_rows(item);
#pragma unroll 1
      for (int k = 0; k < stages; ++k) {
        mbarrier::wait(ring_.empty(), ring_.parity ^ 1);
        if constexpr (kGateUp) copy_rows(item, k);
        scales_.copy(ring_, item, k, k == stages - 1);
        mbarrier::arrive_after_copies(ring_.full());
        ring_.advance();
      }
    }
    mbarrier::wait(ring_.empty(), ring_.parity ^ 1);
    mbarrier::arrive(ring_.full());
  }

 private:
  __device__ void find_rows(const GroupedItem& item) {
    const uint32_t stride = uint32_t(p_.row_stride * int(sizeof(weight_t)) / 16);
    const auto token = [&](int r) { return plan_.token(item.first + r); };
#pragma unroll
    for (int j = 0; j < kRowsOfThread; ++j) {
      const int r = thread_ / 8 + kRowsAtOnce * j;
      if (r < item.rows) row_[j] = uint32_t(token(r)) * stride;
    }
    scales_.begin(item, token);
  }

  __device__ __forceinline__ void copy_rows(const GroupedItem& item, int k) const {
    const int piece = thread_ % 8, first = thread_ / 8;
    const int column = k * Shape::kStageK + piece * (16 / int(sizeof(weight_t)));
    const bool live = column < p_.depth;  // past the end are zeros, as in the weights
    const uint4* source =
        reinterpret_cast<const uint4*>(static_cast<const weight_t*>(p_.rows) + (live ? column : 0));
    const uint32_t target =
        ring_.stage_data() + kWeightBytes + first * kRowBytes + ((piece ^ (first % 8)) << 4);
    static_assert(kRowsAtOnce % 4 == 0);  // so that only one bit of the swap differs
#pragma unroll
    for (int j = 0; j < kRowsOfThread; ++j) {
      const int further = kRowsAtOnce * j;
      if (first + further < item.rows)
        copy::async_16((target ^ (further % 8 << 4)) + further * kRowBytes, source + row_[j], live);
    }
  }

  const GroupedParams& p_;
  const Plan& plan_;
  Ring ring_;
  ScaleLoader<Config, kGateUp, kThreads> scales_;
  int thread_;
  uint32_t row_[kRowsOfThread];  // in units of 16 bytes
};

}  // namespace hpcjit::moe
