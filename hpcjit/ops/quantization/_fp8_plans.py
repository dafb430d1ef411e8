"""The three FP8 quantisers (a scale per row, per group, per tensor) and which of their shapes a call gets.

Each also quantises a gated activation of its input, whose rows then have twice as many columns as those of the output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from hpcjit import checks
from hpcjit.build import Config, Template
from hpcjit.jit_op import NOTHING, Plan
from hpcjit.ops._rows import (
    AFTER_LOADS,
    AT_END,
    AT_START,
    TYPE_NAMES,
    holds_long_row,
    resident_blocks,
    row_shape,
    streams,
    vector_width,
)
from hpcjit.ops._tensors import FLOATS, distinct

GROUP_SIZES = (16, 32, 64, 128, 256)

_FEW_VECS = 2**18  # below, more threads in flight are worth more than more loads per thread
_MAX_BLOCKS = 1056  # of the per-tensor kernels: eight for each SM of the largest part


@dataclass(frozen=True)
class RowQuantConfig(Config):
    input_t: str = "bf16"
    threads: int = 256
    row_threads: int = 256
    vec: int = 8
    vecs_per_thread: int = 2
    exact: bool = True
    activation: int = 0
    stream_in: bool = True
    stream_out: bool = False
    prefetch_row: bool = False
    min_blocks: int = 1
    trigger: int = 0
    pdl: bool = True


ROW_QUANT = Template(
    op="quantization.row_quant",
    header="quantization/row_quant.cuh",
    entry="hpcjit::quantization::RowQuant",
    config=RowQuantConfig,
    params=("input", "output", "scale", "num_tokens", "hidden_size", "input_stride", "output_stride"),
)


@dataclass(frozen=True)
class GroupQuantConfig(Config):
    input_t: str = "bf16"
    threads: int = 256
    vec: int = 8
    access: int = 8
    vecs_per_thread: int = 1  # more loads per thread were measured to be slower in copies and gated activations
    group_size: int = 128
    power_of_two: bool = False
    activation: int = 0
    stream_out: bool = False
    pdl: bool = True


GROUP_QUANT = Template(
    op="quantization.group_quant",
    header="quantization/group_quant.cuh",
    entry="hpcjit::quantization::GroupQuant",
    config=GroupQuantConfig,
    params=(
        "input",
        "output",
        "scale",
        "num_tokens",
        "hidden_size",
        "input_stride",
        "output_stride",
        "scale_token_stride",
        "scale_group_stride",
    ),
)


@dataclass(frozen=True)
class TensorQuantConfig(Config):
    input_t: str = "bf16"
    threads: int = 256
    vec: int = 8
    vecs_per_thread: int = 4
    dynamic: bool = False
    flat: bool = True
    activation: int = 0
    stream_out: bool = False
    pdl: bool = True


TENSOR_QUANT = Template(
    op="quantization.tensor_quant",
    header="quantization/tensor_quant.cuh",
    entry="hpcjit::quantization::TensorQuant",
    config=TensorQuantConfig,
    params=(
        "input",
        "output",
        "scale",
        "workspace",
        "num_tokens",
        "hidden_size",
        "input_stride",
        "output_stride",
        "num_blocks",
    ),
)


def _extent(op: str, input: torch.Tensor, out: torch.Tensor) -> dict[str, int]:
    num_tokens, input_stride = checks.rows(op, "input", input)
    _, output_stride = checks.rows(op, "out", out)
    return {
        "num_tokens": num_tokens,
        "hidden_size": out.shape[-1],
        "input_stride": input_stride,
        "output_stride": output_stride,
    }


def _vector_width(input: torch.Tensor, out: torch.Tensor, extent: dict[str, int]) -> int:
    placed = [(input, extent["input_stride"]), (out, extent["output_stride"])]
    return vector_width(extent["hidden_size"], input.element_size(), placed)


def row_quant_plan(op: str, input: torch.Tensor, out: torch.Tensor, *, activation: int = 0) -> Plan | str:
    """One scale per row."""
    if out.numel() == 0:
        return NOTHING
    extent = _extent(op, input, out)
    vec = _vector_width(input, out, extent)
    large = streams(out.numel())
    light = activation == 0 and input.element_size() == 2 and vec > 1
    num_vecs = extent["hidden_size"] // vec
    vecs = 2 if light and num_vecs <= 512 else 4
    shape = row_shape(num_vecs, extent["num_tokens"], large=large, max_vecs=4, vecs=vecs)
    gated = activation != 0  # only plain rows were measured with default caching, which gains 4 %, and with a prefetch
    ahead = large and not gated and holds_long_row(shape) and vec * input.element_size() == 16
    config = RowQuantConfig(
        TYPE_NAMES[input.dtype],
        threads=shape.threads,
        row_threads=shape.row_threads,
        vec=vec,
        vecs_per_thread=shape.vecs_per_thread,
        exact=shape.exact,
        activation=activation,
        stream_in=gated or not large,
        stream_out=gated and large,
        min_blocks=resident_blocks(shape) if large and light else 1,
        prefetch_row=ahead,
        trigger=AT_END if large and gated else AFTER_LOADS if large and not ahead else AT_START,
    )
    return Plan(ROW_QUANT, config, {"output": "out", **extent})


def group_quant_plan(
    op: str,
    input: torch.Tensor,
    group_size: int,
    scale_ue8m0: bool,
    out: torch.Tensor,
    scale: torch.Tensor,
    *,
    activation: int = 0,
) -> Plan | str:
    """One scale per group. A vector has 8 elements whatever the alignment, so that a group of 256 still fits a warp."""
    if out.numel() == 0:
        return NOTHING
    extent = _extent(op, input, out)
    placed = [(input, extent["input_stride"]), (out, extent["output_stride"])]
    whole = vector_width(extent["hidden_size"], 2, placed) == 8  # rows aligned to 8 elements of the output too
    config = GroupQuantConfig(
        TYPE_NAMES[input.dtype],
        access=8 if whole else 1,
        group_size=group_size,
        power_of_two=scale_ue8m0,
        activation=activation,
        stream_out=streams(out.numel()),
    )
    token_stride, group_stride = _scale_strides(op, scale)
    strides = {"scale_token_stride": token_stride, "scale_group_stride": group_stride}
    return Plan(GROUP_QUANT, config, {"output": "out", **extent, **strides})


def tensor_quant_plan(
    op: str, input: torch.Tensor, dynamic: bool, out: torch.Tensor, *, activation: int = 0
) -> Plan | str:
    """One scale for all: found, or given."""
    if out.numel() == 0 and not dynamic:
        return NOTHING
    extent = _extent(op, input, out)
    flat = not activation and input.is_contiguous() and out.is_contiguous()
    if flat:  # one long row, whatever the number of columns
        extent = {"num_tokens": 1} | dict.fromkeys(("hidden_size", "input_stride", "output_stride"), out.numel())
    vec = _vector_width(input, out, extent)
    vecs = out.numel() // vec
    config = TensorQuantConfig(
        TYPE_NAMES[input.dtype],
        vec=vec,
        vecs_per_thread=1 if vecs <= _FEW_VECS else 2 if activation else 4,
        dynamic=dynamic,
        flat=flat,
        activation=activation,
        stream_out=streams(out.numel()),
    )
    chunk = config.threads * config.vecs_per_thread
    num_blocks = min(max(-(-vecs // chunk), 1), _MAX_BLOCKS)
    values: dict[str, int | float | str] = {"output": "out", **extent, "num_blocks": num_blocks}
    return Plan(TENSOR_QUANT, config, values, workspace_bytes=4 * num_blocks if dynamic else 0)


# --- checks ---------------------------------------------------------------------------------------------------------


def check_input(op: str, input: torch.Tensor) -> None:
    """What every quantiser of a plain tensor asks of it."""
    checks.tensor(op, "input", input, dtypes=FLOATS, min_ndim=1)
    checks.rows(op, "input", input)
    if input.shape[-1] == 0:
        raise checks.ArgumentError(op, "input", "of at least one column", checks.describe(input))
    checks.no_grad(op, input=input)


def check_out(op: str, out: torch.Tensor, shape: tuple[int, ...], like: torch.Tensor) -> None:
    checks.tensor(op, "out", out, dtypes=(torch.float8_e4m3fn,), shape=shape, like=like)
    checks.rows(op, "out", out, written=True)


def check_dense_scale(op: str, scale: torch.Tensor, shape: tuple[int, ...], like: torch.Tensor) -> None:
    """A float32 scale of this shape, without gaps."""
    checks.tensor(op, "scale", scale, dtypes=(torch.float32,), shape=shape, like=like)
    if not scale.is_contiguous():
        raise checks.ArgumentError(op, "scale", "contiguous", f"strides {scale.stride()}")
    checks.no_grad(op, scale=scale)


def check_group_size(op: str, group_size: int, input: torch.Tensor, halves: int = 1) -> None:
    """The input has whole groups, in each of its `halves`."""
    checks.choice(op, "group_size", group_size, GROUP_SIZES)
    if input.shape[-1] % (halves * group_size):
        expected = f"of a multiple of {halves * group_size} columns"
        raise checks.ArgumentError(op, "input", expected, checks.describe(input))


def check_group_scale(op: str, scale: torch.Tensor, group_size: int, out: torch.Tensor) -> None:
    """A float32 scale per group, the tokens or the groups next to each other, or any other strides."""
    shape = (*out.shape[:-1], out.shape[-1] // group_size)
    checks.tensor(op, "scale", scale, dtypes=(torch.float32,), shape=shape, like=out, dense_last=False)
    _scale_strides(op, scale)
    distinct(op, "scale", scale)
    checks.no_grad(op, scale=scale)


def _scale_strides(op: str, scale: torch.Tensor) -> tuple[int, int]:
    """Strides of tokens and of groups."""
    if scale.numel() == 0:
        return 0, 0
    return checks.rows(op, "scale", scale[..., :1])[1], scale.stride(-1)


def empty_group_scale(op: str, out: torch.Tensor, group_size: int, column_major: bool) -> torch.Tensor:
    """Memory for the scales of `out`. Column-major: the tokens of a group are neighbours, padded to 16 bytes."""
    checks.choice(op, "column_major_scales", column_major, (False, True))
    tokens, groups = out.shape[:-1], out.shape[-1] // group_size
    if not column_major:
        return out.new_empty((*tokens, groups), dtype=torch.float32)
    num_tokens = math.prod(tokens)
    padded = -(-num_tokens // 4) * 4
    scale = out.new_empty((groups, padded), dtype=torch.float32)[:, :num_tokens].t()
    return scale if len(tokens) == 1 else scale.view((*tokens, groups))
