// The producer side of a team's ring: which tile comes next, and the copies that bring it.
//
// The warps of a team fill its ring themselves, one tile (K and V) per stage, kStages - 1 ahead of what they
// read. Two tiles ahead of the copies, their page ids are asked for, so that no copy waits for the table.
#pragma once
#include "attention/decode_work.cuh"
#include "hpcjit/ptx/copy.cuh"
#include "hpcjit/ptx/prefetch.cuh"

namespace hpcjit::attention {

// Page of a token (its index in the request's row of the table), and the token's slot there.
struct Place {
  int page;
  int slot;
};

template <class Config>
__device__ __forceinline__ Place place_of(const DecodeParams& p, int token) {
  const int page = Config::kShiftedPages ? token >> int(p.page_shift) : token / int(p.page_size);
  return {page, token - page * int(p.page_size)};
}

template <class Config>
__device__ __forceinline__ int live_from(const DecodeParams& p, const Request& r) {
  return Config::kWindow ? sched::first_token(r.seq_len, r.q_len, int(p.window)) : 0;
}

// Runs `fetch` on every 128 bytes of the query rows of a pair and on their scales, a lane for each row.
template <class Config, class Fetch>
__device__ __forceinline__ void touch_queries(const DecodeParams& p, const Request& r, int head,
                                              Fetch&& fetch) {
  for (int n = threadIdx.x % 32; n < r.q_len * int(p.group); n += 32) {
    const int j = Config::kCausal ? n / int(p.group) : 0, q_head = head * int(p.group) + n - j * int(p.group);
    const auto* q = static_cast<const typename Config::q_t*>(p.q) + (r.q_start + j) * p.q_token_stride +
                    q_head * p.q_head_stride;
#pragma unroll 1
    for (int i = 0; i < Config::kHeadDim * int(sizeof(*q)); i += 128)
      fetch(reinterpret_cast<const unsigned char*>(q) + i);
    if constexpr (Config::kQScale)
      fetch(p.q_scale + (r.q_start + j) * p.q_scale_token_stride + q_head * p.q_scale_head_stride);
  }
}

// A tile of K and V that is to be copied. Where pages hold whole tiles, `page` and `slot` are those of its first
// row (its last rows may be dead, the page is not), otherwise each lane has those of the row of its number.
template <class Config>
struct Tile {
  static_assert(Config::kWholeTiles || Config::kTile <= 32, "a lane per row");
  int request;  // -1: no tile
  int head;
  int first;                 // token of row 0
  int live_begin, live_end;  // rows
  int slot;
  int page;          // as the table says
  const int* entry;  // of the table; null: none

  __device__ __forceinline__ bool is_live(int row) const {
    return row < live_end && (!Config::kWindow || row >= live_begin);
  }

  __device__ __forceinline__ void ask_page(const DecodeParams& p, bool guess) {
    const int row = row_of_lane();
    const Place place = place_of<Config>(p, first + row);
    slot = place.slot;
    const bool none = request < 0 || (!Config::kWholeTiles && (row >= Config::kTile || !is_live(row)));
    entry = none ? nullptr : p.block_table + request * p.table_stride + place.page;
    page = 0;
    if (entry != nullptr) page = guess ? __ldcg(entry) : *entry;
  }

  __device__ __forceinline__ int page_now() const { return entry != nullptr ? *entry : 0; }

  __device__ __forceinline__ static int row_of_lane() {
    return Config::kWholeTiles ? 0 : int(threadIdx.x % 32);
  }

  // The page, or 0 for one that does not exist: whatever is read there, it is readable.
  __device__ __forceinline__ int existing_page(const DecodeParams& p) const {
    if (unsigned(page) < unsigned(p.num_pages)) return page;
    if (p.fault != nullptr) {
      report(p.fault, request * p.table_width + place_of<Config>(p, first + row_of_lane()).page, page,
             p.num_pages);
    }
    return 0;
  }
};

// The tiles of one team in order.
template <class Config>
struct Producer {
  using S = Shape<Config>;
  static constexpr int kAhead = 2;

  Walk<Config> walk;
  Piece piece;
  int tile;   // from the begin of the piece
  bool more;  // the walk has not ended
  Tile<Config> asked[kAhead];

  __device__ __forceinline__ void begin(const DecodeParams& p, const Small<Config>& small, int team,
                                        bool guess) {
    walk.begin(p, small);
    tile = team;
    more = walk.piece(p, piece);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) asked[i] = next(p, guess);
  }

  __device__ __forceinline__ Tile<Config> next(const DecodeParams& p, bool guess) {
    while (more && tile >= piece.end - piece.begin) {
      // The invariant schedule deals tiles anew in each piece: who reads a tile must not depend on the others.
      tile = Config::kSchedule == kInvariant ? int(threadIdx.x / 32 / Config::kRowGroups)
                                             : tile - (piece.end - piece.begin);
      walk.advance(p, piece, guess);
      more = walk.piece(p, piece);
      if (!guess && more && threadIdx.x < 32)
        touch_queries<Config>(p, walk.request, piece.head, [](const void* row) { prefetch_l1(row); });
    }
    Tile<Config> t;
    t.request = more ? piece.request : -1;
    t.head = piece.head;
    t.first = (walk.tiles.first + piece.begin + tile) * Config::kTile;
    t.live_begin = live_from<Config>(p, walk.request) - t.first;
    t.live_end = walk.request.seq_len - t.first;
    t.ask_page(p, guess);
    tile += S::kTeams;
    return t;
  }
};

// Copies the rows of K or V of a tile, 16 bytes per thread of the team and step. Rows without a live token
// become zeros: they may hold anything, and 0 * NaN is NaN.
template <class Config, class Rows>
__device__ __forceinline__ void copy_rows(const Tile<Config>& tile, int page, uint32_t target,
                                          const void* cache, int64_t page_stride, int64_t slot_stride,
                                          int64_t head_stride, uint64_t policy) {
  constexpr int kThreads = Config::kRowGroups * 32;
  constexpr int kBytes = sizeof(typename Config::kv_t);
  constexpr int kSteps = (Config::kTile * Rows::kChunks + kThreads - 1) / kThreads;
  constexpr bool kRegular = kThreads % Rows::kChunks == 0;  // a thread's rows are at equal distances
  const int thread = threadIdx.x % kThreads, first_row = thread / Rows::kChunks;
  const auto* base = static_cast<const unsigned char*>(cache) + tile.head * (head_stride * kBytes);
  const int64_t place = page * (page_stride * kBytes) + tile.slot * (slot_stride * kBytes);
  const unsigned char* source = base + thread % Rows::kChunks * 16;
  if constexpr (kRegular && Config::kWholeTiles) source += place + first_row * (slot_stride * kBytes);
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int flat = i * kThreads + thread;
    const int chunk = kRegular ? thread % Rows::kChunks : flat % Rows::kChunks;
    const int row = kRegular ? first_row + i * (kThreads / Rows::kChunks) : flat / Rows::kChunks;
    if (Config::kTile * Rows::kChunks % kThreads != 0 && row >= Config::kTile) break;
    if constexpr (!Config::kWholeTiles) {
      source = base + __shfl_sync(~0u, place, row) + chunk * 16;
    } else if constexpr (!kRegular) {
      source = base + place + row * (slot_stride * kBytes) + chunk * 16;
    } else if (i > 0) {
      source += kThreads / Rows::kChunks * (slot_stride * kBytes);
    }
    copy::async_16(target + Rows::offset(row, chunk), source, tile.is_live(row), policy);
  }
}

template <class Config>
__device__ __forceinline__ void copy_scales(const DecodeParams& p, const Tile<Config>& tile, int page,
                                            float* scales) {
#pragma unroll
  for (int i = 0; i < (Config::kTile + 31) / 32; ++i) {
    const int row = i * 32 + threadIdx.x % 32;
    const int64_t slot = Config::kWholeTiles ? tile.slot + row : tile.slot;
    if (row >= Config::kTile) break;
    if constexpr (Config::kKScale == 2)
      copy::async_4(copy::shared_address(scales + row),
                    p.k_scale + page * p.k_scale_page_stride + slot * p.k_scale_slot_stride +
                        tile.head * p.k_scale_head_stride,
                    tile.is_live(row));
    if constexpr (Config::kVScale == 2)
      copy::async_4(copy::shared_address(scales + Config::kTile + row),
                    p.v_scale + page * p.v_scale_page_stride + slot * p.v_scale_slot_stride +
                        tile.head * p.v_scale_head_stride,
                    tile.is_live(row));
  }
}

// Starts the copies of the producer's tile, if there is one, into a stage, and moves on. All warps of the team;
// one group of copies in any case, so that groups can be counted.
template <class Config>
__device__ __forceinline__ void start_copies(const DecodeParams& p, Producer<Config>& from,
                                             const Smem<Config>& smem, int team, int stage, uint64_t policy) {
  using S = Shape<Config>;
  const Tile<Config>& tile = from.asked[0];
  if (tile.request >= 0) {
    const uint32_t target = copy::shared_address(smem.stage(team, stage));
    const int page = tile.existing_page(p);
    copy_rows<Config, typename S::K>(tile, page, target, p.k_cache, p.k_page_stride, p.k_slot_stride,
                                     p.k_head_stride, policy);
    copy_rows<Config, typename S::V>(tile, page, target + S::K::kBytes, p.v_cache, p.v_page_stride,
                                     p.v_slot_stride, p.v_head_stride, policy);
    if constexpr (S::kTokenScales) copy_scales<Config>(p, tile, page, smem.scales(team, stage));
#pragma unroll
    for (int i = 1; i < Producer<Config>::kAhead; ++i) from.asked[i - 1] = from.asked[i];
    from.asked[Producer<Config>::kAhead - 1] = from.next(p, false);
  }
  copy::commit();
}

// Moves a tile's live rows towards L2, on the strength of lengths and page ids that may still change.
template <class Config>
__device__ __forceinline__ void hint_tile(const DecodeParams& p, const Tile<Config>& tile) {
  using S = Shape<Config>;
  constexpr int kBytes = sizeof(typename Config::kv_t);
  // A lane per row; the warps of a team share out a tile of more, whose rows lie in one page.
  const int row = threadIdx.x % (Config::kWholeTiles ? 32 * Config::kRowGroups : 32);
  if (tile.request < 0 || row >= Config::kTile || !tile.is_live(row) ||
      unsigned(tile.page) >= unsigned(p.num_pages))
    return;
  const int slot = Config::kWholeTiles ? tile.slot + row : tile.slot;
  const auto hint = [&](const void* cache, int64_t page_stride, int64_t slot_stride, int64_t head_stride,
                        int bytes) {
    const auto* from = static_cast<const unsigned char*>(cache) +
                       (tile.page * page_stride + slot * slot_stride + tile.head * head_stride) * kBytes;
    for (int i = 0; i < bytes; i += 128) prefetch_l2(from + i);
  };
  hint(p.k_cache, p.k_page_stride, p.k_slot_stride, p.k_head_stride, S::K::kRowBytes);
  hint(p.v_cache, p.v_page_stride, p.v_slot_stride, p.v_head_stride, S::V::kRowBytes);
}

}  // namespace hpcjit::attention
