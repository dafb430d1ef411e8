"""Arguments of the fused mixture of experts, and everything that can be wrong with them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hpcjit import checks
from hpcjit.errors import ArgumentError
from hpcjit.ops._tensors import distinct, overwrites_none

QUANT = ("bf16", "fp8_tensor", "fp8_channel", "fp8_block")
ACTIVATIONS = ("silu", "gelu")
BLOCK = 128  # features that share a scale in "fp8_block"
HIDDEN_GROUP = 64  # features of the hidden activation that share one; fewer in the form for few tokens
MAX_EXPERTS = 512
MAX_TOP_K = 32
MAX_PAIRS = 2**25
_MOST_REACH = 2**36  # bytes from the first row of x to the last: kernels count them in 16 bytes, with 32 bits
MAX_SIZE = 2**16  # of hidden_size and intermediate_size

_E4M3 = (torch.float8_e4m3fn,)
_BF16 = (torch.bfloat16,)
_FP32 = (torch.float32,)


class FusedMoeArgs(NamedTuple):
    x: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    w13_scale: torch.Tensor | None
    w2_scale: torch.Tensor | None
    x_scale: torch.Tensor | None
    quant: str
    activation: str
    shared_output: torch.Tensor | None
    expert_offset: int
    num_global_experts: int | None
    apply_weights_on_input: bool
    out: torch.Tensor

    @property
    def num_experts(self) -> int:
        return self.w13.shape[0]

    @property
    def intermediate_size(self) -> int:
        return self.w2.shape[2]

    @property
    def quantises(self) -> bool:
        """Whether the operator turns the activations into FP8."""
        return self.quant != "bf16" and self.x.dtype != torch.float8_e4m3fn

    @property
    def given_scale(self) -> bool:
        """Whether it does so with a scale that the caller gave."""
        return self.quantises and self.x_scale is not None


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def check(op: str, a: FusedMoeArgs) -> None:
    checks.choice(op, "quant", a.quant, QUANT)
    checks.choice(op, "activation", a.activation, ACTIVATIONS)
    checks.choice(op, "apply_weights_on_input", a.apply_weights_on_input, (False, True))
    checks.integer(op, "expert_offset", a.expert_offset, low=0, high=2**30)
    _check_x(op, a)
    _check_weights(op, a)
    _check_routing(op, a)
    _check_scales(op, a)
    _check_rows(op, a)
    named = {name: value for name, value in a._asdict().items() if isinstance(value, torch.Tensor)}
    checks.no_grad(op, **named)


def _fail(op: str, name: str, expected: str, value: torch.Tensor | None) -> ArgumentError:
    return ArgumentError(op, name, expected, "None" if value is None else checks.describe(value))


def aligned(op: str, name: str, value: torch.Tensor) -> None:
    """Rows are copied 16 bytes at a time."""
    stride = value.stride(0) if value.ndim == 2 and value.shape[0] > 1 else 0
    if value.numel() and (stride * value.element_size() % 16 or _address(value) % 16):
        raise ArgumentError(op, name, "with rows on 16-byte boundaries", f"{checks.describe(value)}, stride {stride}")


def _address(value: torch.Tensor) -> int:
    """0 for tensors that torch traces or transforms: they have none."""
    try:
        return 0 if torch.compiler.is_compiling() else value.data_ptr()
    except RuntimeError:
        return 0


def _check_x(op: str, a: FusedMoeArgs) -> None:
    checks.tensor(op, "x", a.x, dtypes=_BF16 if a.quant == "bf16" else _BF16 + _E4M3, min_ndim=2)
    if a.x.ndim != 2 or not 0 < a.x.shape[1] <= MAX_SIZE:
        raise _fail(op, "x", f"[num_tokens, hidden_size] with hidden_size up to {MAX_SIZE}", a.x)
    aligned(op, "x", a.x)
    reach = (a.x.shape[0] - 1) * a.x.stride(0) * a.x.element_size()
    if reach > _MOST_REACH:
        expected = "at a stride with which all rows lie within 64 GiB"
        raise ArgumentError(op, "x", expected, f"{checks.describe(a.x)}, stride {a.x.stride(0)}")


def _check_weights(op: str, a: FusedMoeArgs) -> None:
    dtypes = _BF16 if a.quant == "bf16" else _E4M3
    hidden = a.x.shape[1]
    for name, value in (("w13", a.w13), ("w2", a.w2)):
        checks.tensor(op, name, value, dtypes=dtypes, min_ndim=3, like=a.x)
        if value.ndim != 3 or not value.is_contiguous():
            raise _fail(op, name, "contiguous, of rank 3", value)
        aligned(op, name, value)
    experts, rows, columns = a.w13.shape
    if not 1 <= experts <= MAX_EXPERTS or rows % 2 or not 0 < rows <= 2 * MAX_SIZE or columns != hidden:
        raise _fail(op, "w13", f"[1 to {MAX_EXPERTS} experts, 2 * intermediate_size, {hidden}]", a.w13)
    if tuple(a.w2.shape) != (experts, hidden, rows // 2):
        raise _fail(op, "w2", f"of shape {[experts, hidden, rows // 2]}", a.w2)
    step = 8 if a.quant == "bf16" else 16
    for name, value, size in (("x", a.x, hidden), ("w2", a.w2, rows // 2)):
        if size % step:
            raise _fail(op, name, f"with a multiple of {step} columns", value)


def _check_routing(op: str, a: FusedMoeArgs) -> None:
    checks.tensor(op, "topk_ids", a.topk_ids, dtypes=(torch.int32,), min_ndim=2, like=a.x)
    shape = (a.x.shape[0], a.topk_ids.shape[1])
    if tuple(a.topk_ids.shape) != shape or not 1 <= shape[1] <= MAX_TOP_K:
        raise _fail(op, "topk_ids", f"[{shape[0]}, 1 to {MAX_TOP_K}]", a.topk_ids)
    if a.topk_ids.numel() > MAX_PAIRS:
        raise _fail(op, "topk_ids", f"at most {MAX_PAIRS} pairs", a.topk_ids)
    if a.num_global_experts is not None:
        low = a.expert_offset + a.num_experts
        checks.integer(op, "num_global_experts", a.num_global_experts, low=low, high=2**31 - 1)
    checks.tensor(op, "topk_weights", a.topk_weights, dtypes=_FP32, shape=shape, like=a.x)


def _scale_shapes(a: FusedMoeArgs) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of w13_scale and w2_scale."""
    experts, hidden, inner = a.num_experts, a.x.shape[1], a.intermediate_size
    if a.quant == "fp8_tensor":
        return (experts,), (experts,)
    if a.quant == "fp8_channel":
        return (experts, 2 * inner), (experts, hidden)
    inner_blocks, hidden_blocks = ceil_div(inner, BLOCK), ceil_div(hidden, BLOCK)
    return (experts, 2 * inner_blocks, hidden_blocks), (experts, hidden_blocks, inner_blocks)


def _check_scales(op: str, a: FusedMoeArgs) -> None:
    scales = {"w13_scale": a.w13_scale, "w2_scale": a.w2_scale, "x_scale": a.x_scale}
    if a.quant == "bf16":
        for name, value in scales.items():
            if value is not None:
                raise _fail(op, name, "None with quant='bf16'", value)
        return
    for (name, value), shape in zip(list(scales.items())[:2], _scale_shapes(a), strict=True):
        if value is None:
            raise _fail(op, name, f"float32 of shape {list(shape)} with quant={a.quant!r}", value)
        checks.tensor(op, name, value, dtypes=_FP32, shape=shape, like=a.x)
        if not value.is_contiguous():
            raise ArgumentError(op, name, "contiguous", f"strides {value.stride()}")
    _check_x_scale(op, a)


def x_scale_shapes(quant: str, rows: int, groups: int) -> tuple[tuple[int, ...], ...]:
    """Those that the scale of FP8 rows may have."""
    if quant == "fp8_tensor":
        return (1,), (rows, 1)
    return ((rows, 1), (rows,)) if quant == "fp8_channel" else ((rows, groups),)


def _check_x_scale(op: str, a: FusedMoeArgs) -> None:
    tokens, groups = a.x.shape[0], ceil_div(a.x.shape[1], BLOCK)
    if a.x_scale is None:
        if not a.quantises:
            raise _fail(op, "x_scale", "a float32 tensor with activations in float8_e4m3fn", None)
        return
    shapes = x_scale_shapes(a.quant, tokens, groups)
    if a.quantises:
        if a.quant != "fp8_tensor":
            raise _fail(op, "x_scale", f"None with activations in bfloat16 and quant={a.quant!r}", a.x_scale)
        shapes = ((1,),)
    checks.tensor(op, "x_scale", a.x_scale, dtypes=_FP32, like=a.x, dense_last=False)
    if tuple(a.x_scale.shape) not in shapes:
        raise _fail(op, "x_scale", "of shape " + " or ".join(str(list(shape)) for shape in shapes), a.x_scale)


def _check_rows(op: str, a: FusedMoeArgs) -> None:
    for name, value in (("shared_output", a.shared_output), ("out", a.out)):
        if value is not None:
            checks.tensor(op, name, value, dtypes=_BF16, shape=tuple(a.x.shape), like=a.x)
            aligned(op, name, value)
    distinct(op, "out", a.out)
    read = ("w13", "w2", "topk_ids", "topk_weights", "w13_scale", "w2_scale", "x_scale")
    overwrites_none(op, "out", a.out, {name: getattr(a, name) for name in read})
