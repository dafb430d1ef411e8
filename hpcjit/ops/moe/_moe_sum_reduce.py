"""Sum of the results of a token's experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hpcjit import checks
from hpcjit.build import Config, Template
from hpcjit.errors import ArgumentError
from hpcjit.fused_op import define
from hpcjit.jit_op import NOTHING, JitOp, Plan
from hpcjit.ops import _peers
from hpcjit.ops._rows import AT_END, AT_START, TYPE_NAMES, streams, vector_width
from hpcjit.ops._tensors import FLOATS, accumulation_dtype, compiling, overwrites_none, require
from hpcjit.spec import KernelBackend

MAX_BATCH = 8  # pairs that a thread loads at once
THREADS = (256, 192, 128, 96, 64, 32)
_FEW_VECS = 132 * 64 * 8  # eight small blocks on each SM of an H200
MAX_BLOCKS = 2**31 - 1


@dataclass(frozen=True)
class SumReduceConfig(Config):
    input_t: str = "bf16"
    threads: int = 128
    vec: int = 8
    batch: int = 8
    has_weights: bool = False
    has_positions: bool = False
    has_shared: bool = False
    stream: bool = False
    trigger: int = 0
    pdl: bool = True


SUM_REDUCE = Template(
    op="moe.sum_reduce",
    header="moe/sum_reduce.cuh",
    entry="hpcjit::moe::SumReduce",
    config=SumReduceConfig,
    params=(
        *("x", "positions", "weights", "shared", "out", "num_tokens", "top_k", "hidden_size", "token_stride"),
        *("pair_stride", "positions_stride", "weights_stride", "shared_stride", "out_stride", "scaling_factor"),
    ),
)


class SumReduceArgs(NamedTuple):
    x: torch.Tensor
    scaling_factor: float
    weights: torch.Tensor | None
    out: torch.Tensor


class MoeSumReduceOp(JitOp):
    op = "moe.moe_sum_reduce"
    schema = "(Tensor x, float scaling_factor, Tensor? weights, Tensor(a!) out) -> ()"

    def check(self, *args: Any) -> None:
        a = SumReduceArgs(*args)
        checks.tensor(self.op, "x", a.x, dtypes=FLOATS, min_ndim=3)
        if a.x.ndim != 3 or 0 in a.x.shape[1:]:
            raise ArgumentError(self.op, "x", "[num_tokens, top_k, hidden_size]", checks.describe(a.x))
        num_tokens, top_k, hidden_size = a.x.shape
        checks.number(self.op, "scaling_factor", a.scaling_factor)
        if a.weights is not None:
            shape = (num_tokens, top_k)
            checks.tensor(self.op, "weights", a.weights, dtypes=(torch.float32,), shape=shape, like=a.x)
        checks.tensor(self.op, "out", a.out, dtypes=(a.x.dtype,), shape=(num_tokens, hidden_size), like=a.x)
        checks.rows(self.op, "out", a.out, written=True)
        overwrites_none(self.op, "out", a.out, {"x": a.x, "weights": a.weights})
        if num_tokens * -(-hidden_size // THREADS[-1]) > MAX_BLOCKS:
            raise ArgumentError(self.op, "x", f"at most {MAX_BLOCKS} pieces of 32 columns", checks.describe(a.x))
        checks.no_grad(self.op, x=a.x, weights=a.weights, out=a.out)

    def plan(self, *args: Any) -> Plan | str:
        a = SumReduceArgs(*args)
        num_tokens, top_k, hidden_size = a.x.shape
        if num_tokens == 0:
            return NOTHING
        token_stride, pair_stride = (a.x.stride(axis) if a.x.shape[axis] > 1 else 0 for axis in (0, 1))
        out_stride = checks.rows(self.op, "out", a.out)[1]
        placed = [(a.x, token_stride), (a.x, pair_stride), (a.out, out_stride if num_tokens > 1 else 0)]
        vec = vector_width(hidden_size, a.x.element_size(), placed)
        large = streams(a.x.numel() * a.x.element_size())
        config = SumReduceConfig(
            TYPE_NAMES[a.x.dtype],
            threads=block_threads(hidden_size // vec, num_tokens),
            vec=vec,
            batch=min(top_k, MAX_BATCH),
            has_weights=a.weights is not None,
            stream=large,
            trigger=AT_END if large else AT_START,
        )
        values: dict[str, int | float | str] = {
            "num_tokens": num_tokens,
            "top_k": top_k,
            "hidden_size": hidden_size,
            "token_stride": token_stride,
            "pair_stride": pair_stride,
            **dict.fromkeys(("positions", "positions_stride", "shared", "shared_stride"), 0),
            "weights_stride": 0 if a.weights is None else checks.rows(self.op, "weights", a.weights)[1],
            "out_stride": out_stride,
        }
        if a.weights is None:
            values["weights"] = 0
        return Plan(SUM_REDUCE, config, values)

    def reference(self, *args: Any) -> None:
        a = SumReduceArgs(*args)
        dtype = accumulation_dtype(a.x.dtype)
        total = torch.zeros(a.out.shape, dtype=dtype, device=a.x.device)
        for k in range(a.x.shape[1]):
            value = a.x[:, k].to(dtype)
            if a.weights is not None:
                weight = a.weights[:, k : k + 1]
                value = torch.where(weight == 0, 0, weight * value)
            total += value
        a.out.copy_(total * a.scaling_factor)

    def forward_aot(self, *args: Any) -> None:
        """Contiguous bfloat16, neither weights nor scaling."""
        self.check(*args)
        a = SumReduceArgs(*args)
        if a.weights is not None or a.scaling_factor != 1.0:
            _peers.refuse(self.op, KernelBackend.AOT, "it has neither weights nor a scaling_factor")
        if a.x.dtype != torch.bfloat16 or a.x.shape[2] % 8 or not (a.x.is_contiguous() and a.out.is_contiguous()):
            _peers.refuse(self.op, KernelBackend.AOT, "it takes contiguous bfloat16, columns a multiple of 8")
        _peers.sglang("moe.moe_topk_sum", "moe_topk_sum")(a.x, a.out)

    def forward_triton(self, *args: Any) -> None:
        self.check(*args)
        from hpcjit.ops.moe import _triton

        _triton.sum_reduce(self.op, *SumReduceArgs(*args))


def block_threads(num_vecs: int, num_tokens: int) -> int:
    """Of a block, which lies within a token: the largest that leaves the fewest idle, or the least if all run at once."""
    if num_vecs * num_tokens <= _FEW_VECS:
        return 64 if num_vecs % 64 == 0 else 32
    return min(THREADS, key=lambda threads: -(-num_vecs // threads) * threads)


moe_sum_reduce_op = MoeSumReduceOp()
define(moe_sum_reduce_op)


def moe_sum_reduce(
    x: torch.Tensor,
    *,
    scaling_factor: float = 1.0,
    weights: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Add up what a token's experts computed.

        out[t] = scaling_factor * (x[t, 0] + x[t, 1] + ...)                       (float32, in this order, rounded once)
        out[t] = scaling_factor * (weights[t, 0] * x[t, 0] + ...)                 with weights

    Args:
        x: `[num_tokens, top_k, hidden_size]`, bfloat16, float16 or float32, columns contiguous, other axes at any stride.
        scaling_factor: of the sum.
        weights: None, or float32 `[num_tokens, top_k]`. A pair whose weight is 0 is not read: it may hold anything, as those
            of padding tokens and of experts elsewhere do.
        out: `[num_tokens, hidden_size]` of the dtype of `x`, receives the sums. A new tensor by default.
        backend: run this backend or fail.

    Returns:
        `out`. Bits repeat.

    Raises:
        ArgumentError: a wrong dtype, shape, stride or device, `out` in the place of an input, a tensor that requires grad.

    Safe under CUDA graphs once the signature has run or been prewarmed.
    """
    require(MoeSumReduceOp.op, "x", x, 3)
    if out is None:
        out = x.new_empty((x.shape[0], x.shape[2]))
    if compiling("moe.moe_sum_reduce", backend):
        torch.ops.hpcjit.moe_moe_sum_reduce(x, scaling_factor, weights, out)
    elif backend is None:
        moe_sum_reduce_op.fast(x, scaling_factor, weights, out)
    else:
        moe_sum_reduce_op(x, scaling_factor, weights, out, backend=backend)
    return out
