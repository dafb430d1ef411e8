// Joins two attention results over disjoint sets of keys, each with its log-sum-exp (natural logarithm):
//
//   lse = log(exp(lse_a) + exp(lse_b))        out = (exp(lse_a) out_a + exp(lse_b) out_b) / exp(lse)
//
// kLanes neighbouring lanes of a warp share a head and move a vector each per step, kVecsPerLane steps at once;
// the loads of the first ones are under way before the weights are needed. fp32 throughout, with the larger
// log-sum-exp taken out; bits repeat. A side of weight 0 contributes nothing, whatever it holds.
//
// out may be out_a or out_b: a thread writes only elements that it alone reads, after reading them. lse may be
// lse_a or lse_b: a head's lanes have all read both before the first of them writes (__syncwarp).
#pragma once
#include "hpcjit/launch.cuh"
#include "hpcjit/ptx/pdl.cuh"
#include "hpcjit/tile/vec.cuh"

namespace hpcjit::attention {

struct MergeStateParams {
  const void* out_a;
  const float* lse_a;
  const void* out_b;
  const float* lse_b;
  void* out;
  float* lse;
  int64_t num_tokens;
  int64_t num_heads;
  int64_t head_dim;
  int64_t out_a_token_stride;
  int64_t out_a_head_stride;
  int64_t lse_a_token_stride;
  int64_t lse_a_head_stride;
  int64_t out_b_token_stride;
  int64_t out_b_head_stride;
  int64_t lse_b_token_stride;
  int64_t lse_b_head_stride;
  int64_t out_token_stride;
  int64_t out_head_stride;
  int64_t lse_token_stride;
  int64_t lse_head_stride;
};

struct MergedLse {
  float weight_a;
  float weight_b;
  float lse;

  // Infinities before any difference: equal ones share, -inf weighs nothing. NaN reaches all three values.
  __device__ MergedLse(float a, float b) {
    const float largest = fmaxf(a, b);
    const float exp_a = a == -INFINITY ? 0.f : a == largest ? 1.f : expf(a - largest);
    const float exp_b = b == -INFINITY ? 0.f : b == largest ? 1.f : expf(b - largest);
    const float total = exp_a + exp_b;
    weight_a = total == 0.f ? 0.f : exp_a / total;
    weight_b = total == 0.f ? 0.f : exp_b / total;
    lse = largest + log1pf(a == largest ? exp_b : exp_a);
  }
};

// One head of one token, as one of the lanes that share it sees it: every kLanes-th vector from its first on.
template <class Config>
struct MergedHead {
  using input_t = typename Config::input_t;
  static constexpr int kVec = Config::kVec, kVecs = Config::kVecsPerLane;

  const input_t* a;
  const input_t* b;
  input_t* out;
  int num_vecs;  // from the lane's first one to the end of the head
  Vec<input_t, kVec> raw_a[kVecs], raw_b[kVecs];

  __device__ MergedHead(const MergeStateParams& p, int64_t token, int64_t head, int lane)
      : a(static_cast<const input_t*>(p.out_a) + token * p.out_a_token_stride + head * p.out_a_head_stride +
          lane * kVec),
        b(static_cast<const input_t*>(p.out_b) + token * p.out_b_token_stride + head * p.out_b_head_stride +
          lane * kVec),
        out(static_cast<input_t*>(p.out) + token * p.out_token_stride + head * p.out_head_stride +
            lane * kVec),
        num_vecs(int(p.head_dim / kVec) - lane) {}

  __device__ bool has(int vec) const { return Config::kExact || vec < num_vecs; }

  __device__ void load(int first) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int vec = first + i * Config::kLanes;
      if (!has(vec)) continue;
      raw_a[i].load(a + vec * kVec);
      raw_b[i].load(b + vec * kVec);
    }
  }

  __device__ void store(int first, const MergedLse& merged) const {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int vec = first + i * Config::kLanes;
      if (!has(vec)) continue;
      float x[kVec], y[kVec];
      raw_a[i].to(x);
      raw_b[i].to(y);
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        const float part_a = merged.weight_a == 0.f ? 0.f : x[j];  // 0 * NaN is NaN
        const float part_b = merged.weight_b == 0.f ? 0.f : y[j];
        x[j] = fmaf(merged.weight_a, part_a, merged.weight_b * part_b);
      }
      Vec<input_t, kVec> z;
      z.from(x);
      z.template store<Config::kStreamOut ? Cache::kStream : Cache::kDefault>(out + vec * kVec);
    }
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kVecsPerLane == 1 ? 2048 / Config::kThreads : 1)
    merge_state_kernel(const __grid_constant__ MergeStateParams p) {
  constexpr int kHeads = Config::kThreads / Config::kLanes;
  constexpr int kStep = Config::kLanes * Config::kVecsPerLane;
  pdl::trigger();
  const int64_t first = int64_t(blockIdx.x) * kHeads;
  const int64_t first_token = first / p.num_heads;
  const uint32_t flat = uint32_t(first - first_token * p.num_heads) + threadIdx.x / Config::kLanes;
  const uint32_t token_step = flat / uint32_t(p.num_heads);
  const int64_t token = first_token + token_step;
  const int64_t head = flat - token_step * uint32_t(p.num_heads);
  const bool inside = token < p.num_tokens;
  int lane = threadIdx.x % Config::kLanes;
  asm("" : "+r"(lane));  // with an offset made of masked bits nvcc splits the 16-byte store into words

  MergedHead<Config> row(p, token, head, lane);
  pdl::wait();
  float lse_a = 0.f, lse_b = 0.f;
  if (inside) {
    lse_a = p.lse_a[token * p.lse_a_token_stride + head * p.lse_a_head_stride];
    lse_b = p.lse_b[token * p.lse_b_token_stride + head * p.lse_b_head_stride];
    row.load(0);
  }
  __syncwarp();
  if (!inside) return;
  const MergedLse merged(lse_a, lse_b);
  row.store(0, merged);
  if (lane == 0) p.lse[token * p.lse_token_stride + head * p.lse_head_stride] = merged.lse;
  if constexpr (!Config::kExact) {
    for (int vec = kStep; vec < row.num_vecs; vec += kStep) {
      row.load(vec);
      row.store(vec, merged);
    }
  }
}

template <class Config>
struct MergeState {
  using Params = MergeStateParams;

  static cudaError_t prepare() {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, merge_state_kernel<Config>);
  }

  static cudaError_t launch(const Params& p, cudaStream_t stream) {
    const int64_t blocks = ceil_div(p.num_tokens * p.num_heads, Config::kThreads / Config::kLanes);
    return hpcjit::launch(merge_state_kernel<Config>, {blocks, Config::kThreads, 0, Config::kPdl}, stream, p);
  }
};

}  // namespace hpcjit::attention
