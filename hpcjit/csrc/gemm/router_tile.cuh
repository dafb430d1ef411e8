// Router logits by warpgroup products: y[m, n] = sum_k x[m, k] * w[n, k], x 16-bit, w fp32, sums fp32.
// kPresplit: w and w_low are bf16, w + scale * w_low takes the place of the fp32 weights.
//
// A block owns kTokens tokens x 64 kGroups experts of one of kSplits ranges of K. Experts are the rows of the product
// (A, in registers), tokens its columns (B). One thread of the last warpgroup copies boxes of x and w to a ring of
// kStages in shared memory (TMA, full and empty barriers). Each of kGroups x kSlots warpgroups takes 64 experts and
// every kSlots-th stage, reads its fp32 weights from the ring, splits them into kTerms 16-bit terms and multiplies each
// with the same x tile; the next fragments are made while the products of the last ones run. kShare blocks of a
// cluster have neighbouring tokens and the same weights: each copies its part of a box of w to all of them.
//
// Tensor cores cut off their sums' last bit at every step, so after kPromote of K the sums move to a second set,
// rounded (0: never). kSeparateLow: products of the second term have sums of their own, scaled at the end.
//
// Shared memory: ring, 1024-byte aligned: kStages x (x [kTokens][kStageK], w [kStageK / 32][64 kGroups][32] fp32), rows
// swizzled by TMA; inbox [kSplits][kTokens / kSplits][64 kGroups + 4] fp32; barriers. After the loop the ring holds the
// sums y [kSlots][kTokens][64 kGroups + 4]. The first slot adds up all slots; each block copies its sums to the inboxes of
// the blocks that own the tokens, once all blocks of the cluster have started. All sums are in a fixed order. What becomes
// of a result is up to a Sink.
#pragma once
#include "gemm/router_tile_join.cuh"
#include "gemm/router_tile_shape.cuh"
#include "gemm/router_tile_sums.cuh"
#include "hpcjit/launch.cuh"
#include "hpcjit/ptx/named_barrier.cuh"
#include "hpcjit/ptx/pdl.cuh"
#include "hpcjit/ptx/registers.cuh"
#include "hpcjit/ptx/tma.cuh"
#include "hpcjit/tensor_map.cuh"

namespace hpcjit::gemm {

template <class Config>
__device__ void copy_tiles(const RouterTileWork<Config>& work, RouterTileRing ring, const CUtensorMap& x_map,
                           const CUtensorMap& weight_map, const CUtensorMap& low_map) {
  using Shape = RouterTileShape<Config>;
  constexpr int kRows = Shape::kExperts / Config::kShare;  // of a weight box that this block copies
  uint16_t blocks = 0;                                     // that receive them
#pragma unroll
  for (int i = 0; i < Config::kShare; ++i) blocks |= uint16_t(1u << (work.split + i * Config::kSplits));
  for (int i = 0; i < work.count; ++i) {
    const int k = (work.first + i) * Config::kStageK;
    const uint32_t x_tile = ring.data + ring.stage * Shape::kStageBytes;
    mbarrier::wait(ring.empty(), ring.parity ^ 1);
    mbarrier::arrive_expecting(ring.full(), Shape::kStageBytes);
    tma::load(x_tile, &x_map, k, int(work.token), ring.full());
#pragma unroll
    for (int j = 0; j < Config::kStageK / 32; ++j) {
      const uint32_t rows = x_tile + Shape::kXBytes + j * Shape::kWeightBox + work.share * kRows * 128;
      const int expert = int(work.expert) + work.share * kRows;
      const CUtensorMap& map = Config::kPresplit && j == 1 ? low_map : weight_map;
      const int column = Config::kPresplit ? k : k + 32 * j;
      if constexpr (Config::kShare == 1)
        tma::load(rows, &map, column, expert, ring.full());
      else
        tma::load_to(blocks, rows, &map, column, expert, ring.full());
    }
    ring.advance<Config::kStages>(1);
  }
}

// All threads of the block, which meet from two places of the code; __syncthreads() asks for one.
template <class Config>
__device__ __forceinline__ void meet() {
  named_barrier::sync<RouterTileShape<Config>::kThreads>(2);
}

// The warpgroup that copies. It may not run what the others run after they have taken its registers.
template <class Config, class Sink>
__device__ __forceinline__ void copy_role(const typename Sink::Params& p, const RouterTileWork<Config>& work,
                                          const RouterTileRing& ring, const CUtensorMap& x_map,
                                          const CUtensorMap& weight_map, const CUtensorMap& low_map) {
  using Shape = RouterTileShape<Config>;
  if constexpr (Shape::kRaises) release_registers<Shape::kCopying>();
  if (threadIdx.x == Shape::kComputing) {
    const auto begun = Sink::begin(p, work);
    copy_tiles<Config>(work, ring, x_map, weight_map, low_map);
    Sink::end(p, work, begun);
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 2 + (Config::kSlots > 1); ++i) meet<Config>();
  if constexpr (Shape::kCluster > 1 && Config::kShare == 1) cluster::wait();
  if constexpr (Shape::kCluster > 1) {
    cluster::arrive_relaxed();
    cluster::wait();
  }
}

// The warpgroups that compute: `y` lies at the start of the ring.
template <class Config, class Sink>
__device__ __forceinline__ void compute_role(const typename Sink::Params& p,
                                             const RouterTileWork<Config>& work, const RouterTileRing& ring,
                                             float* y) {
  using Shape = RouterTileShape<Config>;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int group = threadIdx.x / 128 % Config::kGroups, slot = threadIdx.x / 128 / Config::kGroups;
  if constexpr (Shape::kRaises) claim_registers<Shape::kRaised>();
  RouterTileSums<Config> sums;
  float* place = y + sums.place(group, warp, lane);
  sums.accumulate(work, ring, group, slot, warp, lane);
  sums.add_low(Config::kPresplit ? float(p.scale) : 1.f / kFp16LowScale);
  meet<Config>();  // all have read the ring
  if constexpr (Config::kSlots > 1) {
    if (slot > 0) sums.store(place + slot * Shape::kPart);
    meet<Config>();
    if (slot == 0) sums.add_slots(place);
  }
  if (slot == 0) sums.store(place);
  if (Config::kSplits > 1 && slot == 0) copy::fence_async();  // what was written will be sent
  meet<Config>();
  const float* parts = y;
  if constexpr (Shape::kCluster > 1 && Config::kShare == 1) cluster::wait();  // all blocks have started
  if constexpr (Config::kSplits > 1) {
    parts = y + Shape::kInbox / 4;
    if (threadIdx.x < Config::kSplits)
      send_sums<Config>(work, y, copy::shared_address(parts), ring.inbox<Config>(), threadIdx.x);
    mbarrier::wait_in_cluster(ring.inbox<Config>(), 0);
  }
  if constexpr (Shape::kCluster > 1) cluster::arrive_relaxed();
  write_tile<Config, Sink>(p, work, parts);
  // Nobody ends while another reads its sums or frees its stages.
  if constexpr (Shape::kCluster > 1) cluster::wait();
  Sink::gate(p, work, y);
}

// The whole work of a block.
template <class Config, class Sink>
__device__ __forceinline__ void router_tile(const typename Sink::Params& p, const CUtensorMap& x_map,
                                            const CUtensorMap& weight_map, const CUtensorMap& low_map) {
  using Shape = RouterTileShape<Config>;
  extern __shared__ uint8_t raw[];
  uint8_t* smem = raw + (1024 - copy::shared_address(raw) % 1024) % 1024;
  const RouterTileWork<Config> work(p);
  const RouterTileRing ring{copy::shared_address(smem), copy::shared_address(smem) + Shape::kBarriers};

  if constexpr (!Sink::kTriggersLate) pdl::trigger();
  // Barriers of the ring in turn full and empty, then that of the inbox: a thread for each.
  if (threadIdx.x <= 2 * Config::kStages) {
    const bool empty = threadIdx.x % 2 == 1;
    mbarrier::init(ring.barriers + 8 * threadIdx.x, empty ? Config::kGroups * Config::kShare : 1);
    mbarrier::fence_init();
    if (Config::kSplits > 1 && threadIdx.x == 2 * Config::kStages)
      mbarrier::arrive_expecting(ring.inbox<Config>(), Shape::kInboxBytes);
  }
  if (threadIdx.x == Shape::kComputing) {
    tma::prefetch_map(&x_map);
    tma::prefetch_map(&weight_map);
    if constexpr (Config::kPresplit) tma::prefetch_map(&low_map);
  }
  __syncthreads();
  if constexpr (Shape::kCluster > 1) cluster::arrive_relaxed();  // fence_init has made the barriers known
  if constexpr (Config::kShare > 1) cluster::wait();             // before a copy reaches another block
  pdl::wait();
  if constexpr (Sink::kTriggersLate) pdl::trigger();

  if (threadIdx.x >= Shape::kComputing)
    copy_role<Config, Sink>(p, work, ring, x_map, weight_map, low_map);
  else
    compute_role<Config, Sink>(p, work, ring, reinterpret_cast<float*>(smem));
}

template <class Config>
__global__ void __launch_bounds__(RouterTileShape<Config>::kThreads, Config::kBlocksPerSm)
    router_tile_kernel(const __grid_constant__ RouterTileParams p, const __grid_constant__ CUtensorMap x_map,
                       const __grid_constant__ CUtensorMap weight_map,
                       const __grid_constant__ CUtensorMap low_map) {
  router_tile<Config, TileOut<Config>>(p, x_map, weight_map, low_map);
}

struct RouterTileMaps {
  CUtensorMap x, weight, low;
};

template <class Config>
cudaError_t encode_router_maps(const RouterTileParams& p, RouterTileMaps& maps) {
  constexpr auto kXType = __is_same(typename Config::x_t, bf16) ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                                : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  constexpr int kRows = RouterTileShape<Config>::kExperts / Config::kShare;
  cudaError_t status = encode_tensor_map<kXType, 2>(
      maps.x, {p.x, p.num_tokens, p.hidden_size, p.x_stride * 2}, Config::kTokens, Config::kStageK);
  if (status != cudaSuccess) return status;
  if constexpr (Config::kPresplit) {
    const Matrix high = {p.weight, p.num_experts, p.hidden_size, p.weight_stride * 2};
    const Matrix low = {p.weight_low, p.num_experts, p.hidden_size, p.low_stride * 2};
    status = encode_tensor_map<kXType, 2>(maps.weight, high, kRows, 64);
    if (status == cudaSuccess) status = encode_tensor_map<kXType, 2>(maps.low, low, kRows, 64);
  } else {
    const Matrix weight = {p.weight, p.num_experts, p.hidden_size, p.weight_stride * 4};
    status = encode_tensor_map<CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4>(maps.weight, weight, kRows, 32);
    maps.low = maps.weight;
  }
  return status;
}

template <class Config>
LaunchShape router_tile_launch(const RouterTileParams& p, int smem_bytes) {
  using Shape = RouterTileShape<Config>;
  const int64_t token_tiles = ceil_div(p.num_tokens, Config::kTokens * Config::kShare);
  const int64_t blocks = token_tiles * ceil_div(p.num_experts, Shape::kExperts) * Shape::kCluster;
  return {blocks, Shape::kThreads, smem_bytes, Config::kPdl, Shape::kCluster};
}

template <class Config, class... Params>
cudaError_t prepare_router_tile(void (*kernel)(Params...), int smem_bytes) {
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  return status == cudaSuccess && RouterTileShape<Config>::kCluster > 8 ? allow_large_cluster(kernel)
                                                                        : status;
}

template <class Config, class Params, class... KernelParams>
cudaError_t launch_router_tile(void (*kernel)(KernelParams...), int smem_bytes, const Params& p,
                               cudaStream_t stream) {
  RouterTileMaps maps;
  const cudaError_t status = encode_router_maps<Config>(p, maps);
  if (status != cudaSuccess) return status;
  const LaunchShape shape = router_tile_launch<Config>(p, smem_bytes);
  return hpcjit::launch(kernel, shape, stream, p, maps.x, maps.weight, maps.low);
}

template <class Config>
struct RouterTile {
  using Params = RouterTileParams;
  static constexpr int kSmem = RouterTileShape<Config>::kSmem;

  static cudaError_t prepare() { return prepare_router_tile<Config>(router_tile_kernel<Config>, kSmem); }

  static cudaError_t launch(const Params& p, cudaStream_t stream) {
    return launch_router_tile<Config>(router_tile_kernel<Config>, kSmem, p, stream);
  }
};

}  // namespace hpcjit::gemm
