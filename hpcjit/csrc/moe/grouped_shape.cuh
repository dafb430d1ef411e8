// What a block of the grouped product works on, and where things lie in its shared memory; see grouped.cuh.
#pragma once
#include "hpcjit/ptx/copy.cuh"
#include "hpcjit/types.cuh"

namespace hpcjit::moe {

constexpr int kQuantNone = 0, kQuantTensor = 1, kQuantChannel = 2, kQuantBlock = 3;  // Config::kQuant
constexpr int kRowBytes = 128;    // of K in a stage, what the swizzle spans
constexpr int kWeightRows = 128;  // of an item: 64 for each warpgroup that multiplies
constexpr int kWeightBytes = kWeightRows * kRowBytes;
constexpr int kScaleBlock = 128,
              kHidden = 64;  // features that share a scale: of weights, and of the hidden activation

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
  // For the guess which weights a block will need first, and columns of them that are fetched on it.
  const int32_t* topk_ids;
  int64_t ids_stride;
  int num_pairs, expert_offset, guessed_columns;
};

struct GroupedItem {
  int expert, first, rows, feature_tile;
};

// An item is up to kTokens rows of one expert and 128 rows of its weights: kGateUp, 64 of gate and 64 of up.
template <class Config>
struct GroupedShape {
  using weight_t = typename Config::weight_t;
  using partial_t = typename Config::partial_t;
  static constexpr bool kScaled = Config::kQuant != kQuantNone;
  static constexpr int kTokens = Config::kTokens;
  static constexpr int kRowBox = kTokens < 32 ? kTokens : 32;
  static constexpr int kComputing = 256, kThreads = kComputing + 128;
  static constexpr int kStageK = kRowBytes / int(sizeof(weight_t));
  // Scales of a row in a stage: of gate-up's rows, and of down's.
  static constexpr int parts(bool gate_up) { return kScaled && !gate_up && Config::kHalfGroups ? 2 : 1; }
  // Whether scales of rows differ along K; otherwise they come with the last stage of an item.
  static constexpr bool by_group(bool gate_up) {
    return Config::kQuant == kQuantBlock || parts(gate_up) == 2;
  }

  static constexpr int max(int a, int b) { return a > b ? a : b; }
  static constexpr int kStageBytes = kWeightBytes + kTokens * kRowBytes;
  static constexpr int kScaleFloats =
      kScaled ? parts(false) * kTokens + 4 : 0;  // of the rows, and of weights
  static constexpr int kHiddenPitch = kHidden * int(sizeof(weight_t)) + 16;
  static constexpr int kHiddenBytes = kTokens * kHiddenPitch;
  static constexpr int kMaxima = 9 * kTokens * 4;                              // of each warp; inverse scales
  static constexpr int kPartialBytes = kTokens * 64 * int(sizeof(partial_t));  // of a warpgroup
  static constexpr int kStaged = max(kHiddenBytes + kMaxima, 2 * kPartialBytes);
  static constexpr int kPerStage = kStageBytes + kScaleFloats * 4 + 16;
  static constexpr int kBudget = 227 * 1024 - 1024;  // and for alignment
  static constexpr int kFit = (kBudget - kStaged) / kPerStage;
  static constexpr int kStages = kFit < 12 ? kFit : 12;
  static constexpr int kStagedAt = kStages * kStageBytes;
  static constexpr int kScales = kStagedAt + kStaged;
  static constexpr int kBarriers = kScales + kStages * kScaleFloats * 4;
  static constexpr int kSmem = kBarriers + kStages * 16 + 1024;
  // Registers of a thread where those that compute need more than they were launched with.
  static constexpr bool kRaises = kTokens > 64;
  static constexpr int kCopying = 56, kRaised = 224;
  static_assert(kStages >= 3 && kTokens <= 128 && kTokens % 16 == 0);
};

// Where a thread is in a ring of kStages, whose barriers (full, empty) follow each other.
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
