// The warpgroup of the grouped product that copies; see grouped.cuh.
//
// Weights, and rows that lie behind each other, come by TMA, asked for by one thread. Gathered rows (kGateUp) come by 16-byte
// copies of all threads, eight to a row, each placed where TMA's 128-byte swizzle would put it; scales by 4-byte ones. These
// copies arrive at the stage's barrier by themselves, so nobody waits for them here, and those who multiply what they have
// written fence it for the tensor cores. Rows past the end of a tile: what the ring holds there, NaN too, meets only columns
// that nobody writes.
#pragma once
#include "hpcjit/ptx/global.cuh"
#include "hpcjit/ptx/mbarrier.cuh"
#include "moe/grouped_map.cuh"

namespace hpcjit::moe {

template <class Config>
class GroupedLoader {
  using Shape = GroupedShape<Config>;
  using weight_t = typename Config::weight_t;
  static constexpr int kRowsOfThread = Shape::kTokens / 16;

 public:
  using Ring = GroupedRing<Shape::kStages>;

  __device__ explicit GroupedLoader(const Ring& ring)
      : ring_(ring), thread_(threadIdx.x - Shape::kComputing) {}

  // All stages of an item.
  template <bool kGateUp>
  __device__ __forceinline__ void load(const GroupedParams& p, const CUtensorMap& weights,
                                       const CUtensorMap& rows, const GroupedItem& item) {
    const int stages = (p.depth + Shape::kStageK - 1) / Shape::kStageK;
    const int boxes = kGateUp ? 0 : (item.rows + Shape::kRowBox - 1) / Shape::kRowBox;
    find_rows<kGateUp>(p, item);
#pragma unroll 1
    for (int k = 0; k < stages; ++k) {
      mbarrier::wait(ring_.empty(), ring_.parity ^ 1);
      const uint32_t stage = ring_.data + ring_.stage * Shape::kStageBytes;
      if (thread_ == 0) {
        mbarrier::arrive_expecting(ring_.full(), kWeightBytes + boxes * Shape::kRowBox * kRowBytes);
        load_weights<kGateUp>(stage, weights, k * Shape::kStageK, item.expert, item.feature_tile, p.features,
                              ring_.full());
      }
      if constexpr (kGateUp) {
        copy_rows(p, item, k);
      } else if (thread_ == 0) {
        for (int box = 0; box < boxes; ++box)
          tma::load(stage + kWeightBytes + box * Shape::kRowBox * kRowBytes, &rows, k * Shape::kStageK,
                    item.first + box * Shape::kRowBox, ring_.full());
      }
      if constexpr (Shape::kScaled)
        if (Shape::by_group(kGateUp) || k == stages - 1) copy_scales<kGateUp>(p, item, k);
      mbarrier::arrive_after_copies(ring_.full());
      ring_.advance();
    }
  }

 private:
  // Row of `rows` (and of its scales) that row `r` of the item is.
  template <bool kGateUp>
  __device__ static int source_row(const GroupedParams& p, const GroupedItem& item, int r) {
    if constexpr (kGateUp)
      return p.sorted[item.first + r] / unsigned(p.top_k);
    else
      return item.first + r;
  }

  template <bool kGateUp>
  __device__ void find_rows(const GroupedParams& p, const GroupedItem& item) {
    if constexpr (kGateUp) {
      const uint32_t stride = uint32_t(p.row_stride * int(sizeof(weight_t)) / 16);
#pragma unroll
      for (int j = 0; j < kRowsOfThread; ++j) {
        const int r = thread_ / 8 + 16 * j;
        if (r < item.rows) row_[j] = uint32_t(source_row<kGateUp>(p, item, r)) * stride;
      }
    }
    if constexpr (Shape::kScaled)
      if (thread_ < item.rows)
        scale_ = p.row_scale + source_row<kGateUp>(p, item, thread_) * p.scale_row_stride;
  }

  __device__ __forceinline__ void copy_rows(const GroupedParams& p, const GroupedItem& item, int k) {
    const int piece = thread_ % 8, r = thread_ / 8;
    const int column = k * Shape::kStageK + piece * (16 / int(sizeof(weight_t)));
    const bool live = column < p.depth;  // past the end are zeros, as in the weights
    const uint4* source =
        reinterpret_cast<const uint4*>(static_cast<const weight_t*>(p.rows) + (live ? column : 0));
    const uint32_t target = ring_.data + ring_.stage * Shape::kStageBytes + kWeightBytes + r * kRowBytes +
                            ((piece ^ (r % 8)) << 4);
#pragma unroll
    for (int j = 0; j < kRowsOfThread; ++j)
      if (r + 16 * j < item.rows) copy::async_16(target + j * 16 * kRowBytes, source + row_[j], live);
  }

  // Of groups past the end they are zero.
  template <bool kGateUp>
  __device__ __forceinline__ void copy_scales(const GroupedParams& p, const GroupedItem& item, int k) {
    constexpr int kParts = Shape::parts(kGateUp);
    const uint32_t target = ring_.data + Shape::kScales + ring_.stage * Shape::kScaleFloats * 4;
    if (thread_ < item.rows) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int group = k * kParts + part;
        const bool live = group < p.scale_groups;
        copy::async_4(target + (part * Shape::kTokens + thread_) * 4,
                      scale_ + (live ? group : 0) * p.scale_group_stride, live);
      }
    }
    if constexpr (Config::kQuant == kQuantBlock)
      if (thread_ < 2)
        copy::async_4(target + (Shape::kScaleFloats - 4 + thread_) * 4,
                      weight_scale<kGateUp>(p, item, thread_) + k, true);
  }

  // The scales along K of the block of weights; kGateUp: of gate (0) or up (1).
  template <bool kGateUp>
  __device__ static const float* weight_scale(const GroupedParams& p, const GroupedItem& item, int half) {
    const int blocks = (p.features + kScaleBlock - 1) / kScaleBlock;
    const int along = (p.depth + kScaleBlock - 1) / kScaleBlock;
    if constexpr (kGateUp)
      return p.weight_scale + (int64_t(item.expert * 2 + half) * blocks + item.feature_tile / 2) * along;
    return p.weight_scale + (int64_t(item.expert) * blocks + item.feature_tile) * along;
  }

  Ring ring_;
  int thread_;
  uint32_t row_[kRowsOfThread];  // in units of 16 bytes
  const float* scale_ = nullptr;
};

}  // namespace hpcjit::moe
