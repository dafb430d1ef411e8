// What a warp keeps of a pair: queries, maxima, sums and O in registers.
//
// Lane 4 g + t of a warp: see decode_tile.cuh.
#pragma once
#include "attention/decode_work.cuh"
#include "hpcjit/ptx/copy.cuh"
#include "hpcjit/ptx/mma.cuh"

namespace hpcjit::attention {

// S^T of a tile, in blocks of 16 tokens by 8 query rows.
template <class Config>
using Logits = float[Config::kTile / 16][Config::kRowTiles][4];

template <class Config>
__device__ __forceinline__ void wait_for_team(int team) {
  if constexpr (Config::kRowGroups == 1) {
    __syncwarp();
  } else {
    asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(Config::kRowGroups * 32) : "memory");
  }
}

// What stays with a warp for one piece.
template <class Config>
struct State {
  static constexpr int kNt = Config::kRowTiles;
  uint32_t q[Config::kHeadDim / 16][kNt][2];  // unless they are in shared memory
  // A logit of a column is factor * z. z is S times the token's scale; with a cap it is the logit itself.
  float factor[kNt][2];
  float o[Config::kValueHeadDim / 16][kNt][4];
  float max[kNt][2];  // of z; the largest may be above it, see has_grown
  float sum[kNt][2];  // of this lane's tokens only
};

// The query rows of a warp as they are in memory: 16 dims of each row per step, in the order that the K fragment has. Where
// they are is found out before they are asked for, and they are not needed before `open`.
template <class Config>
struct Queries {
  using q_t = typename Config::q_t;
  static constexpr int kSteps = Config::kHeadDim / 16, kWords = sizeof(q_t) == 1 ? 1 : 2;
  bool live[Config::kRowTiles];
  const q_t* row[Config::kRowTiles];
  const float* scale_of_row[Config::kRowTiles];
  uint32_t raw[Config::kRowTiles][kSteps][kWords];
  float scale[Config::kRowTiles];

  __device__ __forceinline__ void aim(const DecodeParams& p, const Request& r, int head, int first_row) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int group = int(p.group);
#pragma unroll
    for (int nt = 0; nt < Config::kRowTiles; ++nt) {
      const int n = first_row + nt * 8 + g;
      const int j = Config::kCausal ? n / group : 0;
      const int q_head = head * group + n - j * group;
      live[nt] = n < r.q_len * group;
      row[nt] = static_cast<const q_t*>(p.q) + int64_t(r.q_start + j) * p.q_token_stride +
                q_head * p.q_head_stride + (Shape<Config>::kFp8 ? 4 : 2) * t;
      if constexpr (Config::kQScale)
        scale_of_row[nt] =
            p.q_scale + (r.q_start + j) * p.q_scale_token_stride + q_head * p.q_scale_head_stride;
    }
  }

  __device__ __forceinline__ void fetch() {
#pragma unroll
    for (int nt = 0; nt < Config::kRowTiles; ++nt) {
      scale[nt] = 1.f;
      if constexpr (Config::kQScale)
        if (live[nt]) scale[nt] = *scale_of_row[nt];
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        uint32_t (&x)[kWords] = raw[nt][s];
        if constexpr (sizeof(q_t) == 1) {
          x[0] = live[nt] ? *reinterpret_cast<const uint32_t*>(row[nt] + 16 * s) : 0u;
        } else if constexpr (Shape<Config>::kFp8) {
          const uint2 both =
              live[nt] ? *reinterpret_cast<const uint2*>(row[nt] + 16 * s) : make_uint2(0u, 0u);
          x[0] = both.x;
          x[1] = both.y;
        } else {
          x[0] = live[nt] ? *reinterpret_cast<const uint32_t*>(row[nt] + 16 * s) : 0u;
          x[1] = live[nt] ? *reinterpret_cast<const uint32_t*>(row[nt] + 16 * s + 8) : 0u;
        }
      }
    }
  }
};

// Q as the second operand.
template <class Config>
__device__ __forceinline__ void take_q(State<Config>& state, const Smem<Config>& smem,
                                       const Queries<Config>& queries) {
  using S = Shape<Config>;
  using q_t = typename Config::q_t;
  using mma_t = typename Config::mma_t;
  constexpr int kSteps = Config::kHeadDim / 16;
  constexpr bool kNormalise = sizeof(q_t) == 2 && S::kFp8 && Config::kNormaliseQ;
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int nt = 0; nt < Config::kRowTiles; ++nt) {
    float scale = queries.scale[nt];
    uint32_t raw[kSteps][2];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const auto& x = queries.raw[nt][s];
      if constexpr (sizeof(q_t) == 1) {
        mma::e4m3x4_to_fp16(x[0], raw[s][0], raw[s][1]);
      } else {
        raw[s][0] = x[0];
        raw[s][1] = x[1];
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
          reinterpret_cast<uint32_t*>(smem.queries() + 32 * s)[nt * 2 + i] = raw[s][i];
        } else {
          state.q[s][nt][i] = raw[s][i];
        }
    // The lane's columns in S^T are the rows that lanes 8 t and 8 t + 4 have loaded.
#pragma unroll
    for (int c = 0; c < 2; ++c) state.factor[nt][c] = __shfl_sync(~0u, scale, 8 * t + 4 * c);
  }
}

template <class Config>
__device__ __forceinline__ void open(const DecodeParams& p, State<Config>& state, const Smem<Config>& smem,
                                     const Queries<Config>& queries, int head) {
  take_q<Config>(state, smem, queries);
  float scale = float(p.scale * p.k_factor);
  if constexpr (Config::kKScale == 1) scale *= p.k_scale[head * p.k_scale_head_stride];
#pragma unroll
  for (int nt = 0; nt < Config::kRowTiles; ++nt)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      state.factor[nt][c] *= scale;
      state.max[nt][c] = -INFINITY;
      state.sum[nt][c] = 0.f;
    }
#pragma unroll
  for (int d = 0; d < Config::kValueHeadDim / 16; ++d)
#pragma unroll
    for (int nt = 0; nt < Config::kRowTiles; ++nt)
#pragma unroll
      for (int i = 0; i < 4; ++i) state.o[d][nt][i] = 0.f;
}

}  // namespace hpcjit::attention
