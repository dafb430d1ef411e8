"""Who attends to which tiles: the schedules of the decode kernel in plain Python, for pictures and tests.

The functions are those of `include/hpcjit/sched/folded.cuh`, which says what they compute and why; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

MANY_PARTS = 13  # kManyParts


class Cut(NamedTuple):
    """A boundary between two workers: before `tile` of pair (request, head), whose part of the axis begins at `start`."""

    request: int
    head: int
    tile: int
    start: int


class Piece(NamedTuple):
    """A run of tiles of one pair that one worker does, counted from the request's first live tile."""

    worker: int
    request: int
    head: int
    begin: int
    end: int

    @property
    def tiles(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Rules:
    """What a launch cuts the work by; the names are those of the launch parameters (`decode_params.cuh`)."""

    num_kv_heads: int
    workers: int
    splits: int  # of a pair, static
    least: int
    whole: int
    slack: int
    less: int
    margin: int
    tile: int = 16  # tokens

    @classmethod
    def of(cls, plan: Any) -> Rules:
        """Those of a plan of `attention.decode`."""
        values = {"tile": plan.config.tile, **plan.values}
        return cls(**{name: int(values[name]) for name in cls.__dataclass_fields__})


def tiles_of(seq_len: int, q_len: int, window: int, tile_tokens: int) -> tuple[int, int]:
    """The first tile with a token that a query row may see, and the number of tiles from there on."""
    if seq_len <= 0 or q_len <= 0:
        return 0, 0
    first_token = max(seq_len - q_len + 1 - window, 0) if window > 0 else 0
    first = first_token // tile_tokens
    return first, (seq_len - 1) // tile_tokens + 1 - first


def interval_length(total: int, pairs: int, workers: int, largest: int, least: int, whole: int, slack: int) -> int:
    """What each worker gets of an axis of length `total`."""
    length = max(-(-total // workers), least)
    if largest <= whole:
        length = max(length, largest)
    if largest <= 0 or length <= 1 or total != pairs * largest:
        return length
    parts = (largest - 1) // (length - 1)
    even = -(-length // largest) * largest if length > largest else -(-largest // parts)
    return even if even - length <= slack else length


class Axis(NamedTuple):
    """How workers divide an axis of length `total`: the first `spared` of them get `less` less than an interval."""

    total: int
    interval: int
    workers: int
    spared: int = 0
    less: int = 0

    @classmethod
    def of(cls, counts: Sequence[int], rules: Rules) -> Axis:
        """For requests of so many tiles."""
        heads, margin, workers = rules.num_kv_heads, rules.margin, rules.workers
        longest = max(counts, default=0)
        total = sum(heads * (2 * margin + count) for count in counts)
        sizes = (2 * margin + longest, rules.least, 2 * margin + rules.whole, rules.slack)
        axis = cls(total, interval_length(total, heads * len(counts), workers, *sizes), workers)
        spared = workers // 4
        if rules.less <= 0 or heads > 1 or longest <= MANY_PARTS * axis.interval:
            return axis
        less = min(rules.less, axis.interval // 2)
        length = max(axis.interval, -(-(total + spared * less) // workers))
        return cls(total, length, workers, spared, less)

    def position(self, worker: int) -> int:
        """Where the work of a worker begins."""
        return max(self.total - (self.workers - worker) * self.interval + max(self.spared - worker, 0) * self.less, 0)


def cut_at(x: int, request: int, request_start: int, count: int, margin: int, step: int = 1) -> Cut:
    """The cut at position x of the axis, which lies in `request`, each of whose heads has `count` tiles."""
    cost = 2 * margin + count
    head = (x - request_start) // cost
    start = request_start + head * cost
    tile = x - start - margin
    if tile >= max(count, 1):
        return Cut(request, head + 1, 0, start + cost)
    return Cut(request, head, max(tile, 0) // step * step, start)


def cuts(counts: Sequence[int], rules: Rules) -> list[Cut]:
    """The boundaries of all workers, one more than there are workers, for requests of so many tiles.

    Intervals are counted from the end of the axis: what they are longer than need be, the first workers lack.
    """
    heads, margin = rules.num_kv_heads, rules.margin
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + heads * (2 * margin + count))
    axis = Axis.of(counts, rules)
    found, request = [], 0
    for i in range(rules.workers + 1):
        x = axis.position(i)
        while request < len(counts) and x >= starts[request + 1]:
            request += 1
        if request == len(counts):
            found.append(Cut(request, 0, 0, axis.total))
            continue
        cut = cut_at(x, request, starts[request], counts[request], margin)
        found.append(cut if cut.head < heads else cut._replace(request=request + 1, head=0))
    return found


def dynamic(counts: Sequence[int], rules: Rules) -> list[Piece]:
    """The pieces of the dynamic schedule in the order of the tiles."""
    heads = rules.num_kv_heads
    places = [(cut.request * heads + cut.head, cut.tile) for cut in cuts(counts, rules)]
    pieces = []
    for worker, ((first, tile), (last, end_tile)) in enumerate(pairwise(places)):
        for pair in range(first, min(last + 1, len(counts) * heads)):
            request, head = divmod(pair, heads)
            begin = tile if pair == first else 0
            end = end_tile if pair == last else counts[request]
            if pair < last or begin < end:
                pieces.append(Piece(worker, request, head, begin, end))
    return pieces


def static(counts: Sequence[int], rules: Rules) -> list[Piece]:
    """The pieces of the static schedule: every pair in `splits` equal parts, a worker for each."""
    pieces = []
    for request, count in enumerate(counts):
        share = -(-count // rules.splits)
        for head in range(rules.num_kv_heads):
            first = (request * rules.num_kv_heads + head) * rules.splits
            for split in range(rules.splits):
                begin, end = min(split * share, count), min((split + 1) * share, count)
                if begin < end or count == split == 0:
                    pieces.append(Piece(first + split, request, head, begin, end))
    return pieces
