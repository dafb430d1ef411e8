// One warp's arithmetic on one tile: S^T = K Q^T, online softmax, O^T += V^T P^T.
//
// Tokens lie on the rows of the products and query rows on the columns, so eight query rows fill an
// instruction and a warp needs nobody else: it keeps the maximum, the sum and O of the tokens that it saw.
// With kSplit the warps of a team have all rows: each makes S of its part of the tokens, hands the weights to
// the others, and has O of its part of the dims. So K and V are widened and read once, not once per warp.
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
