// From the warps' sums to the output: across the teams of a block, then across the blocks that share a pair
// (decode_join.cuh).
#pragma once
#include "attention/decode_join.cuh"
#include "attention/decode_tile.cuh"

namespace hpcjit::attention {

// Writes the row's result with the scale of V and the sink taken in.
template <class Config>
__device__ __forceinline__ void write_result(const DecodeParams& p, const Request& r, int head, int n,
                                             Row<Config>& row) {
  using out_t = typename Config::out_t;
  const int j = Config::kCausal ? n / int(p.group) : 0;
  const int q_head = head * int(p.group) + n - j * int(p.group);
  float weight = 1.f;
  if constexpr (Config::kSinks) {
    const float sink = p.sinks[q_head];
    const float joint = fmaxf(row.max, sink);
    weight = weight_of(row.max, joint);
    row.sum = row.sum * weight + weight_of(sink, joint);
    row.max = joint;
  }
  float inverse = has_weight(row.sum) ? __fdividef(weight, row.sum) : 0.f;
  if constexpr (Shape<Config>::kFp8) inverse *= float(p.v_factor);
  if constexpr (Config::kVScale == 1) inverse *= p.v_scale[head * p.v_scale_head_stride];
  const int64_t token = r.q_start + j;
  out_t* out = static_cast<out_t*>(p.out) + token * p.out_token_stride + q_head * p.out_head_stride;
#pragma unroll
  for (int quad = 0; quad < Row<Config>::kQuads; ++quad) {
    const float4& o = row.o[quad];
    const int dim = row.dim(quad);
    if (dim >= Config::kValueHeadDim) break;
    const uint32_t lower = pack2<out_t>(o.x * inverse, o.y * inverse);
    const uint32_t upper = pack2<out_t>(o.z * inverse, o.w * inverse);
    if constexpr (Config::kOutVec == 4) {
      *reinterpret_cast<uint2*>(out + dim) = make_uint2(lower, upper);
    } else {
      auto* bits = reinterpret_cast<uint16_t*>(out + dim);
      bits[0] = uint16_t(lower);
      bits[1] = uint16_t(lower >> 16);
      bits[2] = uint16_t(upper);
      bits[3] = uint16_t(upper >> 16);
    }
  }
  if (p.lse != nullptr && threadIdx.x % 32 == 0)
    p.lse[token * p.lse_token_stride + q_head * p.lse_head_stride] =
        has_weight(row.sum) ? row.max + logf(row.sum) : -INFINITY;
}

// A warp's sums into a free stage. Columns of neighbouring lanes lie in banks of their own through the XOR.
template <class Config>
__device__ __forceinline__ void store_sums(const State<Config>& state, Small<Config>& small, float* o,
                                           int team, int first_row) {
  using S = Shape<Config>;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int nt = 0; nt < Config::kRowTiles; ++nt)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int n = first_row + nt * 8 + 2 * t + c;
      float sum = state.sum[nt][c];
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) sum += __shfl_xor_sync(~0u, sum, offset);
      const float max =
          Config::kSoftcap ? state.max[nt][c] : state.max[nt][c] * fmaxf(state.factor[nt][c], 1e-30f);
      if (g == 0) small.stats[n][team] = make_float2(max, sum);
      float* row = o + n * S::kDimV;
#pragma unroll
      for (int d = 0; d < Config::kValueHeadDim / 16; ++d)
        if constexpr (S::kFp8) {
          *reinterpret_cast<float2*>(row + ((16 * d + 2 * g) ^ (8 * t))) =
              make_float2(state.o[d][nt][c], state.o[d][nt][2 + c]);
        } else {
          row[(16 * d + g) ^ (8 * t)] = state.o[d][nt][c];
          row[(16 * d + 8 + g) ^ (8 * t)] = state.o[d][nt][2 + c];
        }
    }
}

// Row n over all teams, in their order. Lane t brings maximum and sum of team t and the stage with its O.
template <class Config>
__device__ __forceinline__ void join_teams(const Smem<Config>& smem, int n, Row<Config>& row) {
  using S = Shape<Config>;
  static_assert((S::kTeams & (S::kTeams - 1)) == 0, "as many lanes for each");
  const Small<Config>& small = smem.small();
  const int team_of_lane = threadIdx.x % S::kTeams;
  const float2 stats = small.stats[n][team_of_lane];
  const int stage = small.free_stage[team_of_lane];
  float4 o[S::kTeams][row.kQuads];
#pragma unroll
  for (int team = 0; team < S::kTeams; ++team) {
    const float* sums = smem.sums(team, __shfl_sync(~0u, stage, team)) + n * S::kDimV;
#pragma unroll
    for (int quad = 0; quad < row.kQuads; ++quad)
      if (row.dim(quad) < S::kDimV)
        o[team][quad] = *reinterpret_cast<const float4*>(sums + (row.dim(quad) ^ (8 * (n / 2 % 4))));
  }
  row.clear();
  row.max = max_of_lanes(stats.x);
  const float weight = weight_of(stats.x, row.max);
#pragma unroll
  for (int team = 0; team < S::kTeams; ++team) {
    const float of_team = __shfl_sync(~0u, weight, team);
#pragma unroll
    for (int quad = 0; quad < row.kQuads; ++quad)
      if (row.dim(quad) < S::kDimV) row.add(quad, of_team, o[team][quad]);
  }
  row.sum = weight * stats.y;
#pragma unroll
  for (int offset = 1; offset < S::kTeams; offset *= 2) row.sum += __shfl_xor_sync(~0u, row.sum, offset);
}

// After the last tile of a piece, all warps: sums to output, or to whom they are passed on.
template <class Config>
__device__ __forceinline__ void close(const DecodeParams& p, const State<Config>& state,
                                      const Smem<Config>& smem, const Request& r, const Piece& piece,
                                      int team, int first_row, int free_stage) {
  Small<Config>& small = smem.small();
  if (threadIdx.x % (32 * Config::kRowGroups) == 0) small.free_stage[team] = free_stage;
  store_sums<Config>(state, small, smem.sums(team, free_stage), team, first_row);
  __syncthreads();
  const Share share = small.share;
#pragma unroll 1
  for (int n = threadIdx.x / 32; n < r.q_len * int(p.group); n += Config::kWarps) {
    Row<Config> row;
    join_teams<Config>(smem, n, row);
    join_blocks<Config>(p, share, n, row,
                        [&](Row<Config>& whole) { write_result<Config>(p, r, piece.head, n, whole); });
  }
  __syncthreads();  // the stages are free again
}

}  // namespace hpcjit::attention
