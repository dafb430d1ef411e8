// Router GEMM for many tokens and their gate, in one launch: gemm/router_tile.cuh, then moe/router_gate.cuh.
//
// The blocks that compute a token tile (its experts x kSplits) divide its tokens: the first `sharers` of them gate tokens
// share, share + sharers, ... when they have passed their own logits on. A block may wait only when all blocks of the
// tile have started. So each tile has a word that counts blocks that have started (low 16 bits) and has a bit for every
// share whose block has asked whether all have (above). A share that was asked for too early is left to the block that
// starts last, which finds the bits of exactly those. Blocks of a tile are neighbours and start together; that they do
// decides only who gates. Whoever completes the word sets it to 0.
//
// The copying thread counts while the others compute. counters: uint64_t words[token tiles], then the rows. Shared
// memory: when the product is done, each warp lays a row and a list of candidates over it.
#pragma once
#include "gemm/router_tile.cuh"
#include "moe/router_gate.cuh"

namespace hpcjit::moe {

struct RouterTopkTileParams : gemm::RouterTileParams {
  RouterGateParams gate;
};

constexpr int kStartedBits = 16, kMaxSharers = 64 - kStartedBits;

template <class Config>
struct TopkTileShape {
  using Product = gemm::RouterTileShape<Config>;
  static constexpr int kWarps = Product::kComputing / 32;
  static constexpr int kStaged = PassedRow<Config>::kStaged;
  static constexpr int kGateBytes = kWarps * (4 * kStaged + int(sizeof(CandidateList)));
  static constexpr int kSmem = Product::kBarriers >= kGateBytes ? Product::kSmem : kGateBytes + 1024;
};

__device__ __forceinline__ uint64_t add_to(uint64_t* word, uint64_t x) {
  uint64_t before;
  asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(word), "l"(x) : "memory");
  return before;
}

// Who gates a token tile, as one of its blocks sees it.
template <class Config>
struct TileCrowd {
  uint32_t blocks, own, sharers;
  uint64_t* word;

  __device__ __forceinline__ TileCrowd(const RouterTopkTileParams& p,
                                       const gemm::RouterTileWork<Config>& work) {
    constexpr uint32_t kExperts = gemm::RouterTileShape<Config>::kExperts;
    constexpr uint32_t kMost = Config::kTokens < kMaxSharers ? Config::kTokens : kMaxSharers;
    blocks = (uint32_t(p.num_experts) + kExperts - 1) / kExperts * Config::kSplits;
    own = uint32_t(work.expert) / kExperts * Config::kSplits + work.split;
    sharers = min(blocks, kMost);
    word = static_cast<uint64_t*>(p.gate.counters) + uint32_t(work.token) / Config::kTokens;
  }

  __device__ __forceinline__ uint64_t complete() const {
    return blocks | (((uint64_t(1) << sharers) - 1) << kStartedBits);
  }
  __device__ __forceinline__ uint32_t started(uint64_t seen) const {
    return uint32_t(seen) & ((1u << kStartedBits) - 1);
  }
};

// A Sink: logits go to their token's row, and to `out` if that is wanted.
template <class Config>
struct TileRows {
  using Params = RouterTopkTileParams;
  using Work = gemm::RouterTileWork<Config>;
  static constexpr bool kOnce = true;          // a row that was taken must not be written again
  static constexpr bool kTriggersLate = true;  // dependents read the rows

  __device__ __forceinline__ static int begin(const Params&, const Work&) { return 0; }
  __device__ __forceinline__ static void end(const Params&, const Work&, int) {}
  __device__ __forceinline__ static void put(const Params& p, int64_t token, int64_t expert,
                                             const float (&value)[4]) {
    float* target = passed_row(p.gate, p.num_experts, token) + expert;
    if (expert + 4 <= p.num_experts) {
      global::pass(target, make_float4(value[0], value[1], value[2], value[3]));
    } else {
#pragma unroll
      for (int j = 0; j < 3; ++j)
        if (expert + j < p.num_experts) global::pass(target + j, value[j]);
    }
    if constexpr (Config::kHasLogits) gemm::write_quad<Config>(p, token, expert, value);
  }

  __device__ __forceinline__ static void gate(const Params&, const Work&, float*) {}
};

// The Sink of the one launch.
template <class Config>
struct TileGate : TileRows<Config> {
  using Params = RouterTopkTileParams;
  using Work = gemm::RouterTileWork<Config>;
  static constexpr bool kTriggersLate = false;

  // The shares that this block gates, a bit for each.
  __device__ __forceinline__ static uint64_t& shares() {
    __shared__ uint64_t mask;
    return mask;
  }

  __device__ __forceinline__ static uint64_t begin(const Params& p, const Work& work) {
    return add_to(TileCrowd<Config>(p, work).word, 1);
  }

  __device__ __forceinline__ static void end(const Params& p, const Work& work, uint64_t seen) {
    const TileCrowd<Config> crowd(p, work);
    const bool last = crowd.started(seen) == crowd.blocks - 1;
    uint64_t mask = last ? seen >> kStartedBits : 0, now = seen + 1;
    if (crowd.own < crowd.sharers) {
      const uint64_t bit = uint64_t(1) << crowd.own;
      seen = add_to(crowd.word, bit << kStartedBits);
      now = seen + (bit << kStartedBits);
      if (crowd.started(seen) == crowd.blocks) mask |= bit;
    }
    if (now == crowd.complete()) *crowd.word = 0;
    shares() = mask;
  }

  __device__ __forceinline__ static void gate(const Params& p, const Work& work, float* memory) {
    using Shape = TopkTileShape<Config>;
    // No warp reads sums any more; that no other block does was waited for.
    named_barrier::sync<Shape::Product::kComputing>(1);
    const int warp = threadIdx.x / 32;
    auto* lists = reinterpret_cast<CandidateList*>(memory);
    float* staged = reinterpret_cast<float*>(lists + Shape::kWarps) + warp * Shape::kStaged;
    const uint32_t sharers = TileCrowd<Config>(p, work).sharers;
    const int64_t end = min(work.token + Config::kTokens, p.num_tokens);
    for (uint64_t mask = shares(); mask != 0; mask &= mask - 1) {
      const int share = __ffsll(int64_t(mask)) - 1;
      gate_passed<Config>(p.gate, p.num_experts, work.token + share + warp * sharers, Shape::kWarps * sharers,
                          end, staged, lists[warp]);
    }
  }
};

template <class Config>
__global__ void __launch_bounds__(gemm::RouterTileShape<Config>::kThreads, Config::kBlocksPerSm)
    router_topk_tile_kernel(const __grid_constant__ RouterTopkTileParams p,
                            const __grid_constant__ CUtensorMap x_map,
                            const __grid_constant__ CUtensorMap weight_map,
                            const __grid_constant__ CUtensorMap low_map) {
  gemm::router_tile<Config, TileGate<Config>>(p, x_map, weight_map, low_map);
}

template <class Config>
struct RouterTopkTile {
  using Params = RouterTopkTileParams;
  using Shape = TopkTileShape<Config>;

  static cudaError_t prepare() {
    return gemm::prepare_router_tile<Config>(router_topk_tile_kernel<Config>, Shape::kSmem);
  }

  static cudaError_t launch(const Params& p, cudaStream_t stream) {
    return gemm::launch_router_tile<Config>(router_topk_tile_kernel<Config>, Shape::kSmem, p, stream);
  }
};

}  // namespace hpcjit::moe
