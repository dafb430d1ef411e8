// The main loop of the wgmma router GEMM, of one warpgroup; see router_tile.cuh.
#pragma once
#include "gemm/router_tile_shape.cuh"
#include "gemm/term_split.cuh"
#include "hpcjit/ptx/mbarrier.cuh"
#include "hpcjit/ptx/mma.cuh"
#include "hpcjit/ptx/wgmma.cuh"

namespace hpcjit::gemm {

// Rows of the product within a warp lie such that eight bytes of four of them, swizzled, are in different banks.
__device__ __forceinline__ int expert_of_row(int g) {
  return g < 4 ? 2 * g : 2 * g - 7;
}

// The fragments of one warp: a[term] of 16 of K, from the boxes of its warpgroup.
template <class Config>
struct RouterTileWeights {
  using x_t = typename Config::x_t;
  using Fragments = uint32_t[Config::kTerms][4];
  static constexpr int kBox = RouterTileShape<Config>::kWeightBox;
  uint32_t row;        // byte offset of the lane's row in a box
  uint32_t column[4];  // byte offsets of the lane's share of a step's K in a row, swizzled

  __device__ RouterTileWeights(int warp, int lane) {
    const int g = lane / 4, t = lane % 4;
    const int e = expert_of_row(Config::kPresplit ? lane % 8 : g);
    row = (16 * warp + e) * 128;
    if constexpr (Config::kPresplit) {
      row += lane / 8 % 2 * 1024;
#pragma unroll
      for (int i = 0; i < 4; ++i) column[i] = uint32_t((2 * i + lane / 16) ^ e) << 4;
    } else {
      row += (t & 1) * 8;
#pragma unroll
      for (int i = 0; i < 4; ++i) column[i] = uint32_t(((t >> 1) ^ e) ^ (2 * i)) << 4;
    }
  }

  __device__ __forceinline__ void load(uint32_t boxes, int step, Fragments& a) const {
    if constexpr (Config::kPresplit) {
#pragma unroll
      for (int j = 0; j < Config::kTerms; ++j) mma::ldmatrix_x4(a[j], boxes + j * kBox + row + column[step]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t address =
            boxes + step / 2 * kBox + row + (i & 1) * 1024 + column[2 * (step % 2) + i / 2];
        float2 w;
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(w.x), "=f"(w.y) : "r"(address));
        uint32_t terms[Config::kTerms];
        split_pair<x_t, Config::kTerms>(w.x, w.y, terms);
#pragma unroll
        for (int j = 0; j < Config::kTerms; ++j) a[j][i] = terms[j];
      }
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

  // Fragments of kBatch steps, made while the products before them run.
  using Batch = uint32_t[Config::kBatch][Config::kTerms][4];

  __device__ __forceinline__ void multiply_batch(Batch& a, uint64_t x_tile, bool add, bool add_low) {
#pragma unroll
    for (int i = 0; i < Config::kBatch; ++i) {
#pragma unroll
      for (int j = 0; j < Config::kTerms; ++j) wgmma::hold(a[i][j]);
    }
    wgmma::fence();
#pragma unroll
    for (int i = 0; i < Config::kBatch; ++i) multiply(a[i], x_tile + i * 2, add || i > 0, add_low || i > 0);
    wgmma::commit();
  }

  __device__ void accumulate(const RouterTileWork<Config>& work, RouterTileRing ring, int group, int slot,
                             int warp, int lane) {
    using Shape = RouterTileShape<Config>;
    constexpr int kBatches = Config::kStageK / 16 / Config::kBatch;
    const RouterTileWeights<Config> weights(warp, lane);
    Batch a[2];
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
    bool add = false, add_low = false;
    int chain = 0;
    uint32_t free = 0;  // barrier of the stage before this one
    const auto run_stage = [&](Batch& even, Batch& odd) {
      const uint32_t stage = ring.data + ring.stage * Shape::kStageBytes;
      const uint32_t boxes = stage + Shape::kXBytes + group * 64 * 128;
      const uint64_t x_tile = wgmma::descriptor<Config::kStageK * 2>(stage);
      mbarrier::wait(ring.full(), ring.parity);
#pragma unroll
      for (int i = 0; i < kBatches; ++i) {
        Batch& mine = i % 2 == 0 ? even : odd;
#pragma unroll
        for (int j = 0; j < Config::kBatch; ++j) weights.load(boxes, i * Config::kBatch + j, mine[j]);
        if (kPromotes && i == 0 && chain == Config::kPromote / Config::kStageK) {
          wgmma::wait<0>();
          wgmma::hold(sums);
          promote();
          chain = 0;
          add = false;
        }
        multiply_batch(mine, x_tile + i * Config::kBatch * 2, add, add_low);
        add = add_low = true;
        wgmma::wait<1>();  // the batch before this one: its fragments and, at the first, its stage are free
        if (i == 0 && free != 0 && warp == 0 && lane < Config::kShare) release(work, free, lane);
      }
      if constexpr (kPromotes) ++chain;
      free = ring.empty();
      ring.advance<kStages>(Config::kSlots);
    };
    ring.advance<kStages>(slot);
#pragma unroll 1
    for (int i = slot; i < work.count; i += Config::kSlots) {
      run_stage(a[0], a[1]);
      if constexpr (kBatches % 2 != 0) {  // the other half of the fragments is next
        i += Config::kSlots;
        if (i >= work.count) break;
        run_stage(a[1], a[0]);
      }
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

  // Of one thread for each block that copies to this one.
  __device__ __forceinline__ static void release(const RouterTileWork<Config>& work, uint32_t barrier,
                                                 int share) {
    if constexpr (Config::kShare == 1)
      mbarrier::arrive(barrier);
    else
      mbarrier::arrive_at(barrier, work.split + share * Config::kSplits);
  }

  // Where the lane's sums lie in y; `i` counts sums.
  __device__ __forceinline__ static int place(int group, int warp, int lane) {
    return 2 * (lane % 4) * RouterTileShape<Config>::kPitch + 64 * group + 16 * warp +
           expert_of_row(lane / 4);
  }
  __device__ __forceinline__ static constexpr int step(int i) {
    return (8 * (i / 4) + (i & 1)) * RouterTileShape<Config>::kPitch + (i & 2) * 4;
  }

  __device__ __forceinline__ void add_low(float scale) {
    if constexpr (Config::kSeparateLow) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] += low[i] * scale;
    }
  }

  // `y` is the lane's place. Adds what the other slots have stored.
  __device__ __forceinline__ void add_slots(const float* y) {
#pragma unroll
    for (int slot = 1; slot < Config::kSlots; ++slot) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] += y[slot * RouterTileShape<Config>::kPart + step(i)];
    }
  }

  __device__ __forceinline__ void store(float* y) const {
#pragma unroll
    for (int i = 0; i < kSums; ++i) y[step(i)] = sums[i];
  }
};

}  // namespace hpcjit::gemm
