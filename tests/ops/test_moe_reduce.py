"""moe_reduce: against its definition, behind the other building blocks, in debug mode, and calls that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_tools import rejects, same_bits

from hpcjit import numerics
from hpcjit.cases import Maker
from hpcjit.cases.moe import reduce_args
from hpcjit.cases.moe_experts import Experts
from hpcjit.errors import ArgumentError, ArgumentTypeError
from hpcjit.fused_op import reset_decisions
from hpcjit.ops.activation import silu_and_mul
from hpcjit.ops.moe import grouped_gemm, moe_plan, moe_reduce
from hpcjit.ops.moe._fused_moe import fused_moe_op
from hpcjit.ops.moe._fused_moe_args import FusedMoeArgs
from hpcjit.ops.moe._moe_reduce import ReduceArgs

OP = "moe.moe_reduce"
NAN = float("nan")


def made(m: Maker, *sizes: Any, shared: bool = False) -> ReduceArgs:
    return ReduceArgs(*reduce_args(m, *sizes, shared))


def run(a: ReduceArgs, **changes) -> torch.Tensor:
    a = a._replace(**changes)
    return moe_reduce(*a[:3], shared_output=a.shared_output, out=a.out)


class TestValues:
    @pytest.mark.parametrize("shared", [False, True])
    def test_definition(self, m: Maker, shared: bool):
        a = made(m, 5, 3, 40, shared=shared)
        found = run(a)
        for t in range(5):
            total = a.shared_output[t].double() if shared else torch.zeros(40, dtype=torch.float64, device=m.device)
            for k in range(3):
                total += a.topk_weights[t, k].double() * a.rows[int(a.positions[t, k])].double()
            torch.testing.assert_close(found[t].double(), total, rtol=2**-8, atol=1e-5)

    def test_in_order_and_float32(self, m: Maker):
        """1 is lost next to 2^24 and not next to 0."""
        rows = torch.tensor([[1.0], [2.0**24], [-(2.0**24)]], device=m.device)
        weights = torch.ones(2, 3, device=m.device)
        positions = torch.tensor([[0, 1, 2], [1, 2, 0]], dtype=torch.int32, device=m.device)
        assert moe_reduce(rows, positions, weights).flatten().tolist() == [0.0, 1.0]

    def test_nobody(self, m: Maker):
        """What has no position has no say, and neither has what no position names; no rows at all will do."""
        a = made(m, 4, 2, 64, shared=True)
        nobody = torch.full_like(a.positions, -1)
        a.rows.fill_(NAN)
        assert same_bits(run(a, positions=nobody), a.shared_output)
        assert not run(a, positions=nobody, rows=a.rows[:0], shared_output=None).any()

    def test_nan(self, m: Maker):
        """A row of NaN spoils its token, unless its weight is 0."""
        a = made(m, 3, 2, 64)
        a.rows[int(a.positions[1, 0])] = NAN
        assert run(a).isnan().any(-1).tolist() == [False, True, False]
        a.topk_weights[1, 0] = 0.0
        assert run(a).isfinite().all()

    def test_in_place_of_the_shared_output(self, m: Maker):
        a = made(m, 6, 4, 256, shared=True)
        expected = run(a)
        assert same_bits(run(a, out=a.shared_output), expected)


@pytest.mark.parametrize("offset", [0, 8])
def test_building_blocks_make_the_whole(m: Maker, offset: int):
    """Plan, product, activation, product, reduction: the rule of fused_moe holds for what they give."""
    sizes = Experts(30, 8, 128, 64, 4, quant="bf16", codes=False, shared=True, offset=offset, global_experts=16)

    def steps(*args: Any) -> None:
        a = FusedMoeArgs(*args)
        sorted_pairs, positions, *tiles = moe_plan(a.topk_ids, a.num_experts, 16, expert_offset=a.expert_offset)
        live = int((positions >= 0).sum())
        x = a.x[sorted_pairs[:live].long() // a.topk_ids.shape[1]]
        rows = grouped_gemm(silu_and_mul(grouped_gemm(x, a.w13, *tiles, 16)), a.w2, *tiles, 16)
        moe_reduce(rows, positions, a.topk_weights, shared_output=a.shared_output, out=a.out)

    for deviation in numerics.check(fused_moe_op, sizes.make(m), steps):
        assert deviation.ok, str(deviation)


class TestDebugMode:
    @pytest.fixture(autouse=True)
    def debug(self, monkeypatch):
        monkeypatch.setenv("HPCJIT_DEBUG", "1")
        reset_decisions()
        yield
        reset_decisions()

    @pytest.mark.parametrize("bad", [-2, 12, 2**31 - 1])
    def test_a_position(self, m: Maker, bad: int):
        a = made(m, 4, 3, 64)
        a.positions[2, 1], a.positions[3, 0] = bad, bad
        with pytest.raises(ArgumentError, match=rf"'positions'.*\[0, 12\), got {bad} at position \[2, 1\] \(2 such"):
            run(a)

    def test_good_ones(self, m: Maker):
        a = made(m, 4, 3, 64)
        a.positions[0] = -1
        assert run(a).isfinite().all()


def test_refused(m: Maker):
    a = made(m, 4, 3, 64, shared=True)
    bad: list[tuple[str, torch.Tensor]] = [
        ("rows", a.rows[0]),
        ("rows", a.rows[:, :0]),
        ("positions", a.positions[0]),
        ("positions", a.positions[:, :0]),
        ("topk_weights", a.topk_weights[:, :2]),
        ("shared_output", a.shared_output[:3]),
        ("out", a.out[:, :32]),
        ("out", a.rows[:4]),
    ]
    for argument, value in bad:
        with rejects(OP, argument, a.out):
            run(a, **({argument: value} | ({} if argument == "out" else {"out": a.out})))
    for argument, dtype in (("positions", torch.int64), ("topk_weights", torch.bfloat16), ("out", torch.float32)):
        with rejects(OP, argument, a.out, error=ArgumentTypeError):
            run(a, **{argument: getattr(a, argument).to(dtype)})
