// Router GEMM for few tokens: out[m, n] = sum over k of x[m, k] weight[n, k], as fast as the weights can be read.
//
// Weights are fp32, split into kTerms 16-bit terms in registers (term_split.cuh), or with kPresplit two bf16 matrices:
// weight + scale * weight_low. They go from global memory to registers and are the A operand of mma.m16n8k16
// (16 experts), tokens are B (8 each). Inside a k16 thread 4 g + t holds k 4 t .. 4 t + 3 of both, in the slots where
// the instruction expects 2 t, 2 t + 1, 2 t + 8, 2 t + 9: one order of k is as good as another.
//
// A block has kRowTiles x 16 experts and kTokenTiles x 8 tokens; a cluster of kSplits blocks splits k, and so do the
// kWarps warps of each, every one with kDepth steps of k32 under way (kOnce: it has no more). Sums start from zero in
// every step, smallest terms first, and are added up in fp32: tensor cores cut off what they cannot hold, so their own
// chains are kept short.
//
// Sums over warps go through shared memory, then each block sends its sums to the block of the cluster that owns them
// (kSplits shares, equal but for the last ones); all in a fixed order. Shared memory: float4 partial[kWarps][kVecs], a
// vector per lane and tile, written by its warp, read after __syncthreads(); float4 shares[kSplits][kShare], written by
// st.async of the cluster once all its blocks have started (cluster barrier), read when the mbarrier behind it has counted
// all bytes. What becomes of a result is up to a Sink.
//
// Before pdl::wait() weights are only prefetched: a predecessor may be writing them.
#pragma once
#include "gemm/router_repair.cuh"
#include "gemm/router_stream_load.cuh"
#include "hpcjit/ptx/cluster.cuh"
#include "hpcjit/ptx/copy.cuh"
#include "hpcjit/ptx/mbarrier.cuh"
#include "hpcjit/ptx/mma.cuh"
#include "hpcjit/ptx/pdl.cuh"

namespace hpcjit::gemm {

template <class Config>
using StreamSums = float[Config::kRowTiles][Config::kTokenTiles][4];

// What a term counts beside the one before it.
template <class Config>
__device__ __forceinline__ float term_factor(const RouterStreamParams& p) {
  if constexpr (Config::kPresplit) return float(p.scale);
  return __is_same(typename Config::x_t, fp16) ? 1.f / kFp16LowScale : 1.f;
}

// Product of one tile of one step.
template <class Config>
__device__ __forceinline__ void multiply_tile(const uint32_t (&a)[Config::kTerms][2][4], const uint2 (&x)[2],
                                              float (&sum)[4], float factor) {
  using x_t = typename Config::x_t;
  constexpr bool kScaled = Config::kPresplit || __is_same(x_t, fp16);
  // Few tiles: two chains, because the latency of one shows.
  constexpr int kChains = !kScaled && Config::kRowTiles * Config::kTokenTiles <= 4 ? 2 : 1;
  float part[kChains][4] = {};
#pragma unroll
  for (int term = Config::kTerms - 1; term >= 0; --term) {
    float smaller[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      smaller[i] = part[0][i];
      if (kScaled) part[0][i] = 0.f;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t b[2] = {x[half].x, x[half].y};
      mma::m16n8k16<x_t>(part[half % kChains], a[term][half], b);
    }
    if constexpr (kScaled) {
      if (term == Config::kTerms - 1) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) part[0][i] = fmaf(smaller[i], factor, part[0][i]);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) sum[i] += kChains == 2 ? part[0][i] + part[kChains - 1][i] : part[0][i];
}

// Adds the product of one step.
template <class Config>
__device__ __forceinline__ void multiply(const StreamWeights<Config>& w, const StreamTokens<Config>& x,
                                         StreamSums<Config>& sums, float factor) {
#pragma unroll
  for (int row = 0; row < Config::kRowTiles; ++row) {
    uint32_t a[Config::kTerms][2][4];
    w.fragments(row, a);
#pragma unroll
    for (int token = 0; token < Config::kTokenTiles; ++token)
      multiply_tile<Config>(a, x.raw[token], sums[row][token], factor);
  }
}

// All steps of a warp, kDepth of them under way.
template <class Config>
__device__ __forceinline__ void stream(const RouterStreamParams& p, const StreamPlace<Config>& place,
                                       const typename StreamWeights<Config>::Rows& weight_rows,
                                       const typename StreamTokens<Config>::Rows& token_rows,
                                       StreamSums<Config>& sums) {
  constexpr int kDepth = Config::kDepth;
  const int count = int(place.end - place.begin);
  const float factor = term_factor<Config>(p);
  StreamWeights<Config> w[kDepth];
  StreamTokens<Config> x[kDepth];
  const auto load = [&](int slot, int step) {
    if (!Config::kOnce && step >= count) return;
    w[slot].load(weight_rows, int64_t(step) * kStepK);
    x[slot].load(token_rows, int64_t(step) * kStepK);
  };
#pragma unroll
  for (int slot = 0; slot < kDepth; ++slot) load(slot, slot);
  if constexpr (Config::kOnce) {
#pragma unroll
    for (int slot = 0; slot < kDepth; ++slot) multiply<Config>(w[slot], x[slot], sums, factor);
  } else {
    for (int step = 0; step < count; step += kDepth) {
#pragma unroll
      for (int slot = 0; slot < kDepth; ++slot) {
        if (step + slot >= count) break;
        multiply<Config>(w[slot], x[slot], sums, factor);
        load(slot, step + slot + kDepth);
      }
    }
  }
}

__device__ __forceinline__ void add(float4& a, float4 b) {
  a.x += b.x;
  a.y += b.y;
  a.z += b.z;
  a.w += b.w;
}

// Sum of `count` vectors that lie `stride` apart, in this order.
template <int kCount>
__device__ __forceinline__ float4 sum_of(const float4* first, int stride) {
  float4 sum = first[0];
#pragma unroll
  for (int i = 1; i < kCount; ++i) add(sum, first[i * stride]);
  return sum;
}

// The Sink of a product alone: results go to `out`. begin() is called once `pdl::wait()` has returned. A Sink that says
// kTriggersLate has dependents that may start no sooner.
template <class Config>
struct StreamOut {
  using out_t = typename Config::out_t;
  static constexpr bool kTriggersLate = false;
  const RouterStreamParams& p;

  __device__ __forceinline__ void begin() {}
  __device__ __forceinline__ void put(int64_t token, int64_t expert, float value) const {
    static_cast<out_t*>(p.out)[token * p.out_stride + expert] = from_float<out_t>(value);
  }
};

// Hands over the four results that lane `vec` % 32 of tile `vec` / 32 has; whole warps call it.
template <class Config, class Sink>
__device__ __forceinline__ void store(const RouterStreamParams& p, const StreamPlace<Config>& place, int vec,
                                      bool mine, float4 sum, const Sink& sink) {
  const int tile = vec / 32, g = vec % 32 / 4, t = vec % 4;
  const int64_t row = place.first_row + tile / Config::kTokenTiles * 16 + g;
  const int64_t column = place.first_token + tile % Config::kTokenTiles * 8 + 2 * t;
  float value[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t expert = row + i / 2 * 8, token = column + i % 2;
    const bool live = mine && expert < p.num_experts && token < p.num_tokens;
    if constexpr (!Config::kPresplit) value[i] = repair<Config>(value[i], live, token, expert, p);
    if (live) sink.put(token, expert, value[i]);
  }
}

// Behind the shares; counts the bytes of all of them.
template <class Config>
__device__ __forceinline__ uint32_t arrival_barrier() {
  extern __shared__ float4 partial[];
  return copy::shared_address(partial + StreamShape<Config>::kVecs * Config::kWarps +
                              StreamShape<Config>::kInbox);
}

// Says to the cluster that this block's memory may be written from now on.
template <class Config>
__device__ __forceinline__ void open_shares() {
  if (threadIdx.x == 0) {
    mbarrier::init(arrival_barrier<Config>(), 1);
    mbarrier::fence_init();
    const int owned = StreamShape<Config>::owned(blockIdx.x % Config::kSplits);
    mbarrier::arrive_expecting(arrival_barrier<Config>(), 16 * Config::kSplits * owned);
  }
  __syncwarp();
  cluster::arrive_relaxed();
}

// Adds up the warps' sums, over the cluster too, and hands them over.
template <class Config, class Sink>
__device__ __forceinline__ void combine(const RouterStreamParams& p, const StreamPlace<Config>& place,
                                        const StreamSums<Config>& sums, const Sink& sink) {
  using Shape = StreamShape<Config>;
  constexpr int kVecs = Shape::kVecs, kShare = Shape::kShare;
  extern __shared__ float4 partial[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int tile = 0; tile < kVecs / 32; ++tile) {
    const float (&part)[4] = sums[tile / Config::kTokenTiles][tile % Config::kTokenTiles];
    partial[warp * kVecs + tile * 32 + lane] = make_float4(part[0], part[1], part[2], part[3]);
  }
  __syncthreads();
  if constexpr (Config::kSplits == 1) {
    for (int vec = threadIdx.x; vec < kVecs; vec += Shape::kThreads)
      store(p, place, vec, true, sum_of<Config::kWarps>(partial + vec, kVecs), sink);
  } else {
    const float4* shares = partial + Config::kWarps * kVecs;
    const uint32_t arrived = arrival_barrier<Config>();
    cluster::wait();
    for (int vec = threadIdx.x; vec < kVecs; vec += Shape::kThreads) {
      const uint32_t owner = uint32_t(vec / kShare);
      const uint32_t target = copy::shared_address(shares + place.rank * kShare + vec % kShare);
      cluster::store4_async(cluster::map(target, owner), sum_of<Config::kWarps>(partial + vec, kVecs),
                            cluster::map(arrived, owner));
    }
    const int owned = Shape::owned(place.rank);
    if (warp * 32 >= owned) return;
    mbarrier::wait_in_cluster(arrived, 0);
    for (int first = warp * 32; first < owned; first += Shape::kThreads) {
      const int vec = min(first + lane, owned - 1);
      store(p, place, place.rank * kShare + vec, vec == first + lane,
            sum_of<Config::kSplits>(shares + vec, kShare), sink);
    }
  }
}

// The whole work of a block.
template <class Config, class Sink>
__device__ __forceinline__ void router_stream(const RouterStreamParams& p, Sink& sink) {
  if constexpr (!Sink::kTriggersLate) pdl::trigger();
  if constexpr (Config::kSplits > 1) open_shares<Config>();
  const StreamPlace<Config> place(p);
  if constexpr (Config::kPrefetch) prefetch_weights(p, place);
  const typename StreamWeights<Config>::Rows weight_rows(p, place, threadIdx.x % 32);
  const typename StreamTokens<Config>::Rows token_rows(p, place, threadIdx.x % 32);
  pdl::wait();
  if constexpr (Sink::kTriggersLate) pdl::trigger();
  sink.begin();
  StreamSums<Config> sums = {};
  stream<Config>(p, place, weight_rows, token_rows, sums);
  combine<Config>(p, place, sums, sink);
}

template <class Config>
__global__ void __launch_bounds__(StreamShape<Config>::kThreads, Config::kBlocksPerSm)
    router_stream_kernel(const __grid_constant__ RouterStreamParams p) {
  StreamOut<Config> sink{p};
  router_stream<Config>(p, sink);
}

template <class Config, class... Params>
cudaError_t prepare_router_stream(void (*kernel)(Params...),
                                  int smem_bytes = StreamShape<Config>::kSmemBytes) {
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  return status == cudaSuccess && Config::kSplits > 8 ? allow_large_cluster(kernel) : status;
}

template <class Config>
LaunchShape router_stream_launch(const RouterStreamParams& p,
                                 int smem_bytes = StreamShape<Config>::kSmemBytes) {
  using Shape = StreamShape<Config>;
  const int64_t tiles = ceil_div(p.num_experts, Shape::kRows) * ceil_div(p.num_tokens, Shape::kTokens);
  return {tiles * Config::kSplits, Shape::kThreads, smem_bytes, Config::kPdl, Config::kSplits};
}

template <class Config>
struct RouterStream {
  using Params = RouterStreamParams;

  static cudaError_t prepare() { return prepare_router_stream<Config>(router_stream_kernel<Config>); }

  static cudaError_t launch(const Params& p, cudaStream_t stream) {
    return hpcjit::launch(router_stream_kernel<Config>, router_stream_launch<Config>(p), stream, p);
  }
};

}  // namespace hpcjit::gemm
