// Router logits by warpgroup products: y[m, n] = sum_k x[m, k] * w[n, k], x 16-bit, w fp32, sums fp32.
//
// A block owns kTokens tokens x 64 kGroups experts of one of kSplits ranges of K. Experts are the rows of the product
// (A, in registers), tokens its columns (B). A warp of the last warpgroup copies boxes of x and w to a ring of kStages in shared
// memory (TMA, full and empty barriers); each of kGroups warpgroups takes 64 experts, reads its fp32 weights from the
// ring, splits them into kTerms 16-bit terms and multiplies each with the same x tile. The next fragments are made
// while the products of the last ones run. kShare blocks of a cluster have neighbouring tokens and the same weights:
// each copies its part of a weight box to all of them.
//
// Tensor cores cut off their sums' last bit at every step, so after kPromote of K the sums move to a second set,
// rounded (0: never). kSeparateLow: products of the second term have sums of their own, times low_scale at the end.
//
// Shared memory: ring, 1024-byte aligned: kStages x (x [kTokens][kStageK], w [kStageK / 32][64 kGroups][32] fp32), rows
// swizzled by TMA; then the barriers. After the loop the ring holds y [kTokens][64 kGroups + 4], and block `split` of a
// cluster adds the parts of all splits, in their order, for its share of the tokens.
#pragma once
#include "gemm/term_split.cuh"
#include "hpcjit/launch.cuh"
#include "hpcjit/ptx/cluster.cuh"
#include "hpcjit/ptx/copy.cuh"
#include "hpcjit/ptx/mbarrier.cuh"
#include "hpcjit/ptx/pdl.cuh"
#include "hpcjit/ptx/registers.cuh"
#include "hpcjit/ptx/tma.cuh"
#include "hpcjit/ptx/wgmma.cuh"
#include "hpcjit/tensor_map.cuh"
#include "hpcjit/tile/vec.cuh"

namespace hpcjit::gemm {

struct RouterTileParams {
  const void* x;
  const float* weight;
  void* out;
  int64_t num_tokens;
  int64_t num_experts;
  int64_t hidden_size;
  int64_t x_stride;
  int64_t weight_stride;
  int64_t out_stride;
  double low_scale;
};

template <class Config>
struct RouterTileShape {
  static constexpr int kExperts = 64 * Config::kGroups;
  static constexpr int kXBytes = Config::kTokens * Config::kStageK * 2;
  static constexpr int kWeightBox = kExperts * 128;  // 32 of K
  static constexpr int kStageBytes = kXBytes + Config::kStageK / 32 * kWeightBox;
  static constexpr int kPitch = kExperts + 4;  // floats; spreads the columns of a warp's sums over all banks
  static constexpr int kRing = Config::kStages * kStageBytes;
  static constexpr int kStaged = Config::kTokens * kPitch * 4;
  static constexpr int kBarriers = kRing > kStaged ? kRing : (kStaged + 1023) / 1024 * 1024;
  static constexpr int kSmem = kBarriers + Config::kStages * 16 + 1024;
  static constexpr int kCluster = Config::kSplits * Config::kShare;
  static constexpr int kThreads = 128 * Config::kGroups + 128;
  static constexpr int kRegisters = Config::kGroups == 3 ? 160 : 240;  // of a thread that computes; others 24
  static_assert(kXBytes % 1024 == 0 && Config::kTokens % Config::kSplits == 0);
};

// What this block works on.
template <class Config>
struct RouterTileWork {
  using Shape = RouterTileShape<Config>;
  int split, share;
  int64_t token, expert;  // the first ones
  int first, count;       // stages of K

  __device__ explicit RouterTileWork(const RouterTileParams& p) {
    const int rank = blockIdx.x % Shape::kCluster;
    split = rank % Config::kSplits;
    share = rank / Config::kSplits;
    const int64_t tile = blockIdx.x / Shape::kCluster;
    const int64_t expert_tiles = (p.num_experts + Shape::kExperts - 1) / Shape::kExperts;
    expert = tile % expert_tiles * Shape::kExperts;
    token = (tile / expert_tiles * Config::kShare + share) * Config::kTokens;
    const int total = int((p.hidden_size + Config::kStageK - 1) / Config::kStageK);
    const int each = (total + Config::kSplits - 1) / Config::kSplits;
    first = split * each;
    count = max(0, min(each, total - first));
  }
};

struct RouterTileRing {
  uint32_t data, barriers;
  int stage = 0;
  uint32_t parity = 0;

  __device__ uint32_t full() const { return barriers + stage * 16; }
  __device__ uint32_t empty() const { return barriers + stage * 16 + 8; }
  template <int kStages>
  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <class Config>
__device__ void copy_tiles(const RouterTileWork<Config>& work, RouterTileRing ring, const CUtensorMap& x_map,
                           const CUtensorMap& weight_map) {
  using Shape = RouterTileShape<Config>;
  constexpr int kPart = Shape::kExperts / Config::kShare;  // rows of a weight box that this block copies
  uint16_t mask = 0;
#pragma unroll
  for (int i = 0; i < Config::kShare; ++i) mask |= uint16_t(1u << (work.split + i * Config::kSplits));
  for (int i = 0; i < work.count; ++i) {
    const int k = (work.first + i) * Config::kStageK;
    const uint32_t x_tile = ring.data + ring.stage * Shape::kStageBytes;
    mbarrier::wait_in_cluster(ring.empty(), ring.parity ^ 1);
    mbarrier::arrive_expecting(ring.full(), Shape::kStageBytes);
    tma::load(x_tile, &x_map, k, int(work.token), ring.full());
#pragma unroll
    for (int j = 0; j < Config::kStageK / 32; ++j) {
      const uint32_t part = x_tile + Shape::kXBytes + j * Shape::kWeightBox + work.share * kPart * 128;
      const int row = int(work.expert) + work.share * kPart;
      if constexpr (Config::kShare == 1)
        tma::load(part, &weight_map, k + 32 * j, row, ring.full());
      else
        tma::load_to(mask, part, &weight_map, k + 32 * j, row, ring.full());
    }
    ring.advance<Config::kStages>();
  }
}

// Rows of the product within a warp lie such that eight bytes of four of them, swizzled, are in different banks.
__device__ __forceinline__ int expert_of_row(int g) {
  return g < 4 ? 2 * g : 2 * g - 7;
}

// The fragments of one warp.
template <class Config>
struct RouterTileWeights {
  using x_t = typename Config::x_t;
  static constexpr int kTerms = Config::kTerms;
  uint32_t row;        // byte offset of the lane's first row in a box
  uint32_t column[4];  // byte offsets of 8 K each in a row, swizzled, with the lane's two K

  __device__ RouterTileWeights(int warp, int lane) {
    const int g = lane / 4, t = lane % 4, e = expert_of_row(g);
    row = (16 * warp + e) * 128 + (t & 1) * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) column[i] = uint32_t(((t >> 1) ^ e) ^ (2 * i)) << 4;
  }

  __device__ __forceinline__ void load(uint32_t box, int half, float2 (&w)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t address = box + row + (i & 1) * 1024 + column[2 * half + i / 2];
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(w[i].x), "=f"(w[i].y) : "r"(address));
    }
  }

  __device__ __forceinline__ static void split(const float2 (&w)[4], uint32_t (&a)[kTerms][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t terms[kTerms];
      split_pair<x_t, kTerms>(w[i].x, w[i].y, terms);
#pragma unroll
      for (int j = 0; j < kTerms; ++j) a[j][i] = terms[j];
    }
  }
};

template <class Config>
struct RouterTileSums {
  using Product = wgmma::Product<typename Config::x_t, Config::kTokens>;
  static constexpr int kSums = Config::kTokens / 2;
  static constexpr int kStages = Config::kStages;
  static constexpr bool kPromotes = Config::kPromote > 0;
  float sums[kSums];
  float low[Config::kSeparateLow ? kSums : 1];
  float master[kPromotes ? kSums : 1];

  __device__ __forceinline__ void promote() {
#pragma unroll
    for (int i = 0; i < kSums; ++i) master[i] += sums[i];
  }

  template <int kTerms>
  __device__ __forceinline__ void multiply(const uint32_t (&a)[kTerms][4], uint64_t x_tile, bool add,
                                           bool add_low) {
#pragma unroll
    for (int i = 0; i < kTerms; ++i) {
      if constexpr (Config::kSeparateLow) {
        if (i == 1)
          Product::run(low, a[i], x_tile, add_low);
        else
          Product::run(sums, a[i], x_tile, add);
      } else {
        Product::run(sums, a[i], x_tile, add || i > 0);
      }
    }
  }

  __device__ void accumulate(const RouterTileWork<Config>& work, RouterTileRing ring, int group, int warp,
                             int lane) {
    using Shape = RouterTileShape<Config>;
    using Weights = RouterTileWeights<Config>;
    constexpr int kSteps = Config::kStageK / 16;
    const Weights weights(warp, lane);
    uint32_t a[2][Config::kTerms][4];
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = 0.f;
    if constexpr (kPromotes) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) master[i] = 0.f;
    }
    if constexpr (Config::kSeparateLow) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) low[i] = 0.f;
    }
    bool add = false;
    int chain = 0;
    uint32_t free = 0;  // barrier of the stage before this one
    for (int i = 0; i < work.count; ++i) {
      const uint32_t stage = ring.data + ring.stage * Shape::kStageBytes;
      const uint32_t box = stage + Shape::kXBytes + group * 64 * 128;
      const uint64_t x_tile = wgmma::descriptor<Config::kStageK * 2>(stage);
      mbarrier::wait(ring.full(), ring.parity);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        float2 w[4];
        weights.load(box + step / 2 * Shape::kWeightBox, step % 2, w);
        Weights::split(w, a[step % 2]);
#pragma unroll
        for (int j = 0; j < Config::kTerms; ++j) wgmma::hold(a[step % 2][j]);
        wgmma::fence();
        multiply(a[step % 2], x_tile + step * 2, add, i + step > 0);
        wgmma::commit();
        add = true;
        wgmma::wait<
            1>();  // the products before these: their fragments and, at the first step, their stage are free
        if (step == 0 && i > 0) release(work, free, lane, warp);
      }
      free = ring.empty();
      if constexpr (kPromotes) {
        if (++chain == Config::kPromote / Config::kStageK) {
          wgmma::wait<0>();
          wgmma::hold(sums);
          promote();
          chain = 0;
          add = false;
        }
      }
      ring.advance<kStages>();
    }
    wgmma::wait<0>();
    wgmma::hold(sums);
    if constexpr (kPromotes) {
      if (add) promote();
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] = master[i];
    }
    if constexpr (Config::kSeparateLow) wgmma::hold(low);
  }

  __device__ __forceinline__ static void release(const RouterTileWork<Config>& work, uint32_t barrier,
                                                 int lane, int warp) {
    if (lane != 0 || warp != 0) return;
    if constexpr (Config::kShare == 1) {
      mbarrier::arrive(barrier);
    } else {
#pragma unroll
      for (int i = 0; i < Config::kShare; ++i) mbarrier::arrive_at(barrier, work.split + i * Config::kSplits);
    }
  }

  // To y in shared memory.
  __device__ void store(float* y, int group, int warp, int lane, float low_scale) const {
    constexpr int kPitch = RouterTileShape<Config>::kPitch;
    const int expert = 64 * group + 16 * warp + expert_of_row(lane / 4);
    y += 2 * (lane % 4) * kPitch + expert;
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      float value = sums[i];
      if constexpr (Config::kSeparateLow) value += low[i] * low_scale;
      y[(8 * (i / 4) + (i & 1)) * kPitch + (i & 2) * 4] = value;
    }
  }
};

// Sum of the splits of four experts of a token, in their order.
template <int kSplits, int kPitch>
__device__ __forceinline__ float4 join(const float* y, int first_rank) {
  if constexpr (kSplits == 1) return *reinterpret_cast<const float4*>(y);
  float4 part[kSplits];
  const uint32_t address = copy::shared_address(y);
#pragma unroll
  for (int i = 0; i < kSplits; ++i) part[i] = cluster::load4(cluster::map(address, first_rank + i));
  float4 sum = part[0];
#pragma unroll
  for (int i = 1; i < kSplits; ++i) {
    sum.x += part[i].x;
    sum.y += part[i].y;
    sum.z += part[i].z;
    sum.w += part[i].w;
  }
  return sum;
}

template <class Config>
__device__ void write_tile(const RouterTileParams& p, const RouterTileWork<Config>& work, const float* y) {
  using Shape = RouterTileShape<Config>;
  using out_t = typename Config::out_t;
  constexpr int kTokens = Config::kTokens / Config::kSplits;
  constexpr int kQuads = Shape::kExperts / 4;
  for (int i = threadIdx.x; i < kTokens * kQuads; i += Shape::kThreads - 128) {
    const int token = work.split * kTokens + i / kQuads, expert = i % kQuads * 4;
    const float4 sum = join<Config::kSplits, Shape::kPitch>(y + token * Shape::kPitch + expert,
                                                            work.share * Config::kSplits);
    const int64_t n = work.expert + expert;
    if (work.token + token >= p.num_tokens || n >= p.num_experts) continue;
    out_t* target = static_cast<out_t*>(p.out) + (work.token + token) * p.out_stride + n;
    const float value[4] = {sum.x, sum.y, sum.z, sum.w};
    if constexpr (Config::kVectorOut) {
      Vec<out_t, 4> packed;
      packed.from(value);
      packed.store(target);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (n + j < p.num_experts) target[j] = from_float<out_t>(value[j]);
    }
  }
}

template <class Config>
__global__ void __launch_bounds__(RouterTileShape<Config>::kThreads, 1)
    router_tile_kernel(const __grid_constant__ RouterTileParams p, const __grid_constant__ CUtensorMap x_map,
                       const __grid_constant__ CUtensorMap weight_map) {
  using Shape = RouterTileShape<Config>;
  extern __shared__ uint8_t raw[];
  uint8_t* smem = raw + (1024 - copy::shared_address(raw) % 1024) % 1024;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const RouterTileWork<Config> work(p);
  const RouterTileRing ring{copy::shared_address(smem), copy::shared_address(smem) + Shape::kBarriers};

  pdl::trigger();
  if (threadIdx.x == 0) {
    for (int i = 0; i < Config::kStages; ++i) {
      mbarrier::init(ring.barriers + 16 * i, 1);
      mbarrier::init(ring.barriers + 16 * i + 8, Config::kGroups * Config::kShare);
    }
    mbarrier::fence_init();
  }
  if (Config::kPrefetch && warp == 4 * Config::kGroups) {
    for (int i = lane; i < work.count; i += 32) {
      const int k = (work.first + i) * Config::kStageK;
      for (int j = 0; j < Config::kStageK; j += 32) tma::prefetch_box(&weight_map, k + j, int(work.expert));
      tma::prefetch_box(&x_map, k, int(work.token));
    }
  }
  if constexpr (Config::kShare > 1) {
    cluster::arrive();
    cluster::wait();
  } else {
    __syncthreads();
  }
  pdl::wait();

  float* y = reinterpret_cast<float*>(smem);
  if (warp >= 4 * Config::kGroups) {
    if constexpr (Config::kGroups > 1) release_registers<24>();
    if (warp == 4 * Config::kGroups && lane == 0) copy_tiles<Config>(work, ring, x_map, weight_map);
    __syncwarp();
    __syncthreads();
  } else {
    if constexpr (Config::kGroups > 1) claim_registers<Shape::kRegisters>();
    RouterTileSums<Config> sums;
    sums.accumulate(work, ring, warp / 4, warp % 4, lane);
    __syncthreads();  // all have read the ring
    sums.store(y, warp / 4, warp % 4, lane, float(p.low_scale));
  }
  if constexpr (Shape::kCluster > 1) {
    cluster::arrive();
    cluster::wait();
  } else {
    __syncthreads();
  }
  if (warp < 4 * Config::kGroups) write_tile<Config>(p, work, y);
  if constexpr (Shape::kCluster > 1) {  // nobody ends while another reads its sums or frees its stages
    cluster::arrive();
    cluster::wait();
  }
}

template <class Config>
struct RouterTile {
  using Params = RouterTileParams;
  using Shape = RouterTileShape<Config>;

  static cudaError_t prepare() {
    cudaError_t status = cudaFuncSetAttribute(router_tile_kernel<Config>,
                                              cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSmem);
    if (status == cudaSuccess && Shape::kCluster > 8)
      status = allow_large_cluster(router_tile_kernel<Config>);
    return status;
  }

  static cudaError_t launch(const Params& p, cudaStream_t stream) {
    constexpr auto kXType = __is_same(typename Config::x_t, bf16) ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                                  : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    CUtensorMap x_map, weight_map;
    cudaError_t status = encode_tensor_map<kXType, 2>(
        x_map, {p.x, p.num_tokens, p.hidden_size, p.x_stride * 2}, Config::kTokens, Config::kStageK);
    if (status != cudaSuccess) return status;
    status = encode_tensor_map<CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4>(
        weight_map, {p.weight, p.num_experts, p.hidden_size, p.weight_stride * 4},
        Shape::kExperts / Config::kShare, 32);
    if (status != cudaSuccess) return status;
    const int64_t token_groups = ceil_div(p.num_tokens, int64_t(Config::kTokens) * Config::kShare);
    const int64_t blocks = token_groups * ceil_div(p.num_experts, Shape::kExperts) * Shape::kCluster;
    return hpcjit::launch(router_tile_kernel<Config>,
                          {blocks, Shape::kThreads, Shape::kSmem, Config::kPdl, Shape::kCluster}, stream, p,
                          x_map, weight_map);
  }
};

}  // namespace hpcjit::gemm
