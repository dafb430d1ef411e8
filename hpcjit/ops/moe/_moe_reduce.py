"""Rows that are sorted by expert, weighted and added up for each token."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hpcjit import checks
from hpcjit.errors import ArgumentError
from hpcjit.fused_op import define
from hpcjit.jit_op import NOTHING, JitOp, Plan
from hpcjit.ops._rows import AT_END, AT_START, TYPE_NAMES, streams, vector_width
from hpcjit.ops._tensors import FLOATS, accumulation_dtype, compiling, overwrites_none, require
from hpcjit.ops.moe import _ids
from hpcjit.ops.moe._moe_sum_reduce import MAX_BATCH, MAX_BLOCKS, SUM_REDUCE, THREADS, SumReduceConfig, block_threads


class ReduceArgs(NamedTuple):
    rows: torch.Tensor
    positions: torch.Tensor
    topk_weights: torch.Tensor
    shared_output: torch.Tensor | None
    out: torch.Tensor


class MoeReduceOp(JitOp):
    op = "moe.moe_reduce"
    schema = "(Tensor rows, Tensor positions, Tensor topk_weights, Tensor? shared_output, Tensor(a!) out) -> ()"

    def check(self, *args: Any) -> None:
        a = ReduceArgs(*args)
        checks.tensor(self.op, "rows", a.rows, dtypes=FLOATS, min_ndim=2)
        if a.rows.ndim != 2 or not a.rows.shape[1]:
            raise ArgumentError(self.op, "rows", "[num_rows, hidden_size]", checks.describe(a.rows))
        checks.tensor(self.op, "positions", a.positions, dtypes=(torch.int32,), min_ndim=2, like=a.rows)
        if a.positions.ndim != 2 or not a.positions.shape[1]:
            raise ArgumentError(self.op, "positions", "[num_tokens, top_k]", checks.describe(a.positions))
        shape = tuple(a.positions.shape)
        checks.tensor(self.op, "topk_weights", a.topk_weights, dtypes=(torch.float32,), shape=shape, like=a.rows)
        hidden_size = a.rows.shape[1]
        for name, value in (("shared_output", a.shared_output), ("out", a.out)):
            if value is not None:
                shape = (a.positions.shape[0], hidden_size)
                checks.tensor(self.op, name, value, dtypes=(a.rows.dtype,), shape=shape, like=a.rows)
                checks.rows(self.op, name, value, written=name == "out")
        inputs = {"rows": a.rows, "positions": a.positions, "topk_weights": a.topk_weights}
        overwrites_none(self.op, "out", a.out, inputs)
        if shape[0] * -(-hidden_size // THREADS[-1]) > MAX_BLOCKS:
            expected = f"few enough for {MAX_BLOCKS} pieces of 32 columns"
            raise ArgumentError(self.op, "positions", expected, checks.describe(a.positions))
        named = {name: value for name, value in a._asdict().items() if isinstance(value, torch.Tensor)}
        checks.no_grad(self.op, **named)

    def check_values(self, *args: Any) -> None:
        a = ReduceArgs(*args)
        _ids.check(self.op, "positions", a.positions, a.rows.shape[0])

    def plan(self, *args: Any) -> Plan | str:
        a = ReduceArgs(*args)
        (num_tokens, top_k), hidden_size = a.positions.shape, a.rows.shape[1]
        if num_tokens == 0:
            return NOTHING
        strides = {"rows": a.rows.stride(0) if a.rows.shape[0] > 1 else 0}
        for name in ("positions", "topk_weights", "shared_output", "out"):
            value = getattr(a, name)
            strides[name] = 0 if value is None else checks.rows(self.op, name, value)[1]
        placed = [(a.rows, strides["rows"])]
        placed += [(x, strides[name] if num_tokens > 1 else 0) for name, x in _of_tokens(a) if x is not None]
        vec = vector_width(hidden_size, a.rows.element_size(), placed)
        large = streams(num_tokens * top_k * hidden_size * a.rows.element_size())
        config = SumReduceConfig(
            TYPE_NAMES[a.rows.dtype],
            threads=block_threads(hidden_size // vec, num_tokens),
            vec=vec,
            batch=min(top_k, MAX_BATCH),
            has_weights=True,
            has_positions=True,
            has_shared=a.shared_output is not None,
            stream=large,
            trigger=AT_END if large else AT_START,
        )
        values: dict[str, int | float | str] = {
            "x": "rows",
            "weights": "topk_weights",
            "shared": 0 if a.shared_output is None else "shared_output",
            "num_tokens": num_tokens,
            "top_k": top_k,
            "hidden_size": hidden_size,
            "token_stride": 0,
            "pair_stride": strides["rows"],
            "positions_stride": strides["positions"],
            "weights_stride": strides["topk_weights"],
            "shared_stride": strides["shared_output"],
            "out_stride": strides["out"],
            "scaling_factor": 1.0,
        }
        return Plan(SUM_REDUCE, config, values)

    def reference(self, *args: Any) -> None:
        a = ReduceArgs(*args)
        total = torch.zeros(a.out.shape, dtype=accumulation_dtype(a.rows.dtype), device=a.rows.device)
        if a.rows.shape[0]:
            for k in range(a.positions.shape[1]):
                weight = a.topk_weights[:, k : k + 1]
                live = (a.positions[:, k : k + 1] >= 0) & (weight != 0)
                value = a.rows[a.positions[:, k].clamp(0, a.rows.shape[0] - 1).long()].to(total.dtype)
                total += torch.where(live, weight * value, 0)
        if a.shared_output is not None:
            total += a.shared_output
        a.out.copy_(total)

    def forward_triton(self, *args: Any) -> None:
        self.check(*args)
        from hpcjit.ops.moe import _triton

        _triton.reduce(self.op, ReduceArgs(*args))


def _of_tokens(a: ReduceArgs) -> tuple[tuple[str, torch.Tensor | None], ...]:
    """The tensors with a row per token that are accessed as vectors."""
    return ("shared_output", a.shared_output), ("out", a.out)


moe_reduce_op = MoeReduceOp()
define(moe_reduce_op)


def moe_reduce(
    rows: torch.Tensor,
    positions: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    shared_output: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Bring rows that are sorted by expert, such as `grouped_gemm` makes, back to the order of the tokens, and add them up.

        out[t] = topk_weights[t, 0] * rows[positions[t, 0]] + topk_weights[t, 1] * rows[positions[t, 1]] + ...
                 + shared_output[t]                                         (float32, in this order, rounded once)

    Args:
        rows: `[num_rows, hidden_size]`, bfloat16, float16 or float32, rows at any stride.
        positions: int32 `[num_tokens, top_k]`, rows at any stride: the row of each pair, as `moe_plan` finds them. A pair at a
            negative position contributes nothing. Positions past the last row are read all the same; debug mode reports them.
        topk_weights: float32 `[num_tokens, top_k]`. A pair whose weight is 0 is not read either: its row may hold anything.
        shared_output: None, or `[num_tokens, hidden_size]` of the dtype of `rows`.
        out: `[num_tokens, hidden_size]` of the dtype of `rows`; may be shared_output. A new tensor by default.
        backend: run this backend or fail.

    Returns:
        `out`. Bits repeat.

    Raises:
        ArgumentError: a wrong dtype, shape, stride or device, `out` in the place of another input, a tensor that requires
            grad; in debug mode a position outside of `[-1, num_rows)`.

    Safe under CUDA graphs, with positions that change between replays, once the signature has run or been prewarmed. Method:
    un-permutation as in MegaBlocks (Gale et al., 2022), a gather without atomics.
    """
    require(MoeReduceOp.op, "rows", rows, 2)
    require(MoeReduceOp.op, "positions", positions, 2)
    if out is None:
        out = rows.new_empty((positions.shape[0], rows.shape[1]))
    args = (rows, positions, topk_weights, shared_output, out)
    if compiling("moe.moe_reduce", backend):
        torch.ops.hpcjit.moe_moe_reduce(*args)
    elif backend is None:
        moe_reduce_op.fast(*args)
    else:
        moe_reduce_op(*args, backend=backend)
    return out
