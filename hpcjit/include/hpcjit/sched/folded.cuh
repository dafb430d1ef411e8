// The folded schedule: variable-length work cut into equal intervals by a pure function of the lengths.
//
// A request of n tiles costs c = 2 margin + n on an axis; each of its heads (a pair) takes that much, heads
// innermost, requests in order:
//
//   pair (b, h) owns [S, S + c_b)       S = num_heads * (c_0 + ... + c_{b-1}) + h * c_b
//   worker i of n works on [total - (n - i) L, total - (n - i - 1) L)    L = ceil(total / n), or more (see interval_length)
//   or, of the first k, if these get m less (see axis_of), (k - i) m and (k - i - 1) m further on
//   a cut at x in pair (b, h) falls before tile max(0, x - S - margin), or behind the pair if there is no such tile
//
// The margins before and behind the tiles are what it costs to open and to close a piece.
//
// Both neighbours of a cut evaluate the same function, so nothing is exchanged: no task map, no walk. A worker
// has at most two parts of pairs (its first and its last piece of work), and which workers share a pair follows
// from S alone. Everything is integer, so host and device agree to the last tile. The method is that of
// Stream-K (arXiv 2301.03598) on lengths instead of tiles of one product, with the cost of opening a piece.
//
// Intervals are counted from the end of the axis: where they are longer than need be, the first workers have no work.
//
// Int is the type of positions on the axis: 32 bits where the costs of full tables fit, for the divisions' sake.
#pragma once
#include <stdint.h>

#ifdef __CUDACC__
#define HPCJIT_BOTH __host__ __device__ __forceinline__
#else
#define HPCJIT_BOTH inline
#endif

namespace hpcjit::sched {

HPCJIT_BOTH int32_t divide(int32_t a, int32_t b) {  // of non-negative numbers
  return int32_t(uint32_t(a) / uint32_t(b));
}
HPCJIT_BOTH int64_t divide(int64_t a, int64_t b) {
  return int64_t(uint64_t(a) / uint64_t(b));
}

// The tiles that hold the tokens which any query row of a request may see.
struct Tiles {
  int first;
  int count;
};

// First token that the first of q_len query rows may see; the last row's own token is seq_len - 1. No window is too
// large: a difference to it is only taken where it is positive.
HPCJIT_BOTH int first_token(int seq_len, int q_len, int window) {
  const int end = seq_len - q_len + 1;
  return window > 0 && end > window ? end - window : 0;
}

HPCJIT_BOTH Tiles tiles_of(int seq_len, int q_len, int window, int tile_tokens) {
  if (seq_len <= 0 || q_len <= 0) return {0, 0};
  const int first = first_token(seq_len, q_len, window) / tile_tokens;
  return {first, (seq_len - 1) / tile_tokens + 1 - first};
}

// Division by a number that is known before its dividends: most of the work is done beforehand.
struct Divisor {
  uint32_t by;
  uint32_t inverse;

  HPCJIT_BOTH explicit Divisor(int by) : by(by), inverse(~0u / uint32_t(by)) {}

  HPCJIT_BOTH int32_t divide(int32_t a) const {  // a is not negative
    uint32_t quotient = uint32_t(uint64_t(uint32_t(a)) * inverse >> 32), rest = uint32_t(a) - quotient * by;
    for (int i = 0; i < 2; ++i)
      if (rest >= by) {
        ++quotient;
        rest -= by;
      }
    return int32_t(quotient);
  }
  HPCJIT_BOTH int64_t divide(int64_t a) const { return sched::divide(a, int64_t(by)); }
};

template <class Int>
struct Axis {
  Int total;     // cost of all pairs
  Int interval;  // L
  int margin;    // in tiles; at least 1
  int workers;
  int spared;  // k: so many workers, the first,
  Int less;    // m: get so much less; below `interval`
};

// Where the work of worker i begins, which is where that of worker i - 1 ends; `workers` gives the end of the axis.
template <class Int>
HPCJIT_BOTH Int cut_position(const Axis<Int>& axis, int i) {
  const int spared = axis.spared > i ? axis.spared - i : 0;
  const Int x = axis.total - Int(axis.workers - i) * axis.interval + Int(spared) * axis.less;
  return x > 0 ? x : 0;
}

// A boundary of an interval: before `tile` (counted from the request's first live tile) of pair (request, head).
template <class Int>
struct Cut {
  int request;
  int head;
  int tile;
  Int start;  // S of the pair
};

// Equal shares. If all pairs cost the same, moved up by at most `slack` to where whole pairs, or equal parts of a pair,
// fill an interval: that spares the joins of pieces, and in a mixed batch only balance. No interval is shorter than
// `least`, nor than the largest pair if that costs up to `whole`: below that a join costs more than it saves. Then equal
// pairs stay whole where there is a worker for each.
template <class Int>
HPCJIT_BOTH Int interval_length(Int total, int pairs, const Divisor& workers, int largest, int least,
                                int whole, int slack) {
  Int length = workers.divide(Int(total + Int(workers.by) - 1));
  length = length > least ? length : least;
  if (largest <= whole && length < largest) length = largest;
  if (largest <= 0 || length <= 1 || total != Int(pairs) * largest) return length;
  Int even;
  if (length > largest) {
    even = divide(Int(length + largest - 1), Int(largest)) * largest;
  } else {
    const Int parts = divide(Int(largest - 1), Int(length - 1));  // the most whose size is at least `length`
    even = divide(Int(largest + parts - 1), parts);
  }
  return even - length <= slack ? even : length;
}

constexpr int kManyParts = 13;

// The axis of a launch whose longest pair has `longest` tiles. Who joins parts of a pair ends late, and what comes next on that
// multiprocessor begins late: that is the first workers' (attention/decode_work.cuh). So, if a request has more than
// kManyParts parts and there is one head, a quarter of the workers gets `less` less, though no less than half, and all others a
// little more.
template <class Int>
HPCJIT_BOTH Axis<Int> axis_of(Int total, int batch, int heads, const Divisor& workers, int longest,
                              int margin, int least, int whole, int slack, int less) {
  const int largest = 2 * margin + longest, n = int(workers.by);
  Int length = interval_length<Int>(total, heads * batch, workers, largest, least, 2 * margin + whole, slack);
  Axis<Int> axis = {total, length, margin, n, 0, 0};
  if (less <= 0 || heads > 1 || Int((longest - 1) / kManyParts) < length) return axis;
  axis.spared = n / 4;
  axis.less = less < length / 2 ? Int(less) : Int(length / 2);
  length = workers.divide(Int(total + Int(axis.spared) * axis.less + n - 1));
  axis.interval = axis.interval > length ? axis.interval : length;
  return axis;
}

// The cut at x, which lies in request b with `count` tiles: request_start is num_heads * (c_0 + ... + c_{b-1}). Cuts
// fall only before multiples of `step` tiles. One behind a pair is given as head + 1, tile 0; that head may not exist.
template <class Int>
HPCJIT_BOTH Cut<Int> cut_at(Int x, int request, Int request_start, int count, int margin, int step) {
  const int cost = 2 * margin + count;
  const int head = x - request_start < cost ? 0 : int(divide(Int(x - request_start), Int(cost)));
  const Int start = request_start + Int(head) * cost;
  const int offset = int(x - start) - margin;
  if (offset >= (count > 0 ? count : 1)) return {request, head + 1, 0, start + cost};
  return {request, head, offset > 0 ? (step > 1 ? offset / step * step : offset) : 0, start};
}

// The worker that owns `tile` of the pair that starts at S (any tile for a pair without tiles): the last one
// whose cut is not behind it.
template <class Int>
HPCJIT_BOTH int worker_of(const Axis<Int>& axis, Int start, int tile, int count) {
  const Int behind = axis.total - 1 - (start + axis.margin + (count > 0 ? tile : 0));
  const Int usual = Int(axis.workers - axis.spared) * axis.interval;
  if (behind < usual) return axis.workers - 1 - int(divide(behind, axis.interval));
  return axis.spared - 1 - int(divide(behind - usual, axis.interval - axis.less));
}

}  // namespace hpcjit::sched
