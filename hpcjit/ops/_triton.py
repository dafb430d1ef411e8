"""What the Triton baselines of several groups share. They are imported, as this is, by the first call that runs on Triton.

Each is the plain kernel for the job: a program per row or token that holds all of it, masks for any size, no tuning. They
show what the obvious way costs, and run where a peer package is missing.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from typing import NoReturn

import triton
import triton.language as tl

from hpcjit.errors import BackendError
from hpcjit.spec import KernelBackend

MAX_COLUMNS = 2**17  # a longer row does not fit the registers of one program

_E4M3_MAX = tl.constexpr(448.0)
_SCALE_FLOOR = tl.constexpr(1e-10)


def refuse(op: str, reason: str) -> NoReturn:
    """Say that the baseline does not cover a call."""
    raise BackendError(f"{op}: backend {KernelBackend.TRITON} cannot run this call: {reason}")


def row_shape(op: str, columns: int) -> tuple[int, int]:
    """The power of two that holds a row, and the warps for it."""
    if columns > MAX_COLUMNS:
        refuse(op, f"it takes rows of at most {MAX_COLUMNS} columns, got {columns}")
    block = triton.next_power_of_2(columns)
    return block, _warps(block)


def head_shape(op: str, heads: int, head_dim: int) -> tuple[int, int, int]:
    """Powers of two that hold some heads of a token, and the warps for them."""
    block_dim, _ = row_shape(op, head_dim)
    block_heads = min(triton.next_power_of_2(heads), max(2048 // block_dim, 1))
    return block_heads, block_dim, _warps(block_heads * block_dim)


def _warps(elements: int) -> int:
    """Sixteen elements a lane, until that takes a whole multiprocessor."""
    return min(max(elements // 512, 1), 16 if elements <= 2**15 else 32)


@triton.jit
def row_scale(y):
    """`max(max|y|, 1e-10) / 448` of a row in float32; NaN elements do not count."""
    largest = tl.max(tl.where(y == y, tl.abs(y), 0.0), axis=0)
    return tl.div_rn(tl.maximum(largest, _SCALE_FLOOR), _E4M3_MAX)


@triton.jit
def to_e4m3(y):
    """`y` rounded to the nearest e4m3, saturating at +-448; NaN stays NaN."""
    return tl.clamp(y, -_E4M3_MAX, _E4M3_MAX, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
