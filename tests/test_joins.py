"""How the shares of a pair become whole: who reads which slot, that all are read and zero again, that no wait is forever."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest
from joins_host import Group, Share, Step, constants, invariant_steps, library, steps
from schedule_host import Batch, Formula, Schedule, compiled, cut_pairs, random_batches

from hpcjit.errors import ToolchainError
from hpcjit.ops.attention._decode_schedule import Rules, static

FAN, JOINERS = 12, 2
ROWS = (0, 3, 4, 7, 8, 12, 127)  # each of a row's residues that matter
SPLITS = (*range(2, 4 * FAN + 3), 132, 264, 511, 2048)


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    try:
        library()
    except ToolchainError as problem:
        pytest.skip(str(problem))


@pytest.fixture(scope="module")
def formula(tmp_path_factory: pytest.TempPathFactory) -> Formula:
    try:
        return compiled(tmp_path_factory.mktemp("schedule"))[32]
    except ToolchainError as problem:
        pytest.skip(str(problem))


def of_splits(splits: int, n: int) -> list[list[Step]]:
    return [steps(Share(split, splits, 0, 0), n) for split in range(splits)]


@pytest.mark.parametrize("n", ROWS)
class TestWhoJoins:
    def test_the_root_has_every_share_once(self, n: int):
        """Its own and, in the order of the tokens, those of its group; then the results of the other groups in their order."""
        for splits in SPLITS:
            everyone = of_splits(splits, n)
            (root,) = (split for split, own in enumerate(everyone) if own[-1].kind == "write")
            assert root == Group.of(splits, 0).joiner_of(n)
            parts = Counter([root])
            for split, own in enumerate(everyone):
                reads = [step.splits for step in own if step.kind == "read"]
                assert all(list(level) == sorted(set(level) - {split}) for level in reads), splits
                parts.update(other for level in reads for other in level)
            assert parts == Counter(range(splits)), splits

    def test_groups(self, n: int):
        """A group's shares are read by its joiner, the joiners of other groups by the root."""
        for splits in SPLITS:
            everyone, joiners = of_splits(splits, n), []
            for index in range(-(-splits // FAN)):
                group = Group.of(splits, index)
                joiners.append(group.joiner_of(n))
                members = range(group.begin, group.begin + group.size)
                assert group.joiner_of(n) in members[:JOINERS], splits
                first = everyone[joiners[-1]][0]
                assert first == Step("read", tuple(split for split in members if split != joiners[-1])), splits
            root = everyone[joiners[0]]
            assert [step.splits for step in root if step.kind == "read"][1:] == (
                [tuple(joiners[1:])] if joiners[1:] else []
            )

    def test_all_but_the_root_pass_on_once_and_last(self, n: int):
        for splits in SPLITS:
            for own in of_splits(splits, n):
                assert [step.kind for step in own].count("pass") + [step.kind for step in own].count("write") == 1
                assert own[-1].kind in ("pass", "write")

    def test_the_last_share_waits_for_nobody(self, n: int):
        for splits in SPLITS:
            assert not any(step.splits for step in of_splits(splits, n)[-1]), splits


def test_joiners_have_their_parts_of_the_rows():
    """Two of a full group, half of the rows each, four neighbouring ones at a time."""
    assert constants() == (FAN, JOINERS)
    assert [Group.of(30, 1).joiner_of(n) for n in range(10)] == [12] * 4 + [13] * 4 + [12] * 2
    assert [Group.of(splits, 0)[1:] for splits in (2, 3, 12, 13)] == [(2, 1), (3, 2), (12, 2), (12, 2)]
    assert [Group.of(splits, 1).joiners for splits in (13, 14, 15)] == [1, 1, 2]


def test_joins_are_the_last_piece_of_a_worker(formula: Formula):
    for batch in random_batches():
        schedule = Schedule(formula, batch)
        last = {piece.worker: piece for piece in schedule.pieces}
        for pieces in cut_pairs(schedule):
            for piece in pieces:
                if any(step.splits for n in (0, 4) for step in steps(schedule.share(piece), n)):
                    assert last[piece.worker] == piece, batch


# --- a machine that runs the blocks -----------------------------------------------------------------------------------


class Task(NamedTuple):
    """A piece as the machine sees it: a pair and its part, and what to do with each of its rows."""

    pair: tuple[int, int]
    share: Share
    rows: tuple[tuple[Step, ...], ...]


class Stuck(Exception):
    """Every resident block waits."""


class Machine:
    """Starts blocks in the order of their numbers as others end, at most `resident` at a time, each at a speed of its own."""

    def __init__(self, blocks: list[list[Task]], warps: int, seed: int) -> None:
        self.blocks, self.warps, self.random = blocks, warps, random.Random(seed)
        self.slots: set[tuple[int, int]] = set()  # (slot, row) that are not zero
        self.passed: set[tuple[int, int]] = set()
        self.results: Counter[tuple] = Counter()

    def run(self, resident: int) -> None:
        waiting, running = iter(self.blocks), []
        while True:
            while len(running) < resident and (block := next(waiting, None)) is not None:
                running.append((self.block(block), self.random.choice((1.0, 0.5, 0.05))))
            if not running:
                return
            some = [one for one in running if self.random.random() < one[1]]
            if not self.advance(running, some) and not self.advance(running, list(running)):
                raise Stuck(f"{len(running)} blocks")

    def advance(self, running: list, some: list) -> bool:
        """Whether any of them has done anything."""
        moved = False
        for one in some:
            step = next(one[0], None)
            moved |= step is not False
            if step is None:
                running.remove(one)
        return moved

    def block(self, tasks: list[Task]) -> Iterator[bool]:
        """Pieces in their order, a barrier behind each; yields whether something was done."""
        for task in tasks:
            yield True  # the piece's tiles
            warps = [self.warp(task, warp) for warp in range(self.warps)]
            while warps:
                steps = [(warp, next(warp, None)) for warp in warps]
                warps = [warp for warp, step in steps if step is not None]
                yield any(step is not False for _, step in steps)

    def warp(self, task: Task, warp: int) -> Iterator[bool]:
        for n in range(warp, len(task.rows), self.warps):
            for kind, splits in task.rows[n]:
                if kind == "read":
                    words = {(task.share.slot(split), n) for split in splits}
                    while not words <= self.slots:
                        yield False
                    self.slots -= words
                elif kind == "pass":
                    word = (task.share.slot(task.share.split), n)
                    assert word not in self.passed, "a second time in a launch"
                    self.passed.add(word)
                    self.slots.add(word)
                else:
                    self.results[task.pair, n] += 1
                yield True


def check(blocks: list[list[Task]], resident: int, warps: int, seed: int) -> None:
    """All rows of all pairs are written once, and every word that was passed on is zero again."""
    machine = Machine(blocks, warps, seed)
    machine.run(resident)
    expected = {(task.pair, n) for block in blocks for task in block for n in range(len(task.rows))}
    assert machine.results == Counter(expected)
    assert not machine.slots


def blocks_of(pieces: list, workers: int, task: Callable[..., Task]) -> list[list[Task]]:
    """By the number of the block: the last worker is the first block."""
    of_worker = defaultdict(list)
    for piece in pieces:
        of_worker[piece.worker].append(task(piece))
    return [of_worker[worker] for worker in reversed(range(workers))]


def dynamic_blocks(formula: Formula, batch: Batch, rows: int) -> list[list[Task]]:
    schedule = Schedule(formula, batch)

    def task(piece) -> Task:
        share = schedule.share(piece)
        return Task(piece[1:3], share, tuple(tuple(steps(share, n)) for n in range(rows)))

    return blocks_of(schedule.pieces, batch.workers, task)


def static_blocks(counts: list[int], heads: int, splits: int, rows: int) -> list[list[Task]]:
    rules = Rules(heads, len(counts) * heads * splits, splits, least=1, whole=0, slack=0, less=0, margin=1)

    def task(piece) -> Task:
        count, pair = counts[piece.request], piece.request * heads + piece.head
        part = max(1, -(-count // splits))
        share = Share(piece.begin // part, max(1, -(-count // part)), pair * splits, 0)
        assert share.slot(share.split) == piece.worker
        return Task(piece[1:3], share, tuple(tuple(steps(share, n)) for n in range(rows)))

    return blocks_of(static(counts, rules), rules.workers, task)


def invariant_blocks(formula: Formula, batch: Batch, rows: int) -> list[list[Task]]:
    schedule = Schedule(formula, batch)
    max_pieces = max(schedule.counts) // batch.step + 1

    def task(piece) -> Task:
        share = schedule.invariant_share(piece, max_pieces)
        return Task(piece[1:3], share, (tuple(invariant_steps(share)),) * rows)

    return blocks_of(schedule.pieces, batch.workers, task)


class TestWaitsEnd:
    """On any machine that has room for JOINERS blocks, in whatever order they come to their joins."""

    RESIDENT = (JOINERS, JOINERS, JOINERS + 1, 5, 132, 1000)
    SHAPES = ((1, 8), (5, 4), (8, 8), (16, 8), (13, 2), (64, 8))  # rows and warps

    def random_launches(self, seed: int) -> Iterator[tuple[random.Random, Batch]]:
        r = random.Random(seed)
        for batch in random_batches()[seed::12]:
            keep = min(len(batch.lengths), 25)
            yield r, replace(batch, lengths=batch.lengths[:keep], q_lens=batch.q_lens[:keep], heads=min(batch.heads, 3))

    def test_dynamic(self, formula: Formula):
        for seed, (r, batch) in enumerate(self.random_launches(0)):
            rows, warps = r.choice(self.SHAPES)
            check(dynamic_blocks(formula, batch, rows), r.choice(self.RESIDENT), warps, seed)

    @pytest.mark.parametrize("workers", [1, 2, 3, 12, 13, 14, 15, 24, 25, 26, 37, 132, 264])
    def test_one_pair_of_all(self, formula: Formula, workers: int):
        batch = Batch((16 * workers * 10,), (1,), workers=workers, margin=1)
        for resident in sorted({*self.RESIDENT}):
            check(dynamic_blocks(formula, batch, 9), resident, 8, resident)

    def test_static(self):
        r = random.Random(1)
        for seed in range(100):
            counts = [r.choice((0, 1, 2, 15, 16, 17, r.randint(0, 300))) for _ in range(r.randint(1, 12))]
            rows, warps = r.choice(self.SHAPES)
            blocks = static_blocks(counts, r.randint(1, 3), r.choice((2, 4, 8, 16)), rows)
            check(blocks, r.choice(self.RESIDENT), warps, seed)

    def test_invariant(self, formula: Formula):
        """Here one block is enough."""
        for seed, (r, batch) in enumerate(self.random_launches(2)):
            rows, warps = r.choice(self.SHAPES)
            blocks = invariant_blocks(formula, replace(batch, step=r.choice((8, 64, 128))), rows)
            check(blocks, r.choice((1, *self.RESIDENT)), warps, seed)

    def test_the_machine_notices(self, formula: Formula):
        """One block at a time is too few for two joiners; blocks in the order of the axis wait for those to come."""
        blocks = dynamic_blocks(formula, Batch((16 * 400,), (1,), workers=40, margin=1), 8)
        with pytest.raises(Stuck):
            check(blocks, 1, 8, 0)
        with pytest.raises(Stuck):
            check(blocks[::-1], JOINERS, 8, 0)
