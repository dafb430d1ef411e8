// The gate behind a router GEMM (gemm/router_stream.cuh, gemm/router_tile.cuh): how the logits of a token get from the
// blocks that compute them to the warp that gates it without a launch in between.
//
// Every token has a row in global memory whose words are zero until they are written (ptx/global.cuh); no gate can tell a
// logit of 0 from the -0 that stands for it. The warp that gates the token reads the row until no word is zero, puts the
// zeros back for the next launch, and goes on with the copy that it has.
//
// A warp waits only for blocks that are known to have started; whoever uses this says how it knows. Those write before they
// wait for anything, so waiting ends, whatever else the GPU runs and in whichever order blocks are placed.
#pragma once
#include "hpcjit/ptx/global.cuh"
#include "hpcjit/types.cuh"
#include "moe/gate.cuh"

namespace hpcjit::moe {

// `counters` holds what the users of this file count with, and `rows_offset` bytes further on the rows. `workspace`: see
// router_topk_pair.cuh.
struct RouterGateParams {
  const float* bias;
  const int32_t* num_valid_tokens;
  float* weights;
  int32_t* ids;
  void* counters;
  void* workspace;
  int64_t rows_offset;
  int64_t weights_stride;
  int64_t ids_stride;
  double scaling_factor;
};

// Config of gate.cuh.
template <class Config>
struct GateOf {
  using logits_t = float;
  static constexpr int kPerLane = Config::kPerLane, kVec = Config::kVec, kTopK = Config::kTopK;
  static constexpr int kNumGroups = Config::kNumGroups, kTopkGroups = Config::kTopkGroups;
  static constexpr int kSharedExperts = Config::kSharedExperts;
  static constexpr bool kExact = Config::kExactGate, kSigmoid = Config::kSigmoid, kScaled = Config::kScaled;
  static constexpr bool kRenormalize = Config::kRenormalize, kHasSoftcap = false, kHasBias = Config::kHasBias;
  static constexpr bool kRanked = Config::kRanked;
};

// --- rows -----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ int row_pitch(int64_t num_experts) {
  return int(num_experts + 3) / 4 * 4;
}

__device__ __forceinline__ float* passed_row(const RouterGateParams& p, int64_t num_experts, int64_t token) {
  return reinterpret_cast<float*>(static_cast<char*>(p.counters) + p.rows_offset) +
         token * row_pitch(num_experts);
}

// What a lane holds of a row: four neighbours out of every 128.
template <class Config>
struct PassedRow {
  static constexpr int kQuads = (Config::kPerLane + 3) / 4;
  static constexpr int kStaged = 128 * kQuads;  // floats of a row in shared memory
  // Whether each lane has all of its quads: 32 lanes have 128 experts at a time, so 32 or 64 leave lanes without any.
  static constexpr bool kFull = Config::kExactGate && Config::kPerLane % 4 == 0;
  uint4 quad[kQuads];

  // Calls f(quad, its first expert) for those inside the row.
  template <class F>
  __device__ __forceinline__ void each(int lane, int num_experts, F f) {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const int expert = 4 * (lane + 32 * i);
      if (kFull || expert < num_experts) f(quad[i], expert);
    }
  }

  __device__ __forceinline__ void load(const float* row, int lane, int num_experts) {
    each(lane, num_experts, [&](uint4& x, int expert) {
      asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                   : "l"(row + expert)
                   : "memory");
    });
  }

  // Whether all of it had been written.
  __device__ __forceinline__ bool whole(int lane, int num_experts) {
    bool found = true;
    each(lane, num_experts, [&](const uint4& x, int expert) {
      found &= x.x != 0;
      if constexpr (Config::kVec == 4) {
        found &= (x.y != 0) & (x.z != 0) & (x.w != 0);
      } else {
        found &= x.y != 0 || expert + 1 >= num_experts;
        found &= x.z != 0 || expert + 2 >= num_experts;
        found &= x.w != 0 || expert + 3 >= num_experts;
      }
    });
    return __all_sync(kAllLanes, found);
  }

  __device__ __forceinline__ void store(float* row, int lane, int num_experts) {
    each(lane, num_experts, [&](const uint4& x, int expert) { *reinterpret_cast<uint4*>(row + expert) = x; });
  }

  __device__ __forceinline__ void clear(float* row, int lane, int num_experts) {
    each(lane, num_experts,
         [&](const uint4&, int expert) { *reinterpret_cast<uint4*>(row + expert) = make_uint4(0, 0, 0, 0); });
  }
};

// --- tokens ---------------------------------------------------------------------------------------------------------

// One token, whose logits lie at `logits` in shared memory, by a warp.
template <class Config>
__device__ __forceinline__ void gate_token(const RouterGateParams& p, int64_t num_experts, int64_t token,
                                           const float* logits, CandidateList& list) {
  using Gate = GateOf<Config>;
  const int lane = threadIdx.x % 32;
  float* weights = p.weights + token * p.weights_stride;
  int32_t* ids = p.ids + token * p.ids_stride;
  if (Config::kHasValid && token >= *p.num_valid_tokens) {
    gate_padding<Gate>(lane, weights, ids);
  } else {
    const GateInputs inputs = {p.bias, int(num_experts), 0.f, float(p.scaling_factor)};
    gate_row<Gate>(lane, logits, inputs, weights, ids, list);
  }
}

// Tokens first, first + step, ... below `end`, by a warp. `staged` is shared memory of the warp's own.
template <class Config>
__device__ void gate_passed(const RouterGateParams& p, int64_t num_experts, int64_t first, int64_t step,
                            int64_t end, float* staged, CandidateList& list) {
  if (first >= end) return;
  const int lane = threadIdx.x % 32, count = int(num_experts);
  PassedRow<Config> row;
  row.load(passed_row(p, num_experts, first), lane, count);
#pragma unroll 1
  for (int64_t token = first; token < end; token += step) {
    float* source = passed_row(p, num_experts, token);
    while (!row.whole(lane, count)) row.load(source, lane, count);
    row.store(staged, lane, count);
    row.clear(source, lane, count);
    __syncwarp();
    if (token + step < end) row.load(passed_row(p, num_experts, token + step), lane, count);
    gate_token<Config>(p, num_experts, token, staged, list);
    __syncwarp();  // the row and the list are written again
  }
}

}  // namespace hpcjit::moe
