// Where the tiles of a grouped product and the tokens of its rows come from; see grouped.cuh.
//
// MemoryPlan: from a launch of plan.cuh, or a caller. OwnPlan: with few pairs every block finds them for itself, which takes
// less time than a launch before this one; the first block writes them down for the launches that follow. Its rows of an
// expert are in the order of tokens, like those of plan.cuh, but a token that names an expert twice has one row.
#pragma once
#include <type_traits>

#include "hpcjit/ptx/pdl.cuh"
#include "moe/grouped_walk.cuh"

namespace hpcjit::moe {

template <class Config>
class MemoryPlan {
 public:
  using Walk = GroupedWalk<Config::kTokens>;

  __device__ MemoryPlan(const GroupedParams& p, uint8_t*) : p_(p) {}
  __device__ void clear() {}
  __device__ void find() {}
  __device__ void publish() const {}
  __device__ Walk walk() const { return Walk(p_); }
  __device__ int token(int row) const { return int(p_.sorted[row] / unsigned(p_.top_k)); }

 private:
  const GroupedParams& p_;
};

template <class Config>
class OwnPlan {
  using Shape = GroupedShape<Config, true>;
  using Room = typename Shape::Own;
  static constexpr int kThreads = Shape::kThreads;
  static constexpr int kPairsOfThread = (Room::kPairs + kThreads - 1) / kThreads;

 public:
  // Items in turn, like GroupedWalk.
  class Walk {
   public:
    __device__ Walk(const TokenTile* tiles, int num_tiles, int feature_tiles)
        : tiles_(tiles), num_items_(num_tiles * feature_tiles), feature_tiles_(feature_tiles) {}
    __device__ __forceinline__ bool next(GroupedItem& item) {
      if (at_ >= num_items_) return false;
      const TokenTile tile = tiles_[at_ / feature_tiles_];
      item = {tile.expert, int(tile.first), tile.rows, at_ % feature_tiles_};
      at_ += int(gridDim.x);
      return true;
    }

   private:
    const TokenTile* tiles_;
    int num_items_, feature_tiles_, at_ = int(blockIdx.x);
  };

  __device__ OwnPlan(const GroupedParams& p, uint8_t* smem)
      : p_(p),
        plan_{at<uint32_t>(smem, Room::kMask), at<uint16_t>(smem, Room::kStart),
              at<uint32_t>(smem, Room::kScan), at<TokenTile>(smem, 0)},
        tokens_(at<uint16_t>(smem, Room::kTokenList)) {}

  // Needs nothing from other grids.
  __device__ void clear() { plan_.clear(); }

  // After clear() and a barrier. By all threads of the block.
  __device__ void find() {
    pdl::wait();
    int expert[kPairsOfThread];
#pragma unroll
    for (int j = 0; j < kPairsOfThread; ++j) expert[j] = expert_of(pair(j));
#pragma unroll
    for (int j = 0; j < kPairsOfThread; ++j)
      if (expert[j] >= 0) plan_.add(expert[j], token_of(pair(j)));
    __syncthreads();
    num_tiles_ = int(plan_.place_experts());
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kPairsOfThread; ++j) place(pair(j), expert[j]);
    if (blockIdx.x == 0) write_tiles();
    __syncthreads();
  }

  // What the first block has written is there before its launch lets the next one start.
  __device__ void publish() const {
    if (blockIdx.x == 0) __threadfence();
  }

  __device__ Walk walk() const { return Walk(plan_.tiles, num_tiles_, p_.feature_tiles); }
  __device__ int token(int row) const { return tokens_[row]; }

 private:
  template <class T>
  __device__ static T* at(uint8_t* smem, int offset) {
    return reinterpret_cast<T*>(smem + Shape::kOwnAt + offset);
  }
  __device__ static int pair(int j) { return int(threadIdx.x) + j * kThreads; }
  __device__ int token_of(int pair) const { return int(unsigned(pair) / unsigned(p_.top_k)); }

  // Or -1.
  __device__ int expert_of(int pair) const {
    const int token = token_of(pair);
    if (token >= p_.own.num_tokens) return -1;
    const int id = p_.own.topk_ids[token * p_.own.ids_stride + pair % unsigned(p_.top_k)];
    const uint32_t e = uint32_t(id) - uint32_t(p_.own.expert_offset);
    return e < uint32_t(p_.num_experts) ? int(e) : -1;
  }

  __device__ void place(int pair, int expert) {
    const int token = token_of(pair);
    if (token >= p_.own.num_tokens) return;
    const int row = expert >= 0 ? int(plan_.row_of(expert, token)) : -1;
    if (row >= 0) tokens_[row] = uint16_t(token);
    if (blockIdx.x == 0) p_.own.position[pair] = row;
  }

  __device__ void write_tiles() const {
    for (int i = threadIdx.x; i < num_tiles_; i += kThreads) {
      const TokenTile tile = plan_.tiles[i];
      p_.own.tiles[i] = make_uint4(tile.expert, tile.first, tile.rows, 0);
    }
    if (threadIdx.x == 0) *p_.own.num_tiles = num_tiles_;
  }

  const GroupedParams& p_;
  typename Room::Plan plan_;
  uint16_t* tokens_;
  int num_tiles_ = 0;
};

template <class Config, bool kGateUp>
using GroupedPlan = std::conditional_t<(GroupedShape<Config, kGateUp>::Own::kExperts > 0), OwnPlan<Config>,
                                       MemoryPlan<Config>>;

}  // namespace hpcjit::moe
