"""The folded schedule on a CPU: `sched/folded.cuh` compiled for the host, and what the decode kernel makes of it.

Tiles, intervals, cuts and owners come from the header's own functions. The rest is what `find_cuts`, `Walk` and `share_of` of
`csrc/attention` do with them, worker by worker.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from hpcjit import build, toolchain

FAN = 16  # kFan of decode_merge.cuh

SHIM = r"""
#include "hpcjit/sched/folded.cuh"
using namespace hpcjit::sched;

template <class Int>
void interval(const int64_t* a, int64_t* out) {
  out[0] = interval_length<Int>(Int(a[0]), int(a[1]), int(a[2]), int(a[3]), int(a[4]), int(a[5]), int(a[6]));
}
template <class Int>
void cut(const int64_t* a, int64_t* out) {
  const Cut<Int> c = cut_at<Int>(Int(a[0]), int(a[1]), Int(a[2]), int(a[3]), int(a[4]), int(a[5]));
  out[0] = c.request, out[1] = c.head, out[2] = c.tile, out[3] = c.start;
}
template <class Int>
void worker(const int64_t* a, int64_t* out) {
  out[0] = worker_of<Int>({Int(a[0]), Int(a[1]), int(a[2])}, Int(a[3]), int(a[4]), int(a[5]));
}
extern "C" void interval_32(const int64_t* a, int64_t* out) { interval<int32_t>(a, out); }
extern "C" void interval_64(const int64_t* a, int64_t* out) { interval<int64_t>(a, out); }
extern "C" void cut_32(const int64_t* a, int64_t* out) { cut<int32_t>(a, out); }
extern "C" void cut_64(const int64_t* a, int64_t* out) { cut<int64_t>(a, out); }
extern "C" void worker_32(const int64_t* a, int64_t* out) { worker<int32_t>(a, out); }
extern "C" void worker_64(const int64_t* a, int64_t* out) { worker<int64_t>(a, out); }
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


class Formula:
    """The functions of the header on an axis of 32 or 64 bits. No argument may exceed what the kernel computes it in."""

    def __init__(self, library: ctypes.CDLL, bits: int) -> None:
        self._library, self._bits, self._out = library, bits, (ctypes.c_int64 * 4)()

    def tiles(self, seq_len: int, q_len: int, window: int, tile_tokens: int) -> tuple[int, int]:
        """First tile and number of tiles."""
        out = self._call("tiles", 0, seq_len, q_len, window, tile_tokens)
        return out[0], out[1]

    def interval(self, total: int, pairs: int, workers: int, largest: int, least: int, whole: int, slack: int) -> int:
        return self._call(f"interval_{self._bits}", 1, total, pairs, workers, largest, least, whole, slack)[0]

    def cut(self, x: int, request: int, start: int, count: int, margin: int, step: int) -> Cut:
        return Cut(*self._call(f"cut_{self._bits}", 1, x, request, start, count, margin, step))

    def worker(self, axis: tuple[int, int, int], start: int, tile: int, count: int) -> int:
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
    source, library = folder / "schedule.cpp", folder / "schedule.so"
    source.write_text(SHIM)
    command = [
        toolchain.find_host_compiler().path,
        "-std=c++17",
        "-O2",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-shared",
        "-fPIC",
    ]
    subprocess.run([*command, "-I", str(build.PACKAGE / "include"), "-o", str(library), str(source)], check=True)
    loaded = ctypes.CDLL(str(library))
    return {bits: Formula(loaded, bits) for bits in (32, 64)}


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


class Share(NamedTuple):
    """Part `split` of `splits` of a pair; its slot, that of its group's leader, and the pair's own counter."""

    split: int
    splits: int
    slot: int
    leader: int
    root: int


class Schedule:
    def __init__(self, formula: Formula, batch: Batch) -> None:
        self.formula, self.batch = formula, batch
        rows = zip(batch.lengths, batch.q_lens, strict=True)
        self.tiles = [formula.tiles(length, q_len, batch.window, batch.tile) for length, q_len in rows]
        self.counts = [count for _, count in self.tiles]
        costs = [batch.heads * (2 * batch.margin + count) for count in self.counts]
        self.starts = [0, *accumulate(costs)]
        self.total = formula.fits(self.starts[-1])
        largest = 2 * batch.margin + max(self.counts)
        whole = 2 * batch.margin + batch.whole
        pairs = batch.heads * len(self.counts)
        self.interval = formula.interval(self.total, pairs, batch.workers, largest, batch.least, whole, batch.slack)

    @cached_property
    def cuts(self) -> list[Cut]:
        """As find_cuts: cuts `worker` and `worker + 1` are those of a worker."""
        found, request = [], 0
        for i in range(self.batch.workers + 1):
            x = self.formula.fits(i * self.interval)
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
        axis = (self.total, self.interval, self.batch.margin)
        return self.formula.worker(axis, start, tile, piece.count)

    def share(self, piece: Piece) -> Share:
        """As share_of, of a pair in parts under the dynamic schedule."""
        first, last = self.owner(piece, 0), self.owner(piece, piece.count - 1)
        slots = [2 * first + 1, *range(2 * (first + 1), 2 * (last + 1), 2)]
        split = piece.worker - first
        return Share(split, len(slots), slots[split], slots[split // FAN * FAN], first)
