"""Argument checks shared by the operators. Each raises before anything is built or launched and names what was wrong."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hpcjit.errors import ArgumentError, ArgumentTypeError

_NUMBERS = (int, float)  # a tuple: torch 2.8 cannot trace isinstance with a union


def describe(value: Any) -> str:
    """A short picture of a value for error messages, such as `bfloat16[2, 4096] on cuda:0`."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} on {value.device}"
    return f"{type(value).__name__} {' '.join(reprlib.repr(value).split())}"


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def tensor(
    op: str,
    name: str,
    value: Any,
    *,
    dtypes: Sequence[torch.dtype] | None = None,
    shape: Sequence[int] | None = None,
    min_ndim: int = 0,
    like: torch.Tensor | None = None,
    dense_last: bool = True,
) -> torch.Tensor:
    """Check one tensor argument: type, dtype, device (that of `like`), shape or least rank, unit stride of the last axis."""
    if not isinstance(value, torch.Tensor):
        raise ArgumentTypeError(op, name, "a tensor", describe(value))
    if value.layout != torch.strided:
        raise ArgumentTypeError(op, name, "a dense tensor", f"layout {value.layout}")
    if value.is_nested:
        raise ArgumentTypeError(op, name, "a dense tensor", "a nested one")
    if dtypes is not None and value.dtype not in dtypes:
        raise ArgumentTypeError(op, name, _names(dtypes), describe(value))
    if like is not None and value.device != like.device:
        raise ArgumentError(op, name, f"on {like.device} like the other tensors", describe(value))
    if shape is not None and tuple(value.shape) != tuple(shape):
        raise ArgumentError(op, name, f"of shape {list(shape)}", describe(value))
    if value.ndim < min_ndim:
        raise ArgumentError(op, name, f"of rank {min_ndim} or more", describe(value))
    if dense_last and value.ndim and value.shape[-1] > 1 and value.stride(-1) != 1:
        raise ArgumentError(op, name, "contiguous in its last axis", f"strides {value.stride()}")
    return value


def rows(op: str, name: str, value: torch.Tensor, *, written: bool = False) -> tuple[int, int]:
    """Number of rows and their common stride (in elements) when every axis but the last is folded into one.

    Raises:
        ArgumentError: the leading axes have no common stride, or rows to be written lie on top of each other.
    """
    count, stride = 1, 0
    for size, step in zip(reversed(value.shape[:-1]), reversed(value.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if count > 1 and step != stride * count and value.numel():
            raise ArgumentError(
                op, name, "a view whose leading axes fold into one (call .contiguous())", f"strides {value.stride()}"
            )
        if count == 1:
            stride = step
        count *= size
    if count <= 1:
        stride = value.shape[-1] if value.ndim else 1
    count = math.prod(value.shape[:-1])
    if written and count > 1 and stride < value.shape[-1]:
        raise ArgumentError(
            op, name, "a tensor whose rows do not overlap, because it is written", f"row stride {stride}"
        )
    return count, stride


def apart(op: str, name: str, value: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Refuse two arguments that begin at the same memory where both are written."""
    if same_start(value, other):
        raise ArgumentError(op, name, f"other memory than '{other_name}': both are written", describe(value))


def same_start(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both have memory that begins at one address. Tensors that torch traces or transforms have none."""
    if torch.compiler.is_compiling() or not one.numel() or not other.numel():
        return False
    if any(x.device.type == "meta" or type(x).__torch_dispatch__ is not _DISPATCH for x in (one, other)):
        return False
    try:
        return one.data_ptr() == other.data_ptr()
    except RuntimeError:  # of a functional transform
        return False


_DISPATCH = torch.Tensor.__torch_dispatch__


def no_grad(op: str, **tensors: torch.Tensor | None) -> None:
    """Refuse tensors that autograd is following: the operators have no backward and would cut the graph silently."""
    if not torch.is_grad_enabled():
        return
    for name, value in tensors.items():
        if value is not None and value.requires_grad:
            raise ArgumentError(
                op, name, "a tensor that needs no gradient (use torch.no_grad or .detach())", "requires_grad=True"
            )


FLOAT_MAX = 3.4028234663852886e38  # what kernels compute with is float32


def number(op: str, name: str, value: Any, *, low: float = -FLOAT_MAX, high: float = FLOAT_MAX) -> float:
    """A real number in [low, high], which float32 can hold; an integer must fit into 64 bits, as torch's scalars do."""
    if isinstance(value, bool) or not isinstance(value, _NUMBERS):
        raise ArgumentTypeError(op, name, "a number", describe(value))
    if isinstance(value, int) and value.bit_length() > 63:
        raise ArgumentError(op, name, "a float or an integer of 64 bits", f"an integer of {value.bit_length() + 1}")
    if not math.isfinite(value) or not low <= value <= high:
        bounded = "" if (low, high) == (-FLOAT_MAX, FLOAT_MAX) else f" in [{low:g}, {high:g}]"
        raise ArgumentError(op, name, f"a finite number of float32{bounded}", value)
    return float(value)


def integer(op: str, name: str, value: Any, *, low: int, high: int) -> int:
    """An integer in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(op, name, "an integer", describe(value))
    if not low <= value <= high:
        raise ArgumentError(op, name, f"in [{low}, {high}]", value)
    return value


def choice(op: str, name: str, value: Any, choices: Sequence[Any]) -> Any:
    """One of a few values, of the same type: 1 is not True, and nothing foreign is compared."""
    if not any(type(value) is type(known) and value == known for known in choices):
        raise ArgumentError(op, name, "one of " + ", ".join(map(repr, choices)), describe(value))
    return value
