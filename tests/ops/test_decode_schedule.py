"""The static schedule in Python, and the rules that a plan gives. `test_schedule.py` compares the rest with the kernel's."""

from __future__ import annotations

import random

import pytest
import torch

from hpcjit.cases import Maker
from hpcjit.cases.attention import Batch
from hpcjit.ops.attention._decode import decode_op
from hpcjit.ops.attention._decode_schedule import Piece, Rules, dynamic, static
from hpcjit.ops.attention._decode_shape import DecodeArgs


def rules(heads: int, splits: int) -> Rules:
    return Rules(heads, heads * splits, splits, least=1, whole=0, slack=0, less=0, margin=1)


def test_static_parts_are_equal_and_cover_every_pair_once():
    r = random.Random(0)
    for _ in range(500):
        counts = [r.choice((0, 1, 2, 15, 16, 17, r.randint(0, 500))) for _ in range(r.randint(1, 12))]
        heads, splits = r.randint(1, 9), r.choice((1, 2, 4, 8, 16))
        pieces = static(counts, rules(heads, splits))
        assert [piece.worker for piece in pieces] == sorted({piece.worker for piece in pieces})
        for request, count in enumerate(counts):
            for head in range(heads):
                own = [piece for piece in pieces if (piece.request, piece.head) == (request, head)]
                assert [piece.begin for piece in own] == [0, *(piece.end for piece in own[:-1])]
                assert own[-1].end == count
                assert {piece.tiles for piece in own[:-1]} <= {-(-count // splits)}
                assert all(
                    (piece.worker - own[0].worker, piece.worker // splits) == (i, request * heads + head)
                    for i, piece in enumerate(own)
                )


def test_a_pair_without_tiles_has_a_piece_that_writes_its_zeros():
    assert static([0, 3], rules(1, 2)) == [Piece(0, 0, 0, 0, 0), Piece(2, 1, 0, 0, 2), Piece(3, 1, 0, 2, 3)]
    assert [piece for piece in dynamic([0, 3], rules(1, 2)) if piece.request == 0] == [Piece(0, 0, 0, 0, 0)]


@pytest.mark.parametrize("schedule", ["dynamic", "static"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_rules_are_those_of_the_plan(schedule: str, dtype: torch.dtype):
    args = DecodeArgs(*Batch(2, 8, dtype, (4096, 100))(Maker("meta")))
    plan = decode_op.plan(*args._replace(schedule=schedule))
    found = Rules.of(plan)
    assert (found.num_kv_heads, found.tile) == (2, plan.config.tile)
    assert {name: plan.values[name] for name in ("workers", "splits", "least", "whole", "slack", "margin")}.items() <= (
        vars(found).items()
    )
    counts = [-(-length // found.tile) for length in (4096, 100)]
    pieces = static(counts, found) if schedule == "static" else dynamic(counts, found)
    assert sum(piece.tiles for piece in pieces) == 2 * sum(counts)
    assert max(piece.worker for piece in pieces) < found.workers
