// One warp's arithmetic on one tile: S^T = K Q^T, online softmax, O^T += V^T P^T.
//
// Tokens lie on the rows of the products and query rows on the columns, so eight query rows fill an
// instruction and a warp needs nobody else: it keeps the maximum, the sum and O of the tokens that it saw.
// Lane 4 g + t: in S^T it holds tokens g and g + 8 and the query rows 2 t and 2 t + 1 of each 16 x 8 block;
// in O^T dims in the place of tokens. FP8 data is widened to fp16, which is exact; the order of dims inside a
// block is then the one in which bytes lie in registers, and Q and O follow it (load_q, store_sums).
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

// With few query rows the sums are made in two chains, for a product waits long for the one before.
template <class Config>
__device__ __forceinline__ void multiply_k(const State<Config>& state, uint32_t k, Logits<Config>& s) {
  using S = Shape<Config>;
  using K = typename S::K;
  using mma_t = typename Config::mma_t;
  constexpr int kChains = Config::kRowTiles == 1 ? 2 : 1;
  const int lane = threadIdx.x % 32, row = lane & 15, high = lane >> 4;
#pragma unroll
  for (int mt = 0; mt < Shape<Config>::kBlocks; ++mt) {
    float chains[kChains][Config::kRowTiles][4] = {};
#pragma unroll
    for (int pair = 0; pair < K::kChunks / 2; ++pair) {
      uint32_t r[4];
      mma::ldmatrix_x4(r, k + K::offset(mt * 16 + row, 2 * pair + high));
      if constexpr (S::kFp8) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t a[4];
          mma::e4m3x4_to_fp16(r[2 * half], a[0], a[2]);
          mma::e4m3x4_to_fp16(r[2 * half + 1], a[1], a[3]);
#pragma unroll
          for (int nt = 0; nt < Config::kRowTiles; ++nt)
            mma::m16n8k16<mma_t>(chains[half % kChains][nt], a, state.q[2 * pair + half][nt]);
        }
      } else {
#pragma unroll
        for (int nt = 0; nt < Config::kRowTiles; ++nt)
          mma::m16n8k16<mma_t>(chains[pair % kChains][nt], r, state.q[pair][nt]);
      }
    }
#pragma unroll
    for (int nt = 0; nt < Config::kRowTiles; ++nt)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        s[mt][nt][i] = kChains == 2 ? chains[0][nt][i] + chains[kChains - 1][nt][i] : chains[0][nt][i];
  }
}

// Every query is read once per step: tokens are the inner loop, and all of S is in the making.
template <class Config>
__device__ __forceinline__ void multiply_k_shared(const uint4* queries, uint32_t k, Logits<Config>& s) {
  using S = Shape<Config>;
  using K = typename S::K;
  using mma_t = typename Config::mma_t;
  constexpr int kHalves = S::kFp8 ? 2 : 1;  // of 16 dims, in 32 bytes
  const int lane = threadIdx.x % 32, row = lane & 15, high = lane >> 4;
#pragma unroll
  for (int mt = 0; mt < S::kBlocks; ++mt)
#pragma unroll
    for (int nt = 0; nt < Config::kRowTiles; ++nt)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[mt][nt][i] = 0.f;
#pragma unroll
  for (int pair = 0; pair < K::kChunks / 2; ++pair) {
    uint32_t q[kHalves][Config::kRowTiles][2];
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
      load_operands(q[half], queries + 32 * S::kOperands * (kHalves * pair + half));
#pragma unroll
    for (int mt = 0; mt < S::kBlocks; ++mt) {
      uint32_t r[4];
      mma::ldmatrix_x4(r, k + K::offset(mt * 16 + row, 2 * pair + high));
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        uint32_t a[4] = {r[0], r[1], r[2], r[3]};
        if constexpr (S::kFp8) {
          mma::e4m3x4_to_fp16(r[2 * half], a[0], a[2]);
          mma::e4m3x4_to_fp16(r[2 * half + 1], a[1], a[3]);
        }
#pragma unroll
        for (int nt = 0; nt < Config::kRowTiles; ++nt) mma::m16n8k16<mma_t>(s[mt][nt], a, q[half][nt]);
      }
    }
  }
}

// From S to z (see State); masked ones -inf. `scales` of K and V per token, where there are such.
template <class Config>
__device__ __forceinline__ void to_logits(const DecodeParams& p, const State<Config>& state,
                                          const float* scales, int first, bool masked, Logits<Config>& s) {
  const int g = threadIdx.x % 32 / 4;
  const float cap = Config::kSoftcap ? float(p.softcap) : 0.f,
              inverse = Config::kSoftcap ? float(1. / p.softcap) : 0.f;
#pragma unroll
  for (int mt = 0; mt < Shape<Config>::kBlocks; ++mt)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = mt * 16 + half * 8 + g;
      const float of_token = Config::kKScale == 2 ? scales[token] : 1.f;
#pragma unroll
      for (int nt = 0; nt < Config::kRowTiles; ++nt)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& z = s[mt][nt][2 * half + c];
          if constexpr (Config::kKScale == 2) z *= of_token;
          if constexpr (Config::kSoftcap) z = cap * tanhf(z * state.factor[nt][c] * inverse);
          if (!Config::kBranchMask && masked &&
              (first + token >= state.end[nt][c] || first + token < state.begin[nt][c]))
            z = -INFINITY;
        }
    }
}

// The tokens of a step that a row must not see: z becomes -inf. What a row may see is found out anew, for few steps
// have such tokens and registers are dear.
template <class Config>
__device__ __forceinline__ void mask(const DecodeParams& p, const Request& r, int first_row, int first,
                                     Logits<Config>& s) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int nt = 0; nt < Config::kRowTiles; ++nt)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const Visible seen = visible<Config>(p, r, first_row + nt * 8 + lane % 4 * 2 + c);
#pragma unroll
      for (int mt = 0; mt < Shape<Config>::kBlocks; ++mt)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int token = first + mt * 16 + half * 8 + lane / 4;
          if (token >= seen.end || token < seen.begin) s[mt][nt][2 * half + c] = -INFINITY;
        }
    }
}

__device__ __forceinline__ float max_of_column(float m) {
#pragma unroll
  for (int offset = 4; offset < 32; offset *= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, offset));
  return m;
}

// From the maxima of lanes to those of all who share the tile.
template <class Config>
__device__ __forceinline__ void join_maxima(const Smem<Config>& smem, float (&max)[Config::kRowTiles][2]) {
  using S = Shape<Config>;
#pragma unroll
  for (int nt = 0; nt < Config::kRowTiles; ++nt)
#pragma unroll
    for (int c = 0; c < 2; ++c) max[nt][c] = max_of_column(max[nt][c]);
  if constexpr (!Config::kSplit) return;
  const int part = part_of_warp<Config>(), row = threadIdx.x % 4 * 2;
  float* maxima = smem.maxima();
#pragma unroll
  for (int nt = 0; nt < Config::kRowTiles; ++nt)
    if (threadIdx.x % 32 < 4)
      *reinterpret_cast<float2*>(maxima + part * S::kRows + nt * 8 + row) =
          make_float2(max[nt][0], max[nt][1]);
  wait_for_team<Config>(threadIdx.x / 32 / Config::kRowGroups);
#pragma unroll
  for (int i = 1; i < S::kParts; ++i)
#pragma unroll
    for (int nt = 0; nt < Config::kRowTiles; ++nt) {
      const float* other = maxima + (part + i) % S::kParts * S::kRows + nt * 8 + row;
#pragma unroll
      for (int c = 0; c < 2; ++c) max[nt][c] = fmaxf(max[nt][c], other[c]);
    }
}

// Whether a maximum has grown so much that O must follow. A lazy one may lag behind by a factor of 2^8 in the weights,
// which float32 and the exponents of 16 bits have room for; not if scales of tokens come on top.
template <class Config>
__device__ __forceinline__ bool has_grown(float max, float m, float factor) {
  constexpr float kLag = Config::kVScale == 2 ? 0.f : 8.f;
  if constexpr (Config::kLazyMax) return (m - max) * base2<Config>(factor) > kLag;  // false for -inf - -inf
  return m > max;
}

// Turns z into weights and brings max, sum and O to the new maximum.
template <class Config>
__device__ __forceinline__ void soften(State<Config>& state, const Smem<Config>& smem, Logits<Config>& s) {
  constexpr int kNt = Config::kRowTiles;
  float max[kNt][2];
  bool grown = false;
#pragma unroll
  for (int nt = 0; nt < kNt; ++nt)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float m = state.max[nt][c];
#pragma unroll
      for (int mt = 0; mt < Shape<Config>::kBlocks; ++mt) m = fmaxf(m, fmaxf(s[mt][nt][c], s[mt][nt][2 + c]));
      if constexpr (!Config::kLazyMax) m = max_of_column(m);
      grown |= has_grown<Config>(state.max[nt][c], m, state.factor[nt][c]);
      max[nt][c] = m;
    }
  if (any_of_team<Config>(grown)) {
    if constexpr (Config::kLazyMax) join_maxima<Config>(smem, max);
#pragma unroll
    for (int nt = 0; nt < kNt; ++nt)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float shrink =
            exp2_fast((state.max[nt][c] - finite_or_zero(max[nt][c])) * base2<Config>(state.factor[nt][c]));
        state.max[nt][c] = max[nt][c];
        state.sum[nt][c] *= shrink;
#pragma unroll
        for (int d = 0; d < Shape<Config>::kWarpDims / 16; ++d) {
          state.o[d][nt][c] *= shrink;
          state.o[d][nt][2 + c] *= shrink;
        }
      }
  }
#pragma unroll
  for (int nt = 0; nt < kNt; ++nt)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float factor = base2<Config>(state.factor[nt][c]);
      const float offset = -finite_or_zero(Config::kLazyMax ? state.max[nt][c] : max[nt][c]) * factor;
#pragma unroll
      for (int mt = 0; mt < Shape<Config>::kBlocks; ++mt)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float weight = exp2_fast(fmaf(s[mt][nt][2 * half + c], factor, offset));
          s[mt][nt][2 * half + c] = weight;
          state.sum[nt][c] += weight;
        }
    }
}

// Weights of 8 bits would cost more precision than the output's rounding: in bf16 the product is made with what is left
// of them as well.
template <class Config>
__device__ __forceinline__ void pack_weights(const float (&s)[Config::kRowTiles][4],
                                             uint32_t (&weights)[Config::kRowTiles][2],
                                             uint32_t (&rest)[Config::kRowTiles][2]) {
  using mma_t = typename Config::mma_t;
#pragma unroll
  for (int nt = 0; nt < Config::kRowTiles; ++nt)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float x = s[nt][2 * half], y = s[nt][2 * half + 1];
      const uint32_t rounded = pack2<mma_t>(x, y);
      weights[nt][half] = mma::transpose(rounded);
      if constexpr (Shape<Config>::kBf16Mma)
        rest[nt][half] = mma::transpose(
            pack2<mma_t>(x - __uint_as_float(rounded << 16), y - __uint_as_float(rounded & 0xffff0000u)));
    }
}

// Adds the products of 16 tokens, block `mt` of V.
template <class Config>
__device__ __forceinline__ void multiply_block(State<Config>& state, uint32_t v, int mt,
                                               const uint32_t (&weights)[Config::kRowTiles][2],
                                               const uint32_t (&rest)[Config::kRowTiles][2]) {
  using S = Shape<Config>;
  using V = typename S::V;
  using mma_t = typename Config::mma_t;
  constexpr int kNt = Config::kRowTiles, kChunks = V::kChunks / S::kParts;
  const int lane = threadIdx.x % 32;
  // The second matrix is eight tokens further for bytes (two dims per element), eight dims for 16 bits.
  const int row = S::kFp8 ? lane & 15 : (lane & 7) + (lane >> 4) * 8;
  const int high = S::kFp8 ? lane >> 4 : (lane >> 3) & 1;
  const int first = part_of_warp<Config>() * kChunks;
#pragma unroll
  for (int pair = 0; pair < kChunks / 2; ++pair) {
    uint32_t r[4];
    mma::ldmatrix_x4_trans(r, v + V::offset(mt * 16 + row, first + 2 * pair + high));
    if constexpr (S::kFp8) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // Bytes of a register: two dims of one token, two dims of the next. Tokens go together.
        uint32_t a[4];
        mma::e4m3x4_to_fp16(__byte_perm(r[2 * half], 0, 0x3120), a[0], a[1]);
        mma::e4m3x4_to_fp16(__byte_perm(r[2 * half + 1], 0, 0x3120), a[2], a[3]);
#pragma unroll
        for (int nt = 0; nt < kNt; ++nt) mma::m16n8k16<mma_t>(state.o[2 * pair + half][nt], a, weights[nt]);
      }
    } else {
#pragma unroll
      for (int nt = 0; nt < kNt; ++nt) mma::m16n8k16<mma_t>(state.o[pair][nt], r, weights[nt]);
      if constexpr (S::kBf16Mma)
#pragma unroll
        for (int nt = 0; nt < kNt; ++nt) mma::m16n8k16<mma_t>(state.o[pair][nt], r, rest[nt]);
    }
  }
}

template <class Config>
__device__ __forceinline__ void multiply_v(State<Config>& state, uint32_t v, const Logits<Config>& s) {
#pragma unroll
  for (int mt = 0; mt < Shape<Config>::kBlocks; ++mt) {
    uint32_t weights[Config::kRowTiles][2], rest[Config::kRowTiles][2];
    pack_weights<Config>(s[mt], weights, rest);
    multiply_block<Config>(state, v, mt, weights, rest);
  }
}

// With kSplit every warp needs the weights of all tokens for its dims.
template <class Config>
__device__ __forceinline__ void multiply_v_split(State<Config>& state, const Smem<Config>& smem, uint32_t v,
                                                 const Logits<Config>& s) {
  using S = Shape<Config>;
  constexpr int kBlock = S::kWeightParts * S::kOperands * 32;
  uint4* shared = smem.weights();
  uint32_t weights[Config::kRowTiles][2], rest[Config::kRowTiles][2];
#pragma unroll
  for (int mt = 0; mt < S::kBlocks; ++mt) {
    uint4* to = shared + (part_of_warp<Config>() * S::kBlocks + mt) * kBlock;
    pack_weights<Config>(s[mt], weights, rest);
    store_operands(to, weights);
    if constexpr (S::kBf16Mma) store_operands(to + kBlock / 2, rest);
  }
  wait_for_team<Config>(threadIdx.x / 32 / Config::kRowGroups);
#pragma unroll
  for (int mt = 0; mt < Config::kStep / 16; ++mt) {
    load_operands(weights, shared + mt * kBlock);
    if constexpr (S::kBf16Mma) load_operands(rest, shared + mt * kBlock + kBlock / 2);
    multiply_block<Config>(state, v, mt, weights, rest);
  }
}

// Tokens `at` to `at` + kStep of a tile, of which token `first` is row 0. Rows and scales without a live token are zeros.
template <class Config>
__device__ __forceinline__ void attend_step(const DecodeParams& p, State<Config>& state,
                                            const Smem<Config>& smem, const Request& r, int first_row,
                                            unsigned char* stage, const float* scales, int first, int at) {
  using S = Shape<Config>;
  const int own = at + part_of_warp<Config>() * S::kBlocks * 16;
  Logits<Config> s;
  const uint32_t k = copy::shared_address(stage + own * S::K::kPanel);
  if constexpr (Config::kSharedQ) {
    multiply_k_shared<Config>(smem.queries(), k, s);
  } else {
    multiply_k<Config>(state, k, s);
  }
  first += own;
  scales += own;
  const int behind = Config::kCausal ? r.q_len - 1 : 0;
  const int window = Config::kWindow ? int(p.window) : 0;
  const bool masked =
      first + S::kBlocks * 16 > r.seq_len - behind || (Config::kWindow && first < r.seq_len - window);
  to_logits<Config>(p, state, scales, first, masked, s);
  if (Config::kBranchMask && masked) mask<Config>(p, r, first_row, first, s);
  soften<Config>(state, smem, s);
  unsigned char* v = stage + S::K::kBytes + at * S::V::kPanel;
  if constexpr (Config::kVScale == 2) {
#pragma unroll
    for (int mt = 0; mt < S::kBlocks; ++mt)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float of_token = scales[Config::kTile + mt * 16 + half * 8 + threadIdx.x % 32 / 4];
#pragma unroll
        for (int nt = 0; nt < Config::kRowTiles; ++nt)
#pragma unroll
          for (int c = 0; c < 2; ++c) s[mt][nt][2 * half + c] *= of_token;
      }
  }
  if constexpr (Config::kSplit) {
    multiply_v_split<Config>(state, smem, copy::shared_address(v), s);
  } else {
    multiply_v<Config>(state, copy::shared_address(v), s);
  }
}

// Everything between the arrival of a tile and the release of its stage.
template <class Config>
__device__ __forceinline__ void attend(const DecodeParams& p, State<Config>& state, const Smem<Config>& smem,
                                       const Request& r, int first_row, unsigned char* stage,
                                       const float* scales, int first) {
#pragma unroll 1
  for (int at = 0; at < Config::kTile; at += Config::kStep)
    attend_step<Config>(p, state, smem, r, first_row, stage, scales, first, at);
}

}  // namespace hpcjit::attention
