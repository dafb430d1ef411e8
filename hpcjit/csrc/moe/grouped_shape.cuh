// What a block of the grouped product works on, and where things lie in its shared memory; see grouped.cuh.
#pragma once
#include "hpcjit/ptx/copy.cuh"
#include "hpcjit/types.cuh"

namespace hpcjit::moe {

constexpr int kQuantNone = 0, kQuantTensor = 1, kQuantChannel = 2, kQuantBlock = 3;  // Config::kQuant
constexpr int kBoxRows = 64,
              kRowBytes = 128;  // of a box of weights; a row of a box is what the swizzle spans
constexpr int kBoxBytes = kBoxRows * kRowBytes;
constexpr int kScaleBlock = 128,
              kHidden = 64;  // features that share a scale: of weights, and of the hidden activation

// Of one product: rows[r] (K elements) times the weights of the row's expert.
struct GroupedParams {
  const uint4* tiles;  // of plan.cuh
  const int32_t* num_tiles;
  const int32_t* sorted;  // Gather: row r is that of token sorted[r] / top_k
  const void* rows;
  const float* row_scale;  // FP8: [row or token][group of K], strides below
  const float*
      weight_scale;  // FP8: [expert], [expert][row of weights], or [expert][blocks of rows][blocks of K]
  const float* topk_weights;  // kWeightsOnInput: [token][top_k]
  void* out;
  float* out_scale;  // hidden activation in FP8: [row][out_scale_stride], one for 64 features
  int64_t row_stride, scale_row_stride, scale_group_stride, weights_stride, out_stride, out_scale_stride;
  int top_k, num_experts;
  // kGateUp: for the guess which weights a block will need first, and stages of them that are fetched on it.
  const int32_t* topk_ids;
  int64_t ids_stride;
  int num_pairs, expert_offset, guessed_stages;
  int depth;          // K, elements
  int scale_groups;   // of a row
  int features;       // of the result
  int feature_tiles;  // items of a tile
};

// kGateUp: a box of gate rows and one of up rows, for 64 features. Otherwise two boxes of neighbouring rows, 128 features.
template <class Config, bool kGateUp>
struct GroupedShape {
  using weight_t = typename Config::weight_t;
  static constexpr bool kScaled = Config::kQuant != kQuantNone;
  static constexpr int kTokens = Config::kTokens;
  static constexpr int kColumns = kTokens < 64 ? kTokens : 64;  // of a product: tokens of a warpgroup
  static constexpr int kGroups = kTokens / kColumns;
  static constexpr int kComputing = 128 * kGroups, kThreads = kComputing + 128;
  static constexpr int kStageK = kRowBytes / int(sizeof(weight_t));
  static constexpr int kFeatures = kGateUp ? 64 : 128;  // of an item
  static constexpr int kParts =
      kScaled && !kGateUp && Config::kHalfGroups ? 2 : 1;  // scales of a row in a stage
  static constexpr int kStageBytes = 2 * kBoxBytes + kTokens * kRowBytes;
  static constexpr int kScaleFloats =
      kScaled ? kParts * kTokens + 4 : 0;  // of the rows, and of each box of weights
  static constexpr int kStagedPitch = 64 * int(sizeof(weight_t)) + 16;
  static constexpr int kStaged = kGateUp ? kTokens * kStagedPitch : 0;
  static constexpr int kMaxima = kGateUp && kScaled ? kGroups * 4 * kColumns * 4 : 0;
  static constexpr int kPerStage = kStageBytes + kScaleFloats * 4 + 16;
  static constexpr int kBudget = (Config::kBlocksPerSm == 1 ? 227 : 113) * 1024 - 1024;  // and for alignment
  static constexpr int kFit = (kBudget - kStaged - kMaxima) / kPerStage;
  static constexpr int kStages = kFit < 12 ? kFit : 12;
  static constexpr int kLag = kStages > 5 ? 4 : kStages - 2;  // stages whose rows are under way
  static constexpr int kScales = kStages * kStageBytes;
  static constexpr int kStagedAt = kScales + kStages * kScaleFloats * 4;
  static constexpr int kMaximaAt = kStagedAt + kStaged;
  static constexpr int kBarriers = (kMaximaAt + kMaxima + 15) / 16 * 16;
  static constexpr int kSmem = kBarriers + kStages * 16 + 1024;
  // Registers of a thread at the launch, and where those that compute need more, what they get from those that copy.
  static constexpr int kAtLaunch = 65536 / (kThreads * Config::kBlocksPerSm) / 8 * 8;
  static constexpr bool kRaises = kGroups > 1;
  static constexpr int kCopying = 72, kRaised = 216;
  static_assert(kStages >= 3 && kTokens % kColumns == 0 && kGroups <= 2 && (kTokens & (kTokens - 1)) == 0);
  static_assert(!kRaises || kCopying + kGroups * kRaised <= 512);
};

// Where a block stands in the ring.
template <int kStages>
struct GroupedRing {
  uint32_t data, barriers;
  int stage = 0;
  uint32_t parity = 0;

  __device__ uint32_t full() const { return barriers + stage * 16; }
  __device__ uint32_t empty() const { return barriers + stage * 16 + 8; }
  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

struct GroupedItem {
  int expert, first, rows, feature_tile;
};

// First row of box `box` of an item in the matrix of all experts' weights.
template <bool kGateUp>
__device__ __forceinline__ int weight_row(const GroupedParams& p, const GroupedItem& item, int box) {
  if constexpr (kGateUp) return (item.expert * 2 + box) * p.features + item.feature_tile * kBoxRows;
  return item.expert * p.features + (item.feature_tile * 2 + box) * kBoxRows;
}

// The items of a block: tile by tile, all features of a tile before the next. A tile is read an item ahead.
class GroupedWalk {
 public:
  __device__ explicit GroupedWalk(const GroupedParams& p)
      : tiles_(p.tiles),
        features_(p.feature_tiles),
        item_(blockIdx.x),
        items_(*p.num_tiles * p.feature_tiles) {
    if (item_ < items_) ahead_ = tiles_[item_ / features_];
  }

  __device__ bool next(GroupedItem& item) {
    if (item_ >= items_) return false;
    item = {int(ahead_.x), int(ahead_.y), int(ahead_.z), item_ % features_};
    item_ += gridDim.x;
    if (item_ < items_) ahead_ = tiles_[item_ / features_];
    return true;
  }

 private:
  const uint4* tiles_;
  int features_, item_, items_;
  uint4 ahead_ = {};
};

}  // namespace hpcjit::moe
