"""The folded schedule on a CPU: `sched/folded.cuh` compiled for the host, and what the decode kernel makes of it.

Tiles, intervals, positions, cuts and owners come from the header's own functions. The rest is what `find_cuts`, `Walk` and
`share_of` of `csrc/attention` do with them, worker by worker.
"""

from __future__ import annotations

import ctypes
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from host_library import compile_library
from joins_host import Share

from hpcjit.ops.attention._decode_plan import Work
from hpcjit.ops.attention._decode_shape import Sizes

FAR = 2**31 - 1  # more than any length

SHIM = r"""
#include "hpcjit/sched/folded.cuh"
using namespace hpcjit::sched;

template <class Int>
void interval(const int64_t* a, int64_t* out) {
  const Divisor workers{int(a[2])};
  out[0] = interval_length<Int>(Int(a[0]), int(a[1]), workers, int(a[3]), int(a[4]), int(a[5]), int(a[6]));
}
template <class Int>
void axis(const int64_t* a, int64_t* out) {
  const Divisor workers{int(a[3])};
  const Axis<Int> x = axis_of<Int>(Int(a[0]), int(a[1]), int(a[2]), workers, int(a[4]), int(a[5]), int(a[6]), int(a[7]),
                                   int(a[8]), int(a[9]));
  out[0] = x.total, out[1] = x.interval, out[2] = x.margin, out[3] = x.workers, out[4] = x.spared, out[5] = x.less;
}
template <class Int>
Axis<Int> read_axis(const int64_t* a) {
  return {Int(a[0]), Int(a[1]), int(a[2]), int(a[3]), int(a[4]), Int(a[5])};
}
template <class Int>
void position(const int64_t* a, int64_t* out) {
  out[0] = cut_position<Int>(read_axis<Int>(a), int(a[6]));
}
template <class Int>
void cut(const int64_t* a, int64_t* out) {
  const Cut<Int> c = cut_at<Int>(Int(a[0]), int(a[1]), Int(a[2]), int(a[3]), int(a[4]), int(a[5]));
  out[0] = c.request, out[1] = c.head, out[2] = c.tile, out[3] = c.start;
}
template <class Int>
void worker(const int64_t* a, int64_t* out) {
  out[0] = worker_of<Int>(read_axis<Int>(a), Int(a[6]), int(a[7]), int(a[8]));
}
extern "C" void interval_32(const int64_t* a, int64_t* out) { interval<int32_t>(a, out); }
extern "C" void interval_64(const int64_t* a, int64_t* out) { interval<int64_t>(a, out); }
extern "C" void axis_32(const int64_t* a, int64_t* out) { axis<int32_t>(a, out); }
extern "C" void axis_64(const int64_t* a, int64_t* out) { axis<int64_t>(a, out); }
extern "C" void position_32(const int64_t* a, int64_t* out) { position<int32_t>(a, out); }
extern "C" void position_64(const int64_t* a, int64_t* out) { position<int64_t>(a, out); }
extern "C" void cut_32(const int64_t* a, int64_t* out) { cut<int32_t>(a, out); }
extern "C" void cut_64(const int64_t* a, int64_t* out) { cut<int64_t>(a, out); }
extern "C" void worker_32(const int64_t* a, int64_t* out) { worker<int32_t>(a, out); }
extern "C" void worker_64(const int64_t* a, int64_t* out) { worker<int64_t>(a, out); }
extern "C" void quotient(const int64_t* a, int64_t* out) { out[0] = Divisor(int(a[1])).divide(int32_t(a[0])); }
extern "C" void tiles(const int64_t* a, int64_t* out) {
  const Tiles t = tiles_of(int(a[0]), int(a[1]), int(a[2]), int(a[3]));
  out[0] = t.first, out[1] = t.count;
}
"""


class Cut(NamedTuple):
    """Before `tile` of pair (request, head), which begins at `start` of the axis."""

    request: int
    head: int
    tile: int
    start: int


class Axis(NamedTuple):
    total: int
    interval: int
    margin: int
    workers: int
    spared: int
    less: int


class Formula:
    """The functions of the header on an axis of 32 or 64 bits. No argument may exceed what the kernel computes it in."""

    def __init__(self, library: ctypes.CDLL, bits: int) -> None:
        self._library, self._bits, self._out = library, bits, (ctypes.c_int64 * 6)()

    def tiles(self, seq_len: int, q_len: int, window: int, tile_tokens: int) -> tuple[int, int]:
        """First tile and number of tiles."""
        out = self._call("tiles", 0, seq_len, q_len, window, tile_tokens)
        return out[0], out[1]

    def interval(self, total: int, pairs: int, workers: int, largest: int, least: int, whole: int, slack: int) -> int:
        return self._call(f"interval_{self._bits}", 1, total, pairs, workers, largest, least, whole, slack)[0]

    def axis(self, total: int, batch: int, heads: int, workers: int, longest: int, *rules: int) -> Axis:
        """`rules`: margin, least, whole, slack, less."""
        return Axis(*self._call(f"axis_{self._bits}", 1, total, batch, heads, workers, longest, *rules))

    def cut(self, x: int, request: int, start: int, count: int, margin: int, step: int) -> Cut:
        return Cut(*self._call(f"cut_{self._bits}", 1, x, request, start, count, margin, step)[:4])

    def quotient(self, a: int, b: int) -> int:
        """By Divisor; 32 bits."""
        return self._call("quotient", 0, a, b)[0]

    def position(self, axis: Axis, i: int) -> int:
        return self._call(f"position_{self._bits}", 1, *axis, i)[0]

    def worker(self, axis: Axis, start: int, tile: int, count: int) -> int:
        return self._call(f"worker_{self._bits}", 1, *axis, start, tile, count)[0]

    def fits(self, position: int) -> int:
        assert 0 <= position < 2 ** (self._bits - 1), position
        return position

    def _call(self, name: str, on_axis: int, *values: int) -> list[int]:
        for value in values:
            assert 0 <= value < 2 ** (self._bits - 1 if on_axis else 31), (name, values)
        getattr(self._library, name)((ctypes.c_int64 * len(values))(*values), self._out)
        return list(self._out)


def compiled(folder: Path) -> dict[int, Formula]:
    """By the bits of the axis. Raises ToolchainError where there is no host compiler."""
    library = compile_library(folder, "schedule", SHIM)
    return {bits: Formula(library, bits) for bits in (32, 64)}


@dataclass(frozen=True)
class Batch:
    """Live lengths and query rows of requests, and the rules of a launch by the names of its parameters."""

    lengths: tuple[int, ...]
    q_lens: tuple[int, ...]
    heads: int = 1
    window: int = 0
    tile: int = 16
    workers: int = 132
    margin: int = 8
    least: int = 1
    whole: int = 0
    slack: int = 0
    less: int = 0
    step: int = 0  # tiles of a piece of the invariant schedule; 0: dynamic


class Piece(NamedTuple):
    """Tiles [begin, end) of the `count` of a pair, done by one worker."""

    worker: int
    request: int
    head: int
    begin: int
    end: int
    count: int

    @property
    def whole(self) -> bool:
        return self.begin == 0 and self.end == self.count


class Schedule:
    def __init__(self, formula: Formula, batch: Batch) -> None:
        self.formula, self.batch = formula, batch
        rows = zip(batch.lengths, batch.q_lens, strict=True)
        self.tiles = [formula.tiles(length, q_len, batch.window, batch.tile) for length, q_len in rows]
        self.counts = [count for _, count in self.tiles]
        costs = [batch.heads * (2 * batch.margin + count) for count in self.counts]
        self.starts = [0, *accumulate(costs)]
        self.total = formula.fits(self.starts[-1])
        rules = (batch.margin, batch.least, batch.whole, batch.slack, 0 if batch.step else batch.less)
        sizes = (len(self.counts), batch.heads, batch.workers, max(self.counts))
        self.axis = formula.axis(self.total, *sizes, *rules)
        formula.fits(batch.workers * self.axis.interval)  # the difference to it too, which may be negative

    @cached_property
    def cuts(self) -> list[Cut]:
        """As find_cuts: cuts `worker` and `worker + 1` are those of a worker."""
        found, request = [], 0
        for i in range(self.batch.workers + 1):
            x = self.formula.position(self.axis, i)
            while request < len(self.counts) and x >= self.starts[request + 1]:
                request += 1
            found.append(self._cut(x, request) if x < self.total else Cut(len(self.counts), 0, 0, self.total))
        return found

    def _cut(self, x: int, request: int) -> Cut:
        batch = self.batch
        cut = self.formula.cut(x, request, self.starts[request], self.counts[request], batch.margin, max(batch.step, 1))
        return cut if cut.head < batch.heads else cut._replace(request=request + 1, head=0)

    @cached_property
    def pieces(self) -> list[Piece]:
        """Of all workers, in their order."""
        return [piece for worker in range(self.batch.workers) for piece in self.walk(worker)]

    def walk(self, worker: int) -> Iterator[Piece]:
        """As Walk: from one cut to the next."""
        (request, head, tile, _), end = self.cuts[worker : worker + 2]
        while (request, head) <= (end.request, end.head) and request < len(self.counts):
            count, last = self.counts[request], (request, head) == (end.request, end.head)
            stop = end.tile if last else count
            if last and tile >= stop:
                return
            if self.batch.step:
                stop = min(stop, tile + self.batch.step)
            yield Piece(worker, request, head, tile, stop, count)
            tile = stop
            if tile < count or last:
                continue
            tile, head = 0, head + 1
            if head == self.batch.heads:
                request, head = request + 1, 0

    def owner(self, piece: Piece, tile: int) -> int:
        """The worker that the formula names for a tile of the piece's pair, which must be a pair that is cut."""
        start = self.cuts[piece.worker + (piece.begin == 0)].start  # as share_of takes it
        return self.formula.worker(self.axis, start, tile, piece.count)

    def share(self, piece: Piece) -> Share:
        """As share_of, under the dynamic schedule."""
        if piece.whole:
            return Share(0, 1, 0, 0)
        first, last = self.owner(piece, 0), self.owner(piece, piece.count - 1)
        return Share(piece.worker - first, last - first + 1, first, self.batch.workers)

    def invariant_share(self, piece: Piece, max_pieces: int) -> Share:
        """As share_of, under the invariant schedule."""
        before, behind = self.cuts[piece.worker : piece.worker + 2]
        step, pair = self.batch.step, (piece.request, piece.head)
        first = before[:2] != pair or before.tile == 0
        last = piece.end == piece.count or (behind[:2] == pair and piece.end == behind.tile)
        slot = (piece.request * self.batch.heads + piece.head) * max_pieces
        return Share(piece.begin // step, max(1, -(-piece.count // step)), slot, 0, first and last)


def random_batch(r: random.Random) -> Batch:
    """Few or many requests, mostly short, with any rules that a launch could have."""
    top = r.choice((40, 300, 9000, 9000, 200_000))
    size = r.choice((1, 2, 5, r.randint(1, 40), r.randint(1, 300)))
    lengths = [r.choice((0, 1, 15, 16, 17, 32, 33, r.randint(0, 300), r.randint(0, top))) for _ in range(size)]
    q_len = r.randint(0, 8)
    return Batch(
        tuple(lengths),
        tuple(r.randint(0, 8) if r.random() < 0.3 else q_len for _ in lengths),
        heads=r.choice((1, 1, 2, 3, 8, r.randint(1, 16))),
        window=r.choice((0, 0, 0, 1, 16, 100, 1000, FAR)),
        tile=r.choice((16, 32)),
        workers=r.choice((1, 2, 132, 264, r.randint(1, 264))),
        margin=r.randint(1, 16),
        least=r.choice((0, 1, 4, 8, 16)),
        whole=r.choice((0, 0, 5, 40, 200)),
        slack=r.choice((0, 0, 1, 8, 16)),
        less=r.choice((0, 0, 1, 10, 40)),
    )


@cache
def random_batches() -> list[Batch]:
    r = random.Random(20)
    return [random_batch(r) for _ in range(2000)]


def cut_pairs(schedule: Schedule) -> Iterator[list[Piece]]:
    """The pieces of every pair that is in parts, in order."""
    pairs = defaultdict(list)
    for piece in schedule.pieces:
        if not piece.whole:
            pairs[piece.request, piece.head].append(piece)
    yield from pairs.values()


def work_of(batch: Batch, schedule: str) -> Work:
    """What a launch takes, with a table for the longest request and not more."""
    dims = {"num_q_heads": batch.heads, "num_kv_heads": batch.heads, "head_dim": 128, "value_head_dim": 128}
    table = {"page_size": 1, "table_width": max(*batch.lengths, 1)}
    return Work.of(Sizes(batch=len(batch.lengths), max_q_len=8, **dims, **table), schedule, batch.tile, batch.workers)
