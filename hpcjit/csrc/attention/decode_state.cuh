// What a warp keeps of a pair: queries, maxima, sums and O in registers; and what the warps of a team tell each other.
//
// Lane 4 g + t of a warp: see decode_tile.cuh.
#pragma once
#include "attention/decode_work.cuh"
#include "hpcjit/ptx/copy.cuh"
#include "hpcjit/ptx/mma.cuh"

namespace hpcjit::attention {

// S of the tokens of a step, of 16 tokens by 8 query rows each.
template <class Config>
using Logits = float[Shape<Config>::kBlocks][Config::kRowTiles][4];

template <class Config>
__device__ __forceinline__ void wait_for_team(int team) {
  if constexpr (Config::kRowGroups == 1) {
    __syncwarp();
  } else {
    asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(Config::kRowGroups * 32) : "memory");
  }
}

// Which part of the tokens and dims of its team's tile a warp has.
template <class Config>
__device__ __forceinline__ int part_of_warp() {
  return Config::kSplit ? int(threadIdx.x) / 32 % Config::kRowGroups : 0;
}

// Whether it is so in any lane of those who share the tile. With kSplit a barrier of the team.
template <class Config>
__device__ __forceinline__ bool any_of_team(bool x) {
  if constexpr (!Config::kSplit) return __any_sync(~0u, x);
  const int team = threadIdx.x / 32 / Config::kRowGroups;
  int result;
  asm volatile(
      "{\n"
      ".reg .pred p, q;\n"
      "setp.ne.s32 p, %1, 0;\n"
      "bar.red.or.pred q, %2, %3, p;\n"
      "selp.s32 %0, 1, 0, q;\n"
      "}"
      : "=r"(result)
      : "r"(int(x)), "r"(team + 1), "n"(Config::kRowGroups * 32)
      : "memory");
  return result != 0;
}

// Second operands for tiles of 8 columns, two tiles per 16 bytes of the lane.
template <int kNt>
__device__ __forceinline__ void load_operands(uint32_t (&x)[kNt][2], const uint4* from) {
#pragma unroll
  for (int nt = 0; nt < kNt; nt += 2) {
    const uint4 y = from[16 * nt];
    x[nt][0] = y.x, x[nt][1] = y.y;
    if (nt + 1 < kNt) x[nt + 1][0] = y.z, x[nt + 1][1] = y.w;
  }
}

template <int kNt>
__device__ __forceinline__ void store_operands(uint4* to, const uint32_t (&x)[kNt][2]) {
#pragma unroll
  for (int nt = 0; nt < kNt; nt += 2) {
    const bool two = nt + 1 < kNt;
    to[16 * nt] = make_uint4(x[nt][0], x[nt][1], two ? x[nt + 1][0] : 0u, two ? x[nt + 1][1] : 0u);
  }
}

// What stays with a warp for one piece.
template <class Config>
struct State {
  static constexpr int kNt = Config::kRowTiles;
  uint32_t q[Config::kHeadDim / 16][kNt][2];  // unless they are in shared memory
  // A logit of a column is factor * z. z is S times the token's scale; with a cap it is the logit itself.
  float factor[kNt][2];  // with kSharedFactors the one of base 2
  int end[kNt][2];       // first token that a column must not see
  int begin[kNt][2];     // first token that it may see
  float o[Shape<Config>::kWarpDims / 16][kNt][4];
  float max[kNt][2];  // of z
  float sum[kNt][2];  // of this lane's tokens only
};

// Q as the second operand: 16 dims of each row per step, in the order that the K fragment has.
template <class Config>
__device__ __forceinline__ void load_q(const DecodeParams& p, State<Config>& state, const Smem<Config>& smem,
                                       const Request& r, int head, int first_row) {
  using S = Shape<Config>;
  using q_t = typename Config::q_t;
  using mma_t = typename Config::mma_t;
  constexpr int kSteps = Config::kHeadDim / 16;
  constexpr bool kNormalise = sizeof(q_t) == 2 && S::kFp8 && Config::kNormaliseQ;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int group = int(p.group);
#pragma unroll
  for (int nt = 0; nt < Config::kRowTiles; ++nt) {
    const int n = first_row + nt * 8 + g;
    const int j = Config::kCausal ? n / group : 0;
    const bool live = n < r.q_len * group;
    const int q_head = head * group + n - j * group;
    const q_t* row =
        static_cast<const q_t*>(p.q) + int64_t(r.q_start + j) * p.q_token_stride + q_head * p.q_head_stride;
    float scale = 1.f;
    if constexpr (Config::kQScale)
      if (live) scale = p.q_scale[(r.q_start + j) * p.q_scale_token_stride + q_head * p.q_scale_head_stride];
    uint32_t raw[kSteps][2];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if constexpr (sizeof(q_t) == 1) {
        const uint32_t x = live ? *reinterpret_cast<const uint32_t*>(row + 16 * s + 4 * t) : 0u;
        mma::e4m3x4_to_fp16(x, raw[s][0], raw[s][1]);
      } else if constexpr (S::kFp8) {
        const uint2 x = live ? *reinterpret_cast<const uint2*>(row + 16 * s + 4 * t) : make_uint2(0u, 0u);
        raw[s][0] = x.x;
        raw[s][1] = x.y;
      } else {
        raw[s][0] = live ? *reinterpret_cast<const uint32_t*>(row + 16 * s + 2 * t) : 0u;
        raw[s][1] = live ? *reinterpret_cast<const uint32_t*>(row + 16 * s + 2 * t + 8) : 0u;
      }
    }
    if constexpr (kNormalise) {
      // bf16 reaches further than fp16: a power of two, which is exact, brings the row's largest magnitude below 2.
      float largest = 0.f;
#pragma unroll
      for (int s = 0; s < kSteps; ++s)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          largest = fmaxf(largest, fmaxf(fabsf(__uint_as_float(raw[s][i] << 16)),
                                         fabsf(__uint_as_float(raw[s][i] & 0xffff0000u))));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      const uint32_t exponent = __float_as_uint(largest) & 0x7f800000u;
      const bool usable = exponent > 0x01000000u && exponent < 0x7e000000u;
      const float power = usable ? __uint_as_float(exponent) : 1.f;
      const float inverse = 1.f / power;
      scale *= power;
#pragma unroll
      for (int s = 0; s < kSteps; ++s)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          raw[s][i] = pack2<mma_t>(__uint_as_float(raw[s][i] << 16) * inverse,
                                   __uint_as_float(raw[s][i] & 0xffff0000u) * inverse);
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if constexpr (Config::kSharedQ) {
          uint4* place = smem.queries() + 32 * (s * S::kOperands + nt / 2);
          if (part_of_warp<Config>() == 0) reinterpret_cast<uint32_t*>(place)[nt % 2 * 2 + i] = raw[s][i];
        } else {
          state.q[s][nt][i] = raw[s][i];
        }
    // The lane's columns in S^T are the rows that lanes 8 t and 8 t + 4 have loaded.
#pragma unroll
    for (int c = 0; c < 2; ++c) state.factor[nt][c] = __shfl_sync(~0u, scale, 8 * t + 4 * c);
  }
}

// Tokens before `end` and from `begin` on are those that query row n of a request may see.
struct Visible {
  int begin;
  int end;
};

template <class Config>
__device__ __forceinline__ Visible visible(const DecodeParams& p, const Request& r, int n) {
  const int behind = Config::kCausal ? r.q_len - 1 - n / int(p.group) : 0;
  const int end = r.seq_len - max(behind, 0);
  return {Config::kWindow ? end - int(p.window) : 0, end};
}

// A logit in base 2 per z. Where a scale is 0 all logits are: -inf must stay what it is.
template <class Config>
__device__ __forceinline__ float to_base2(float factor) {
  return Config::kSoftcap ? float(kLog2e) : fmaxf(factor * float(kLog2e), 1e-30f);
}
template <class Config>
__device__ __forceinline__ float base2(float factor) {
  return Shape<Config>::kSharedFactors ? factor : to_base2<Config>(factor);
}

template <class Config>
__device__ __forceinline__ void open(const DecodeParams& p, State<Config>& state, const Smem<Config>& smem,
                                     const Request& r, int head, int first_row) {
  load_q<Config>(p, state, smem, r, head, first_row);
  float scale = float(p.scale * p.k_factor);
  if constexpr (Config::kKScale == 1) scale *= p.k_scale[head * p.k_scale_head_stride];
#pragma unroll
  for (int nt = 0; nt < Config::kRowTiles; ++nt)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const Visible seen = visible<Config>(p, r, first_row + nt * 8 + threadIdx.x % 4 * 2 + c);
      state.factor[nt][c] *= scale;
      if constexpr (Shape<Config>::kSharedFactors) {
        const int lane = threadIdx.x % 32;
        if (lane < 4 && part_of_warp<Config>() == 0)
          smem.factors()[nt * 8 + lane * 2 + c] = state.factor[nt][c];
        state.factor[nt][c] = to_base2<Config>(state.factor[nt][c]);
      }
      state.end[nt][c] = seen.end;
      state.begin[nt][c] = seen.begin;
      state.max[nt][c] = -INFINITY;
      state.sum[nt][c] = 0.f;
    }
#pragma unroll
  for (int d = 0; d < Shape<Config>::kWarpDims / 16; ++d)
#pragma unroll
    for (int nt = 0; nt < Config::kRowTiles; ++nt)
#pragma unroll
      for (int i = 0; i < 4; ++i) state.o[d][nt][i] = 0.f;
}

}  // namespace hpcjit::attention
