"""What several groups ask of tensors, and the precision in which references compute."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hpcjit import checks
from hpcjit.errors import ArgumentError

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def require(op: str, name: str, value: torch.Tensor, min_ndim: int = 1) -> None:
    """What must hold before a public function can ask for the shape of `value` to allocate its result."""
    if not isinstance(value, torch.Tensor) or value.is_nested or value.ndim < min_ndim:
        checks.tensor(op, name, value, min_ndim=min_ndim)


def require_rank(op: str, name: str, value: torch.Tensor, ndim: int) -> None:
    """As `require`, where another argument's range follows from the shape."""
    require(op, name, value, ndim)
    if value.ndim != ndim:
        raise ArgumentError(op, name, f"of rank {ndim}", checks.describe(value))


def compiling(op: str, backend: str | None) -> bool:
    """Whether torch.compile is tracing the caller. What it compiles chooses its backend when it runs, so none can be named."""
    if not torch.compiler.is_compiling():
        return False
    if backend is not None:
        raise ArgumentError(op, "backend", "None under torch.compile (set_fused_op_backend chooses there)", backend)
    return True


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a reference computes: float32, or float64 for float64 inputs (which only references take)."""
    return torch.promote_types(dtype, torch.float32)


def overwrites_none(op: str, name: str, value: torch.Tensor, inputs: Mapping[str, torch.Tensor | None]) -> None:
    """Refuse a tensor to be written that begins at the same memory as one that is read meanwhile."""
    for other_name, other in inputs.items():
        if other is not None and checks.same_start(value, other):
            expected = f"other memory than '{other_name}', which is read meanwhile"
            raise ArgumentError(op, name, expected, checks.describe(value))


def distinct(op: str, name: str, value: torch.Tensor) -> None:
    """Refuse a tensor to be written some of whose elements share memory, as those of an expanded view do."""
    reach = 0  # largest offset of the axes seen so far
    for step, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size == 1 or not value.numel():
            continue
        if step <= reach:
            raise ArgumentError(
                op, name, "a tensor whose elements do not overlap, because it is written", f"strides {value.stride()}"
            )
        reach += step * (size - 1)
