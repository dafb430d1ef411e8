// Softmax over the experts of each token and its top-k.
//
//   x = logits                     or  softcap * tanh(logits / softcap)   (kHasSoftcap)
//   p = softmax(x) in fp32
//   ids = the kTopK largest logits or  of p + bias                        (kHasBias; bias steers the choice only)
//   weights = p[ids]               or  p[ids] / sum(p[ids])               (kRenormalize)
//
// One warp per token; its lanes hold the row in vectors of kVec neighbouring experts. Scores are ordered by
// value, then by the lowest id; NaN comes last and weighs 0. With every logit -inf or NaN all weights are 0.
//
// kRanked: kTopK rounds of redux.max over the lanes' best scores, each striking out every lane that has the
// maximum, end at a bound that at least kTopK scores reach, and few more. Those go to shared memory, one lane
// takes each, and its rank is the number of better ones: work that does not grow with kTopK times the row. A
// bound of -inf (too few ordinary scores, or too many equal ones) or more than 32 candidates leave the token
// to the other way: a round for each winner, which scans the row again. Shared memory: 32 candidates per warp.
//
// Renormalised weights without a bias need no sum over all experts: it cancels. kPrefetch (few tokens) pulls
// the row into L2 while the predecessor still runs; that reads nothing.
#pragma once
#include "hpcjit/launch.cuh"
#include "hpcjit/math/reduce.cuh"
#include "hpcjit/ptx/pdl.cuh"
#include "hpcjit/ptx/prefetch.cuh"
#include "hpcjit/tile/vec.cuh"

namespace hpcjit::moe {

struct TopkSoftmaxParams {
  const void* logits;
  const float* bias;
  float* weights;
  int32_t* ids;
  int64_t num_tokens;
  int64_t num_experts;
  int64_t logits_stride;
  int64_t weights_stride;
  int64_t ids_stride;
  double softcap;
};

constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr uint32_t kStruckOut = 0, kNanKey = 1, kMinusInfinityKey = 0x007fffffu;

// Larger float, larger key; -inf maps above kNanKey.
__device__ __forceinline__ uint32_t order_key(float x) {
  if (x != x) return kNanKey;
  const uint32_t u = __float_as_uint(x + 0.f);  // -0 becomes +0: they tie
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}

// Inverse of order_key for keys of numbers.
__device__ __forceinline__ float keyed_value(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// exp(x - largest), with 1 for the largest itself (inf - inf) and 0 for NaN and where no logit is above -inf.
__device__ __forceinline__ float exponential(float x, float largest) {
  if (x == largest) return largest == -INFINITY ? 0.f : 1.f;
  const float e = __expf(x - largest);
  return e == e ? e : 0.f;
}

// The same where both are ordinary; NaN otherwise. Below 2^-126 it is 0, which no sum that holds a 1 notices.
__device__ __forceinline__ float quick_exponential(float x, float largest) {
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"((x - largest) * 1.4426950408889634f));
  return e;
}

struct alignas(8) Candidate {
  float score;
  int id;
};
struct alignas(16) CandidatePair {
  Candidate a, b;
};
constexpr int kMaxCandidates = 32;

// Without short cuts, so without branches.
__device__ __forceinline__ bool better(const Candidate& a, const Candidate& b) {
  return (a.score > b.score) | ((a.score == b.score) & (a.id < b.id));
}

// A candidate to shared memory by a predicated store: the compiler makes a branch of `if`.
__device__ __forceinline__ void store_if(bool condition, uint32_t address, float score, int id) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.s32 p, %0, 0;\n@p st.shared.v2.b32 [%1], {%2, %3};\n}" ::"r"(int(condition)),
      "r"(address), "f"(score), "r"(id)
      : "memory");
}

// One of a token's winners, or none where rank is not below kTopK.
struct Winner {
  int rank;
  int id;
  float logit;
};

// A token's scores: first the logits, then what the experts are chosen by.
template <class Config>
struct TokenRow {
  using logits_t = typename Config::logits_t;
  static constexpr int kPerLane = Config::kPerLane;
  static constexpr int kVec = Config::kVec;
  static constexpr int kTopK = Config::kTopK;

  const logits_t* logits;
  int num_experts;
  int lane;
  float softcap;
  float score[kPerLane];

  // Ids of a lane grow with i; the first id is lane * kVec.
  __device__ static constexpr int step(int i) { return i / kVec * (32 * kVec) + i % kVec; }
  __device__ int id(int i) const { return lane * kVec + step(i); }
  __device__ bool inside(int i) const { return id(i) < num_experts; }

  __device__ float capped(float logit) const {
    if constexpr (Config::kHasSoftcap) return softcap * tanhf(logit / softcap);
    return logit;
  }

  __device__ void prefetch() const {
    constexpr int kLine = 128 / int(sizeof(logits_t));
    if (lane * kLine < num_experts) prefetch_l2(logits + lane * kLine);  // 32 lines: 1024 fp32
  }

  __device__ void load() {
#pragma unroll
    for (int i = 0; i < kPerLane; i += kVec) {
      float v[kVec];
#pragma unroll
      for (int j = 0; j < kVec; ++j) v[j] = -INFINITY;  // padding weighs nothing
      if (inside(i)) {                                  // kVec divides num_experts
        Vec<logits_t, kVec> raw;
        raw.load(logits + id(i));
        raw.to(v);
      }
#pragma unroll
      for (int j = 0; j < kVec; ++j) score[i + j] = v[j];
    }
  }

  // The lane's best score; NaN does not count.
  __device__ float best() const {
    float x = -INFINITY;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) x = fmaxf(x, score[i]);
    return x;
  }

  // What padding stands for in a sum of exponentials: -inf, which a softcap would make -softcap.
  __device__ float weighed(int i) const {
    if constexpr (Config::kHasSoftcap) return inside(i) ? capped(score[i]) : -INFINITY;
    return score[i];
  }

  // 1 / sum of exponentials, 0 for a sum of 0.
  __device__ float inverse_total(float largest) const {
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) total += quick_exponential(weighed(i), largest);
    total = reduce_lanes<Add>(total);
    if (total != total) {
      total = 0.f;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) total += exponential(weighed(i), largest);
      total = reduce_lanes<Add>(total);
    }
    return total > 0.f ? 1.f / total : 0.f;
  }

  __device__ void add_bias(const float* bias, float largest, float inverse_total) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (!inside(i)) continue;
      const float x = capped(score[i]);
      score[i] = x == x ? exponential(x, largest) * inverse_total + bias[id(i)] : x;
    }
  }

  // Puts the scores that reach `bound` into the list, and fills it up; returns how many there are. More than
  // kMaxCandidates: writes nothing.
  __device__ int collect(float bound, Candidate* list) const {
    int own = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) own += score[i] >= bound;
    int end = own;  // of this lane's part of the list: a prefix sum
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int before = __shfl_up_sync(kAllLanes, end, offset);
      if (lane >= offset) end += before;
    }
    const int count = __shfl_sync(kAllLanes, end, 31);
    if (count > kMaxCandidates) return count;
    uint32_t address = uint32_t(__cvta_generic_to_shared(list + end - own));
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const bool reaches = score[i] >= bound;
      store_if(reaches, address, score[i], id(i));
      address += reaches ? uint32_t(sizeof(Candidate)) : 0u;
    }
    if (lane >= count) list[lane] = {-INFINITY, INT32_MAX};
    __syncwarp();
    return count;
  }

  // `best_key` is the lane's, `top` the largest of all. False: choose by rounds.
  __device__ bool choose_by_rank(uint32_t best_key, uint32_t top, Candidate* list, Winner& winner) const {
#pragma unroll
    for (int k = 1; k < kTopK; ++k) {
      if (best_key == top) best_key = kStruckOut;
      top = __reduce_max_sync(kAllLanes, best_key);
    }
    if (top <= kMinusInfinityKey) return false;
    const int count = collect(keyed_value(top), list);
    if (count > kMaxCandidates) return false;
    const Candidate own = list[lane];
    int rank = lane < count ? 0 : kTopK;
#pragma unroll 1
    for (int i = 0; i < count; i += 4) {
      const CandidatePair* pair = reinterpret_cast<const CandidatePair*>(list + i);
      const CandidatePair first = pair[0], second = pair[1];
      rank += better(first.a, own);
      rank += better(first.b, own);
      rank += better(second.a, own);
      rank += better(second.b, own);
    }
    // A lane without a candidate names no expert.
    winner = {rank, own.id, Config::kHasBias && rank < kTopK ? to_float(logits[own.id]) : own.score};
    return true;
  }

  __device__ Winner choose_by_rounds() const {
    uint32_t key[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) key[i] = inside(i) ? order_key(score[i]) : kStruckOut;
    Winner winner = {lane, 0, 0.f};
#pragma unroll 1
    for (int k = 0; k < kTopK; ++k) {
      uint32_t best_key = key[0];
      int best_id = id(0);
#pragma unroll
      for (int i = 1; i < kPerLane; ++i)
        if (key[i] > best_key) {
          best_key = key[i];
          best_id = id(i);
        }
      const uint32_t top = __reduce_max_sync(kAllLanes, best_key);
      const int top_id = __reduce_min_sync(kAllLanes, best_key == top ? best_id : INT32_MAX);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i)
        if (top_id == id(i)) key[i] = kStruckOut;
      if (lane == k) winner.id = top_id;
    }
    winner.logit = to_float(logits[winner.id]);
    return winner;
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    topk_softmax_kernel(const __grid_constant__ TopkSoftmaxParams p) {
  using logits_t = typename Config::logits_t;
  constexpr int kTopK = Config::kTopK;
  constexpr bool kNeedsTotal = Config::kHasBias || !Config::kRenormalize;
  __shared__ CandidatePair lists[Config::kThreads / 32][kMaxCandidates / 2];

  pdl::trigger_at<Config::kTrigger, pdl::kAtStart>();
  const int lane = threadIdx.x % 32;
  const int64_t token = int64_t(blockIdx.x) * (Config::kThreads / 32) + threadIdx.x / 32;
  if (token >= p.num_tokens) return;
  TokenRow<Config> row{static_cast<const logits_t*>(p.logits) + token * p.logits_stride, int(p.num_experts),
                       lane, float(p.softcap)};
  if constexpr (Config::kPrefetch) row.prefetch();
  pdl::wait();
  row.load();

  uint32_t best_key = order_key(row.best());
  uint32_t top = __reduce_max_sync(kAllLanes, best_key);
  const float largest = row.capped(keyed_value(top));
  float inverse_total = 1.f;
  if constexpr (kNeedsTotal) inverse_total = row.inverse_total(largest);
  if constexpr (Config::kHasBias) {
    row.add_bias(p.bias, largest, inverse_total);
    best_key = order_key(row.best());
    top = __reduce_max_sync(kAllLanes, best_key);
  }

  Winner winner;
  Candidate* list = &lists[threadIdx.x / 32][0].a;
  if (!Config::kRanked || !row.choose_by_rank(best_key, top, list, winner)) winner = row.choose_by_rounds();

  float weight = 0.f;
  if (winner.rank < kTopK) weight = exponential(row.capped(winner.logit), largest) * inverse_total;
  if constexpr (Config::kRenormalize) {
    const float sum = reduce_lanes<Add>(weight);
    weight = sum > 0.f ? weight / sum : 0.f;
  }
  if (winner.rank < kTopK) {
    p.weights[token * p.weights_stride + winner.rank] = weight;
    p.ids[token * p.ids_stride + winner.rank] = winner.id;
  }
  pdl::trigger_at<Config::kTrigger, pdl::kAtEnd>();
}

template <class Config>
struct TopkSoftmax {
  using Params = TopkSoftmaxParams;

  static cudaError_t prepare() {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, topk_softmax_kernel<Config>);
  }

  static cudaError_t launch(const Params& p, cudaStream_t stream) {
    const int64_t blocks = ceil_div(p.num_tokens, Config::kThreads / 32);
    return hpcjit::launch(topk_softmax_kernel<Config>, {blocks, Config::kThreads, 0, Config::kPdl}, stream,
                          p);
  }
};

}  // namespace hpcjit::moe
