// Parameters, constants and shared memory of the mixture of experts in one launch; see mono.cuh.
#pragma once
#include "hpcjit/ptx/copy.cuh"
#include "hpcjit/ptx/mbarrier.cuh"
#include "hpcjit/types.cuh"
#include "moe/grouped_shape.cuh"
#include "moe/token_plan.cuh"

namespace hpcjit::moe {

struct MonoParams {
  const void* x;
  const float* x_scale;  // FP8: [token][group of K], strides below
  const void* w13;
  const float* w13_scale;
  const float* w2_scale;
  const int32_t* topk_ids;
  const float* topk_weights;
  const bf16* shared_output;
  bf16* out;
  uint8_t* hidden;  // [part of K][row][Shape::kHiddenRow]: 256 bytes of e4m3 or bf16, FP8: scales of 16 codes
  uint32_t*
      counters;  // ticket, blocks that have ended, then for each tile items that have written hidden rows
  int64_t x_stride, x_scale_token_stride, x_scale_group_stride, ids_stride, weights_stride, shared_stride,
      out_stride;
  int num_tokens, top_k, num_experts, expert_offset, hidden_size, intermediate_size, prefetch_bytes;
};

template <class Config>
struct MonoShape {
  using weight_t = typename Config::weight_t;
  static constexpr bool kScaled = Config::kQuant != kQuantNone;
  static constexpr int kBytes = int(sizeof(weight_t));
  static constexpr int kTokenTiles = Config::kTokenTiles, kRows = 8 * kTokenTiles;
  // Warps: groups of those that compute, one that copies weights, one that copies rows, those that finish, in turns.
  static constexpr int kComputing = 8, kGroups = Config::kGroups, kCopiesWeights = kGroups * kComputing;
  static constexpr int kCopiesRows = kCopiesWeights + 1, kFirstFinishing = kCopiesRows + 1;
  static constexpr int kFinishing = 2;
  static constexpr int kThreads = 32 * (kFirstFinishing + kFinishing);

  // Gate-up: 16 features, a stage has a chunk of 128 bytes of K for each warp.
  static constexpr int kFeatures = 16, kRowTiles = 2;
  static constexpr int kChunk = 128, kChunkK = kChunk / kBytes, kChunks = kComputing;
  static constexpr int kGateUpBox = kFeatures * kChunk * kChunks;
  static constexpr int kRowPitch =
      kChunk * kChunks + 16;  // 16: rows of a matrix fragment meet different banks

  // Down: kColumns features, a stage has up to 256 bytes of K of kSlots tiles.
  static constexpr int kColumns = Config::kColumns, kColumnTiles = kColumns / 16;
  static constexpr int kSlots = kComputing / kColumnTiles;
  static constexpr int kDownChunk = 64, kDownChunkK = kDownChunk / kBytes, kDownChunks = 4;
  static constexpr int kDownK = kDownChunks * kDownChunkK;
  static constexpr int kDownBox = kColumns * kDownChunk * kDownChunks;
  static constexpr int kHiddenRow =
      kScaled ? 336 : 272;  // 16 more than there is: rows of a fragment meet different banks
  static constexpr int kSlotRows = kRows * kHiddenRow;

  static constexpr int max(int a, int b) { return a > b ? a : b; }
  static constexpr int kWeightBytes = max(2 * kGateUpBox, kSlots* kDownBox);
  static constexpr int kStageBytes =
      (kWeightBytes + max(kRows * kRowPitch, kSlots* kSlotRows) + 1023) / 1024 * 1024;

  // Sums of the warps (two buffers) in gate-up, and of the tokens in down, share memory.
  static constexpr int kSumVecs = kRowTiles * kTokenTiles * 32;  // float4, of a warp
  static constexpr int kSumBytes = 2 * kGroups * kComputing * kSumVecs * 16;
  static constexpr int kOutPitch = kColumns + 8;
  static constexpr int kOutBytes = kGroups * kSlots * Config::kTokens * kOutPitch * 4;
  static constexpr int kScratch = max(kSumBytes, kOutBytes);

  using Plan = TokenPlan<kThreads, Config::kExperts, Config::kTokens, kRows>;
  static constexpr int kMaskWords = Plan::kWords, kMaxTiles = Plan::max_tiles(Config::kPairs);
  static constexpr int kItems = 4;  // tickets between the warps

  static constexpr int kTilesAt = kScratch;
  static constexpr int kWeightsAt = kTilesAt + kMaxTiles * 8;
  static constexpr int kPairWeightsAt = kWeightsAt + Config::kPairs * 4;
  static constexpr int kMaskAt = kPairWeightsAt + Config::kPairs * 4;
  static constexpr int kTokenAt = kMaskAt + Config::kExperts * kMaskWords * 4;
  static constexpr int kIdsAt = kTokenAt + (Config::kPairs * 2 + 3) / 4 * 4;
  static constexpr int kStartAt = kIdsAt + (Config::kPairs * 2 + 3) / 4 * 4;
  static constexpr int kScanAt = kStartAt + (Config::kExperts * 2 + 3) / 4 * 4;
  static constexpr int kTicketsAt = kScanAt + 4 * (kThreads / 32);
  static constexpr int kTablesEnd = (kTicketsAt + 4 * kItems + 15) / 16 * 16;

  static constexpr int kBudget = 227 * 1024 - 1024;  // and for alignment
  static constexpr int kFit = (kBudget - kTablesEnd - 16 * (kItems + 2)) / (kStageBytes + 16);
  // A whole number for each group: a slot of the ring then belongs to one, and none waits for a phase that is two
  // ahead.
  static constexpr int kStages = (kFit < 6 ? kFit : 6) / kGroups * kGroups;
  static constexpr int kBarriersAt = kTablesEnd;
  static constexpr int kItemBarriersAt = kBarriersAt + 16 * kStages;
  static constexpr int kSumBarriersAt = kItemBarriersAt + 16 * kItems;
  static constexpr int kRing = (kSumBarriersAt + 16 * 2 + 1023) / 1024 * 1024;
  static constexpr int kSmem = kRing + kStages * kStageBytes + 1024;
  static_assert(kGroups == 1 || Config::kQuant != kQuantBlock);  // registers would not suffice
  static_assert(kStages >= 2 && kSmem <= 227 * 1024 && kSlots >= 1 && Config::kTokens <= 256 &&
                Config::kPairs <= 4096);
};

// What all warps of a block know of the call.
template <class Config>
struct MonoBlock {
  using Shape = MonoShape<Config>;
  const MonoParams& p;
  uint8_t* smem;
  uint32_t base;  // of smem
  uint32_t num_tiles = 0;

  __device__ MonoBlock(const MonoParams& params, uint8_t* memory)
      : p(params), smem(memory), base(copy::shared_address(memory)) {}

  template <class T>
  __device__ T* at(int offset) const {
    return reinterpret_cast<T*>(smem + offset);
  }
  __device__ TokenTile tile(uint32_t i) const { return at<TokenTile>(Shape::kTilesAt)[i]; }
  __device__ int token_of(uint32_t row) const { return at<uint16_t>(Shape::kTokenAt)[row]; }
  __device__ float weight_of(uint32_t row) const { return at<float>(Shape::kWeightsAt)[row]; }

  // Tickets: the gate-up items, tile by tile, then the down items.
  __device__ uint32_t features() const { return unsigned(p.intermediate_size) / Shape::kFeatures; }
  __device__ uint32_t gate_up_items() const { return num_tiles * features(); }
  __device__ uint32_t items() const {
    return gate_up_items() + (unsigned(p.hidden_size) + Shape::kColumns - 1) / Shape::kColumns;
  }
  __device__ int gate_up_chunks() const { return p.hidden_size / Shape::kChunkK; }
  __device__ int gate_up_stages() const { return (gate_up_chunks() + Shape::kChunks - 1) / Shape::kChunks; }
  // Which stage of K an item has as its k-th: neighbours begin with different ones. With all SMs at the same place of every
  // row at a time, reads were 2 % slower.
  __device__ int gate_up_stage(int feature, int k) const {
    return (feature / Shape::kFeatures + k) % gate_up_stages();
  }
  __device__ uint8_t* hidden_row(uint32_t part, uint32_t row) const {
    return p.hidden + (int64_t(part) * p.num_tokens * p.top_k + row) * Shape::kHiddenRow;
  }
  __device__ uint32_t down_parts() const {
    return (unsigned(p.intermediate_size) + Shape::kDownK - 1) / Shape::kDownK;
  }
  // Slots of a down item: parts of tiles.
  __device__ uint32_t down_slots() const { return num_tiles * down_parts(); }
};

// Where a warp stands in the ring of stages, or of tickets.
template <int kCount>
struct MonoRing {
  uint32_t barriers;
  int stage = 0;
  uint32_t parity = 0;

  __device__ uint32_t full() const { return barriers + stage * 16; }
  __device__ uint32_t empty() const { return barriers + stage * 16 + 8; }
  __device__ void advance() {
    if (++stage == kCount) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ void advance(uint32_t stages) {
    const uint32_t at = stage + stages;
    stage = at % kCount;
    parity ^= at / kCount % 2;
  }
};

// The block's items, as all warps but the one that draws tickets see them; lane 0 of a warp hands an entry back.
template <class Config>
class MonoItems {
  using Shape = MonoShape<Config>;

 public:
  __device__ explicit MonoItems(const MonoBlock<Config>& block)
      : tickets_(block.template at<uint32_t>(Shape::kTicketsAt)),
        ring_{block.base + Shape::kItemBarriersAt} {}

  __device__ uint32_t next(int lane) {
    mbarrier::wait(ring_.full(), ring_.parity);
    const uint32_t ticket = tickets_[ring_.stage];
    __syncwarp();
    if (lane == 0) mbarrier::arrive(ring_.empty());
    ring_.advance();
    return ticket;
  }

  // For a warp that has nothing to do for the ticket it saw last, nor for later ones.
  __device__ void leave(int lane, uint32_t end, uint32_t last) {
    while (last < end) last = next(lane);
  }

 private:
  const uint32_t* tickets_;
  MonoRing<Shape::kItems> ring_;
};

}  // namespace hpcjit::moe
