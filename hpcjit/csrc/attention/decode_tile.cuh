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

// What stays with a warp for one piece.
template <class Config>
struct State {
  static constexpr int kNt = Config::kRowTiles;
  uint32_t q[Config::kHeadDim / 16][kNt][2];
  // A logit of a column is factor * z. z is S times the token's scale; with a cap it is the logit itself.
  float factor[kNt][2];
  int end[kNt][2];    // first token that a column must not see
  int begin[kNt][2];  // first token that it may see
  float o[Config::kValueHeadDim / 16][kNt][4];
  float max[kNt][2];  // of z
  float sum[kNt][2];  // of this lane's tokens only
};

// Q as the second operand: 16 dims of each row per step, in the order that the K fragment has.
template <class Config>
__device__ __forceinline__ void load_q(const DecodeParams& p, State<Config>& state, const Request& r,
                                       int head, int first_row) {
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
      for (int i = 0; i < 2; ++i) state.q[s][nt][i] = raw[s][i];
    // The lane's columns in S^T are the rows that lanes 8 t and 8 t + 4 have loaded.
#pragma unroll
    for (int c = 0; c < 2; ++c) state.factor[nt][c] = __shfl_sync(~0u, scale, 8 * t + 4 * c);
  }
}

template <class Config>
__device__ __forceinline__ void open(const DecodeParams& p, State<Config>& state, const Request& r, int head,
                                     int first_row) {
  load_q<Config>(p, state, r, head, first_row);
  float scale = float(p.scale * p.k_factor);
  if constexpr (Config::kKScale == 1) scale *= p.k_scale[head * p.k_scale_head_stride];
#pragma unroll
  for (int nt = 0; nt < Config::kRowTiles; ++nt)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int n = first_row + nt * 8 + threadIdx.x % 4 * 2 + c;
      const int behind = Config::kCausal ? r.q_len - 1 - n / int(p.group) : 0;
      state.factor[nt][c] *= scale;
      state.end[nt][c] = r.seq_len - max(behind, 0);
      state.begin[nt][c] = Config::kWindow ? state.end[nt][c] - int(p.window) : 0;
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

// With few query rows the sums are made in two chains, for a product waits long for the one before.
template <class Config>
__device__ __forceinline__ void multiply_k(const State<Config>& state, uint32_t k,
                                           float (&s)[Config::kTile / 16][Config::kRowTiles][4]) {
  using S = Shape<Config>;
  using K = typename S::K;
  using mma_t = typename Config::mma_t;
  constexpr int kChains = Config::kRowTiles == 1 ? 2 : 1;
  const int lane = threadIdx.x % 32, row = lane & 15, high = lane >> 4;
#pragma unroll
  for (int mt = 0; mt < Config::kTile / 16; ++mt) {
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

// From S to z (see State); masked ones -inf. `scales` of K and V per token, where there are such.
template <class Config>
__device__ __forceinline__ void to_logits(const DecodeParams& p, const State<Config>& state,
                                          const float* scales, int first, bool masked,
                                          float (&s)[Config::kTile / 16][Config::kRowTiles][4]) {
  const int g = threadIdx.x % 32 / 4;
  const float cap = Config::kSoftcap ? float(p.softcap) : 0.f,
              inverse = Config::kSoftcap ? float(1. / p.softcap) : 0.f;
#pragma unroll
  for (int mt = 0; mt < Config::kTile / 16; ++mt)
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
          if (masked && (first + token >= state.end[nt][c] || first + token < state.begin[nt][c]))
            z = -INFINITY;
        }
    }
}

// A logit in base 2 per z. Where a scale is 0 all logits are: -inf must stay what it is.
template <class Config>
__device__ __forceinline__ float base2(float factor) {
  return Config::kSoftcap ? float(kLog2e) : fmaxf(factor * float(kLog2e), 1e-30f);
}

// Turns z into weights and brings max, sum and O to the new maximum.
template <class Config>
__device__ __forceinline__ void soften(State<Config>& state,
                                       float (&s)[Config::kTile / 16][Config::kRowTiles][4]) {
  constexpr int kNt = Config::kRowTiles;
  float max[kNt][2];
  bool grown = false;
#pragma unroll
  for (int nt = 0; nt < kNt; ++nt)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float m = state.max[nt][c];
#pragma unroll
      for (int mt = 0; mt < Config::kTile / 16; ++mt) m = fmaxf(m, fmaxf(s[mt][nt][c], s[mt][nt][2 + c]));
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, offset));
      grown |= m > state.max[nt][c];
      max[nt][c] = m;
    }
  if (__any_sync(~0u, grown)) {
#pragma unroll
    for (int nt = 0; nt < kNt; ++nt)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float shrink =
            exp2_fast((state.max[nt][c] - finite_or_zero(max[nt][c])) * base2<Config>(state.factor[nt][c]));
        state.max[nt][c] = max[nt][c];
        state.sum[nt][c] *= shrink;
#pragma unroll
        for (int d = 0; d < Config::kValueHeadDim / 16; ++d) {
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
      const float offset = -finite_or_zero(max[nt][c]) * factor;
#pragma unroll
      for (int mt = 0; mt < Config::kTile / 16; ++mt)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float weight = exp2_fast(fmaf(s[mt][nt][2 * half + c], factor, offset));
          s[mt][nt][2 * half + c] = weight;
          state.sum[nt][c] += weight;
        }
    }
}

template <class T>
struct IsBf16 {
  static constexpr bool value = false;
};
template <>
struct IsBf16<bf16> {
  static constexpr bool value = true;
};

// Weights of 8 bits would cost more precision than the output's rounding: in bf16 the product is made with what is left
// of them as well.
template <class Config>
__device__ __forceinline__ void multiply_v(State<Config>& state, uint32_t v,
                                           const float (&s)[Config::kTile / 16][Config::kRowTiles][4]) {
  using S = Shape<Config>;
  using V = typename S::V;
  using mma_t = typename Config::mma_t;
  constexpr int kNt = Config::kRowTiles;
  constexpr bool kSplit = IsBf16<mma_t>::value;
  const int lane = threadIdx.x % 32;
  // The second matrix is eight tokens further for bytes (two dims per element), eight dims for 16 bits.
  const int row = S::kFp8 ? lane & 15 : (lane & 7) + (lane >> 4) * 8;
  const int high = S::kFp8 ? lane >> 4 : (lane >> 3) & 1;
#pragma unroll
  for (int mt = 0; mt < Config::kTile / 16; ++mt) {
    uint32_t weights[kNt][2], rest[kNt][2];
#pragma unroll
    for (int nt = 0; nt < kNt; ++nt)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float x = s[mt][nt][2 * half], y = s[mt][nt][2 * half + 1];
        const uint32_t rounded = pack2<mma_t>(x, y);
        weights[nt][half] = mma::transpose(rounded);
        if constexpr (kSplit)
          rest[nt][half] = mma::transpose(
              pack2<mma_t>(x - __uint_as_float(rounded << 16), y - __uint_as_float(rounded & 0xffff0000u)));
      }
#pragma unroll
    for (int pair = 0; pair < V::kChunks / 2; ++pair) {
      uint32_t r[4];
      mma::ldmatrix_x4_trans(r, v + V::offset(mt * 16 + row, 2 * pair + high));
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
        if constexpr (kSplit)
#pragma unroll
          for (int nt = 0; nt < kNt; ++nt) mma::m16n8k16<mma_t>(state.o[pair][nt], r, rest[nt]);
      }
    }
  }
}

// Everything between the arrival of a tile and the release of its stage. `first`: token of the tile's row 0. Rows
// and scales without a live token are zeros.
template <class Config>
__device__ __forceinline__ void attend(const DecodeParams& p, State<Config>& state, const Request& r,
                                       unsigned char* stage, const float* scales, int first) {
  using S = Shape<Config>;
  float s[Config::kTile / 16][Config::kRowTiles][4];
  multiply_k<Config>(state, copy::shared_address(stage), s);
  const int behind = Config::kCausal ? r.q_len - 1 : 0;
  const int window = Config::kWindow ? int(p.window) : 0;
  const bool masked =
      first + Config::kTile > r.seq_len - behind || (Config::kWindow && first < r.seq_len - window);
  to_logits<Config>(p, state, scales, first, masked, s);
  soften<Config>(state, s);
  unsigned char* v = stage + S::K::kBytes;
  if constexpr (Config::kVScale == 2) {
#pragma unroll
    for (int mt = 0; mt < Config::kTile / 16; ++mt)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float of_token = scales[Config::kTile + mt * 16 + half * 8 + threadIdx.x % 32 / 4];
#pragma unroll
        for (int nt = 0; nt < Config::kRowTiles; ++nt)
#pragma unroll
          for (int c = 0; c < 2; ++c) s[mt][nt][2 * half + c] *= of_token;
      }
  }
  multiply_v<Config>(state, copy::shared_address(v), s);
}

}  // namespace hpcjit::attention
