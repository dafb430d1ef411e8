"""From the records of a trace back to the arguments of a call."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hpcjit import trace_file
from hpcjit.cases import Args, Case, Maker
from hpcjit.errors import ArgumentError, FormatError
from hpcjit.jit_op import JitOp
from hpcjit.registry import registry
from hpcjit.trace_file import TensorSignature, TraceRecord

MakeTensor = Callable[[str, TensorSignature], torch.Tensor]

_NUMBERS = {"float": (int, float), "int": (int,), "bool": (bool,), "str": (str,)}


def operator(name: str) -> JitOp:
    """The operator object behind a registered name.

    Raises:
        UnknownOpError: no such operator.
    """
    for spec in registry.specs(name):
        owner = spec.load_owner()
        if isinstance(owner, JitOp):
            return owner
    raise ArgumentError(name, "op", "an operator with a JIT backend", name)


def calls(path: str | os.PathLike[str]) -> Iterator[tuple[str, JitOp, TraceRecord]]:
    """Every record of a trace file with its operator and a name for messages.

    Raises:
        FormatError: a damaged file.
        UnknownOpError: a record of an operator that does not exist here.
    """
    for number, record in enumerate(trace_file.load(path), 2):
        yield f"{os.fspath(path)}: line {number}", operator(record.op), record


def arguments(where: str, op: JitOp, record: TraceRecord, make: MakeTensor) -> Args:
    """The arguments of the recorded call, with tensors from `make(name, signature)`.

    Raises:
        FormatError: an argument is missing or of the wrong kind, or the operator does not take the call.
    """
    values = []
    for name, kind in zip(op.arguments, op.kinds, strict=True):
        if name in record.tensors:
            values.append(make(name, record.tensors[name]))
        elif name not in record.scalars:
            raise FormatError(f"{where}: {record.op} needs '{name}', which the record lacks")
        else:
            values.append(_scalar(f"{where}: {record.op}", name, kind, record.scalars[name]))
    return tuple(values)


def _scalar(where: str, name: str, kind: str, value: Any) -> Any:
    if value is None:
        return None
    if kind == "scalartype" and isinstance(value, str):
        return dtype_of(where, value.removeprefix("torch."))
    if not isinstance(value, _NUMBERS.get(kind, ())):
        raise FormatError(f"{where}: '{name}' must be a {kind}, got {value!r}")
    return value


def dtype_of(where: str, name: str) -> torch.dtype:
    """The torch dtype of that name, or FormatError."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise FormatError(f"{where}: there is no dtype '{name}'")
    return found


def on_meta(where: str) -> MakeTensor:
    """Tensors without memory, for plans."""

    def make(name: str, signature: TensorSignature) -> torch.Tensor:
        dtype = dtype_of(where, signature.dtype)
        try:
            if signature.stride is None:
                return torch.empty(signature.shape, dtype=dtype, device="meta")
            return torch.empty_strided(signature.shape, signature.stride, dtype=dtype, device="meta")
        except RuntimeError as error:
            raise FormatError(f"{where}: '{name}' cannot be {signature}: {error}") from None

    return make


def checked(where: str, op: JitOp, args: Args) -> Args:
    """The arguments, or FormatError when the operator would refuse them."""
    try:
        op.check(*args)
    except ArgumentError as error:
        raise FormatError(f"{where}: {error}") from None
    return args


# --- cases from a trace ---------------------------------------------------------------------------------------------


def cases_of_trace(path: str | os.PathLike[str], ops: list[str]) -> list[Case]:
    """A case for every different call in a trace, the most frequent first; `ops` keeps only these operators.

    Floating tensors get normal values. Integer inputs get the first recorded sample, else 0, 1, 2 and so on. The traffic is
    not known for recorded calls, so their rows have no rate.
    """
    found: dict[tuple[str, str], tuple[int, Case]] = {}
    for where, op, record in calls(path):
        if ops and op.op not in ops:
            continue
        meta = checked(where, op, arguments(where, op, record, on_meta(where)))
        name = _name(op, meta, record)
        count = found.get((op.op, name), (0, None))[0] + record.count
        found[op.op, name] = count, Case(op.op, name, _maker(where, op, record), 0)
    return [case for _, case in sorted(found.values(), key=lambda item: -item[0])]


def _name(op: JitOp, meta: Args, record: TraceRecord) -> str:
    words = [str(record.tensors[name]) for name in op.arguments if name in record.tensors and name not in op.mutated]
    words = words or [str(next(iter(record.tensors.values())))]
    words += [f"{name}={value}" for name, value in record.scalars.items() if value is not None and name != "eps"]
    return " ".join(words).replace(", ", "x")


def _maker(where: str, op: JitOp, record: TraceRecord) -> Callable[[Maker], Args]:
    def make(maker: Maker) -> Args:
        return arguments(where, op, record, lambda name, signature: _fill(where, maker, record, name, signature))

    return make


def _fill(where: str, maker: Maker, record: TraceRecord, name: str, signature: TensorSignature) -> torch.Tensor:
    dtype = dtype_of(where, signature.dtype)
    size = math.prod(signature.shape)
    if dtype.is_floating_point:
        flat = maker.normal(size, dtype=dtype)
    else:
        sample = [values[name] for values in record.values if name in values]
        first = sample[0] if sample else ()
        whole = len(first) == size and all(isinstance(value, int) for value in first)
        known = first if whole else range(size)
        try:
            flat = torch.tensor(known, dtype=dtype, device=maker.device)
        except (RuntimeError, ValueError, OverflowError) as error:
            raise FormatError(f"{where}: the values of '{name}' do not fit {signature}: {error}") from None
    tensor = flat.view(signature.shape)
    if signature.stride is None:
        return tensor
    span = 1 + sum((n - 1) * s for n, s in zip(signature.shape, signature.stride, strict=True)) if size else 0
    strided = torch.zeros(span, dtype=torch.float32, device=maker.device).to(dtype)
    strided = strided.as_strided(signature.shape, signature.stride)
    return strided if any(s == 0 for s in signature.stride) else strided.copy_(tensor)
