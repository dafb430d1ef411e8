// The weighted sums of the fused mixture of experts: for some tokens and a chunk of columns
//
//   out[t] = sum over k of weight[t, k] * row[position[t, k]] + shared[t], in the order of k, in fp32
//
// A pair without a row (position -1) is not read. A thread has kVec neighbouring columns of a token at a time, 16 threads
// 128 columns. Rows lie as `stage_rows` has left them; they are read around L1, where a line would be of an earlier chunk.
#pragma once
#include "hpcjit/tile/vec.cuh"
#include "moe/fused_moe_rows.cuh"
#include "moe/grouped_queue.cuh"

namespace hpcjit::moe {

struct SumParams {
  void* rows;               // row_t [slots][2 * chunk][num_rows][64]
  const int32_t* position;  // [num_tokens][top_k]
  const float* weights;
  const bf16* shared;
  bf16* out;
  int64_t weights_stride, shared_stride, out_stride;
  int num_tokens, num_rows, hidden_size, top_k;
};

template <class Config>
class TokenSum {
  using row_t = typename Config::partial_t;
  using Raw = Vec<row_t, kVec>;
  static constexpr int kThreads = 256;
  static constexpr int kRows =
      (Config::kBlocksPerSm == 1 ? 16 : 8) / Raw::kWords;  // that a thread reads at a time
  static constexpr int kBatch = kRows < 8 ? kRows : 8, kTogether = kRows / kBatch;

 public:
  __device__ TokenSum(const SumParams& p, const QueueParams& q, const GroupedItem& item)
      : p_(p),
        first_token_(item.first),
        first_column_(item.chunk * q.chunk * kWeightRows),
        pieces_(q.chunk * 16) {
    rows_ = static_cast<const row_t*>(p.rows) +
            int64_t(item.chunk % unsigned(q.slots)) * q.chunk * kWeightRows * p.num_rows;
  }

  // By 256 threads; the lanes of a warp stay together.
  __device__ __forceinline__ void run() const {
    const int end = min(kTokensOfSum, p_.num_tokens - first_token_) * pieces_;
#pragma unroll 1
    for (int i = threadIdx.x; i / 32 * 32 < end; i += kThreads * kTogether) sum(i, end);
  }

 private:
  struct Place {
    int token, column;  // column of the chunk
  };

  __device__ Place place(int i) const {
    return {first_token_ + int(i / unsigned(pieces_)), int(i % unsigned(pieces_)) * kVec};
  }

  __device__ __forceinline__ void sum(int i, int end) const {
    float total[kTogether][kVec] = {};
#pragma unroll 1
    for (int first = 0; first < p_.top_k; first += kBatch) {
      int row[kTogether];
      float weight[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) find(i + j * kThreads, end, first, row[j], weight[j]);
      Raw raw[kTogether][kBatch];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) load(place(i + j * kThreads).column, row[j], raw[j]);
#pragma unroll
      for (int j = 0; j < kTogether; ++j) add(row[j], weight[j], raw[j], total[j]);
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j)
      if (i + j * kThreads < end) finish(place(i + j * kThreads), total[j]);
  }

  // Lane l of a half warp gets the row and the weight of choice first + l.
  __device__ __forceinline__ void find(int i, int end, int first, int& row, float& weight) const {
    const int lane = threadIdx.x % 16, k = first + lane;
    row = -1;
    weight = 1.f;
    if (i >= end || lane >= kBatch || k >= p_.top_k) return;
    const int64_t token = place(i).token;
    row = p_.position[token * p_.top_k + k];
    if constexpr (!Config::kWeightsOnInput) weight = p_.weights[token * p_.weights_stride + k];
  }

  __device__ static int of_choice(int x, int k) {
    return __shfl_sync(0xffffffffu, x, int(threadIdx.x % 32 & 16) + k);
  }
  __device__ static float of_choice(float x, int k) {
    return __shfl_sync(0xffffffffu, x, int(threadIdx.x % 32 & 16) + k);
  }

  __device__ __forceinline__ void load(int column, int row, Raw (&raw)[kBatch]) const {
    const row_t* rows = rows_ + int64_t(column / 64) * p_.num_rows * 64;
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int r = of_choice(row, k);
      if (r < 0) continue;
      const uint4* source = reinterpret_cast<const uint4*>(rows + int64_t(r) * 64);
#pragma unroll
      for (int word = 0; word < Raw::kWords; ++word)
        raw[k].word(word) = __ldcg(source + ((column % 64 / kVec * Raw::kWords + word) ^ (r & 7)));
    }
  }

  __device__ __forceinline__ void add(int row, float weight, const Raw (&raw)[kBatch],
                                      float (&total)[kVec]) const {
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const float w = of_choice(weight, k);
      if (of_choice(row, k) < 0) continue;
      float value[kVec];
      raw[k].to(value);
#pragma unroll
      for (int i = 0; i < kVec; ++i) total[i] += w * value[i];
    }
  }

  __device__ __forceinline__ void finish(const Place& at, float (&total)[kVec]) const {
    const int column = first_column_ + at.column;
    if (column >= p_.hidden_size) return;
    if constexpr (Config::kHasShared) {
      Vec<bf16, kVec> raw;
      float value[kVec];
      raw.load(p_.shared + at.token * p_.shared_stride + column);
      raw.to(value);
#pragma unroll
      for (int i = 0; i < kVec; ++i) total[i] += value[i];
    }
    Vec<bf16, kVec> result;
    result.from(total);
    result.store(p_.out + at.token * p_.out_stride + column);
  }

  const SumParams& p_;
  int first_token_, first_column_, pieces_;
  const row_t* rows_;
};

}  // namespace hpcjit::moe
