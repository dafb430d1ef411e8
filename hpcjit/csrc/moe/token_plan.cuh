// Which tokens go to which expert, and tiles of up to kRows of an expert's rows, found by a block for itself in shared memory.
//
// A bit for each token says whether it has chosen an expert, so rows of an expert are in the order of tokens, whatever the
// order of threads, and a token that names an expert twice has one row.
#pragma once
#include <stdint.h>

namespace hpcjit::moe {

// Rows of an expert, at most kRows.
struct TokenTile {
  uint16_t expert, rows;
  uint32_t first;
};

template <int kThreads, int kExperts, int kTokens, int kRows>
struct TokenPlan {
  static constexpr int kWords = (kTokens + 31) / 32, kWarps = kThreads / 32;
  static constexpr int kPerThread = (kExperts + kThreads - 1) / kThreads;

  // The most tiles of so many pairs.
  __host__ __device__ static constexpr int max_tiles(int pairs) {
    return (pairs + (pairs < kExperts ? pairs : kExperts) * (kRows - 1)) / kRows;
  }

  uint32_t* mask;   // [kExperts][kWords]
  uint16_t* start;  // [kExperts]: row
  uint32_t* scan;   // [kWarps]
  TokenTile* tiles;

  // Needs nothing from other grids.
  __device__ void clear() const {
    for (int i = threadIdx.x; i < kExperts * kWords; i += kThreads) mask[i] = 0;
  }

  // After clear() and a barrier.
  __device__ void add(int expert, int token) const {
    atomicOr(mask + expert * kWords + token / 32, 1u << (token % 32));
  }

  // After all of them and a barrier. All threads call it; returns the number of tiles, which are there, as are the starts,
  // after a barrier.
  __device__ uint32_t place_experts() const {
    uint32_t rows[kPerThread], own = 0;
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int e = threadIdx.x * kPerThread + j;
      rows[j] = e < kExperts ? rows_of(e) : 0;
      own += rows[j] | tiles_of(rows[j]) << 16;
    }
    uint32_t total;
    uint32_t at = sum_before(own, total);
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int e = threadIdx.x * kPerThread + j;
      if (e < kExperts) start[e] = uint16_t(at);
      write_tiles(e, at & 0xffff, rows[j], at >> 16);
      at += rows[j] | tiles_of(rows[j]) << 16;
    }
    return total >> 16;
  }

  // Of a token that has chosen the expert; after place_experts() and a barrier.
  __device__ uint32_t row_of(int expert, int token) const {
    uint32_t row = start[expert];
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint32_t bits = mask[expert * kWords + w];
      const int below = token - 32 * w;
      row += __popc(below >= 32 ? bits : below > 0 ? bits & ((1u << below) - 1) : 0u);
    }
    return row;
  }

 private:
  __device__ uint32_t rows_of(int e) const {
    uint32_t rows = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) rows += __popc(mask[e * kWords + w]);
    return rows;
  }

  __device__ static uint32_t tiles_of(uint32_t rows) { return (rows + kRows - 1) / kRows; }

  // Rows (lower half) and tiles (upper half) of all experts before this thread's, and `total`, those of all.
  __device__ uint32_t sum_before(uint32_t own, uint32_t& total) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t sum = own;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const uint32_t other = __shfl_up_sync(0xffffffffu, sum, offset);
      if (lane >= offset) sum += other;
    }
    if (lane == 31) scan[warp] = sum;
    __syncthreads();
    uint32_t before = sum - own;
    total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) before += scan[w];
      total += scan[w];
    }
    return before;
  }

  __device__ void write_tiles(int e, uint32_t first, uint32_t rows, uint32_t tile) const {
    for (uint32_t done = 0; done < rows; done += kRows) {
      const uint32_t count = min(rows - done, uint32_t(kRows));
      tiles[tile++] = {uint16_t(e), uint16_t(count), first + done};
    }
  }
};

}  // namespace hpcjit::moe
