// One warp's arithmetic on one tile: S^T = K Q^T, online softmax, O^T += V^T P^T.
//
// Tokens lie on the rows of the products and query rows on the columns, so eight query rows fill an
// instruction and a warp needs nobody else: it keeps the maximum, the sum and O of the tokens that it saw.
// Lane 4 g + t: in S^T it holds tokens g and g + 8 and the query rows 2 t and 2 t + 1 of each 16 x 8 block;
// in O^T dims in the place of tokens. FP8 data is widened to fp16, which is exact; the order of dims inside a
// block is then the one in which bytes lie in registers, and Q and O follow it (load_q, store_sums).
#pragma once
#include "attention/decode_state.cuh"

namespace hpcjit::attention {

// With few query rows the sums are made in two chains, for a product waits long for the one before.
template <class Config>
__device__ __forceinline__ void multiply_k(const State<Config>& state, uint32_t k, Logits<Config>& s) {
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

// Every query is read once per tile: tokens are the inner loop, and all of S is in the making.
template <class Config>
__device__ __forceinline__ void multiply_k_shared(const uint4* queries, uint32_t k, Logits<Config>& s) {
  using S = Shape<Config>;
  using K = typename S::K;
  using mma_t = typename Config::mma_t;
  constexpr int kHalves = S::kFp8 ? 2 : 1;  // of 16 dims, in 32 bytes
  const int lane = threadIdx.x % 32, row = lane & 15, high = lane >> 4;
#pragma unroll
  for (int mt = 0; mt < Config::kTile / 16; ++mt)
#pragma unroll
    for (int nt = 0; nt < Config::kRowTiles; ++nt)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[mt][nt][i] = 0.f;
#pragma unroll
  for (int pair = 0; pair < K::kChunks / 2; ++pair) {
    uint4 q[kHalves];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) q[half] = queries[32 * (kHalves * pair + half)];
#pragma unroll
    for (int mt = 0; mt < Config::kTile / 16; ++mt) {
      uint32_t r[4];
      mma::ldmatrix_x4(r, k + K::offset(mt * 16 + row, 2 * pair + high));
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        uint32_t a[4] = {r[0], r[1], r[2], r[3]};
        if constexpr (S::kFp8) {
          mma::e4m3x4_to_fp16(r[2 * half], a[0], a[2]);
          mma::e4m3x4_to_fp16(r[2 * half + 1], a[1], a[3]);
        }
        mma::m16n8k16<mma_t>(s[mt][0], a, {q[half].x, q[half].y});
        mma::m16n8k16<mma_t>(s[mt][1], a, {q[half].z, q[half].w});
      }
    }
  }
}

// From S to z (see State). `scales` of K and V per token, where there are such.
template <class Config>
__device__ __forceinline__ void to_logits(const DecodeParams& p, const State<Config>& state,
                                          const float* scales, Logits<Config>& s) {
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
        }
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

// The tokens of a tile that a row must not see: z becomes -inf. What a row may see is found out anew, for few tiles
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
      for (int mt = 0; mt < Config::kTile / 16; ++mt)
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

// A logit in base 2 per z. Where a scale is 0 all logits are: -inf must stay what it is.
template <class Config>
__device__ __forceinline__ float base2(float factor) {
  return Config::kSoftcap ? float(kLog2e) : fmaxf(factor * float(kLog2e), 1e-30f);
}

// Whether a maximum has grown so much that O must follow. It may lag behind by a factor of 2^8 in the weights, which
// float32 and the exponents of 16 bits have room for; not if scales of tokens come on top.
template <class Config>
__device__ __forceinline__ bool has_grown(float max, float m, float factor) {
  constexpr float kLag = Config::kVScale == 2 ? 0.f : 8.f;
  return (m - max) * base2<Config>(factor) > kLag;  // false for -inf - -inf
}

// Turns z into weights and brings max, sum and O to the new maximum.
template <class Config>
__device__ __forceinline__ void soften(State<Config>& state, Logits<Config>& s) {
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
      grown |= has_grown<Config>(state.max[nt][c], m, state.factor[nt][c]);
      max[nt][c] = m;
    }
  if (__any_sync(~0u, grown)) {
#pragma unroll
    for (int nt = 0; nt < kNt; ++nt)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float m = max_of_column(max[nt][c]);
        const float shrink =
            exp2_fast((state.max[nt][c] - finite_or_zero(m)) * base2<Config>(state.factor[nt][c]));
        state.max[nt][c] = m;
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
      const float offset = -finite_or_zero(state.max[nt][c]) * factor;
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
      if constexpr (IsBf16<mma_t>::value)
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
  constexpr int kNt = Config::kRowTiles;
  const int lane = threadIdx.x % 32;
  // The second matrix is eight tokens further for bytes (two dims per element), eight dims for 16 bits.
  const int row = S::kFp8 ? lane & 15 : (lane & 7) + (lane >> 4) * 8;
  const int high = S::kFp8 ? lane >> 4 : (lane >> 3) & 1;
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
      if constexpr (IsBf16<mma_t>::value)
#pragma unroll
        for (int nt = 0; nt < kNt; ++nt) mma::m16n8k16<mma_t>(state.o[pair][nt], r, rest[nt]);
    }
  }
}

template <class Config>
__device__ __forceinline__ void multiply_v(State<Config>& state, uint32_t v, const Logits<Config>& s) {
#pragma unroll
  for (int mt = 0; mt < Config::kTile / 16; ++mt) {
    uint32_t weights[Config::kRowTiles][2], rest[Config::kRowTiles][2];
    pack_weights<Config>(s[mt], weights, rest);
    multiply_block<Config>(state, v, mt, weights, rest);
  }
}

template <class Config>
__device__ __forceinline__ void scale_weights(const float* scales, Logits<Config>& s) {
#pragma unroll
  for (int mt = 0; mt < Config::kTile / 16; ++mt)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float of_token = scales[mt * 16 + half * 8 + threadIdx.x % 32 / 4];
#pragma unroll
      for (int nt = 0; nt < Config::kRowTiles; ++nt)
#pragma unroll
        for (int c = 0; c < 2; ++c) s[mt][nt][2 * half + c] *= of_token;
    }
}

// Everything between the arrival of a tile and the release of its stage. `first`: token of the tile's row 0. Rows
// and scales without a live token are zeros.
template <class Config>
__device__ __forceinline__ void attend(const DecodeParams& p, State<Config>& state, const Smem<Config>& smem,
                                       const Request& r, int first_row, unsigned char* stage,
                                       const float* scales, int first) {
  using S = Shape<Config>;
  Logits<Config> s;
  if constexpr (Config::kSharedQ) {
    multiply_k_shared<Config>(smem.queries(), copy::shared_address(stage), s);
  } else {
    multiply_k<Config>(state, copy::shared_address(stage), s);
  }
  const int behind = Config::kCausal ? r.q_len - 1 : 0;
  const int window = Config::kWindow ? int(p.window) : 0;
  to_logits<Config>(p, state, scales, s);
  if (first + Config::kTile > r.seq_len - behind || (Config::kWindow && first < r.seq_len - window))
    mask<Config>(p, r, first_row, first, s);
  soften<Config>(state, s);
  if constexpr (Config::kVScale == 2) scale_weights<Config>(scales + Config::kTile, s);
  multiply_v<Config>(state, copy::shared_address(stage + S::K::kBytes), s);
}

}  // namespace hpcjit::attention
