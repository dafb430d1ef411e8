// Who goes to which expert, found by every block for itself in shared memory; see mono.cuh.
//
// A bit for each token says whether it has chosen an expert, so rows of an expert are in the order of tokens, whatever the
// order of threads, and a token that names an expert twice has one row with the sum of its weights.
#pragma once
#include "moe/mono_shape.cuh"

namespace hpcjit::moe {

template <class Config>
class MonoPlan {
  using Shape = MonoShape<Config>;
  static constexpr int kThreads = Shape::kThreads, kWords = Shape::kMaskWords, kWarps = kThreads / 32;
  static constexpr int kPerThread = (Config::kExperts + kThreads - 1) / kThreads;

 public:
  __device__ explicit MonoPlan(const MonoBlock<Config>& block)
      : p_(block.p),
        mask_(block.template at<uint32_t>(Shape::kMaskAt)),
        ids_(block.template at<int16_t>(Shape::kIdsAt)),
        start_(block.template at<uint16_t>(Shape::kStartAt)),
        scan_(block.template at<uint32_t>(Shape::kScanAt)),
        tiles_(block.template at<MonoTile>(Shape::kTilesAt)),
        tokens_(block.template at<uint16_t>(Shape::kTokenAt)),
        weights_(block.template at<float>(Shape::kWeightsAt)),
        pair_weights_(block.template at<float>(Shape::kPairWeightsAt)) {}

  // Needs nothing from other grids.
  __device__ void clear() {
    for (int i = threadIdx.x; i < Config::kExperts * kWords; i += kThreads) mask_[i] = 0;
  }

  // After clear() and a barrier. All threads call it; returns the number of tiles, which are there after a barrier.
  __device__ uint32_t find_tiles() {
    const int pairs = p_.num_tokens * p_.top_k;
    for (int i = threadIdx.x; i < pairs; i += kThreads) read_pair(i);
    __syncthreads();
    return place_experts();
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
    if (here) atomicOr(mask_ + e * kWords + token / 32, 1u << (token % 32));
  }

  __device__ uint32_t rows_of(int e) const {
    uint32_t rows = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) rows += __popc(mask_[e * kWords + w]);
    return rows;
  }

  static __device__ uint32_t tiles_of(uint32_t rows) { return (rows + Shape::kRows - 1) / Shape::kRows; }

  // Rows (lower half) and tiles (upper half) of all experts before this thread's, and `total`, those of all.
  __device__ uint32_t sum_before(uint32_t own, uint32_t& total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t sum = own;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const uint32_t other = __shfl_up_sync(0xffffffffu, sum, offset);
      if (lane >= offset) sum += other;
    }
    if (lane == 31) scan_[warp] = sum;
    __syncthreads();
    uint32_t before = sum - own;
    total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) before += scan_[w];
      total += scan_[w];
    }
    return before;
  }

  __device__ uint32_t place_experts() {
    uint32_t rows[kPerThread], own = 0;
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int e = threadIdx.x * kPerThread + j;
      rows[j] = e < Config::kExperts ? rows_of(e) : 0;
      own += rows[j] | tiles_of(rows[j]) << 16;
    }
    uint32_t total;
    uint32_t at = sum_before(own, total);
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int e = threadIdx.x * kPerThread + j;
      if (e < Config::kExperts) start_[e] = uint16_t(at);
      write_tiles(e, at & 0xffff, rows[j], at >> 16);
      at += rows[j] | tiles_of(rows[j]) << 16;
    }
    return total >> 16;
  }

  __device__ void write_tiles(int e, uint32_t first, uint32_t rows, uint32_t tile) {
    for (uint32_t done = 0; done < rows; done += Shape::kRows) {
      const uint32_t count = min(rows - done, uint32_t(Shape::kRows));
      tiles_[tile++] = {uint16_t(e), uint16_t(count), first + done};
    }
  }

  __device__ void place_pair(int i) {
    const int e = ids_[i];
    if (e < 0) return;
    const uint32_t token = unsigned(i) / unsigned(p_.top_k);
    uint32_t row = start_[e];
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint32_t bits = mask_[e * kWords + w];
      const int below = int(token) - 32 * w;
      row += __popc(below >= 32 ? bits : below > 0 ? bits & ((1u << below) - 1) : 0u);
    }
    const int16_t* ids = ids_ + token * p_.top_k;
    const float* weights = pair_weights_ + token * p_.top_k;
    float weight = 0.f;
    for (int k = 0; k < p_.top_k; ++k)
      if (ids[k] == e) weight += weights[k];
    tokens_[row] = uint16_t(token);  // the same from every pair of a token and an expert
    weights_[row] = weight;
  }

  const MonoParams& p_;
  uint32_t* mask_;
  int16_t* ids_;
  uint16_t* start_;
  uint32_t* scan_;
  MonoTile* tiles_;
  uint16_t* tokens_;
  float* weights_;
  float* pair_weights_;
};

}  // namespace hpcjit::moe
