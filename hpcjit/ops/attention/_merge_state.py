"""Two attention results over disjoint sets of keys, joined by their log-sum-exp."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hpcjit import checks
from hpcjit.build import Config, Template
from hpcjit.errors import ArgumentError
from hpcjit.fused_op import define
from hpcjit.jit_op import NOTHING, JitOp, Plan
from hpcjit.ops import _peers
from hpcjit.ops._rows import TYPE_NAMES, streams, vector_width
from hpcjit.ops._tensors import FLOATS, accumulation_dtype, compiling, distinct, overwrites_none, require
from hpcjit.spec import KernelBackend

_MAX_VECS = 4  # of each side in flight in a lane
_FEW_LANES = 2**18  # below, smaller blocks put more SMs to work


@dataclass(frozen=True)
class MergeStateConfig(Config):
    input_t: str = "bf16"
    threads: int = 256
    lanes: int = 16
    vec: int = 8
    vecs_per_lane: int = 1
    exact: bool = True
    stream_out: bool = False
    pdl: bool = True


_RESULTS = ("out_a", "lse_a", "out_b", "lse_b", "out", "lse")

MERGE_STATE = Template(
    op="attention.merge_state",
    header="attention/merge_state.cuh",
    entry="hpcjit::attention::MergeState",
    config=MergeStateConfig,
    params=(
        *_RESULTS,
        *("num_tokens", "num_heads", "head_dim"),
        *(f"{name}_{axis}_stride" for name in _RESULTS for axis in ("token", "head")),
    ),
)


class MergeStateOp(JitOp):
    op = "attention.merge_state"
    schema = "(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, Tensor(a!) out, Tensor(b!) lse) -> ()"

    def check(
        self,
        out_a: torch.Tensor,
        lse_a: torch.Tensor,
        out_b: torch.Tensor,
        lse_b: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        checks.tensor(self.op, "out_a", out_a, dtypes=FLOATS, min_ndim=3)
        if out_a.ndim != 3 or 0 in out_a.shape[1:]:
            raise ArgumentError(self.op, "out_a", "[num_tokens, num_heads, head_dim]", checks.describe(out_a))
        for name, value in (("out_b", out_b), ("out", out)):
            checks.tensor(self.op, name, value, dtypes=(out_a.dtype,), shape=out_a.shape, like=out_a)
        for name, value in (("lse_a", lse_a), ("lse_b", lse_b), ("lse", lse)):
            shape = out_a.shape[:2]
            checks.tensor(self.op, name, value, dtypes=(torch.float32,), shape=shape, like=out_a, dense_last=False)
        distinct(self.op, "out", out)
        distinct(self.op, "lse", lse)
        for name, result, sources in (("out", out, (out_a, out_b)), ("lse", lse, (lse_a, lse_b))):
            for source in sources:
                _check_in_place(self.op, name, result, source)
        checks.apart(self.op, "lse", lse, "out", out)
        overwrites_none(self.op, "out", out, {"lse_a": lse_a, "lse_b": lse_b})
        overwrites_none(self.op, "lse", lse, {"out_a": out_a, "out_b": out_b})
        checks.no_grad(self.op, out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b, out=out, lse=lse)

    def plan(
        self,
        out_a: torch.Tensor,
        lse_a: torch.Tensor,
        out_b: torch.Tensor,
        lse_b: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> Plan | str:
        num_tokens, num_heads, head_dim = out.shape
        if num_tokens == 0:
            return NOTHING
        placed = [(x, x.stride(axis) if x.shape[axis] > 1 else 0) for x in (out_a, out_b, out) for axis in (0, 1)]
        vec = vector_width(head_dim, out.element_size(), placed)
        num_vecs = head_dim // vec
        lanes = _lanes(num_vecs)
        vecs = min(-(-num_vecs // lanes), _MAX_VECS)
        config = MergeStateConfig(
            TYPE_NAMES[out.dtype],
            threads=128 if num_tokens * num_heads * lanes <= _FEW_LANES else 256,
            lanes=lanes,
            vec=vec,
            vecs_per_lane=vecs,
            exact=vecs * lanes == num_vecs,
            stream_out=streams(out.numel() * out.element_size()),
        )
        values = {"num_tokens": num_tokens, "num_heads": num_heads, "head_dim": head_dim}
        for name, x in zip(_RESULTS, (out_a, lse_a, out_b, lse_b, out, lse), strict=True):
            values[f"{name}_token_stride"], values[f"{name}_head_stride"] = x.stride()[:2]
        return Plan(MERGE_STATE, config, values)

    def reference(
        self,
        out_a: torch.Tensor,
        lse_a: torch.Tensor,
        out_b: torch.Tensor,
        lse_b: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        largest = torch.maximum(lse_a, lse_b)
        exp_a, exp_b = (
            torch.where(x == -torch.inf, 0, torch.where(x == largest, 1, torch.exp(x - largest)))
            for x in (lse_a, lse_b)
        )
        total = exp_a + exp_b
        shares = []
        for x, exp in ((out_a, exp_a), (out_b, exp_b)):
            weight = torch.where(total == 0, 0, exp / total).unsqueeze(-1)
            shares.append(torch.where(weight == 0, 0, weight * x.to(accumulation_dtype(x.dtype))))
        joined = torch.logaddexp(lse_a, lse_b)
        out.copy_(shares[0] + shares[1])
        lse.copy_(joined)

    def forward_aot(
        self,
        out_a: torch.Tensor,
        lse_a: torch.Tensor,
        out_b: torch.Tensor,
        lse_b: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Contiguous tensors only. Counts +inf as -inf, and two empty sides give NaN."""
        self.check(out_a, lse_a, out_b, lse_b, out, lse)
        if not all(x.is_contiguous() for x in (out_a, lse_a, out_b, lse_b, out, lse)):
            _peers.refuse(self.op, KernelBackend.AOT, "it takes contiguous tensors")
        _peers.sglang("attention.merge_state", "merge_state_triton")(out_a, lse_a, out_b, lse_b, out, lse)

    def forward_triton(
        self,
        out_a: torch.Tensor,
        lse_a: torch.Tensor,
        out_b: torch.Tensor,
        lse_b: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        self.check(out_a, lse_a, out_b, lse_b, out, lse)
        from hpcjit.ops.attention import _merge_state_triton

        _merge_state_triton.merge_state(self.op, out_a, lse_a, out_b, lse_b, out, lse)


def _lanes(num_vecs: int) -> int:
    """Lanes of a head: a power of two that divides its vectors, unless that leaves too many to each."""
    dividing = min(32, num_vecs & -num_vecs)
    return dividing if num_vecs <= dividing * _MAX_VECS else min(32, 1 << (num_vecs - 1).bit_length())


def _check_in_place(op: str, name: str, result: torch.Tensor, source: torch.Tensor) -> None:
    """A result may be one of the inputs, but no other view of its memory: heads are read and written in any order."""
    if torch.compiler.is_compiling() or result.device.type == "meta" or not result.numel():
        return  # there are no addresses to compare
    if result.data_ptr() == source.data_ptr() and _steps(result) != _steps(source):
        raise ArgumentError(
            op, name, f"strides {source.stride()} like the input in whose place it is", f"strides {result.stride()}"
        )


def _steps(x: torch.Tensor) -> list[int]:
    return [step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1]


merge_state_op = MergeStateOp()
define(merge_state_op)


def merge_state(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join two attention results over disjoint sets of keys into the result over all of them.

        lse = log(exp(lse_a) + exp(lse_b))
        out = (exp(lse_a) * out_a + exp(lse_b) * out_b) / exp(lse)

    Args:
        out_a: `[num_tokens, num_heads, head_dim]`, bfloat16, float16 or float32; any token and head strides, last axis
            contiguous. A head_dim of whole 16-byte vectors is fast; any other works.
        lse_a: float32 `[num_tokens, num_heads]`, any strides: the natural logarithm of the sum of the exponentials of the
            logits, as `attention.decode` returns it. (FlashInfer's is to base 2: multiply it by ln 2.)
        out_b: the other result, like `out_a`.
        lse_b: like `lse_a`.
        out: receives the joined result. It may be `out_a` or `out_b` itself, and must not overlap them otherwise. A new
            tensor by default.
        lse: receives the joined log-sum-exp. It may be `lse_a` or `lse_b` itself, and must not overlap them otherwise. A new
            tensor by default.
        backend: run this backend or fail.

    Returns:
        `(out, lse)`. Computed in float32, with the larger log-sum-exp taken out, and rounded once; bits repeat.

        A side whose weight is 0 contributes nothing, also where its `out` holds NaN: one without keys (-inf), or so far below
        the other (about 104) that its weight is no float32. Two empty sides give `out` 0 and `lse` -inf. A log-sum-exp of
        +inf outweighs every finite one, two of them count half each. NaN in either makes `out` and `lse` of that head NaN.

    Raises:
        ArgumentError: a wrong dtype, shape, stride or device, a tensor that requires grad, or a result that begins where an
            input does that it may not take the place of.

    Safe under CUDA graphs once the signature has run or been prewarmed. Method: Milakov and Gimelshein, 2018.
    """
    require(MergeStateOp.op, "out_a", out_a, 3)
    if out is None:
        out = out_a.new_empty(out_a.shape)
    if lse is None:
        lse = out_a.new_empty(out_a.shape[:2], dtype=torch.float32)
    if compiling("attention.merge_state", backend):
        torch.ops.hpcjit.attention_merge_state(out_a, lse_a, out_b, lse_b, out, lse)
    elif backend is None:
        merge_state_op.fast(out_a, lse_a, out_b, lse_b, out, lse)
    else:
        merge_state_op(out_a, lse_a, out_b, lse_b, out, lse, backend=backend)
    return out, lse
