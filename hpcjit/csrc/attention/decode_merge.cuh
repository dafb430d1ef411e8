// From the warps' sums to the output: across the teams of a block, then across the blocks that share a pair.
//
// A block that has only part of a pair passes its share (maximum, sum and undivided O of each query row) on in a slot
// whose words are zero until they are written (ptx/global.cuh). The first of each kFan neighbouring shares stays with its
// block, which waits for the others, adds them in the order of the tokens and passes the result on in its own slot; the
// first of all does the same with those. So there is neither fence nor counter, and the bits do not depend on who came
// when. In every join a warp looks after whole rows: no barrier is needed between blocks and levels.
//
// That the waiting ends: the later a block is started, the earlier on the axis of the schedule its work lies
// (own_worker), so it waits only for blocks that were started before it; the GPU starts those of a grid in the order of
// their numbers, which scans with look-back rely on as well. And the work that it waits with is its last.
#pragma once
#include "attention/decode_tile.cuh"
#include "hpcjit/ptx/global.cuh"

namespace hpcjit::attention {

constexpr int kFan = 12;

// Slot `slot`, query row n: O, then maximum and sum. Two words more keep what follows aligned; they stay zero.
template <class Config>
__device__ __forceinline__ float* share_at(const DecodeParams& p, int64_t slot, int n) {
  using S = Shape<Config>;
  return p.counters + (slot * S::kRows + n) * (S::kDimV + 4);
}

// Under the dynamic schedule each worker has one slot: at most one of its pieces is a part of a pair that another begins.
template <class Config>
__device__ __forceinline__ Share share_of(const DecodeParams& p, const Small<Config>& small,
                                          const Piece& piece) {
  const int pair = piece.request * int(p.num_kv_heads) + piece.head;
  if constexpr (Config::kSchedule == kStatic) {
    const int share = max(1, (piece.count + int(p.splits) - 1) / int(p.splits));
    return {piece.begin / share, max(1, (piece.count + share - 1) / share), pair * int(p.splits), false};
  } else if constexpr (Config::kSchedule == kInvariant) {
    const int share = int(p.splits);
    const auto in_pair = [&](const auto& cut) {
      return cut.request == piece.request && cut.head == piece.head;
    };
    const bool first = !in_pair(small.cuts[0]) || small.cuts[0].tile == 0;
    const bool last = piece.end == piece.count || (in_pair(small.cuts[1]) && piece.end == small.cuts[1].tile);
    return {piece.begin / share, max(1, (piece.count + share - 1) / share), pair * int(p.max_pieces),
            first && last};
  } else {
    if (piece.begin == 0 && piece.end == piece.count) return {0, 1, 0, false};
    // Only a pair that is cut can be in parts, so its start is that of a cut.
    const auto start = small.cuts[piece.begin > 0 ? 0 : 1].start;
    const int first = sched::worker_of(small.axis, start, 0, piece.count);
    const int last = sched::worker_of(small.axis, start, piece.count - 1, piece.count);
    return {small.worker - first, last - first + 1, first, false};
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
    max = -INFINITY;
    sum = 0.f;
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

// The largest of all lanes. NaN counts as the largest or the smallest, by its sign: where there is one, the sum is NaN too.
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
__device__ __forceinline__ void pass_share(float* share, const Row<Config>& row) {
#pragma unroll
  for (int quad = 0; quad < Row<Config>::kQuads; ++quad)
    if (row.dim(quad) < Config::kValueHeadDim) global::pass(share + row.dim(quad), row.o[quad]);
  if (threadIdx.x % 32 == 0) global::pass(share + Config::kValueHeadDim, make_float2(row.max, row.sum));
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
  row.clear();
#pragma unroll
  for (int team = 0; team < S::kTeams; ++team) {
    stats[team] = small.stats[n][team];
    row.max = fmaxf(row.max, stats[team].x);
  }
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

// Adds shares to a row, in their order: those of `count` slots from `slot` on, `step` apart, as soon as they are there.
// Lane i brings maximum and sum of share i.
template <class Config>
__device__ __forceinline__ void add_shares(const DecodeParams& p, int64_t slot, int count, int step, int n,
                                           Row<Config>& row) {
  constexpr int kQuads = Row<Config>::kQuads, kBatch = kFan / kQuads;  // loads in flight
  const int lane = threadIdx.x % 32;
  const int64_t pitch = step * (share_at<Config>(p, 1, 0) - share_at<Config>(p, 0, 0));
  float* share = share_at<Config>(p, slot, n);
#pragma unroll 1
  for (; count > 0; count -= kBatch, share += kBatch * pitch) {
    float4 o[kBatch][kQuads];
    const auto each = [&](auto&& f) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (i >= count) break;
#pragma unroll
        for (int quad = 0; quad < kQuads; ++quad)
          if (row.dim(quad) < Config::kValueHeadDim) f(share + i * pitch + row.dim(quad), o[i][quad], i);
      }
    };
    float2 stats = make_float2(-INFINITY, -0.f);
    float* own = share + min(lane, count - 1) * pitch + Config::kValueHeadDim;
    const bool brings = lane < min(count, kBatch);
    if (brings) global::load_relaxed(own, stats);
    each([](const float* source, float4& x, int) { global::load_relaxed(source, x); });
    while (true) {
      bool there = global::is_passed(stats);
      if (!there) global::load_relaxed(own, stats);
      each([&](const float* source, float4& x, int) {
        if (global::is_passed(x)) return;
        there = false;
        global::load_relaxed(source, x);
      });
      if (__all_sync(~0u, there)) break;
    }
    if (brings) global::clear(own, stats);
    each([](float* target, const float4& x, int) { global::clear(target, x); });
    const float max = fmaxf(row.max, max_of_lanes(stats.x));
    const float weight = weight_of(stats.x, max), kept = weight_of(row.max, max);
    float sum = weight * stats.y;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    row.max = max;
    row.sum = row.sum * kept + sum;
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad)
      row.o[quad] = {row.o[quad].x * kept, row.o[quad].y * kept, row.o[quad].z * kept, row.o[quad].w * kept};
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (i >= count) break;
      const float of_share = __shfl_sync(~0u, weight, i);
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad)
        if (row.dim(quad) < Config::kValueHeadDim) row.add(quad, of_share, o[i][quad]);
    }
  }
}

// A row of a piece becomes that of its pair, or goes to the block that waits for it: false then.
template <class Config>
__device__ __forceinline__ bool join_blocks(const DecodeParams& p, const Share& share, int n,
                                            Row<Config>& row) {
  if (share.splits == 1) return true;
  float* own = share_at<Config>(p, share.slot(share.split), n);
  if constexpr (Config::kSchedule == kInvariant) {
    // Which pieces a worker has must not matter: their sums all take the same way.
    pass_share<Config>(own, row);
    if (!share.joins) return false;
    row.clear();
    add_shares<Config>(p, share.slot(0), share.splits, 1, n, row);
  } else {
    if (share.split % kFan == 0)
      add_shares<Config>(p, share.slot(share.split + 1), min(kFan, share.splits - share.split) - 1, 1, n,
                         row);
    if (share.split != 0) {
      pass_share<Config>(own, row);
      return false;
    }
    add_shares<Config>(p, share.slot(kFan), (share.splits - 1) / kFan, kFan, n, row);
  }
  return true;
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
    if (join_blocks<Config>(p, share, n, row)) write_result<Config>(p, r, piece.head, n, row);
  }
  __syncthreads();  // the stages are free again
}

}  // namespace hpcjit::attention
