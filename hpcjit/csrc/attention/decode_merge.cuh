// From the warps' sums to the output: across the teams of a block, then across the blocks that share a pair.
//
// A block that has only part of a pair writes its share (maximum, sum and undivided O of each query row) to a slot
// and raises a counter per row; the last to arrive joins the shares in the order of the tokens, so the result does
// not depend on who came last. More than kFan shares are joined in two levels: kFan neighbours first, then their
// results. Nobody waits for anybody. A counter wraps to 0 with its last arrival, so the workspace is ready for the
// next launch. In every join a warp looks after whole rows: no barrier is needed between blocks and levels.
#pragma once
#include "attention/decode_tile.cuh"

namespace hpcjit::attention {

constexpr int kFan = 16;

// Which part of its pair a piece is, and the slots of the pair's shares: split 0 in `first`, split s > 0 in
// base + s * step. Split s has counters for the group that it leads; `root` is where the pair's own are.
struct Share {
  int split;
  int splits;
  int first;
  int base;
  int step;
  int root;

  __device__ __forceinline__ int slot(int split) const { return split == 0 ? first : base + split * step; }
};

// The workspace: O of slots, then maximum and sum of slots, then those of groups; a group's O takes the place of its
// leader's. Counters of slots, then of pairs. All of them per query row.
template <class Config>
struct Workspace {
  using S = Shape<Config>;
  float* o;
  float2* stats;
  float2* group_stats;
  unsigned* counters;
  unsigned* roots;

  __device__ __forceinline__ explicit Workspace(const DecodeParams& p) {
    o = p.workspace;
    stats = reinterpret_cast<float2*>(o + p.slots * (S::kRows * S::kDimV));
    group_stats = stats + p.slots * S::kRows;
    counters = p.counters;
    roots = counters + p.slots * S::kRows;
  }
};

template <class Config>
__device__ __forceinline__ Share share_of(const DecodeParams& p, const Small<Config>& small,
                                          const Piece& piece) {
  const int pair = piece.request * int(p.num_kv_heads) + piece.head;
  if constexpr (Config::kSchedule == kStatic) {
    const int share = max(1, (piece.count + int(p.splits) - 1) / int(p.splits));
    const int base = pair * int(p.splits);
    return {piece.begin / share, max(1, (piece.count + share - 1) / share), base, base, 1, pair};
  } else if constexpr (Config::kSchedule == kInvariant) {
    const int share = int(p.splits);
    const int base = pair * int(p.max_pieces);
    return {piece.begin / share, max(1, (piece.count + share - 1) / share), base, base, 1, pair};
  } else {
    if (piece.begin == 0 && piece.end == piece.count) return {0, 1, 0, 0, 0, 0};
    // Only a pair that is cut can be in parts, so its start is that of a cut.
    const auto start = small.cuts[piece.begin > 0 ? 0 : 1].start;
    const int first = sched::worker_of(small.axis, start, 0, piece.count);
    const int last = sched::worker_of(small.axis, start, piece.count - 1, piece.count);
    return {int(blockIdx.x) - first, last - first + 1, 2 * first + 1, 2 * first, 2, first};
  }
}

// Four dims per lane and step of one query row, before the division by `sum`; both are relative to `max`, which may lag behind the largest logit.
template <class Config>
struct Row {
  static constexpr int kQuads = (Config::kValueHeadDim / 4 + 31) / 32;
  float4 o[kQuads];
  float max;
  float sum;

  // Dim of the lane's quad; past the end where heads are shorter than 128.
  __device__ __forceinline__ static int dim(int quad) { return (quad * 32 + int(threadIdx.x % 32)) * 4; }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) o[quad] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
  __device__ __forceinline__ void add(int quad, float weight, const float4& x) {
    o[quad].x += weight * x.x;
    o[quad].y += weight * x.y;
    o[quad].z += weight * x.z;
    o[quad].w += weight * x.w;
  }
};

// NaN counts as the largest or the smallest, by its sign: where there is one, the sum is NaN as well.
__device__ __forceinline__ float max_of_lanes(float x) {
  const int bits = __float_as_int(x);
  const int ordered = bits ^ (bits >> 31 & INT_MAX);  // as integers in the order of the floats
  const int max = __reduce_max_sync(~0u, ordered);
  return __int_as_float(max ^ (max >> 31 & INT_MAX));
}

// exp(x - max).
__device__ __forceinline__ float weight_of(float x, float max) {
  return exp2_fast((x - finite_or_zero(max)) * float(kLog2e));
}

__device__ __forceinline__ bool has_weight(float sum) {  // NaN counts: it must reach the output
  return !(sum <= 0.f);
}

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

template <class Config>
__device__ __forceinline__ void write_share(float2* stats, float* o, int64_t place, const Row<Config>& row) {
#pragma unroll
  for (int quad = 0; quad < Row<Config>::kQuads; ++quad)
    if (row.dim(quad) < Config::kValueHeadDim)
      __stcg(reinterpret_cast<float4*>(o + place * Config::kValueHeadDim + row.dim(quad)), row.o[quad]);
  if (threadIdx.x % 32 == 0) __stcg(stats + place, make_float2(row.max, row.sum));
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

// Row n over all teams, in their order.
template <class Config>
__device__ __forceinline__ void join_teams(const Smem<Config>& smem, int n, Row<Config>& row) {
  using S = Shape<Config>;
  const Small<Config>& small = smem.small();
  float2 stats[S::kTeams];
  row.max = -INFINITY;
#pragma unroll
  for (int team = 0; team < S::kTeams; ++team) {
    stats[team] = small.stats[n][team];
    row.max = fmaxf(row.max, stats[team].x);
  }
  row.sum = 0.f;
  row.clear();
#pragma unroll
  for (int team = 0; team < S::kTeams; ++team) {
    const float weight = weight_of(stats[team].x, row.max);
    row.sum += weight * stats[team].y;
    const float* o = smem.sums(team, small.free_stage[team]) + n * S::kDimV;
#pragma unroll
    for (int quad = 0; quad < row.kQuads; ++quad)
      if (row.dim(quad) < S::kDimV)
        row.add(quad, weight, *reinterpret_cast<const float4*>(o + (row.dim(quad) ^ (8 * (n / 2 % 4)))));
  }
}

// One row over `count` shares, at most 32: lane i brings maximum and sum of share i and the place of its O.
template <class Config>
__device__ __forceinline__ void join_shares(const float* o, int count, float2 stats, int64_t place,
                                            Row<Config>& row) {
  constexpr int kBatch = 8 / Row<Config>::kQuads;  // loads in flight
  float weight = 0.f;
#pragma unroll 1
  for (int first = 0; first < count; first += kBatch) {
    float4 x[kBatch][row.kQuads];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float* share = o + __shfl_sync(~0u, place, first + i);
#pragma unroll
      for (int quad = 0; quad < row.kQuads; ++quad)
        if (first + i < count && row.dim(quad) < Config::kValueHeadDim)
          x[i][quad] = __ldcg(reinterpret_cast<const float4*>(share + row.dim(quad)));
    }
    if (first == 0) {
      row.clear();
      row.max = max_of_lanes(stats.x);
      weight = weight_of(stats.x, row.max);
      row.sum = weight * stats.y;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) row.sum += __shfl_xor_sync(~0u, row.sum, offset);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float factor = __shfl_sync(~0u, weight, first + i);
#pragma unroll
      for (int quad = 0; quad < row.kQuads; ++quad)
        if (first + i < count && row.dim(quad) < Config::kValueHeadDim) row.add(quad, factor, x[i][quad]);
    }
  }
}

// Arrives at a counter that expects `count`; whether this was the last. Orders the warp's writes so far, which a
// __syncwarp() has gathered, before it, and what the warp reads after the next __syncwarp() behind those of others.
__device__ __forceinline__ bool arrive_last(unsigned* counter, int count) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(unsigned(count - 1))
               : "memory");
  return before == unsigned(count - 1);
}

// After the last tile of a piece, all warps: sums to output, or to a slot and, by the last block, to output. Row
// warp + i * kWarps is bit i of what a warp looks after.
template <class Config>
__device__ __forceinline__ void close(const DecodeParams& p, const State<Config>& state,
                                      const Smem<Config>& smem, const Request& r, const Piece& piece,
                                      int team, int first_row, int free_stage) {
  using S = Shape<Config>;
  Small<Config>& small = smem.small();
  if (threadIdx.x % (32 * Config::kRowGroups) == 0) small.free_stage[team] = free_stage;
  store_sums<Config>(state, small, smem.sums(team, free_stage), team, first_row);
  const Share share = share_of<Config>(p, small, piece);
  const Workspace<Config> w(p);
  __syncthreads();
  const int rows = r.q_len * int(p.group), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int leader = share.split / kFan * kFan;
  unsigned mine = rows > warp ? (2u << ((rows - warp - 1) / Config::kWarps)) - 1 : 0;
  // Of the join that comes next: the shares that it takes (none: the teams), and where its result goes.
  int begin = 0, end = 0, step = 1, target = share.slot(share.split);
  bool finish = share.splits == 1, grouped = false;
#pragma unroll 1
  while (true) {
#pragma unroll 1
    for (unsigned left = mine; left != 0; left &= left - 1) {
      const int n = warp + (__ffs(left) - 1) * Config::kWarps;
      Row<Config> row;
      const bool teams = end == 0;
      if (teams) {
        join_teams<Config>(smem, n, row);
      } else {
        const int count = (end - begin + step - 1) / step;
        const int64_t place = int64_t(share.slot(begin + min(lane, count - 1) * step)) * S::kRows + n;
        const float2 stats =
            lane < count ? __ldcg((step > 1 ? w.group_stats : w.stats) + place) : make_float2(-INFINITY, 0.f);
        join_shares<Config>(w.o, count, stats, place * S::kDimV, row);
      }
      if (finish) {
        write_result<Config>(p, r, piece.head, n, row);
      } else {
        write_share<Config>(teams ? w.stats : w.group_stats, w.o, int64_t(target) * S::kRows + n, row);
      }
    }
    if (end == 0) __syncthreads();  // the stages are free again
    if (finish) return;
    const bool group_next = share.splits > kFan && !grouped;
    const int group_end = min(leader + kFan, share.splits);
    unsigned* counter =
        group_next ? w.counters + share.slot(leader) * S::kRows : w.roots + share.root * S::kRows;
    const int count = group_next ? group_end - leader
                      : grouped  ? (share.splits + kFan - 1) / kFan
                                 : share.splits;
    __syncwarp();
    const bool last = (mine >> lane & 1) && arrive_last(counter + warp + lane * Config::kWarps, count);
    mine = __ballot_sync(~0u, last);
    if (mine == 0) return;
    begin = group_next ? leader : 0;
    end = group_next ? group_end : share.splits;
    step = group_next ? 1 : grouped ? kFan : 1;
    target = share.slot(leader);
    finish = !group_next;
    grouped = true;
  }
}

}  // namespace hpcjit::attention
