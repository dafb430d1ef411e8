// The gate of one token by one warp: scores of its experts, the kTopK best, their weights.
//
//   x = logits, or softcap * tanh(logits / softcap)  (kHasSoftcap)
//   s = softmax(x), or sigmoid(x)                    (kSigmoid)                  in fp32
//   ids = the kTopK largest logits, or of s + bias   (kHasBias; bias steers the choice only)
//   weights = s[ids], over their sum (kRenormalize), times scaling_factor
//
// kNumGroups > 1: only from the kTopkGroups best groups of neighbouring experts. A group counts as much as its best
// expert or, with a bias, its two best together. kSharedExperts more columns hold num_experts, ... with weight 1.
//
// Lanes hold a row in vectors of kVec neighbouring experts; a group lies in kGroupLanes neighbouring lanes. Scores
// are ordered by value, then by the lowest id; NaN comes last and weighs 0.
//
// kRanked: kTopK rounds of redux.max over the lanes' best scores, each striking out every lane that has the maximum,
// end at a bound that at least kTopK scores reach, and few more. Their ids go to a list, one lane takes each, and its
// rank is the number of better ones: work that does not grow with kTopK times the row. A bound of -inf (too few
// ordinary scores, or too many equal ones) or more than 32 candidates leave the token to the other way: a round for
// each winner, which scans the row again.
//
// Renormalised softmax weights without a bias need no sum over all experts: it cancels.
#pragma once
#include "hpcjit/math/reduce.cuh"
#include "hpcjit/tile/vec.cuh"
#include "moe/gate_lanes.cuh"

namespace hpcjit::moe {

// What the rows of a launch share; bias, softcap and scaling_factor where Config says so.
struct GateInputs {
  const float* bias;
  int num_experts;
  float softcap;
  float scaling_factor;
};

constexpr int kMaxCandidates = 32;

// Shared memory of a warp.
struct alignas(16) CandidateList {
  float score[kMaxCandidates];
  int id[kMaxCandidates];
};

// One of a token's winners, or none where rank is not below kTopK.
struct Winner {
  int rank;
  int id;
  float logit;
};

template <class Config>
struct GateRow {
  using logits_t = typename Config::logits_t;
  static constexpr int kPerLane = Config::kPerLane;
  static constexpr int kVec = Config::kVec;
  static constexpr int kTopK = Config::kTopK;
  static constexpr int kNumGroups = Config::kNumGroups;
  static constexpr bool kGrouped = kNumGroups > 1;
  static constexpr int padded(int n) { return n <= 1 ? 1 : 2 * padded((n + 1) / 2); }
  static constexpr int kGroupLanes = 32 / padded(kNumGroups);
  static constexpr bool kNeedsTotal = !Config::kSigmoid && (Config::kHasBias || !Config::kRenormalize);
  static_assert(kNumGroups <= 32 && kTopK <= 32, "one lane for each");

  const logits_t* logits;
  const GateInputs& inputs;
  int lane;
  int first, end;  // of the experts that the lane may hold: its own first one, and the end of its group
  float score[kPerLane];  // logits, then what the experts are chosen by
  float largest = 0.f, inverse_total = 1.f;
  bool kept = true;  // the lane's group

  __device__ GateRow(const logits_t* logits, const GateInputs& inputs, int lane)
      : logits(logits), inputs(inputs), lane(lane), first(lane * kVec), end(inputs.num_experts) {
    if constexpr (kGrouped) {
      const int group = lane / kGroupLanes, size = inputs.num_experts / kNumGroups;
      first = group * size + lane % kGroupLanes * kVec;
      end = group < kNumGroups ? (group + 1) * size : 0;
    }
  }

  // Ids of a lane grow with i.
  __device__ static constexpr int step(int i) { return i / kVec * (kGroupLanes * kVec) + i % kVec; }
  __device__ int id(int i) const { return first + step(i); }
  __device__ bool inside(int i) const { return Config::kExact || id(i) < end; }

  __device__ float capped(float logit) const {
    if constexpr (Config::kHasSoftcap) return inputs.softcap * tanhf(logit / inputs.softcap);
    return logit;
  }

  // kVec neighbours from expert id(i) on, where the row has them; it ends at a multiple of kVec.
  template <class T>
  __device__ void read(const T* row, int i, float (&v)[kVec]) const {
#pragma unroll
    for (int j = 0; j < kVec; ++j) v[j] = -INFINITY;  // padding is never chosen
    if (!inside(i)) return;
    Vec<T, kVec> raw;
    raw.load(row + id(i));
    raw.to(v);
  }

  __device__ void load() {
#pragma unroll
    for (int i = 0; i < kPerLane; i += kVec) {
      float v[kVec];
      read(logits, i, v);
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

  // What an expert weighs by in a sum of exponentials: for padding -inf, which a softcap would make -softcap.
  __device__ float weighed(int i) const {
    if constexpr (Config::kHasSoftcap) return inside(i) ? capped(score[i]) : -INFINITY;
    return score[i];
  }

  // 1 / sum of exponentials, 0 for a sum of 0.
  __device__ void add_up() {
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
    inverse_total = total > 0.f ? 1.f / total : 0.f;
  }

  // What an expert is chosen by. Not open to contraction: a candidate's is computed twice and must come out the same.
  __device__ float choice(float logit, float bias) const {
    if constexpr (!Config::kHasBias) return logit;
    if constexpr (Config::kSigmoid) return __fadd_rn(quick_sigmoid(logit), bias);
    const float x = capped(logit);
    return x == x ? __fmaf_rn(exponential(x, largest), inverse_total, bias) : x;
  }

  __device__ void add_bias() {
#pragma unroll
    for (int i = 0; i < kPerLane; i += kVec) {
      float v[kVec];
      read(inputs.bias, i, v);
#pragma unroll
      for (int j = 0; j < kVec; ++j) score[i + j] = choice(score[i + j], v[j]);
    }
  }

  __device__ float weight(float logit) const {
    if constexpr (Config::kSigmoid) return sigmoid(logit);
    return exponential(capped(logit), largest) * inverse_total;
  }

  // --- groups ---

  // The two best scores of the lane, without NaN, which the minimum of two would turn into the other.
  __device__ void two_best(float& a, float& b) const {
    a = score[0];
    b = -INFINITY;
#pragma unroll
    for (int i = 1; i < kPerLane; ++i) {
      b = fmaxf(b, fminf(a, score[i]));
      a = max_or_nan(a, score[i]);
    }
    if (a == a) return;
    a = b = -INFINITY;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const float x = score[i] == score[i] ? score[i] : -INFINITY;
      b = fmaxf(b, fminf(a, x));
      a = fmaxf(a, x);
    }
  }

  __device__ float group_score(float& lane_best) const {
    float a = lane_best, b = -INFINITY;
    if constexpr (Config::kHasBias) two_best(a, b);
    lane_best = a;
#pragma unroll
    for (int offset = 1; offset < kGroupLanes; offset *= 2) {
      const float other = __shfl_xor_sync(kAllLanes, a, offset);
      if constexpr (Config::kHasBias)
        b = fmaxf(fminf(a, other), fmaxf(b, __shfl_xor_sync(kAllLanes, b, offset)));
      a = fmaxf(a, other);
    }
    if (!Config::kHasBias || inputs.num_experts == kNumGroups) return a;
    const float sum = a + b;
    return sum == sum ? sum : -INFINITY;  // inf - inf
  }

  // Each lane of a group compares it with some of the others; groups of equal score go by the lowest index.
  __device__ void choose_groups(float& lane_best) {
    const float own = group_score(lane_best);
    const int group = lane / kGroupLanes;
    int rank = 0;
#pragma unroll
    for (int i = 0; i < (kNumGroups + kGroupLanes - 1) / kGroupLanes; ++i) {
      const int other = lane % kGroupLanes + i * kGroupLanes;
      const float x = __shfl_sync(kAllLanes, own, other * kGroupLanes % 32);
      rank += (other < kNumGroups) & ((x > own) | ((x == own) & (other < group)));
    }
#pragma unroll
    for (int offset = 1; offset < kGroupLanes; offset *= 2) rank += __shfl_xor_sync(kAllLanes, rank, offset);
    kept = rank < Config::kTopkGroups && group < kNumGroups;
  }

  // --- the choice ---

  // Lists the experts whose scores reach `bound`; returns how many there are. More than kMaxCandidates: lists none.
  __device__ int collect(float bound, CandidateList& list) const {
    if constexpr (kGrouped) bound = kept ? bound : NAN;  // which no score reaches
    int own = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) own = count_if_reached(own, score[i], bound);
    const int last = prefix_sum(own);
    const int count = __shfl_sync(kAllLanes, last, 31);
    if (count > kMaxCandidates) return count;
    uint32_t address = shared_address(list.id + last - own);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) append_if_reached(address, id(i), score[i], bound);
    __syncwarp();
    return count;
  }

  // How many candidates are better than `own`, that of this lane if it has one.
  __device__ int rank_of(float own, int own_id, int count, const CandidateList& list) const {
    int rank = 0;
    const auto compare = [&](int i) {
      const float4 other = *reinterpret_cast<const float4*>(list.score + i);
      rank = count_if_greater(rank, other.x, own);
      rank = count_if_greater(rank, other.y, own);
      rank = count_if_greater(rank, other.z, own);
      rank = count_if_greater(rank, other.w, own);
    };
#pragma unroll
    for (int i = 0; i < kTopK; i += 4) compare(i);  // there are so many at least
#pragma unroll 1
    for (int i = (kTopK + 3) / 4 * 4; i < count; i += 4) compare(i);
    const int sum = __reduce_add_sync(kAllLanes, lane < count ? rank : 0);
    if (2 * sum == count * (count - 1)) return rank;  // all scores differ
#pragma unroll 1
    for (int i = 0; i < count; ++i) rank += (list.score[i] == own) & (list.id[i] < own_id);
    return rank;
  }

  // `best_key` is the lane's, `top` the largest of all. False: choose by rounds.
  __device__ bool choose_by_rank(uint32_t best_key, uint32_t top, CandidateList& list, Winner& winner) const {
#pragma unroll
    for (int k = 1; k < kTopK; ++k) {
      if (best_key == top) best_key = kStruckOut;
      top = __reduce_max_sync(kAllLanes, best_key);
    }
    if (top <= kMinusInfinityKey) return false;
    const int count = collect(keyed_value(top), list);
    if (count > kMaxCandidates) return false;
    winner.id = lane < count ? list.id[lane] : 0;
    winner.logit = to_float(logits[winner.id]);
    float own = choice(winner.logit, Config::kHasBias ? inputs.bias[winner.id] : 0.f);
    own = lane < count ? own : -INFINITY;  // below every candidate: its rank is no winner's
    list.score[lane] = own;
    __syncwarp();
    winner.rank = rank_of(own, winner.id, count, list);
    __syncwarp();  // the list may be filled again
    return true;
  }

  __device__ Winner choose_by_rounds() const {
    uint32_t key[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) key[i] = kept && inside(i) ? order_key(score[i]) : kStruckOut;
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

  __device__ Winner choose(CandidateList& list) {
    float lane_best;
    if constexpr (!Config::kSigmoid) {
      lane_best = best();
      largest = capped(keyed_value(__reduce_max_sync(kAllLanes, number_key(lane_best))));
      if constexpr (kNeedsTotal) add_up();
    }
    if constexpr (Config::kHasBias) add_bias();
    if constexpr (Config::kHasBias || Config::kSigmoid) lane_best = best();
    if constexpr (kGrouped) choose_groups(lane_best);
    const uint32_t best_key = kept ? number_key(lane_best) : kStruckOut;
    const uint32_t top = __reduce_max_sync(kAllLanes, best_key);
    Winner winner;
    if (Config::kRanked && choose_by_rank(best_key, top, list, winner)) return winner;
    return choose_by_rounds();
  }
};

// By all lanes of a warp: the weights and ids of the token whose logits lie at `logits`, in global or shared memory.
// `list` is the warp's own. Config has logits_t, kPerLane, kVec, kTopK, kNumGroups, kTopkGroups, kSharedExperts, kSigmoid,
// kRenormalize, kHasSoftcap, kHasBias and kRanked; kVec divides what a group has of experts, and logits and bias are aligned to
// it; 32 * kPerLane covers the padded groups.
template <class Config>
__device__ __forceinline__ void gate_row(int lane, const typename Config::logits_t* logits,
                                         const GateInputs& inputs, float* weights, int32_t* ids,
                                         CandidateList& list) {
  constexpr int kTopK = Config::kTopK;
  GateRow<Config> row(logits, inputs, lane);
  row.load();
  const Winner winner = row.choose(list);
  float weight = row.weight(winner.logit);
  weight = winner.rank < kTopK ? weight : 0.f;
  if constexpr (Config::kRenormalize) weight = divided(weight, reduce_lanes<Add>(weight));
  if (winner.rank < kTopK) {
    weights[winner.rank] = Config::kScaled ? weight * inputs.scaling_factor : weight;
    ids[winner.rank] = winner.id;
  }
  if (lane < Config::kSharedExperts) {
    weights[kTopK + lane] = 1.f;
    ids[kTopK + lane] = inputs.num_experts + lane;
  }
}

// What a row of padding gets instead: no expert in any column.
template <class Config>
__device__ __forceinline__ void gate_padding(int lane, float* weights, int32_t* ids) {
  for (int i = lane; i < Config::kTopK + Config::kSharedExperts; i += 32) {
    weights[i] = 0.f;
    ids[i] = -1;
  }
}

}  // namespace hpcjit::moe
