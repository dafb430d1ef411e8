"""Which operators a program calls, with which shapes, on which backend, how often: bounded records, saved as JSONL.

Calls with equal operator, backend, tensor signatures and scalars are one record with a count. Nothing grows without
bound: signatures beyond the limit are counted as dropped, and of the integer inputs that decide the time of a dynamic
operator (sequence lengths, expert ids) a record keeps a sample at its call 1, 2, 4, 8 and so on, which also keeps the
number of device reads small.
"""

from __future__ import annotations

import inspect
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcjit.spec import KernelBackend

MAX_VALUES_PER_SAMPLE = 4096
MAX_VALUES_IN_ALL = 1 << 20

_SIGNATURE = re.compile(r"([a-z]\w*)\[((?:\d+(?:, \d+)*)?)\](?: stride \[(-?\d+(?:, -?\d+)*)\])?", re.ASCII)

Scalar = bool | int | float | str | None


@dataclass(frozen=True)
class TensorSignature:
    """Dtype, shape, and the strides when the tensor is not contiguous; `str` gives `"bfloat16[2048, 4096]"`."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None

    def __str__(self) -> str:
        text = f"{self.dtype}{list(self.shape)}"
        return text if self.stride is None else f"{text} stride {list(self.stride)}"

    @classmethod
    def parse(cls, text: str) -> TensorSignature:
        """Inverse of `str`.

        Raises:
            ValueError: `text` is not a signature.
        """
        match = _SIGNATURE.fullmatch(text)
        if match is None:
            raise ValueError(f"not a tensor signature: {text!r}")
        shape = _ints(match[2])
        stride = None if match[3] is None else _ints(match[3])
        if stride is not None and len(stride) != len(shape):
            raise ValueError(f"{len(stride)} strides for {len(shape)} dimensions: {text!r}")
        return cls(match[1], shape, stride)

    @classmethod
    def of(cls, tensor: Any) -> TensorSignature:
        stride = None if tensor.is_contiguous() else tuple(tensor.stride())
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), stride)


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(", ")) if text else ()


Values = Mapping[str, tuple[Any, ...]]


@dataclass
class TraceRecord:
    """One signature of calls. `tensors` and `scalars` are by argument name; a tensor in a list is `"name.0"`.

    A sample in `values` holds, by argument name, the elements in order, or `(value, count)` pairs of a histogram.
    """

    op: str
    backend: KernelBackend
    tensors: dict[str, TensorSignature] = field(default_factory=dict)
    scalars: dict[str, Scalar] = field(default_factory=dict)
    count: int = 1
    values: list[Values] = field(default_factory=list)


@dataclass
class Trace:
    """A snapshot: records in order of first call, and how many calls or values the limits left out."""

    records: list[TraceRecord] = field(default_factory=list)
    dropped_calls: int = 0
    dropped_values: int = 0

    def __iter__(self) -> Iterator[TraceRecord]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)


class Recorder:
    """Collects records from any number of threads."""

    def __init__(self, max_signatures: int = 4096, values: bool = False) -> None:
        if max_signatures < 1:
            raise ValueError(f"max_signatures must be at least 1, got {max_signatures}")
        self._max_signatures = max_signatures
        self._keep_values = values
        self._records: dict[tuple[Any, ...], TraceRecord] = {}
        self._next_sample: dict[tuple[Any, ...], int] = {}
        self._dropped_calls = self._dropped_values = self._stored_values = 0
        self._lock = threading.Lock()

    def record(self, op: Any, backend: KernelBackend, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Count one call of the fused operator `op`."""
        tensors, scalars = _describe(_bind(op, args, kwargs))
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
        values = _read_values(names, tensors)  # waits for the device, so outside the lock
        if values is None:
            return
        size = sum(len(value) for value in values.values())
        with self._lock:
            self._next_sample[key] = 2 * record.count
            if size == 0 or self._stored_values + size > MAX_VALUES_IN_ALL:
                self._dropped_values += 1
                return
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


def _bind(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name; the names are those of the operator's `forward_native`."""
    names = op.__dict__.get("_trace_names")
    if names is None:
        names = op._trace_names = list(inspect.signature(op.forward_native).parameters)
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
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):  # JSON has no NaN or infinity
        return value if math.isfinite(value) else repr(value)
    return str(value)


def _read_values(names: Sequence[str], tensors: Mapping[str, Any]) -> dict[str, tuple[Any, ...]] | None:
    """The named integer tensors' contents; None while a CUDA graph is being captured, when reading is an error."""
    import torch

    values: dict[str, tuple[Any, ...]] = {}
    for entry in names:
        name, _, how = entry.partition(":")
        tensor = tensors.get(name)
        if tensor is None or tensor.is_floating_point() or tensor.is_meta:
            continue
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        if how == "histogram":
            ids, counts = torch.unique(tensor, return_counts=True)
            if ids.numel() <= MAX_VALUES_PER_SAMPLE:
                values[name] = tuple(zip(ids.tolist(), counts.tolist(), strict=True))
        elif tensor.numel() <= MAX_VALUES_PER_SAMPLE:
            values[name] = tuple(tensor.flatten().tolist())
    return values


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
