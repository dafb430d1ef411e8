"""attention.decode_workspace_bytes: what a plan asks for, what it depends on, and sizes that are refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from decode_tools import BF16, FP8, FP16, Batch
from op_tools import rejects

from hpcjit.cases import Maker
from hpcjit.jit_op import Plan
from hpcjit.ops.attention import decode_workspace_bytes
from hpcjit.ops.attention._decode import decode_op
from hpcjit.ops.attention._decode_shape import HEAD_DIMS, SCHEDULES

OP = "attention.decode"
MODEL = {"batch": 64, "num_q_heads": 8, "num_kv_heads": 1, "head_dim": 128, "page_size": 64, "table_width": 64}
schedules = pytest.mark.parametrize("schedule", SCHEDULES)


def planned(batch: Batch) -> tuple[int, int]:
    plan = decode_op.plan(*batch(Maker("meta")))
    return (plan.workspace_bytes, plan.counter_bytes) if isinstance(plan, Plan) else (0, 0)


def asked(batch: Batch) -> tuple[int, int]:
    return decode_workspace_bytes(
        batch=len(batch.lengths),
        num_q_heads=batch.num_q_heads,
        num_kv_heads=batch.kv_heads,
        head_dim=batch.head_dim,
        value_head_dim=batch.value_head_dim or None,
        max_q_len=max(batch.rows_of, default=1),
        page_size=batch.page,
        table_width=max(-(-max(batch.lengths, default=0) // batch.page), 1) + batch.more_width,
        kv_dtype=batch.cache or batch.dtype,
        schedule=batch.schedule,
    )


@schedules
class TestAsPlanned:
    @pytest.mark.parametrize("dtype", [BF16, FP16, FP8], ids=str)
    @pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
    def test_rows(self, schedule: str, dims: tuple[int, int], dtype: torch.dtype):
        for group, q_len in itertools.product((1, 3, 8, 12, 16), range(1, 9)):
            batch = Batch((700, 0), q_len, group=group, dtype=dtype, schedule=schedule)
            batch = batch.but(head_dim=dims[0], value_head_dim=dims[1])
            assert asked(batch) == planned(batch), batch

    @pytest.mark.parametrize("page", [1, 16, 256])
    @pytest.mark.parametrize("length", [0, 1, 2048, 2049, 100_000])
    def test_batches(self, schedule: str, length: int, page: int):
        for size, kv_heads, width in itertools.product((1, 2, 33, 600), (1, 3, 8), (0, 7)):
            batch = Batch((length,) * size, kv_heads=kv_heads, page=page, more_width=width, schedule=schedule)
            assert asked(batch) == planned(batch), batch

    def test_ragged_float8_cache_and_nothing(self, schedule: str):
        for batch in (Batch((90, 3), (1, 5)), Batch((90, 3), cache=FP8), Batch(())):
            assert asked(batch.but(schedule=schedule)) == planned(batch.but(schedule=schedule))


class TestDependence:
    def test_dynamic_is_that_of_any_context_and_batch(self):
        some = {decode_workspace_bytes(**MODEL | {"table_width": width}) for width in (1, 64, 2048, 2**31 - 1)}
        some |= {decode_workspace_bytes(**MODEL | {"batch": batch}) for batch in (1, 4096)}
        some |= {decode_workspace_bytes(**MODEL | {"page_size": page}) for page in (1, 256)}
        assert some == {(0, 2 * 132 * 8 * 132 * 4)}

    @pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
    def test_dynamic_takes_a_few_megabytes(self, dims: tuple[int, int]):
        """For the rows that models have: up to four new tokens of eight heads."""
        wanted = MODEL | {"head_dim": dims[0], "value_head_dim": dims[1], "max_q_len": 4}
        assert sum(decode_workspace_bytes(**wanted)) < 10 << 20

    def test_static_follows_the_pairs(self):
        """Not the context: at least a slot for each that is in parts, and fewer than four for every SM."""
        for batch in (1, 10, 64, 263):
            some = {
                decode_workspace_bytes(**MODEL | {"batch": batch, "table_width": width}, schedule="static")
                for width in (1, 999)
            }
            assert len(some) == 1
            slots = some.pop()[1] // (8 * 132 * 4)
            assert batch < slots < 4 * 132

    def test_invariant_follows_the_context(self):
        for tokens in (64, 2048, 128 * 1024):
            width = tokens // 64
            found = decode_workspace_bytes(**MODEL | {"table_width": width}, schedule="invariant")
            assert found == (0, 64 * (-(-tokens // 2048) + 1) * 8 * 132 * 4)

    @pytest.mark.parametrize("num_sms", [1, 78, 132, 148])
    def test_dynamic_follows_the_device(self, num_sms: int):
        assert decode_workspace_bytes(**MODEL, num_sms=num_sms) == (0, 2 * num_sms * 8 * 132 * 4)

    @pytest.mark.parametrize(
        ("changed", "megabytes"),
        [
            ({}, 1.1),
            ({"num_q_heads": 16, "max_q_len": 8}, 18),
            ({"schedule": "invariant", "table_width": 128 * 1024 // 64}, 18),
        ],
        ids=["8 rows", "128 rows", "invariant"],
    )
    def test_figures_of_the_docstring(self, changed: dict, megabytes: float):
        scratch, counters = decode_workspace_bytes(**MODEL | changed)
        assert scratch == 0
        assert counters / 1e6 == pytest.approx(megabytes, rel=0.03)


@pytest.mark.parametrize(
    ("argument", "changed"),
    [
        ("batch", {"batch": -1}),
        ("page_size", {"page_size": 0}),
        ("table_width", {"table_width": 0}),
        ("num_kv_heads", {"num_kv_heads": 0}),
        ("num_q_heads", {"num_q_heads": 17}),
        ("num_q_heads", {"num_q_heads": 5, "num_kv_heads": 2}),
        ("num_q_heads", {"num_q_heads": 1, "num_kv_heads": 2}),
        ("head_dim", {"head_dim": 96}),
        ("head_dim", {"head_dim": 128.0}),
        ("value_head_dim", {"value_head_dim": torch.empty(0)}),
        ("head_dim", {"head_dim": 192}),
        ("max_q_len", {"max_q_len": 9}),
        ("schedule", {"schedule": "fast"}),
        ("kv_dtype", {"kv_dtype": torch.float32}),
        ("num_sms", {"num_sms": 0}),
    ],
    ids=str,
)
def test_refused(argument: str, changed: dict):
    with rejects(OP, argument):
        decode_workspace_bytes(**MODEL | changed)
