// The end of the wgmma router GEMM: sums over the splits of K, which the blocks of a cluster have; see router_tile.cuh.
#pragma once
#include "gemm/router_repair.cuh"
#include "gemm/router_tile_shape.cuh"
#include "hpcjit/ptx/cluster.cuh"
#include "hpcjit/ptx/copy.cuh"
#include "hpcjit/ptx/mbarrier.cuh"
#include "hpcjit/tile/vec.cuh"

namespace hpcjit::gemm {

// Where four experts of a token lie in the sums of a block. `index` counts along experts, then tokens.
template <class Config>
struct RouterTileQuad {
  static constexpr int kPerToken = RouterTileShape<Config>::kExperts / 4;
  int token, expert;
  __device__ explicit RouterTileQuad(int index) : token(index / kPerToken), expert(index % kPerToken * 4) {}
};

template <int kCount>
__device__ __forceinline__ float4 sum_in_order(const float* first, int stride) {
  float4 sum = *reinterpret_cast<const float4*>(first);
#pragma unroll
  for (int i = 1; i < kCount; ++i) {
    const float4 next = *reinterpret_cast<const float4*>(first + i * stride);
    sum.x += next.x;
    sum.y += next.y;
    sum.z += next.z;
    sum.w += next.w;
  }
  return sum;
}

// Sends each block of the cluster the sums of the tokens that it owns. `inbox` lies at the same place in all of them; the
// barrier `arrived` behind it counts the bytes. One thread for each block. What is sent must stay until it has arrived.
template <class Config>
__device__ __forceinline__ void send_sums(const RouterTileWork<Config>& work, const float* y, uint32_t inbox,
                                          uint32_t arrived, int block) {
  constexpr int kBytes = RouterTileShape<Config>::kOwned * 4;
  const uint32_t owner = work.share * Config::kSplits + block;
  cluster::copy_async(cluster::map(inbox + work.split * kBytes, owner),
                      copy::shared_address(y) + block * kBytes, kBytes, cluster::map(arrived, owner));
}

template <class Config>
__device__ __forceinline__ void write_quad(const RouterTileParams& p, int64_t token, int64_t expert,
                                           const float (&value)[4]) {
  using out_t = typename Config::out_t;
  out_t* target = static_cast<out_t*>(p.out) + token * p.out_stride + expert;
  if constexpr (Config::kVectorOut) {
    Vec<out_t, 4> packed;
    packed.from(value);
    packed.store(target);
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (expert + j < p.num_experts) target[j] = from_float<out_t>(value[j]);
  }
}

// The Sink of a product alone: results go to `out`. begin() and end() are called by the thread that copies, before and
// after it has done so, gate() by the warps that compute, at the end. A Sink that says kOnce gets each result once;
// otherwise put() may be called again with a better one. One that says kTriggersLate has dependents that may not start
// before `pdl::wait()` has returned.
template <class Config>
struct TileOut {
  using Params = RouterTileParams;
  static constexpr bool kOnce = false, kTriggersLate = false;

  __device__ __forceinline__ static int begin(const Params&, const RouterTileWork<Config>&) { return 0; }
  __device__ __forceinline__ static void end(const Params&, const RouterTileWork<Config>&, int) {}
  __device__ __forceinline__ static void put(const Params& p, int64_t token, int64_t expert,
                                             const float (&value)[4]) {
    write_quad<Config>(p, token, expert, value);
  }
  __device__ __forceinline__ static void gate(const Params&, const RouterTileWork<Config>&, float*) {}
};

// Adds up the parts of all splits and hands over this block's tokens. Whole warps call it. Says whether a result was NaN;
// kRepair: looks closer at those.
template <class Config, class Sink, bool kRepair>
__device__ __forceinline__ bool write_sums(const typename Sink::Params& p, const RouterTileWork<Config>& work,
                                           const float* parts) {
  using Shape = RouterTileShape<Config>;
  constexpr int kTokens = Config::kTokens / Config::kSplits;
  constexpr int kQuads = kTokens * (Shape::kExperts / 4);
  bool broken = false;
#pragma unroll 1
  for (int first = threadIdx.x / 32 * 32; first < kQuads; first += Shape::kComputing) {
    const int i = min(first + int(threadIdx.x % 32), kQuads - 1);
    const RouterTileQuad<Config> quad(i);
    const float4 sum =
        sum_in_order<Config::kSplits>(parts + quad.token * Shape::kPitch + quad.expert, Shape::kOwned);
    const int64_t token = work.token + work.split * kTokens + quad.token, expert = work.expert + quad.expert;
    const bool live =
        first + int(threadIdx.x % 32) < kQuads && token < p.num_tokens && expert < p.num_experts;
    float value[4] = {sum.x, sum.y, sum.z, sum.w};
    bool now = live;
    if constexpr (Sink::kOnce) {
      const bool any = (sum.x != sum.x) | (sum.y != sum.y) | (sum.z != sum.z) | (sum.w != sum.w);
      now &= any == kRepair;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (kRepair)
        value[j] = repair<Config>(value[j], live && expert + j < p.num_experts, token, expert + j, p);
      else
        broken |= value[j] != value[j];
    }
    if (now) Sink::put(p, token, expert, value);
  }
  return broken;
}

// Out of line, so that it costs no registers where all is well.
template <class Config, class Sink>
__device__ __noinline__ void write_repaired(const typename Sink::Params& p,
                                            const RouterTileWork<Config>& work, const float* parts) {
  write_sums<Config, Sink, true>(p, work, parts);
}

template <class Config, class Sink>
__device__ __forceinline__ void write_tile(const typename Sink::Params& p, const RouterTileWork<Config>& work,
                                           const float* parts) {
  const bool broken = write_sums<Config, Sink, false>(p, work, parts);
  if constexpr (!Config::kPresplit)
    if (__any_sync(0xffffffffu, broken)) write_repaired<Config, Sink>(p, work, parts);
}

}  // namespace hpcjit::gemm
