"""The schedule of the decode kernel as a pure function: every property that it promises, on the kernel's own formula."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
import torch
from schedule_host import FAR, Batch, Formula, Schedule, compiled, cut_pairs, random_batch, random_batches, work_of

from hpcjit.cases import cases_of
from hpcjit.cases.attention import MIXES, lengths_of
from hpcjit.errors import ToolchainError
from hpcjit.jit_op import Plan
from hpcjit.ops.attention import _decode_schedule
from hpcjit.ops.attention._decode import decode_op
from hpcjit.ops.attention._decode_shape import DecodeArgs


@pytest.fixture(scope="module")
def formulas(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Formula]:
    try:
        return compiled(tmp_path_factory.mktemp("schedule"))
    except ToolchainError as problem:
        pytest.skip(str(problem))


@pytest.fixture(scope="module", params=[32, 64], ids=["int32", "int64"])
def schedules(request: pytest.FixtureRequest, formulas: dict[int, Formula]) -> list[Schedule]:
    return [Schedule(formulas[request.param], batch) for batch in random_batches()]


def check_coverage(schedule: Schedule) -> None:
    """Every tile of every pair once and in order over the workers; a pair without tiles is done once."""
    expected = [(b, h) for b in range(len(schedule.counts)) for h in range(schedule.batch.heads)]
    at, done = 0, 0
    for piece in schedule.pieces:
        assert (piece.request, piece.head, piece.begin) == (*expected[at], done), schedule.batch
        assert piece.begin < piece.end <= piece.count or piece.count == piece.begin == piece.end == 0, schedule.batch
        assert 0 <= piece.worker < schedule.batch.workers
        at, done = (at + 1, 0) if piece.end == piece.count else (at, piece.end)
    assert (at, done) == (len(expected), 0), schedule.batch


class TestDynamic:
    def test_every_tile_is_done_once(self, schedules: list[Schedule]):
        for schedule in schedules:
            check_coverage(schedule)

    def test_a_worker_has_at_most_two_parts(self, schedules: list[Schedule]):
        """The end of a pair is its first piece, the beginning of another its last; the middle of one is all it has."""
        for schedule in schedules:
            of_worker = defaultdict(list)
            for piece in schedule.pieces:
                of_worker[piece.worker].append(piece)
            for pieces in of_worker.values():
                assert all(piece.whole for piece in pieces[1:-1])
                assert all(piece.begin == 0 for piece in pieces[1:])
                assert all(piece.end == piece.count for piece in pieces[:-1])

    def test_splits_are_consecutive_workers(self, schedules: list[Schedule]):
        """The parts of a pair are numbered in order, and each of them knows how many there are and who they are."""
        for schedule in schedules:
            for pieces in cut_pairs(schedule):
                assert [schedule.share(piece).split for piece in pieces] == list(range(len(pieces))), schedule.batch
                assert {schedule.share(piece).splits for piece in pieces} == {len(pieces)}, schedule.batch
                for piece in pieces:
                    assert schedule.owner(pieces[0], piece.begin) == piece.worker
                    assert schedule.owner(pieces[-1], piece.end - 1) == piece.worker

    def test_owners(self, schedules: list[Schedule]):
        """Of whole pairs too, and of those without a tile."""
        for schedule in schedules:
            for piece in schedule.pieces:
                start = schedule.starts[piece.request] + piece.head * (2 * schedule.batch.margin + piece.count)
                assert schedule.formula.worker(schedule.axis, start, piece.begin, piece.count) == piece.worker, (
                    schedule.batch
                )

    def test_slots(self, schedules: list[Schedule]):
        for schedule in schedules:
            shares = [schedule.share(piece) for pieces in cut_pairs(schedule) for piece in pieces]
            slots = [share.slot(share.split) for share in shares]
            assert len(set(slots)) == len(slots), schedule.batch
            assert all(0 <= slot < work_of(schedule.batch, "dynamic").slots for slot in slots), schedule.batch

    def test_balance(self, schedules: list[Schedule]):
        """No worker has more tiles than an interval, nor more work than that and the margins that its cuts fell into."""
        for schedule in schedules:
            tiles, work, margin = Counter(), Counter(), schedule.batch.margin
            for piece in schedule.pieces:
                tiles[piece.worker] += piece.end - piece.begin
                work[piece.worker] += piece.end - piece.begin
                work[piece.worker] += margin * ((piece.begin == 0) + (piece.end == piece.count))
            assert max(tiles.values()) <= schedule.axis.interval, schedule.batch
            spared = [tiles[worker] for worker in range(schedule.axis.spared)]
            assert max(spared, default=0) <= schedule.axis.interval - schedule.axis.less, schedule.batch
            assert max(work.values()) <= schedule.axis.interval + 2 * margin, schedule.batch

    def test_interval(self, schedules: list[Schedule]):
        """Within the slack of equal shares, unless that would be less than is worth it, or some get less."""
        for schedule in schedules:
            batch, axis = schedule.batch, schedule.axis
            even = -(-(schedule.total + axis.spared * axis.less) // batch.workers)
            largest = max(schedule.counts)
            wanted = max(even, batch.least, largest + 2 * batch.margin if largest <= batch.whole else 0)
            assert wanted <= axis.interval <= wanted + batch.slack, batch

    def test_who_gets_less(self, schedules: list[Schedule]):
        """A quarter of the workers, where one pair is in many parts."""
        found = 0
        for schedule in schedules:
            batch, axis = schedule.batch, schedule.axis
            whole = schedule.formula.axis(*whole_axis(schedule))
            many = max(schedule.counts) > _decode_schedule.MANY_PARTS * whole.interval and batch.heads == 1
            if batch.less == 0 or not many:
                assert axis == whole, batch
                continue
            found += 1
            less = min(batch.less, whole.interval // 2)
            assert (axis.spared, axis.less) == (batch.workers // 4, less), batch
            assert axis.interval >= whole.interval
        assert found > 10

    def test_the_width_of_the_axis_changes_nothing(self, formulas: dict[int, Formula]):
        for batch in random_batches():
            narrow, wide = (Schedule(formulas[bits], batch) for bits in (32, 64))
            assert narrow.cuts == wide.cuts, batch
            shares = [[s.share(piece) for pieces in cut_pairs(s) for piece in pieces] for s in (narrow, wide)]
            assert shares[0] == shares[1], batch


def whole_axis(schedule: Schedule) -> tuple[int, ...]:
    """The arguments of the axis on which all workers get the same."""
    batch = schedule.batch
    sizes = (len(schedule.counts), batch.heads, batch.workers, max(schedule.counts))
    return schedule.total, *sizes, batch.margin, batch.least, batch.whole, batch.slack, 0


class TestWholePairs:
    """What spares joins: pairs that are not cut at all, or into equal parts."""

    def test_a_small_pair_alone(self, formulas: dict[int, Formula]):
        for count in range(1, 200):
            batch = Batch((16 * count,), (1,), whole=100, least=2)
            pieces = Schedule(formulas[32], batch).pieces
            assert (len(pieces) == 1) == (count <= 100)

    def test_equal_pairs_with_a_worker_each(self, formulas: dict[int, Formula]):
        """As long as opening and closing a pair costs what a worker gets at least."""
        r = random.Random(21)
        for _ in range(500):
            heads, whole, workers = r.randint(1, 16), r.randint(1, 300), r.randint(16, 264)
            size = r.randint(1, workers // heads)
            length = r.randint(1, 16 * whole)
            batch = replace(random_batch(r), heads=heads, whole=whole, workers=workers, tile=16, window=0)
            batch = replace(batch, lengths=(length,) * size, q_lens=(1,) * size, least=2 * batch.margin)
            assert all(piece.whole for piece in Schedule(formulas[32], batch).pieces), batch

    def test_equal_pairs_within_the_slack(self, formulas: dict[int, Formula]):
        """64 pairs on 132 workers are two parts each and not two and a bit: 128 pieces instead of 132 and more."""
        batch = Batch((4096,) * 64, (1,) * 64, margin=8, slack=8)
        assert len(Schedule(formulas[32], batch).pieces) == 128
        assert len(Schedule(formulas[32], replace(batch, slack=3)).pieces) > 180


class TestInvariant:
    def test_pieces_depend_on_their_pair_alone(self, schedules: list[Schedule]):
        """They begin at multiples of the step and end there or with the pair, whatever the rest of the batch."""
        r = random.Random(22)
        for dynamic in schedules[:500]:
            step = r.choice((1, 3, 8, 64, 128))
            schedule = Schedule(dynamic.formula, replace(dynamic.batch, step=step))
            check_coverage(schedule)
            assert all(cut.tile % step == 0 for cut in schedule.cuts)
            for piece in schedule.pieces:
                assert piece.begin % step == 0, schedule.batch
                assert piece.end == min(piece.begin + step, piece.count), schedule.batch

    def test_slots(self, schedules: list[Schedule]):
        for dynamic in schedules[:500]:
            schedule, max_pieces, slots_of_plan = invariant(dynamic)
            shares = [schedule.invariant_share(piece, max_pieces) for piece in schedule.pieces]
            assert all(share.split < share.splits <= max_pieces for share in shares), schedule.batch
            slots = {share.slot(share.split) for share in shares}
            assert len(slots) == len(shares)
            assert max(slots) < slots_of_plan

    def test_one_piece_of_each_pair_joins(self, schedules: list[Schedule]):
        """The last of the worker that has split 0. If others have pieces of the pair too, it is that worker's last of all."""
        for dynamic in schedules[:500]:
            schedule, max_pieces, _ = invariant(dynamic)
            joiners, pairs, of_worker = defaultdict(list), defaultdict(list), defaultdict(list)
            for piece in schedule.pieces:
                pair = piece[1:3]
                pairs[pair].append(piece)
                of_worker[piece.worker].append(piece)
                if schedule.invariant_share(piece, max_pieces).joins:
                    joiners[pair].append(piece)
            for pair, pieces in pairs.items():
                (joiner,) = joiners[pair]
                assert joiner == [piece for piece in pieces if piece.worker == pieces[0].worker][-1], schedule.batch
                assert joiner in (pieces[-1], of_worker[joiner.worker][-1]), schedule.batch


def invariant(schedule: Schedule) -> tuple[Schedule, int, int]:
    """The same batch under the invariant schedule; slots of a pair, and of all."""
    work = work_of(schedule.batch, "invariant")
    return Schedule(schedule.formula, replace(schedule.batch, step=work.splits)), work.max_pieces, work.slots


class TestInPython:
    """`_decode_schedule`, which draws the schedule, is the same function."""

    def test_dynamic(self, schedules: list[Schedule]):
        for schedule in schedules:
            batch = schedule.batch
            names = ("tile", "workers", "least", "whole", "slack", "less", "margin")
            options = {name: getattr(batch, name) for name in names}
            rules = _decode_schedule.Rules(num_kv_heads=batch.heads, splits=1, **options)
            rows = zip(batch.lengths, batch.q_lens, strict=True)
            tiles = [_decode_schedule.tiles_of(*row, batch.window, batch.tile) for row in rows]
            assert tiles == schedule.tiles, batch
            assert _decode_schedule.cuts(schedule.counts, rules) == schedule.cuts, batch
            assert _decode_schedule.dynamic(schedule.counts, rules) == [piece[:5] for piece in schedule.pieces], batch


class TestDivisor:
    def test_any_number_of_31_bits(self, formulas: dict[int, Formula]):
        r = random.Random(24)
        divisors = [
            1,
            2,
            3,
            132,
            2**16,
            2**16 + 1,
            2**30,
            FAR,
            *(r.randint(1, 2 ** r.randint(1, 31) - 1) for _ in range(500)),
        ]
        for by in divisors:
            quotients = {0, 1, FAR // by, r.randint(0, FAR // by)}
            for a in {q * by + rest for q in quotients for rest in (-1, 0, by - 1)} | {FAR}:
                if 0 <= a <= FAR:
                    assert formulas[32].quotient(a, by) == a // by, (a, by)


class TestTiles:
    def test_every_token_that_a_row_sees(self, formulas: dict[int, Formula]):
        r = random.Random(23)
        for _ in range(5000):
            length, q_len, tile = r.randint(0, 300), r.randint(0, 8), r.choice((16, 32))
            window = r.choice((0, 1, 2, 15, 16, 17, 100, FAR - r.randint(0, 9)))
            first, count = formulas[32].tiles(length, q_len, window, tile)
            rows = range(length - q_len, length)
            seen = [t for t in range(length) if any(t <= row and (not window or t > row - window) for row in rows)]
            assert set(range(first, first + count)) == {t // tile for t in seen}, (length, q_len, window, tile)

    @pytest.mark.parametrize("tile", [16, 32])
    def test_the_longest_requests(self, formulas: dict[int, Formula], tile: int):
        for window in (0, FAR):
            for q_len in range(1, 9):
                assert formulas[32].tiles(FAR, q_len, window, tile) == (0, 2**31 // tile)
                assert formulas[32].tiles(1, q_len, window, tile) == (0, 1)
        assert formulas[32].tiles(FAR, 8, 1, tile) == (2**31 // tile - 1, 1)


class TestGreatSizes:
    @pytest.mark.parametrize("workers", [1, 132, 264])
    @pytest.mark.parametrize("size", [1, 40, 4096])
    def test_full_tables_of_any_length(self, formulas: dict[int, Formula], size: int, workers: int):
        """Far past 32 bits."""
        batch = Batch((FAR,) * size, (8,) * size, heads=16, workers=workers, margin=16, slack=16)
        schedule = Schedule(formulas[64], batch)
        assert size == 1 or schedule.total > 2**32
        check_coverage(schedule)
        for pieces in cut_pairs(schedule):
            assert [schedule.share(piece).split for piece in pieces] == list(range(len(pieces)))

    @pytest.mark.parametrize("size", [1, 8, 40, 132, 1000, 20_000])
    def test_the_widest_table_with_32_bits(self, formulas: dict[int, Formula], size: int):
        """Where the plan just still takes 32 bits, no position of the kernel passes them, and no work is lost."""
        narrow, wide = 1, FAR // 64  # pages of 64 slots
        while wide - narrow > 1:
            middle = (narrow + wide) // 2
            narrow, wide = (middle, wide) if launch_of(size, middle).config.axis_t == "int32" else (narrow, middle)
        assert size < 8 or launch_of(size, wide).config.axis_t == "int64"
        batch = batch_of(launch_of(size, narrow), (64 * narrow,) * size)
        schedule = Schedule(formulas[32], batch)
        assert size < 8 or schedule.total > 2**29
        check_coverage(schedule)
        assert schedule.cuts == Schedule(formulas[64], batch).cuts


def launch_of(size: int, width: int) -> Plan:
    """The launch of the bf16 case with 8 KV heads for a table of this size."""
    case = next(case for case in cases_of("attention.decode") if case.name == "8x64 bf16 64x4K")
    a = DecodeArgs(*case.args("meta"))
    meta = torch.empty(size, width, device="meta", dtype=torch.int32)
    q, out = (tensor[:1].expand(size, -1, -1) for tensor in (a.q, a.out))
    return launch(a._replace(q=q, out=out, block_table=meta, seq_lens=meta[:, 0]))


def launch(args: tuple) -> Plan:
    plan = decode_op.plan(*args)
    assert isinstance(plan, Plan)
    return plan


def batch_of(plan: Plan, lengths: tuple[int, ...]) -> Batch:
    """A batch under the rules of a launch."""
    names = ("workers", "margin", "least", "whole", "slack", "less", "window")
    rules = {name: int(plan.values[name]) for name in names}
    rows = (int(plan.values["max_q_len"]),) * len(lengths)
    return Batch(lengths, rows, heads=int(plan.values["num_kv_heads"]), tile=plan.config.tile, **rules)


# Workers that have work, most parts of a pair, and the largest load over the mean of all 132.
DIVIDED = {
    "1x8 fp8 64x512": (64, 1, 2.06),
    "1x8 fp8 64x4K": (128, 2, 1.03),
    "1x8 fp8 32x128+32x4K": (131, 4, 1.09),
    "1x8 fp8 1x16K+15x64": (80, 65, 1.74),
    "1x8 fp8 1x64K+7x4K": (130, 91, 1.1),
    "1x8 fp8 1x64K+15x4K": (130, 69, 1.09),
    "1x8 fp8 1x64K+31x4K": (132, 46, 1.06),
    "1x8 fp8 1x128K+31x4K": (131, 66, 1.05),
    "1x8 fp8 2x32K+30x4K": (132, 26, 1.06),
    "1x8 fp8 1x2K": (8, 8, 16.5),
    "1x8 fp8 1x32K": (128, 128, 1.07),
    "1x8 fp8 4x8K": (111, 32, 1.23),
    "1x8 fp8 128x1K": (128, 1, 1.03),
    "1x8 fp8 256x2K": (128, 1, 1.03),
    "8x64 bf16 64x512": (128, 1, 1.03),
    "8x64 bf16 64x4K": (132, 2, 1.0),
    "8x64 bf16 32x128+32x4K": (132, 2, 1.0),
    "8x64 bf16 1x16K+15x64": (131, 14, 1.05),
    "8x64 bf16 1x64K+7x4K": (132, 13, 1.0),
    "8x64 bf16 1x64K+15x4K": (132, 10, 1.0),
    "8x64 bf16 1x64K+31x4K": (132, 7, 1.0),
    "8x64 bf16 1x128K+31x4K": (132, 10, 1.0),
    "8x64 bf16 2x32K+30x4K": (132, 4, 1.0),
    "8x64 bf16 1x2K": (128, 16, 1.07),
    "8x64 bf16 1x32K": (128, 16, 1.04),
    "8x64 bf16 4x8K": (128, 4, 1.06),
    "8x64 bf16 128x1K": (132, 2, 1.01),
    "8x64 bf16 256x2K": (132, 2, 1.0),
}


def divided(schedule: Schedule) -> tuple[int, int, float]:
    """The load of a worker is its tiles, and twice the margin for each piece."""
    loads, parts = Counter(), Counter()
    for piece in schedule.pieces:
        loads[piece.worker] += piece.end - piece.begin + 2 * schedule.batch.margin
        parts[piece.request, piece.head] += 1
    mean = sum(loads.values()) / schedule.batch.workers
    return len(loads), max(parts.values()), round(max(loads.values()) / mean, 2)


@pytest.mark.parametrize("name", DIVIDED)
def test_mixes(formulas: dict[int, Formula], name: str):
    """How the mixes of the benchmark are divided by the rules of their launches."""
    plan = launch(next(case for case in cases_of("attention.decode") if case.name == name).args("meta"))
    assert divided(Schedule(formulas[32], batch_of(plan, tuple(lengths_of(name.split()[-1]))))) == DIVIDED[name]


def test_every_mix_is_here():
    assert {name.split()[-1] for name in DIVIDED} == set(MIXES)
