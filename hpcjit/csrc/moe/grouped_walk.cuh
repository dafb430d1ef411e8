// Which items of a grouped product a block works on; see grouped.cuh. Items are numbered tile by tile, all features of a tile
// before the next. A warp walks together.
//
// Plans are read around L1, where a line may be left from another plan: the plan may be that of a launch this one has not
// waited for.
#pragma once
#include "moe/grouped_shape.cuh"

namespace hpcjit::moe {

// Items in turn: a block's number, and every gridDim.x-th from there. Each lane reads the tile of one of the next 32, since
// memory takes longer than a short item.
template <int kTokens>
class GroupedWalk {
 public:
  __device__ explicit GroupedWalk(const GroupedParams& p) : p_(p) {
    fetch(p.most_tiles);  // before it is known how many there are
    num_tiles_ = min(__ldcg(p.num_tiles), p.most_tiles);
  }

  __device__ __forceinline__ bool next(GroupedItem& item) {
    if (at_ == 32) {
      at_ = 0;
      first_ += 32 * int(gridDim.x);
      fetch(num_tiles_);
    }
    if (first_ + at_ * int(gridDim.x) >= num_tiles_ * p_.feature_tiles) return false;
    item = {__shfl_sync(~0u, item_.expert, at_), __shfl_sync(~0u, item_.first, at_),
            __shfl_sync(~0u, item_.rows, at_), __shfl_sync(~0u, item_.feature_tile, at_)};
    ++at_;
    return true;
  }

 private:
  __device__ __forceinline__ void fetch(int end) {
    const int index = first_ + int(threadIdx.x % 32 * gridDim.x), tile = index / p_.feature_tiles;
    if (tile >= end) return;
    const uint4 found = __ldcg(p_.tiles + tile);
    item_ = {int(found.x), int(found.y), min(max(int(found.z), 0), kTokens), index % p_.feature_tiles};
  }

  const GroupedParams& p_;
  int first_ = int(blockIdx.x), at_ = 0, num_tiles_;
  GroupedItem item_ = {};
};

}  // namespace hpcjit::moe
