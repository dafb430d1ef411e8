"""The template behind every row normalisation, and which of its shapes a call gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hpcjit import checks
from hpcjit.build import Config, Template
from hpcjit.jit_op import NOTHING, Plan
from hpcjit.ops._rows import (
    AFTER_LOADS,
    AT_END,
    AT_START,
    FEW_ROWS,
    LINES,
    LONG_ROW,
    NO_PREFETCH,
    TYPE_NAMES,
    WHOLE_ROW,
    RowShape,
    holds_long_row,
    resident_blocks,
    row_shape,
    streams,
    vector_width,
)
from hpcjit.ops._tensors import FLOATS


@dataclass(frozen=True)
class NormConfig(Config):
    input_t: str = "bf16"
    weight_t: str = "bf16"
    output_t: str = "bf16"
    threads: int = 256
    row_threads: int = 256
    vec: int = 8
    vecs_per_thread: int = 2
    exact: bool = True
    has_residual: bool = False
    has_bias: bool = False
    layer_norm: bool = False
    unit_offset: bool = False
    quant: int = 0
    stream_in: bool = False
    stream_out: bool = False
    prefetch: int = 0
    late_weight: bool = False
    min_blocks: int = 1
    trigger: int = 0
    pdl: bool = True


NORM = Template(
    op="layernorm.norm",
    header="layernorm/norm.cuh",
    entry="hpcjit::layernorm::Norm",
    config=NormConfig,
    params=(
        "input",
        "residual",
        "weight",
        "bias",
        "output",
        "scale",
        "num_tokens",
        "hidden_size",
        "input_stride",
        "residual_stride",
        "output_stride",
        "eps",
    ),
)


_TWO_EARLY = 448  # threads up to which an SM holds two blocks with their weights in registers (72 a thread)


@dataclass(frozen=True)
class _Kind:
    """What the time of a normalisation depends on, besides the number of rows and their length."""

    large: bool
    residual: bool
    light: bool  # holds little more than the row and the weights
    bias: bool
    quant: bool
    whole: bool  # rows of whole 16 bytes

    @property
    def plain(self) -> bool:
        return self.light and not self.bias and not self.quant


def _shape(kind: _Kind, num_vecs: int, few: bool, num_tokens: int) -> RowShape:
    if kind.residual:
        vecs = 1 if kind.large and num_vecs <= 1024 else 4
    elif kind.plain and not kind.large:
        vecs = 2 if few and not 512 < num_vecs < LONG_ROW else 4
    else:
        vecs = 2 if kind.light and num_vecs <= 512 else 4
    return row_shape(num_vecs, num_tokens, large=kind.large, max_vecs=8 if kind.light else 4, vecs=vecs)


def _speed(kind: _Kind, num_vecs: int, num_tokens: int) -> dict[str, Any]:
    """The fields of the config that change the time only, as measured in docs/perf/norm.md."""
    few = num_tokens <= FEW_ROWS
    shape = _shape(kind, num_vecs, few, num_tokens)
    narrow = kind.large and kind.residual and shape.vecs_per_thread == 1  # few registers, weights and all
    late = kind.large and not narrow and (not kind.light or kind.bias or shape.threads > _TWO_EARLY)
    wide = late and kind.residual
    ahead = kind.whole and holds_long_row(shape) and (narrow or wide or (late and kind.plain))
    min_blocks = 1
    if narrow:
        min_blocks = resident_blocks(shape, 1536)
    elif late and kind.plain:
        min_blocks = resident_blocks(shape)
    elif ahead:
        min_blocks = resident_blocks(shape, 1024)
    return {
        "threads": shape.threads,
        "row_threads": shape.row_threads,
        "vecs_per_thread": shape.vecs_per_thread,
        "exact": shape.exact,
        "stream_in": wide and not ahead,
        "stream_out": wide and not ahead,
        "prefetch": LINES if not kind.large else WHOLE_ROW if ahead else NO_PREFETCH,
        "late_weight": late or (kind.plain and not kind.large and few and num_vecs >= LONG_ROW),
        "min_blocks": min_blocks,
        "trigger": AT_END if wide else AT_START if (ahead and late) or not kind.large else AFTER_LOADS,
    }


def norm_plan(
    op: str,
    input: torch.Tensor,
    weight: torch.Tensor,
    output: torch.Tensor,
    *,
    output_name: str,
    residual: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    quant: int = 0,
    **options: bool,
) -> Plan | str:
    """The plan of one normalisation; `options` are fields of `NormConfig`."""
    if input.numel() == 0:
        return NOTHING
    num_tokens, input_stride = checks.rows(op, "input", input)
    hidden_size = input.shape[-1]
    residual_stride = 0 if residual is None else checks.rows(op, "residual", residual)[1]
    _, output_stride = checks.rows(op, output_name, output)
    placed = [(input, input_stride), (weight, 0), (output, output_stride)]
    placed += [(tensor, stride) for tensor, stride in ((residual, residual_stride), (bias, 0)) if tensor is not None]
    vec = vector_width(hidden_size, input.element_size(), placed)
    large = streams(input.numel() * input.element_size())
    light = residual is None and input.element_size() <= 2
    kind = _Kind(large, residual is not None, light, bias is not None, bool(quant), vec * input.element_size() == 16)
    config = NormConfig(
        input_t=TYPE_NAMES[input.dtype],
        weight_t=TYPE_NAMES[weight.dtype],
        output_t=TYPE_NAMES[output.dtype],
        vec=vec,
        has_residual=residual is not None,
        has_bias=bias is not None,
        quant=quant,
        **_speed(kind, hidden_size // vec, num_tokens),
        **options,
    )
    return Plan(
        NORM,
        config,
        {
            "residual": "residual" if residual is not None else 0,
            "bias": "bias" if bias is not None else 0,
            "output": output_name,
            "scale": "scale" if quant else 0,
            "num_tokens": num_tokens,
            "hidden_size": hidden_size,
            "input_stride": input_stride,
            "residual_stride": residual_stride,
            "output_stride": output_stride,
        },
    )


def check_norm(
    op: str,
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    bias: torch.Tensor | None = None,
    input_written: bool = False,
) -> None:
    """What every normalisation asks of its input, weight, bias and eps."""
    checks.tensor(op, "input", input, dtypes=FLOATS, min_ndim=1)
    checks.rows(op, "input", input, written=input_written)
    if input.shape[-1] == 0:
        raise checks.ArgumentError(op, "input", "of at least one column", checks.describe(input))
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None or name == "weight":
            dtypes = (input.dtype, torch.float32)
            checks.tensor(op, name, value, dtypes=dtypes, shape=input.shape[-1:], like=input)
    if bias is not None and bias.dtype != weight.dtype:
        raise checks.ArgumentTypeError(op, "bias", f"{weight.dtype} like weight", checks.describe(bias))
    checks.number(op, "eps", eps, low=0.0)
    checks.no_grad(op, input=input, weight=weight, bias=bias)
