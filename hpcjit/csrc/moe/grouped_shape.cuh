// What a block of the grouped product works on, and where things lie in its shared memory; see grouped.cuh.
#pragma once
#include "hpcjit/ptx/copy.cuh"
#include "hpcjit/types.cuh"
#include "moe/token_plan.cuh"

namespace hpcjit::moe {

constexpr int kQuantNone = 0, kQuantTensor = 1, kQuantChannel = 2, kQuantBlock = 3;  // Config::kQuant
constexpr int kRowBytes = 128;    // of K in a stage, what the swizzle spans
constexpr int kWeightRows = 128;  // of an item: 64 for each warpgroup that multiplies
constexpr int kWeightBytes = kWeightRows * kRowBytes;
constexpr int kScaleBlock = 128,
              kHidden = 64;  // features that share a scale: of weights, and of the hidden activation

// Routing, for a launch that finds its plan itself, and where that goes; see grouped_plan.cuh.
struct OwnPlanParams {
  const int32_t* topk_ids;
  uint4* tiles;
  int32_t* num_tiles;
  int32_t* position;  // [token][top_k]
  int64_t ids_stride;
  int num_tokens, expert_offset;
};

// Of one product: rows[r] (K elements) times the weights of the row's expert.
struct GroupedParams {
  const uint4* tiles;  // of plan.cuh
  const int32_t* num_tiles;
  const int32_t* sorted;  // kGateUp: row r is that of token sorted[r] / top_k
  const void* rows;
  const float* row_scale;  // FP8: [row or token][group of K], strides below
  const float*
      weight_scale;  // FP8: [expert], [expert][row of weights], or [expert][blocks of rows][blocks of K]
  const float* topk_weights;  // kWeightsOnInput: [token][top_k]
  void* out;
  float* out_scale;  // hidden activation in FP8: [row][out_scale_stride], one for 64 features
  int64_t row_stride, scale_row_stride, scale_group_stride, weights_stride, out_stride, out_scale_stride;
  int top_k, num_experts;
  int depth;          // K, elements
  int scale_groups;   // of a row
  int features;       // of the result
  int feature_tiles;  // items of a tile
  int most_tiles;     // for which `tiles` has room
  bool planned;       // whether the plan was there when the launch before this one let this one start
  OwnPlanParams own;
};

// Up to kTokens rows of one expert, and 128 rows of its weights: kGateUp, 64 of gate and 64 of up. Tiles may come from a
// caller and hold anything, so what says that no item follows stands where no tile does.
struct alignas(16) GroupedItem {
  int expert, first, rows, feature_tile;
};
constexpr int kNoItem = -1;  // feature_tile

// Room for a plan of a block's own: none, or for the most experts, tokens and pairs of a call.
template <class Config, bool kGateUp, int kThreads>
struct OwnRoom {
  static constexpr int kExperts = 0, kPairs = 0, kBytes = 0;
};
template <class Config, int kThreads>
struct OwnRoom<Config, true, kThreads> {
  static constexpr int kExperts = Config::kOwnExperts, kPairs = Config::kOwnPairs, kTokens = 128;
  using Plan = TokenPlan<kThreads, kExperts, kTokens, Config::kTokens>;
  static constexpr int kMask = Plan::max_tiles(kPairs) * 8, kScan = kMask + kExperts * Plan::kWords * 4;
  static constexpr int kStart = kScan + Plan::kWarps * 4, kTokenList = kStart + kExperts * 2;
  static constexpr int kBytes = kExperts == 0 ? 0 : (kTokenList + kPairs * 2 + 15) / 16 * 16;
};

template <class Config, bool kGateUp>
struct GroupedShape {
  using weight_t = typename Config::weight_t;
  using partial_t = typename Config::partial_t;
  static constexpr bool kScaled = Config::kQuant != kQuantNone;
  static constexpr int kTokens = Config::kTokens;
  static constexpr int kRowBox = kTokens < 32 ? kTokens : 32;
  // Warps that copy what does not come by TMA: gathered rows, scales. Each of their threads arrives at each stage, which
  // takes time, so they are few; with most rows, one warpgroup with the one for boxes, which leaves registers for the sums.
  static constexpr int kRowWarps = !kGateUp         ? int(kScaled)
                                   : kTokens < 32   ? 1
                                   : kTokens <= 128 ? kTokens / 32
                                                    : 3;
  static constexpr int kComputing = 256, kCopyWarps = 1 + kRowWarps;
  // Where those that compute need more registers than they were launched with, whole warpgroups give and get.
  static constexpr bool kRaises = kTokens > 64;
  static constexpr int kThreads = kComputing + (kRaises ? (kCopyWarps + 3) / 4 * 128 : kCopyWarps * 32);
  static constexpr int kCopying = kCopyWarps > 4 ? 80 : kRowWarps == 3 ? 72 : 56;
  static constexpr int kRaised = kCopyWarps > 4 ? 176 : kRowWarps == 3 ? 216 : 224;
  static constexpr int kArrivals = 1 + 32 * kRowWarps;         // at a full barrier
  static constexpr int kPerSm = kGateUp ? 1 : Config::kPerSm;  // blocks
  static constexpr int kStageK = kRowBytes / int(sizeof(weight_t));
  // Scales of a row in a stage.
  static constexpr int kParts = kScaled && !kGateUp && Config::kHalfGroups ? 2 : 1;
  // Whether scales of rows differ along K; otherwise they come with the last stage of an item.
  static constexpr bool kByGroup = Config::kQuant == kQuantBlock || kParts == 2;

  static constexpr int max(int a, int b) { return a > b ? a : b; }
  static constexpr int kStageBytes = kWeightBytes + kTokens * kRowBytes;
  // Beside the data of a stage: its item; scales of the rows, and of the weights: one for each row of them, or up to two.
  static constexpr int kItemFloats = sizeof(GroupedItem) / 4;
  static constexpr int kWeightScales = Config::kQuant == kQuantChannel ? kWeightRows : 4;
  static constexpr int kSideFloats = kItemFloats + (kScaled ? kParts * kTokens + kWeightScales : 0);
  static constexpr int kHiddenBytes = kTokens * kHidden * int(sizeof(weight_t));
  static constexpr int kMaxima = 9 * kTokens * 4;                              // of each warp; inverse scales
  static constexpr int kPartialBytes = kTokens * 64 * int(sizeof(partial_t));  // of a warpgroup
  static constexpr int kStaged = kGateUp ? kHiddenBytes + kMaxima : 2 * kPartialBytes;
  static constexpr int kPerStage = kStageBytes + kSideFloats * 4 + 16;
  static constexpr int kBudget = 228 * 1024 / kPerSm - 2048;  // what a block takes besides, and for alignment
  using Own = OwnRoom<Config, kGateUp, kThreads>;
  static constexpr int kFit = (kBudget - kStaged - Own::kBytes) / kPerStage;
  static constexpr int kStages = kFit < 12 ? kFit : 12;
  static constexpr int kStagedAt = kStages * kStageBytes;
  static constexpr int kSide = kStagedAt + kStaged;
  static constexpr int kBarriers = kSide + kStages * kSideFloats * 4;
  static constexpr int kOwnAt = kBarriers + kStages * 16;
  static constexpr int kSmem = kOwnAt + Own::kBytes + 1024;
  static_assert(!kRaises || kCopying * (kThreads - kComputing) + kRaised * kComputing <=
                                65536 / kThreads / 8 * 8 * kThreads);
  static_assert(kStages >= 3 && kTokens <= 192 && kTokens % 16 == 0);
};

// Where a thread is in the ring; barriers of a stage (full, empty) follow each other. `base` is the start of shared memory.
template <class Config, bool kGateUp>
struct GroupedRing {
  using Shape = GroupedShape<Config, kGateUp>;
  uint32_t base;
  int stage = 0;
  uint32_t parity = 0;

  __device__ uint32_t stage_data() const { return base + stage * Shape::kStageBytes; }
  __device__ uint32_t side() const { return base + Shape::kSide + stage * (Shape::kSideFloats * 4); }
  template <class T>
  __device__ static T* at(uint32_t address) {
    return static_cast<T*>(__cvta_shared_to_generic(address));
  }
  __device__ GroupedItem* item() const { return at<GroupedItem>(side()); }
  __device__ uint8_t* staged() const { return at<uint8_t>(base + Shape::kStagedAt); }
  __device__ uint32_t full() const { return base + Shape::kBarriers + stage * 16; }
  __device__ uint32_t empty() const { return full() + 8; }
  __device__ void advance() {
    if (++stage == Shape::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// A thread's place among those that compute. kGateUp: sums i < 2 are of gate, others of up, of the same feature.
template <bool kGateUp>
struct GroupedPlace {
  int group, warp, lane;  // the warpgroup, which has half of the item's features; in it

  __device__ explicit GroupedPlace(int thread)
      : group(thread / 128), warp(thread / 32 % 4), lane(thread % 32) {}
  __device__ int feature(int i) const {  // of sum i, in the item
    return kGateUp ? 32 * group + 8 * warp + lane / 4 : 64 * group + 16 * warp + lane / 4 + (i & 2) * 4;
  }
  __device__ int column(int i) const { return 8 * (i / 4) + 2 * (lane % 4) + (i & 1); }
};

}  // namespace hpcjit::moe
