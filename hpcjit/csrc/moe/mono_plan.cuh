// Who goes to which expert, found by every block for itself in shared memory; see mono.cuh and token_plan.cuh. A token that
// names an expert twice has one row with the sum of its weights.
#pragma once
#include "moe/mono_shape.cuh"

namespace hpcjit::moe {

template <class Config>
class MonoPlan {
  using Shape = MonoShape<Config>;

 public:
  __device__ explicit MonoPlan(const MonoBlock<Config>& block)
      : p_(block.p),
        plan_{block.template at<uint32_t>(Shape::kMaskAt), block.template at<uint16_t>(Shape::kStartAt),
              block.template at<uint32_t>(Shape::kScanAt), block.template at<TokenTile>(Shape::kTilesAt)},
        ids_(block.template at<int16_t>(Shape::kIdsAt)),
        tokens_(block.template at<uint16_t>(Shape::kTokenAt)),
        weights_(block.template at<float>(Shape::kWeightsAt)),
        pair_weights_(block.template at<float>(Shape::kPairWeightsAt)) {}

  // Needs nothing from other grids.
  __device__ void clear() { plan_.clear(); }

  // After clear() and a barrier. All threads call it; returns the number of tiles, which are there after a barrier.
  __device__ uint32_t find_tiles() {
    const int pairs = p_.num_tokens * p_.top_k;
    for (int i = threadIdx.x; i < pairs; i += Shape::kThreads) read_pair(i);
    __syncthreads();
    return plan_.place_experts();
  }

  // After find_tiles() and a barrier: tokens and weights of the rows. `thread` of kCount threads calls it.
  template <int kCount>
  __device__ void place_pairs(int thread) {
    const int pairs = p_.num_tokens * p_.top_k;
    for (int i = thread; i < pairs; i += kCount) place_pair(i);
  }

 private:
  __device__ void read_pair(int i) {
    const uint32_t token = unsigned(i) / unsigned(p_.top_k), k = unsigned(i) % unsigned(p_.top_k);
    const uint32_t e = uint32_t(p_.topk_ids[token * p_.ids_stride + k]) - uint32_t(p_.expert_offset);
    const bool here = e < uint32_t(p_.num_experts);
    ids_[i] = here ? int16_t(e) : int16_t(-1);
    pair_weights_[i] = p_.topk_weights[token * p_.weights_stride + k];
    if (here) plan_.add(int(e), int(token));
  }

  __device__ void place_pair(int i) {
    const int e = ids_[i];
    if (e < 0) return;
    const uint32_t token = unsigned(i) / unsigned(p_.top_k);
    const uint32_t row = plan_.row_of(e, int(token));
    const int16_t* ids = ids_ + token * p_.top_k;
    const float* weights = pair_weights_ + token * p_.top_k;
    float weight = 0.f;
    for (int k = 0; k < p_.top_k; ++k)
      if (ids[k] == e) weight += weights[k];
    tokens_[row] = uint16_t(token);  // the same from every pair of a token and an expert
    weights_[row] = weight;
  }

  const MonoParams& p_;
  typename Shape::Plan plan_;
  int16_t* ids_;
  uint16_t* tokens_;
  float* weights_;
  float* pair_weights_;
};

}  // namespace hpcjit::moe
