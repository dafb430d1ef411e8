"""Which operators a program calls, with which shapes, on which backend, how often: bounded records, saved as JSONL.

Calls with equal operator, backend, tensor signatures and scalars are one record with a count. Nothing grows without
bound: signatures beyond the limit are counted as dropped, and of the integer inputs that decide the time of a dynamic
operator (sequence lengths, expert ids) a record keeps a sample at its call 1, 2, 4, 8 and so on, which also keeps the
number of device reads small.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hpcjit import trace_file
from hpcjit.errors import ArgumentError, ArgumentTypeError
from hpcjit.spec import KernelBackend
from hpcjit.trace_file import MAX_VALUES_PER_SAMPLE, Scalar, TensorSignature, Trace, TraceRecord, Values, load

__all__ = [
    "TensorSignature",
    "Trace",
    "TraceRecord",
    "clear_fused_op_trace",
    "disable_fused_op_trace",
    "enable_fused_op_trace",
    "get_fused_op_trace",
    "load",
    "save",
]

MAX_TEXT = 256  # of a scalar
MAX_VALUES_IN_ALL = 1 << 20


class Recorder:
    """Collects records from any number of threads."""

    def __init__(self, max_signatures: int = 4096, values: bool = False) -> None:
        if not isinstance(max_signatures, int):
            raise ArgumentTypeError("enable_fused_op_trace", "max_signatures", "an integer", repr(max_signatures))
        if max_signatures < 1:
            raise ArgumentError("enable_fused_op_trace", "max_signatures", "at least 1", max_signatures)
        self._max_signatures = max_signatures
        self._keep_values = values
        self._records: dict[tuple[Any, ...], TraceRecord] = {}
        self._next_sample: dict[tuple[Any, ...], int] = {}
        self._dropped_calls = self._dropped_values = self._stored_values = 0
        self._lock = threading.Lock()

    def record(self, op: Any, backend: KernelBackend, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Count one call of the fused operator `op`."""
        tensors, scalars = _describe(_bind(op.arguments, args, kwargs))
        # The type is part of the key because 1, 1.0 and True are equal and hash alike.
        key = (
            op.op,
            backend,
            tuple((name, TensorSignature.of(tensor)) for name, tensor in tensors.items()),
            tuple((name, type(value), value) for name, value in scalars.items()),
        )
        with self._lock:
            record = self._records.get(key)
            if record is not None:
                record.count += 1
            elif len(self._records) < self._max_signatures:
                record = self._records[key] = TraceRecord(op.op, backend, dict(key[2]), scalars)
            else:
                self._dropped_calls += 1
                return
            due = self._keep_values and op.trace_values and record.count >= self._next_sample.get(key, 1)
        if due:
            self._sample(key, record, op.trace_values, tensors)

    def _sample(
        self, key: tuple[Any, ...], record: TraceRecord, names: Sequence[str], tensors: Mapping[str, Any]
    ) -> None:
        if _capturing(tensors):
            return  # reading would break the capture; a later call is sampled
        values, too_large = _read_values(names, tensors)  # waits for the device, so outside the lock
        size = sum(len(value) for value in values.values())
        with self._lock:
            self._next_sample[key] = 2 * record.count
            if too_large or self._stored_values + size > MAX_VALUES_IN_ALL:
                self._dropped_values += 1
            elif values:
                self._stored_values += size
                record.values.append(values)

    def snapshot(self) -> Trace:
        with self._lock:
            records = [
                TraceRecord(r.op, r.backend, dict(r.tensors), dict(r.scalars), r.count, list(r.values))
                for r in self._records.values()
            ]
            return Trace(records, self._dropped_calls, self._dropped_values)

    def clear(self) -> None:
        with self._lock:
            self._records.clear()
            self._next_sample.clear()
            self._dropped_calls = self._dropped_values = self._stored_values = 0


def _bind(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name."""
    named = {names[i] if i < len(names) else f"arg{i}": value for i, value in enumerate(args)}
    return {**named, **kwargs}


def _describe(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Scalar]]:
    """Split arguments into tensors and scalars; lists are taken apart."""
    tensors: dict[str, Any] = {}
    scalars: dict[str, Scalar] = {}
    for name, value in arguments.items():
        if hasattr(value, "is_contiguous"):
            tensors[name] = value
        elif isinstance(value, list | tuple) and any(hasattr(item, "is_contiguous") for item in value):
            inner_tensors, inner_scalars = _describe({f"{name}.{i}": item for i, item in enumerate(value)})
            tensors.update(inner_tensors)
            scalars.update(inner_scalars)
        else:
            scalars[name] = _scalar(value)
    return tensors, scalars


def _scalar(value: Any) -> Scalar:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):  # JSON has no NaN or infinity
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, list | tuple):
        value = str([_scalar(item) for item in value])
    elif not isinstance(value, str):
        # Not str() of just anything: an object that holds tensors would print them, which waits for the device.
        value = str(value) if type(value).__module__ == "torch" else f"<{type(value).__qualname__}>"
    return value if len(value) <= MAX_TEXT else f"{value[: MAX_TEXT - 3]}..."


def _capturing(tensors: Mapping[str, Any]) -> bool:
    import torch

    return any(tensor.is_cuda for tensor in tensors.values()) and torch.cuda.is_current_stream_capturing()


def _read_values(names: Sequence[str], tensors: Mapping[str, Any]) -> tuple[Values, bool]:
    """The named integer tensors' contents, and whether one was left out for its size."""
    import torch

    values: dict[str, tuple[Any, ...]] = {}
    too_large = False
    for entry in names:
        name, _, how = entry.partition(":")
        tensor = tensors.get(name)
        if tensor is None or tensor.is_floating_point() or tensor.is_meta:
            continue
        counts = None
        if how == "histogram":
            tensor, counts = torch.unique(tensor, return_counts=True)
        if tensor.numel() > MAX_VALUES_PER_SAMPLE:
            too_large = True
            continue
        elements = tensor.flatten().tolist()
        values[name] = tuple(elements if counts is None else zip(elements, counts.tolist(), strict=True))
    return values, too_large


_recorder: Recorder | None = None
_last = Recorder()
_listeners: list[Callable[[], None]] = []


def active() -> Recorder | None:
    """The recorder of the running trace, or None when none is on."""
    return _recorder


def on_change(listener: Callable[[], None]) -> None:
    """Call `listener` whenever a trace starts or stops."""
    _listeners.append(listener)


def _set(recorder: Recorder | None) -> None:
    global _recorder
    _recorder = recorder
    for listener in _listeners:
        listener()


def enable_fused_op_trace(max_signatures: int = 4096, values: bool = False) -> None:
    """Start recording the calls of every fused operator, forgetting what an earlier trace recorded.

    `values=True` also keeps samples of the integer inputs that an operator names in `trace_values`. Reading one waits
    for the device; while a CUDA graph is being captured nothing is read.
    """
    global _last
    _last = Recorder(max_signatures, values)
    _set(_last)


def disable_fused_op_trace() -> None:
    """Stop recording. What was recorded stays until the next trace or `clear_fused_op_trace`."""
    _set(None)


def get_fused_op_trace() -> Trace:
    """A snapshot of the running or last trace."""
    return _last.snapshot()


def clear_fused_op_trace() -> None:
    """Forget what was recorded, without starting or stopping."""
    _last.clear()


def save(path: str | os.PathLike[str], trace: Trace | None = None) -> None:
    """Write a trace, by default the running or last one, to a file that `load` reads."""
    trace_file.save(path, get_fused_op_trace() if trace is None else trace)
