// The warpgroup of the grouped product that copies; see grouped.cuh.
//
// Weights come by TMA, asked for by one thread. Rows come by 16-byte copies of all threads, eight to a row, each placed
// where TMA's 128-byte swizzle would put it; scales by 4-byte ones. A thread's own copies are seen by the tensor cores
// after it has waited for them and fenced; so a stage is announced kLag stages later, by a lane for its warp, or when
// `flush` is called, which must precede any wait for what other warps do with the stages. Rows past the end of a tile are
// not copied: what the ring holds there, NaN too, meets only columns that nobody writes.
#pragma once
#include "hpcjit/ptx/mbarrier.cuh"
#include "moe/grouped_map.cuh"

namespace hpcjit::moe {

template <class Config>
class GroupedLoader {
  using Shape = GroupedShape<Config>;
  using weight_t = typename Config::weight_t;
  static constexpr int kRowsOfThread = Shape::kTokens / 16;
  static constexpr int kScalesOfThread = (Shape::kTokens + 127) / 128;

 public:
  using Ring = GroupedRing<Shape::kStages>;

  __device__ explicit GroupedLoader(const Ring& ring)
      : ring_(ring), announced_(ring), thread_(threadIdx.x - Shape::kComputing) {}

  // All stages of an item. `rows_ready` is called once, before the rows are read, and may call `flush`.
  template <bool kGateUp, class Ready>
  __device__ __forceinline__ void load(const GroupedParams& p, const CUtensorMap& map,
                                       const GroupedItem& item, const Ready& rows_ready) {
    const int stages = (p.depth + Shape::kStageK - 1) / Shape::kStageK;
    find_rows<kGateUp>(p, item);
#pragma unroll 1
    for (int k = 0; k < stages; ++k) {
      mbarrier::wait(ring_.empty(), ring_.parity ^ 1);
      if (thread_ == 0) {
        mbarrier::arrive_expecting(ring_.full(), kWeightBytes);
        load_weights<kGateUp>(ring_.data + ring_.stage * Shape::kStageBytes, map, k * Shape::kStageK,
                              item.expert, item.feature_tile, p.features, ring_.full());
      }
      if (k == 0) rows_ready();
      copy_rows(p, item, k);
      if constexpr (Shape::kScaled)
        if (Shape::by_group(kGateUp) || k == stages - 1) copy_scales<kGateUp>(p, item, k);
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

  __device__ void flush() {
    if (under_way_ == 0) return;
    copy::wait<0>();
    for (; under_way_ > 0; --under_way_) announce();
  }

 private:
  // Row of `rows` (and of its scales) that row `r` of the item is.
  template <bool kGateUp>
  __device__ static int source_row(const GroupedParams& p, const GroupedItem& item, int r) {
    if constexpr (kGateUp)
      return p.sorted[item.first + r] / p.top_k;
    else
      return item.first + r;
  }

  template <bool kGateUp>
  __device__ void find_rows(const GroupedParams& p, const GroupedItem& item) {
    const uint32_t stride = uint32_t(p.row_stride * int(sizeof(weight_t)) / 16);
#pragma unroll
    for (int j = 0; j < kRowsOfThread; ++j) {
      const int r = thread_ / 8 + 16 * j;
      if (r < item.rows) row_[j] = uint32_t(source_row<kGateUp>(p, item, r)) * stride;
    }
    if constexpr (Shape::kScaled) {
#pragma unroll
      for (int j = 0; j < kScalesOfThread; ++j) {
        const int r = thread_ + 128 * j;
        if (r < item.rows) scale_[j] = p.row_scale + source_row<kGateUp>(p, item, r) * p.scale_row_stride;
      }
    }
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

  template <bool kGateUp>
  __device__ __forceinline__ void copy_scales(const GroupedParams& p, const GroupedItem& item, int k) {
    constexpr int kParts = Shape::parts(kGateUp);
    const uint32_t target = ring_.data + Shape::kScales + ring_.stage * Shape::kScaleFloats * 4;
#pragma unroll
    for (int j = 0; j < kScalesOfThread; ++j) {
      const int r = thread_ + 128 * j;
      if (r >= item.rows) continue;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int group = k * kParts + part;
        const bool live = group < p.scale_groups;
        copy::async_4(target + (part * Shape::kTokens + r) * 4,
                      scale_[j] + (live ? group : 0) * p.scale_group_stride, live);
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

  // This thread's copies of the oldest stage are done.
  __device__ void announce() {
    copy::fence_async();
    __syncwarp();
    if (thread_ % 32 == 0) mbarrier::arrive(announced_.full());
    announced_.advance();
  }

  Ring ring_, announced_;
  int thread_, under_way_ = 0;
  uint32_t row_[kRowsOfThread];  // in units of 16 bytes
  const float* scale_[kScalesOfThread] = {};
};

}  // namespace hpcjit::moe
