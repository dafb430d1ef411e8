// Rows of a pair that blocks have in parts become whole.
//
// A block that has only part of a pair passes its share (maximum, sum and undivided O of each query row) on in a slot
// whose words are zero until they are written (ptx/global.cuh): there is neither fence nor counter. Of each kFan
// neighbouring shares a block waits for the others, adds them to its own in the order of the tokens and passes the result
// on in its slot; a block of the first group does the same with those. So the bits do not depend on who came when. The
// rows of a group are dealt to its first blocks, kJoiners at most: one multiprocessor would take long to read all shares.
// A warp looks after whole rows, and no barrier is needed.
//
// That the waiting ends: the later a block is started, the earlier on the axis of the schedule its work lies
// (own_worker), and the GPU starts the blocks of a grid in the order of their numbers, which scans with look-back rely on
// as well. So a block waits for such as were started before it, and for up to kJoiners - 1 of its group that were not; those
// have room as soon as others end, if the grid ever has kJoiners blocks at work. What a block waits with is its last piece.
#pragma once
#include "attention/decode_work.cuh"
#include "hpcjit/ptx/global.cuh"

namespace hpcjit::attention {

// By one thread, before the piece's tiles are there.
template <class Config>
__device__ __forceinline__ Share share_of(const DecodeParams& p, const Small<Config>& small,
                                          const Piece& piece) {
  Share share = {0, 1, 0, 0, {}, 1, {}, false};
  const int pair = piece.request * int(p.num_kv_heads) + piece.head;
  if constexpr (Config::kSchedule == kDynamic) {
    if (piece.begin == 0 && piece.end == piece.count) return share;
    // Only a pair that is cut can be in parts, so its start is that of a cut. Each worker has two slots: for the part of a
    // pair that another begins, and for that of one that goes on with another.
    const auto start = small.cuts[piece.begin > 0 ? 0 : 1].start;
    share.first = sched::worker_of(small.axis, start, 0, piece.count);
    share.begin = int(p.workers);
    share.splits = sched::worker_of(small.axis, start, piece.count - 1, piece.count) - share.first + 1;
    share.split = own_worker() - share.first;
  } else {
    const int part = Config::kSchedule == kStatic ? max(1, (piece.count + int(p.splits) - 1) / int(p.splits))
                                                  : int(p.splits);
    share.first = pair * int(Config::kSchedule == kStatic ? p.splits : p.max_pieces);
    share.splits = max(1, (piece.count + part - 1) / part);
    share.split = piece.begin / part;
  }
  if constexpr (Config::kSchedule == kInvariant) {
    const auto in_pair = [&](const auto& cut) {
      return cut.request == piece.request && cut.head == piece.head;
    };
    const bool begun = !in_pair(small.cuts[0]) || small.cuts[0].tile == 0;
    share.joins =
        begun && (piece.end == piece.count || (in_pair(small.cuts[1]) && piece.end == small.cuts[1].tile));
  }
  share.groups = (share.splits + sched::kFan - 1) / sched::kFan;
  share.group = sched::group_of(share.split / sched::kFan, share.splits);
  share.last = sched::group_of(share.groups - 1, share.splits);
  return share;
}

// Four dims per lane and step of one query row, before the division by `sum`; both are relative to `max`, which may lag
// behind the largest logit.
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

// Where the shares of a query row lie: O, then maximum and sum. Two words more keep what follows aligned; they stay zero.
template <class Config>
struct Slots {
  using S = Shape<Config>;
  static constexpr int kPitch = S::kRows * (S::kDimV + 4) * 4;  // bytes
  char* base;                                                   // slot share.first
  int begin;

  __device__ __forceinline__ Slots(const DecodeParams& p, const Share& share, int n)
      : base(reinterpret_cast<char*>(p.counters + n * (S::kDimV + 4)) + int64_t(share.first) * kPitch),
        begin(share.begin) {}
  __device__ __forceinline__ float* of(int split) const {
    return reinterpret_cast<float*>(base + int64_t(split == 0 ? begin : split) * kPitch);
  }
};

template <class Config>
__device__ __forceinline__ void pass_share(float* share, const Row<Config>& row) {
#pragma unroll
  for (int quad = 0; quad < Row<Config>::kQuads; ++quad)
    if (row.dim(quad) < Config::kValueHeadDim) global::pass(share + row.dim(quad), row.o[quad]);
  if (threadIdx.x % 32 == 0) global::pass(share + Config::kValueHeadDim, make_float2(row.max, row.sum));
}

// Shares that a warp reads at a time.
template <class Config>
constexpr int kLoads = sched::kFan / Row<Config>::kQuads;

// `count` of the others, from `begin` on, that have been read.
struct Read {
  sched::Others others;
  int begin;
  int count;
};

// Zeros again, for the next launch; by the warp that has read them.
template <class Config>
__device__ __forceinline__ void clear_shares(const Slots<Config>& slots, Read& read) {
#pragma unroll
  for (int i = 0; i < kLoads<Config>; ++i) {
    if (i >= read.count) break;
    float* share = slots.of(read.others.split(read.begin + i));
#pragma unroll
    for (int quad = 0; quad < Row<Config>::kQuads; ++quad)
      if (Row<Config>::dim(quad) < Config::kValueHeadDim)
        *reinterpret_cast<float4*>(share + Row<Config>::dim(quad)) = make_float4(0.f, 0.f, 0.f, 0.f);
    if (threadIdx.x % 32 == 0)
      *reinterpret_cast<float2*>(share + Config::kValueHeadDim) = make_float2(0.f, 0.f);
  }
  read.count = 0;
}

// Adds shares to a row, in their order, as soon as they are there. Lane i brings maximum and sum of share i. Apart from the
// loads no step depends on how many there are: what is not loaded counts as there and has no weight.
// What was read before becomes zeros while the next shares come: loads behind stores would come late. If the result ends
// the launch, its own shares become zeros before it is made, for the launch ends no sooner than they are.
template <class Config>
__device__ __forceinline__ void add_shares(const Slots<Config>& slots, const sched::Others& others, bool ends,
                                           Read& read, Row<Config>& row) {
  constexpr int kQuads = Row<Config>::kQuads, kBatch = kLoads<Config>;
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int begin = 0; begin < others.count; begin += kBatch) {
    const int count = min(kBatch, others.count - begin);
    const float* of_lane = slots.of(others.split(begin + min(lane, count - 1))) + Config::kValueHeadDim;
    float2 stats = make_float2(-INFINITY, -0.f);
    float4 o[kBatch][kQuads];
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) o[i][quad] = make_float4(-0.f, -0.f, -0.f, -0.f);
    bool there;
    do {
      if (lane < count) global::load_relaxed(of_lane, stats);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (i >= count) break;
        const float* share = slots.of(others.split(begin + i));
#pragma unroll
        for (int quad = 0; quad < kQuads; ++quad)
          if (row.dim(quad) < Config::kValueHeadDim) global::load_relaxed(share + row.dim(quad), o[i][quad]);
      }
      clear_shares<Config>(slots, read);
      there = global::is_passed(stats);
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) there &= global::are_passed(o, quad);
    } while (!__all_sync(~0u, there));
    read = {others, begin, count};
    if (ends && begin + count == others.count) clear_shares<Config>(slots, read);
    const float max = fmaxf(row.max, max_of_lanes(stats.x));
    const float weight = weight_of(stats.x, max), kept = weight_of(row.max, max);
    row.max = max;
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad)
      row.o[quad] = {row.o[quad].x * kept, row.o[quad].y * kept, row.o[quad].z * kept, row.o[quad].w * kept};
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float of_share = __shfl_sync(~0u, weight, i);
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) row.add(quad, of_share, o[i][quad]);
    }
    float sum = weight * stats.y;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    row.sum = row.sum * kept + sum;
  }
}

// A row of a piece becomes that of its pair and is written, or goes to the block that waits for it.
template <class Config, class Write>
__device__ __forceinline__ void join_blocks(const DecodeParams& p, const Share& share, int n,
                                            Row<Config>& row, Write&& write) {
  if (share.splits == 1) {
    write(row);
    return;
  }
  const Slots<Config> slots(p, share, n);
  auto [levels, passes] = sched::turn_of(share.group, share.groups, share.split, n);
  if constexpr (Config::kSchedule == kInvariant) {
    // Which pieces a worker has must not matter: all shares take the same way.
    pass_share<Config>(slots.of(share.split), row);
    levels = share.joins ? 1 : 0;
    passes = false;
    row.clear();
  }
  const auto others = [&](int level) -> sched::Others {
    if (Config::kSchedule == kInvariant) return {share.splits, 0, 1, INT_MAX, 0};
    return sched::others_of(share.group, share.last, share.groups, n, level);
  };
  Read read = {{}, 0, 0};
#pragma unroll 1
  for (int level = 0; level < levels; ++level)
    add_shares<Config>(slots, others(level), level + 1 == levels && !passes, read, row);
  if (passes) {
    pass_share<Config>(slots.of(share.split), row);
    clear_shares<Config>(slots, read);
  } else if (levels > 0) {
    write(row);
  }
}

}  // namespace hpcjit::attention
