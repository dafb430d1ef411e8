// What router_stream.cuh works on: launch parameters, the place of a block and a warp, and loads of weights and tokens into
// the registers that feed the tensor cores. Past the ends of rows zeros are read, past the last expert the last one.
#pragma once
#include "gemm/term_split.cuh"
#include "hpcjit/launch.cuh"
#include "hpcjit/ptx/prefetch.cuh"

namespace hpcjit::gemm {

struct RouterStreamParams {
  const void* x;
  const void* weight;
  const void* weight_low;
  void* out;
  int64_t num_tokens;
  int64_t num_experts;
  int64_t hidden_size;
  int64_t x_stride;
  int64_t weight_stride;
  int64_t low_stride;
  int64_t out_stride;
  double scale;
};

constexpr int kStepK = 32;

template <class Config>
struct StreamShape {
  static constexpr int kThreads = 32 * Config::kWarps;
  static constexpr int kRows = 16 * Config::kRowTiles;
  static constexpr int kTokens = 8 * Config::kTokenTiles;
  static constexpr int kVecs = 32 * Config::kRowTiles * Config::kTokenTiles;
  static constexpr int kShare = (kVecs + Config::kSplits - 1) / Config::kSplits;
  static constexpr int kInbox = Config::kSplits > 1 ? kShare * Config::kSplits : 0;
  static constexpr int kSmemBytes = 16 * (kVecs * Config::kWarps + kInbox) + 16;

  // Vectors that a block of the cluster owns; the last ones may have fewer, or none.
  __device__ __forceinline__ static int owned(int rank) { return max(0, min(kShare, kVecs - rank * kShare)); }
};

// What a block and a warp work on.
template <class Config>
struct StreamPlace {
  int64_t first_row, first_token;
  int64_t begin, end;  // of the warp, in steps
  int rank;            // in the cluster

  __device__ StreamPlace(const RouterStreamParams& p) {
    using Shape = StreamShape<Config>;
    const uint32_t groups = uint32_t((p.num_experts + Shape::kRows - 1) / Shape::kRows);
    rank = int(blockIdx.x % Config::kSplits);
    const uint32_t tile = blockIdx.x / Config::kSplits, token_tile = tile / groups;
    first_row = int64_t(tile - token_tile * groups) * Shape::kRows;
    first_token = int64_t(token_tile) * Shape::kTokens;
    const uint32_t unit = rank * Config::kWarps + threadIdx.x / 32;
    begin = steps_before(p, unit);
    end = steps_before(p, unit + 1);
  }

  // Steps of the units before this one.
  __device__ __forceinline__ static int64_t steps_before(const RouterStreamParams& p, uint32_t unit) {
    constexpr uint32_t kUnits = Config::kSplits * Config::kWarps;
    if constexpr (Config::kOnce) return int64_t(unit) * Config::kDepth;
    const uint32_t steps = uint32_t((p.hidden_size + kStepK - 1) / kStepK);
    return int64_t(unit) * (steps / kUnits) + min(unit, steps % kUnits);
  }
};

// Four neighbours, of which only those before the end of the row are read.
template <class Config, class Word, class T>
__device__ __forceinline__ Word load_four(const T* p, int64_t left) {
  static_assert(sizeof(Word) == 4 * sizeof(T), "four elements");
  if constexpr (Config::kExact) {
    return *reinterpret_cast<const Word*>(p);
  } else if constexpr (Config::kAligned) {
    return left > 0 ? *reinterpret_cast<const Word*>(p) : Word{};
  } else {
    Word word{};
    T* four = reinterpret_cast<T*>(&word);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < left) four[i] = p[i];
    }
    return word;
  }
}

// Makes the compiler have an address ready here, before pdl::wait().
template <class T>
__device__ __forceinline__ void ready(const T*& p) {
  asm volatile("" : "+l"(p));
}

// Where a lane begins in each row: element 4 t of the warp's first step.
template <class Config>
__device__ __forceinline__ int64_t lane_begin(const StreamPlace<Config>& place, int lane) {
  return place.begin * kStepK + lane % 4 * 4;
}

// Weights of one step as one lane sees them: rows g and g + 8 of each tile.
template <class Config, bool kPresplit = Config::kPresplit>
struct StreamWeights {
  static constexpr int kTiles = Config::kRowTiles;

  struct Rows {
    const float* row[kTiles][2];
    int64_t left;  // elements from there to the end of a row

    __device__ Rows(const RouterStreamParams& p, const StreamPlace<Config>& place, int lane)
        : left(p.hidden_size - lane_begin(place, lane)) {
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        const int64_t index = min(place.first_row + 8 * i + lane / 4, p.num_experts - 1);
        row[i / 2][i % 2] =
            static_cast<const float*>(p.weight) + index * p.weight_stride + lane_begin(place, lane);
        ready(row[i / 2][i % 2]);
      }
    }
  };

  float4 raw[kTiles][2][2];  // tile, k16, row

  __device__ void load(const Rows& rows, int64_t k) {
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) {
      const int64_t at = k + 16 * (i / 2 % 2);
      raw[i / 4][i / 2 % 2][i % 2] = load_four<Config, float4>(rows.row[i / 4][i % 2] + at, rows.left - at);
    }
  }

  __device__ void fragments(int tile, uint32_t (&a)[Config::kTerms][2][4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 w = raw[tile][i / 2][i % 2];
      uint32_t first[Config::kTerms], second[Config::kTerms];
      split_pair<typename Config::x_t>(w.x, w.y, first);
      split_pair<typename Config::x_t>(w.z, w.w, second);
#pragma unroll
      for (int term = 0; term < Config::kTerms; ++term) {
        a[term][i / 2][i % 2] = first[term];
        a[term][i / 2][i % 2 + 2] = second[term];
      }
    }
  }
};

template <class Config>
struct StreamWeights<Config, true> {
  static constexpr int kTiles = Config::kRowTiles;

  struct Rows {
    const bf16* row[2][kTiles][2];
    int64_t left;  // elements from there to the end of a row

    __device__ Rows(const RouterStreamParams& p, const StreamPlace<Config>& place, int lane)
        : left(p.hidden_size - lane_begin(place, lane)) {
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        const int64_t index = min(place.first_row + 8 * i + lane / 4, p.num_experts - 1);
        row[0][i / 2][i % 2] =
            static_cast<const bf16*>(p.weight) + index * p.weight_stride + lane_begin(place, lane);
        row[1][i / 2][i % 2] =
            static_cast<const bf16*>(p.weight_low) + index * p.low_stride + lane_begin(place, lane);
        ready(row[0][i / 2][i % 2]);
        ready(row[1][i / 2][i % 2]);
      }
    }
  };

  uint2 raw[2][kTiles][2][2];  // term, tile, k16, row

  __device__ void load(const Rows& rows, int64_t k) {
#pragma unroll
    for (int i = 0; i < 8 * kTiles; ++i) {
      const int64_t at = k + 16 * (i / 2 % 2);
      raw[i / (4 * kTiles)][i / 4 % kTiles][i / 2 % 2][i % 2] =
          load_four<Config, uint2>(rows.row[i / (4 * kTiles)][i / 4 % kTiles][i % 2] + at, rows.left - at);
    }
  }

  __device__ void fragments(int tile, uint32_t (&a)[2][2][4]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint2 w = raw[i / 4][tile][i / 2 % 2][i % 2];
      a[i / 4][i / 2 % 2][i % 2] = w.x;
      a[i / 4][i / 2 % 2][i % 2 + 2] = w.y;
    }
  }
};

// Tokens of one step: token g of each tile; zeros past the last one.
template <class Config>
struct StreamTokens {
  using x_t = typename Config::x_t;
  static constexpr int kTiles = Config::kTokenTiles;

  struct Rows {
    const x_t* first;
    int64_t tile_stride, left;
    int num_live;  // tiles whose token exists

    __device__ Rows(const RouterStreamParams& p, const StreamPlace<Config>& place, int lane)
        : tile_stride(8 * p.x_stride), left(p.hidden_size - lane_begin(place, lane)) {
      const int64_t token = place.first_token + lane / 4;
      first = static_cast<const x_t*>(p.x) + token * p.x_stride + lane_begin(place, lane);
      ready(first);
      num_live = int(min((p.num_tokens - token + 7) >> 3, int64_t(kTiles)));
    }
  };

  uint2 raw[kTiles][2];  // tile, k16

  __device__ void load(const Rows& rows, int64_t k) {
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      const int64_t at = k + 16 * (i % 2);
      raw[i / 2][i % 2] = uint2{};
      if (i / 2 < rows.num_live)
        raw[i / 2][i % 2] =
            load_four<Config, uint2>(rows.first + i / 2 * rows.tile_stride + at, rows.left - at);
    }
  }
};

template <class Config>
__device__ __forceinline__ void prefetch_weights(const RouterStreamParams& p,
                                                 const StreamPlace<Config>& place) {
  constexpr int kRows = StreamShape<Config>::kRows, kBytes = Config::kPresplit ? 2 : 4;
  const int rows = int(min(p.num_experts - place.first_row, int64_t(kRows)));
  const int row = threadIdx.x % 16;
  if (row >= rows) return;
  const int64_t offset = (place.first_row + row) * p.weight_stride * kBytes;
  const int64_t low_offset = (place.first_row + row) * p.low_stride * kBytes;
#pragma unroll 1
  for (int64_t step = place.begin + threadIdx.x % 32 / 16; step < place.end; step += 2) {
    const int64_t at = step * kStepK * kBytes;
#pragma unroll
    for (int more = 0; more < kRows; more += 16) {
      if (row + more >= rows) break;
      prefetch_l2(static_cast<const char*>(p.weight) + offset + more * p.weight_stride * kBytes + at);
      if constexpr (Config::kPresplit)
        prefetch_l2(static_cast<const char*>(p.weight_low) + low_offset + more * p.low_stride * kBytes + at);
    }
  }
}

}  // namespace hpcjit::gemm
