// What a block of the wgmma router GEMM works on, and where things lie in its shared memory; see router_tile.cuh.
#pragma once
#include "hpcjit/types.cuh"

namespace hpcjit::gemm {

struct RouterTileParams {
  const void* x;
  const void* weight;  // fp32, or kPresplit: bf16
  const void* weight_low;
  void* out;
  int64_t num_tokens;
  int64_t num_experts;
  int64_t hidden_size;
  int64_t x_stride;
  int64_t weight_stride;
  int64_t low_stride;
  int64_t out_stride;
  double scale;  // kPresplit: of weight_low
};

template <class Config>
struct RouterTileShape {
  static constexpr int kExperts = 64 * Config::kGroups;
  static constexpr int kXBytes = Config::kTokens * Config::kStageK * 2;
  static constexpr int kWeightBox = kExperts * 128;  // 32 of K, or kPresplit: 64 of one part
  static constexpr int kStageBytes = kXBytes + Config::kStageK / 32 * kWeightBox;
  static constexpr int kPitch = kExperts + 4;  // floats; spreads the columns of a warp's sums over all banks
  static constexpr int kRing = Config::kStages * kStageBytes;
  static constexpr int kPart = Config::kTokens * kPitch;  // floats of a slot's sums
  static constexpr int kOwned = kPart / Config::kSplits;  // and of those that one block of a cluster writes
  static constexpr int kStaged = Config::kSlots * kPart * 4;
  static constexpr int kInbox = kRing > kStaged ? kRing : (kStaged + 1023) / 1024 * 1024;
  static constexpr int kInboxBytes = Config::kSplits > 1 ? kPart * 4 : 0;
  static constexpr int kBarriers = kInbox + kInboxBytes;
  static constexpr int kSmem = kBarriers + Config::kStages * 16 + 16 + 1024;  // and for alignment
  static constexpr int kCluster = Config::kSplits * Config::kShare;
  static constexpr int kWarpgroups = Config::kGroups * Config::kSlots;  // that compute
  static constexpr int kComputing = 128 * kWarpgroups, kThreads = kComputing + 128;
  // Registers of a thread at the launch. Where those that compute need more they get them from those that copy, which
  // takes time.
  static constexpr int kSums = Config::kTokens / 2 * (1 + (Config::kPromote > 0) + Config::kSeparateLow);
  static constexpr int kAtLaunch = 65536 / (kThreads * Config::kBlocksPerSm) / 8 * 8;
  static constexpr int kCopying = 24;
  static constexpr int kMost = (kAtLaunch * kThreads - 128 * kCopying) / kComputing / 8 * 8;
  static constexpr int kRaised = kMost < 240 ? kMost : 240;
  static constexpr bool kRaises = kSums + 8 * Config::kTerms * Config::kBatch + 40 > kAtLaunch;
  static_assert(kXBytes % 1024 == 0 && Config::kTokens % Config::kSplits == 0);
  static_assert(Config::kSlots < Config::kStages && kWarpgroups <= 3 &&
                Config::kStageK % (16 * Config::kBatch) == 0);
  static_assert(!Config::kPresplit || (Config::kStageK == 64 && Config::kTerms == 2 && Config::kSeparateLow));
};

// What this block works on.
template <class Config>
struct RouterTileWork {
  using Shape = RouterTileShape<Config>;
  int split, share;
  int64_t token, expert;  // the first ones
  int first, count;       // stages of K

  __device__ explicit RouterTileWork(const RouterTileParams& p) {
    const int rank = blockIdx.x % Shape::kCluster;
    split = rank % Config::kSplits;
    share = rank / Config::kSplits;
    const int64_t tile = blockIdx.x / Shape::kCluster;
    const int64_t expert_tiles = (p.num_experts + Shape::kExperts - 1) / Shape::kExperts;
    expert = tile % expert_tiles * Shape::kExperts;
    token = (tile / expert_tiles * Config::kShare + share) * Config::kTokens;
    const int total = int((p.hidden_size + Config::kStageK - 1) / Config::kStageK);
    const int each = (total + Config::kSplits - 1) / Config::kSplits;
    first = split * each;
    count = max(0, min(each, total - first));
  }
};

struct RouterTileRing {
  uint32_t data, barriers;
  int stage = 0;
  uint32_t parity = 0;

  __device__ uint32_t full() const { return barriers + stage * 16; }
  __device__ uint32_t empty() const { return barriers + stage * 16 + 8; }
  template <class Config>  // counts the bytes in the inbox
  __device__ uint32_t inbox() const {
    return barriers + Config::kStages * 16;
  }
  template <int kStages>
  __device__ void advance(int stages) {
    stage += stages;
    if (stage >= kStages) {
      stage -= kStages;
      parity ^= 1;
    }
  }
};

}  // namespace hpcjit::gemm
