"""Debug mode of ids and tiles: those out of range are named, those of nobody are not, and otherwise both are alike."""

from __future__ import annotations

import pytest
import torch
from op_tools import rejects

from hpcjit.cases import Maker
from hpcjit.fused_op import reset_decisions
from hpcjit.ops.moe import grouped_gemm, moe_align_block_size, moe_plan


@pytest.fixture
def debug(monkeypatch):
    """Debug mode, with plans made for it."""
    monkeypatch.setenv("HPCJIT_DEBUG", "1")
    reset_decisions()
    yield
    reset_decisions()


def with_bad(m: Maker, bad: int) -> torch.Tensor:
    ids = m.integers(-1, 8, 6, 4)
    ids[4, 3], ids[5, 0] = bad, bad
    return ids


@pytest.mark.parametrize("bad", [-2, -(2**31), 8, 2**31 - 1])
def test_align(m: Maker, debug, bad: int):
    with rejects(
        "moe.moe_align_block_size", "topk_ids", match=f"[0, 8), got {bad} at position [4, 3] (2 such entries)"
    ):
        moe_align_block_size(with_bad(m, bad), 8, 16)


def test_align_with_a_map(m: Maker, debug):
    """The map says how many there are, not the experts here."""
    expert_map = m.permutation(12, dtype=torch.int32)
    moe_align_block_size(with_bad(m, 11), 8, 16, expert_map=expert_map)
    with rejects("moe.moe_align_block_size", "topk_ids", match="[0, 12), got 12"):
        moe_align_block_size(with_bad(m, 12), 8, 16, expert_map=expert_map)


@pytest.mark.parametrize(("bad", "offset", "limit"), [(-2, 0, 1024), (1024, 8, 1024), (2001, 1993, 2001)])
def test_plan(m: Maker, debug, bad: int, offset: int, limit: int):
    """Ids of other ranks are no mistakes, whatever this one has."""
    moe_plan(with_bad(m, limit - 1), 8, 16, expert_offset=offset)
    with rejects("moe.moe_plan", "topk_ids", match=f"[0, {limit}), got {bad} at position [4, 3]"):
        moe_plan(with_bad(m, bad), 8, 16, expert_offset=offset)


def test_no_ids(m: Maker, debug):
    moe_plan(m.integers(0, 8, 0, 4), 8, 16)
    moe_align_block_size(m.integers(0, 8, 0, 4), 8, 16)


@pytest.mark.parametrize("bad", [-2, 8])
def test_otherwise_they_are_of_no_expert(m: Maker, bad: int):
    _, positions, *_ = moe_plan(with_bad(m, bad), 8, 16)
    assert positions[4, 3] == positions[5, 0] == -1
    entries, *_ = moe_align_block_size(with_bad(m, bad), 8, 16)
    assert not ((entries == 4 * 4 + 3) | (entries == 5 * 4)).any()


@pytest.mark.parametrize(
    ("tile", "count"),
    [
        ([-1, 0, 8, 0], 1),
        ([2, 0, 8, 0], 1),
        ([0, 4, 8, 0], 1),
        ([0, -4, 8, 0], 1),
        ([0, 0, -1, 0], 1),
        ([0, 0, 8, 0], 3),
    ],
)
def test_tiles(m: Maker, debug, tile: list[int], count: int):
    """Those that count must have an expert and rows; what lies behind them may be anything."""
    x, weight = m.normal(8, 64), m.normal(2, 16, 64)
    tiles = m.integers(0, 1, 2, 4)
    tiles[0], tiles[1] = torch.tensor([1, 0, 8, 0]), torch.tensor([-7, 99, 99, 0])
    grouped_gemm(x, weight, tiles, torch.ones(1, dtype=torch.int32, device=m.device), 16)
    tiles[0] = torch.tensor(tile)
    with rejects("moe.grouped_gemm", "num_tiles" if count > 2 else "tiles"):
        grouped_gemm(x, weight, tiles, torch.full((1,), count, dtype=torch.int32, device=m.device), 16)
