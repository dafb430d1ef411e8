// The warpgroup of the grouped product that copies; see grouped.cuh.
//
// Weights come by TMA, asked for by one thread. Rows come by 16-byte copies of all threads, eight to a row, each placed
// where TMA's 128-byte swizzle would put it; scales by 4-byte ones. A thread's own copies are seen by the tensor cores
// after it has waited for them and fenced; so a stage is announced kLag stages later, by a lane for its warp. Rows past the
// end of a tile are not copied: what the ring holds there, NaN too, meets only columns that nobody writes.
#pragma once
#include "hpcjit/ptx/mbarrier.cuh"
#include "hpcjit/ptx/tma.cuh"
#include "moe/grouped_shape.cuh"

namespace hpcjit::moe {

template <class Config, bool kGateUp>
class GroupedLoader {
  using Shape = GroupedShape<Config, kGateUp>;
  using weight_t = typename Config::weight_t;
  static constexpr int kRowsOfThread = Shape::kTokens / 16;

 public:
  using Ring = GroupedRing<Shape::kStages>;

  __device__ GroupedLoader(const GroupedParams& p, const CUtensorMap& map, const Ring& ring)
      : p_(p), map_(map), ring_(ring), announced_(ring), thread_(threadIdx.x - Shape::kComputing) {}

  __device__ void run() {
    GroupedWalk walk(p_);
    GroupedItem item;
    const int stages = (p_.depth + Shape::kStageK - 1) / Shape::kStageK;
    while (walk.next(item)) {
      find_rows(item);
      for (int k = 0; k < stages; ++k) {
        mbarrier::wait(ring_.empty(), ring_.parity ^ 1);
        copy_weights(item, k);
        copy_rows(item, k);
        if constexpr (Shape::kScaled) copy_scales(item, k);
        copy::commit();
        if (under_way_ == Shape::kLag) {
          copy::wait<Shape::kLag>();
          announce();
        } else {
          ++under_way_;
        }
        ring_.advance();
      }
    }
    copy::wait<0>();
    while (under_way_-- > 0) announce();
  }

 private:
  // Row of `rows` (and of its scales) that row `r` of the item is.
  __device__ int64_t source_row(const GroupedItem& item, int r) const {
    if constexpr (kGateUp)
      return p_.sorted[item.first + r] / p_.top_k;
    else
      return item.first + r;
  }

  __device__ void find_rows(const GroupedItem& item) {
#pragma unroll
    for (int j = 0; j < kRowsOfThread; ++j) {
      const int r = thread_ / 8 + 16 * j;
      if (r < item.rows)
        row_[j] = static_cast<const weight_t*>(p_.rows) + source_row(item, r) * p_.row_stride;
    }
    if constexpr (Shape::kScaled)
      if (thread_ < item.rows) scale_ = p_.row_scale + source_row(item, thread_) * p_.scale_row_stride;
  }

  __device__ void copy_weights(const GroupedItem& item, int k) {
    if (thread_ != 0) return;
    const uint32_t stage = ring_.data + ring_.stage * Shape::kStageBytes;
    mbarrier::arrive_expecting(ring_.full(), 2 * kBoxBytes);
#pragma unroll
    for (int box = 0; box < 2; ++box)
      tma::load(stage + box * kBoxBytes, &map_, k * Shape::kStageK, weight_row<kGateUp>(p_, item, box),
                ring_.full());
  }

  __device__ void copy_rows(const GroupedItem& item, int k) {
    const int chunk = thread_ % 8, r = thread_ / 8;
    const int column = k * Shape::kStageK + chunk * (16 / int(sizeof(weight_t)));
    const bool live = column < p_.depth;  // past the end are zeros, as in the weights
    const uint32_t target = ring_.data + ring_.stage * Shape::kStageBytes + 2 * kBoxBytes + r * kRowBytes +
                            ((chunk ^ (r % 8)) << 4);
#pragma unroll
    for (int j = 0; j < kRowsOfThread; ++j)
      if (r + 16 * j < item.rows)
        copy::async_16(target + j * 16 * kRowBytes, live ? row_[j] + column : row_[j], live);
  }

  __device__ void copy_scales(const GroupedItem& item, int k) {
    const uint32_t target = ring_.data + Shape::kScales + ring_.stage * Shape::kScaleFloats * 4;
    if (thread_ < item.rows) {
#pragma unroll
      for (int part = 0; part < Shape::kParts; ++part) {
        const int group = k * Shape::kParts + part;
        const bool live = group < p_.scale_groups;
        copy::async_4(target + (part * Shape::kTokens + thread_) * 4,
                      scale_ + (live ? group : 0) * p_.scale_group_stride, live);
      }
    }
    if constexpr (Config::kQuant == kQuantBlock)
      if (thread_ < 2)
        copy::async_4(target + (Shape::kParts * Shape::kTokens + thread_) * 4,
                      weight_scale(item, thread_) + k, true);
  }

  // The scales along K of the block that box `box` lies in.
  __device__ const float* weight_scale(const GroupedItem& item, int box) const {
    const int blocks = (p_.features + kScaleBlock - 1) / kScaleBlock;
    const int along = (p_.depth + kScaleBlock - 1) / kScaleBlock;
    if constexpr (kGateUp)
      return p_.weight_scale + (int64_t(item.expert * 2 + box) * blocks + item.feature_tile / 2) * along;
    return p_.weight_scale + (int64_t(item.expert) * blocks + item.feature_tile) * along;
  }

  // This thread's copies of the oldest stage are done.
  __device__ void announce() {
    copy::fence_async();
    __syncwarp();
    if (thread_ % 32 == 0) mbarrier::arrive(announced_.full());
    announced_.advance();
  }

  const GroupedParams& p_;
  const CUtensorMap& map_;
  Ring ring_, announced_;
  int thread_, under_way_ = 0;
  const weight_t* row_[kRowsOfThread];
  const float* scale_ = nullptr;
};

}  // namespace hpcjit::moe
