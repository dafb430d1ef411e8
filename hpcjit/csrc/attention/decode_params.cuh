// Launch parameters, compile-time shape and shared-memory map of decode attention.
#pragma once
#include "hpcjit/sched/joins.cuh"
#include "hpcjit/types.cuh"

namespace hpcjit::attention {

// Strides in elements. Scales are addressed like the cache: page, slot, head; a stride of 0 shares one value.
struct DecodeParams {
  const void* q;
  const void* k_cache;
  const void* v_cache;
  const int* block_table;
  const int* seq_lens;
  const int* cu_seqlens_q;  // null: max_q_len rows for every request
  const float* q_scale;     // null: 1
  const float* k_scale;     // null: 1
  const float* v_scale;     // null: 1
  const float* sinks;       // null: none
  void* out;
  float* lse;        // null: not wanted
  float* counters;   // shares of results, zero between launches; see decode_join.cuh
  long long* fault;  // null, or {count, position, value, limit} of page ids and lengths out of range
  double scale;
  double k_factor;  // multiplies k_scale
  double v_factor;
  double softcap;
  int64_t batch;
  int64_t total_q;
  int64_t max_q_len;
  int64_t num_kv_heads;
  int64_t group;  // query heads per KV head
  int64_t num_pages;
  int64_t page_size;
  int64_t page_shift;  // log2 of page_size, or -1
  int64_t capacity;    // tokens that the table can address: lengths are held to it
  int64_t table_width;
  int64_t table_stride;
  int64_t window;  // 0: none
  int64_t workers;
  int64_t splits;      // static: pieces of a request; invariant: tiles of a piece
  int64_t least;       // least tiles of a worker; see sched::interval_length
  int64_t whole;       // tiles up to which a pair is not cut
  int64_t slack;       // tiles that a worker may get more, for the sake of fewer cuts
  int64_t less;        // tiles that the first workers get less where a request is in many parts
  int64_t margin;      // half of what it costs to open and close a pair, in tiles
  int64_t max_pieces;  // invariant: slots of a pair
  int64_t q_token_stride;
  int64_t q_head_stride;
  int64_t q_scale_token_stride;
  int64_t q_scale_head_stride;
  int64_t k_page_stride;
  int64_t k_slot_stride;
  int64_t k_head_stride;
  int64_t v_page_stride;
  int64_t v_slot_stride;
  int64_t v_head_stride;
  int64_t k_scale_page_stride;
  int64_t k_scale_slot_stride;
  int64_t k_scale_head_stride;
  int64_t v_scale_page_stride;
  int64_t v_scale_slot_stride;
  int64_t v_scale_head_stride;
  int64_t out_token_stride;
  int64_t out_head_stride;
  int64_t lse_token_stride;
  int64_t lse_head_stride;
};

constexpr int kDynamic = 0, kStatic = 1, kInvariant = 2;  // Config::kSchedule

constexpr double kLog2e = 1.4426950408889634;

// A K or V tile in shared memory: panels of kPanel bytes of every row, the 16-byte chunks of a row permuted so that
// eight rows at one column never share a bank.
template <int kTile, int kDim, int kElementBytes>
struct TileShape {
  static constexpr int kRowBytes = kDim * kElementBytes;
  static constexpr int kPanel = kRowBytes % 128 == 0 ? 128 : 64;
  static constexpr int kPanelBytes = kTile * kPanel;
  static constexpr int kBytes = kTile * kRowBytes;
  static constexpr int kChunks = kRowBytes / 16;

  __device__ __forceinline__ static int swizzle(int row) { return kPanel == 128 ? row & 7 : (row >> 1) & 3; }

  // Byte offset of a 16-byte chunk of a row.
  __device__ __forceinline__ static int offset(int row, int chunk) {
    constexpr int kPerPanel = kPanel / 16;
    return chunk / kPerPanel * kPanelBytes + row * kPanel + ((chunk % kPerPanel ^ swizzle(row)) * 16);
  }
};

template <class Config>
struct Shape {
  using kv_t = typename Config::kv_t;
  static constexpr bool kFp8 = sizeof(kv_t) == 1;
  static constexpr int kTile = Config::kTile;
  static constexpr int kDimK = Config::kHeadDim, kDimV = Config::kValueHeadDim;
  using K = TileShape<kTile, kDimK, int(sizeof(kv_t))>;
  using V = TileShape<kTile, kDimV, int(sizeof(kv_t))>;

  // A team of kRowGroups warps works on one tile, each warp on kRowTiles * 8 of the query rows.
  static constexpr int kThreads = Config::kWarps * 32;
  static constexpr int kTeams = Config::kWarps / Config::kRowGroups;
  static constexpr int kWarpRows = Config::kRowTiles * 8;
  static constexpr int kRows = Config::kRowGroups * kWarpRows;

  static constexpr bool kTokenScales = Config::kKScale == 2 || Config::kVScale == 2;
  static constexpr int kScaleBytes = kTokenScales ? 2 * kTile * 4 : 0;

  // Shared memory: the ring of every team, scales of tokens, sums, queries of many rows, small things. At the end of a
  // piece the sums of a team's warps go into the stage that is free between two tiles, or into memory of their own if that
  // is too small.
  static constexpr int kStageBytes = K::kBytes + V::kBytes;
  static constexpr int kRingBytes = kTeams * Config::kStages * kStageBytes;
  static constexpr int kScalesBytes = kTeams * Config::kStages * kScaleBytes;

  static constexpr bool kOwnSums = kRows * kDimV * 4 > kStageBytes;
  static constexpr int kSumsBytes = kOwnSums ? kTeams * kRows * kDimV * 4 : 0;

  // Queries that do not stay in registers: for 16 dims, 16 bytes of every lane.
  static constexpr int kQueryBytes = Config::kSharedQ ? Config::kWarps * kDimK / 16 * 512 : 0;
  static constexpr int kSmallAt = kRingBytes + kScalesBytes + kSumsBytes + kQueryBytes;

  static_assert(Config::kWarps % Config::kRowGroups == 0, "whole teams");
  static_assert(kTeams <= 15 || Config::kRowGroups == 1, "a named barrier per team");
  static_assert(!Config::kSharedQ || Config::kRowTiles == 2, "two operands of 8 bytes in 16");
};

struct Request {
  int seq_len;
  int q_len;
  int q_start;
};

// Part `split` of the `splits` of a pair. Its slot is `first` + split, or `first` + `begin` for split 0. Its group, how many
// groups there are, and the last of them. Under the invariant schedule: whether the worker of this piece joins the pair,
// and has now done all of its own pieces.
struct Share {
  int split;
  int splits;
  int first;
  int begin;
  sched::Group group;
  int groups;
  sched::Group last;
  bool joins;
};

template <class Config>
struct Small {
  using S = Shape<Config>;
  float2 stats[S::kRows][S::kTeams];                          // maximum and sum
  int free_stage[S::kTeams];                                  // that holds the sums of a team
  alignas(16) typename Config::axis_t total[Config::kWarps];  // cost of a warp's requests
  alignas(16) int longest[Config::kWarps];                    // most tiles of one of them
  int touched[Config::kWarps];
  sched::Cut<typename Config::axis_t> cuts[2];
  Request of_cut[2];
  sched::Axis<typename Config::axis_t> axis;
  Share share;  // of the piece in work
};

template <class Config>
struct Smem {
  using S = Shape<Config>;
  unsigned char* base;

  __device__ __forceinline__ unsigned char* stage(int team, int stage) const {
    return base + (team * Config::kStages + stage) * S::kStageBytes;
  }
  // kTile scales of K, then kTile scales of V.
  __device__ __forceinline__ float* scales(int team, int stage) const {
    return reinterpret_cast<float*>(base + S::kRingBytes + (team * Config::kStages + stage) * S::kScaleBytes);
  }
  __device__ __forceinline__ float* sums(int team, int free_stage) const {
    return reinterpret_cast<float*>(S::kOwnSums ? base + S::kRingBytes + S::kScalesBytes +
                                                      team * S::kRows * S::kDimV * 4
                                                : stage(team, free_stage));
  }
  // This lane's part of its warp's queries.
  __device__ __forceinline__ uint4* queries() const {
    constexpr int kOfWarp = S::kDimK / 16 * 32;
    return reinterpret_cast<uint4*>(base + S::kRingBytes + S::kScalesBytes + S::kSumsBytes) +
           threadIdx.x / 32 * kOfWarp + threadIdx.x % 32;
  }
  __device__ __forceinline__ Small<Config>& small() const {
    return *reinterpret_cast<Small<Config>*>(base + S::kSmallAt);
  }
};

template <class Config>
constexpr int kSmemBytes = Shape<Config>::kSmallAt + int(sizeof(Small<Config>));
constexpr int kMostSmemBytes = 227 * 1024;  // of a block

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// max - (-inf) must be inf, not NaN, when everything so far was masked.
__device__ __forceinline__ float finite_or_zero(float max) {
  return max == -INFINITY ? 0.f : max;
}

}  // namespace hpcjit::attention
