"""What a trace holds, and its file: JSONL with a header line, then one line per record."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcjit.errors import FormatError
from hpcjit.spec import KernelBackend, check_op_name

FORMAT = "hpcjit-trace"
VERSION = 1
MAX_LINE_BYTES = 16 << 20
MAX_VALUES_PER_SAMPLE = 4096

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
            raise ValueError(f"not a tensor signature: {reprlib.repr(text)}")
        shape = _ints(match[2])
        stride = None if match[3] is None else _ints(match[3])
        if stride is not None and len(stride) != len(shape):
            raise ValueError(f"{len(stride)} strides for {len(shape)} dimensions: {reprlib.repr(text)}")
        return cls(match[1], shape, stride)

    @classmethod
    def of(cls, tensor: Any) -> TensorSignature:
        stride = None if tensor.is_contiguous() else tuple(tensor.stride())
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), stride)


def _ints(text: str) -> tuple[int, ...]:
    values = tuple(int(part) for part in text.split(", ")) if text else ()
    if any(value >= 1 << 63 for value in values):
        raise ValueError(f"not a 64-bit size: {max(values)}")
    return values


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


def save(path: str | os.PathLike[str], trace: Trace) -> None:
    """Write a trace. The file appears whole or not at all; OSError names `path`."""
    header = {
        "format": FORMAT,
        "version": VERSION,
        "records": len(trace),
        "dropped_calls": trace.dropped_calls,
        "dropped_values": trace.dropped_values,
    }
    lines = [json.dumps(line, allow_nan=False) for line in (header, *map(_to_json, trace))]
    write_whole(Path(path), "\n".join([*lines, ""]))


def _to_json(record: TraceRecord) -> dict[str, Any]:
    return {
        "op": record.op,
        "backend": record.backend.value,
        "count": record.count,
        "tensors": {name: str(signature) for name, signature in record.tensors.items()},
        "scalars": record.scalars,
        "values": record.values,
    }


def write_whole(path: Path, text: str) -> None:
    """Put `text` into a file, all of it or nothing."""
    staged = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        with open(staged, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staged, path)
    except OSError as failure:
        _remove(staged)
        raise OSError(failure.errno, failure.strerror, os.fspath(path)) from None
    except BaseException:
        _remove(staged)
        raise


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # it may never have been there, like its folder
        path.unlink()


def load(path: str | os.PathLike[str]) -> Trace:
    """Read what `save` wrote.

    Raises:
        FormatError: the file is not such a trace, or is damaged; names the line and the field.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:

        def next_line(number: int) -> _Line:
            return _Line(f"{os.fspath(path)}: line {number}", file.readline(MAX_LINE_BYTES + 1))

        header = next_line(1)
        header.take("format", lambda value: _one_of(value, FORMAT), f"'{FORMAT}'")
        header.take("version", lambda value: _one_of(value, VERSION), f"{VERSION}, the one this hpcjit reads")
        count = header.take("records", _count, "a count")
        trace = Trace(
            [], header.take("dropped_calls", _count, "a count"), header.take("dropped_values", _count, "a count")
        )
        for number in range(2, count + 2):
            trace.records.append(_record(next_line(number)))
        if file.read(1):
            raise FormatError(
                f"{os.fspath(path)}: line {count + 2}: the header promises {count} records, here is another"
            )
    return trace


class _Line:
    """One line of a trace file: a JSON object whose fields are checked as they are taken."""

    def __init__(self, where: str, raw: bytes) -> None:
        self._where = where
        if len(raw) > MAX_LINE_BYTES:
            raise FormatError(f"{where}: longer than {MAX_LINE_BYTES} bytes")
        if not raw.endswith(b"\n"):
            raise FormatError(f"{where}: the file ends here, it is empty or truncated")
        try:
            fields = json.loads(raw.decode("utf-8"), parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{where}: not JSON: {error}") from None
        if not isinstance(fields, dict):
            raise FormatError(f"{where}: must be a JSON object, got {reprlib.repr(fields)}")
        self._fields: dict[str, Any] = fields

    def take(self, name: str, parse: Callable[[Any], Any], expected: str) -> Any:
        """`parse(field)`; a ValueError from it becomes a FormatError that says what was expected."""
        if name not in self._fields:
            raise FormatError(f"{self._where}: field '{name}' is missing, it must be {expected}")
        value = self._fields[name]
        try:
            return parse(value)
        except ValueError as error:
            raise FormatError(
                f"{self._where}: field '{name}' must be {expected}, got {reprlib.repr(value)} ({error})"
            ) from None


def _record(line: _Line) -> TraceRecord:
    return TraceRecord(
        op=line.take("op", _op, "an operator name 'group.name'"),
        backend=line.take("backend", _backend, "the name of a backend"),
        count=line.take("count", lambda value: _count(value, least=1), "a positive count"),
        tensors=line.take("tensors", _tensors, "an object of tensor signatures such as 'bfloat16[2048, 4096]'"),
        scalars=line.take("scalars", _scalars, "an object of numbers, strings, booleans or nulls"),
        values=line.take("values", _samples, f"a list of objects of at most {MAX_VALUES_PER_SAMPLE} integers or pairs"),
    )


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _one_of(value: Any, expected: str | int) -> Any:
    _need(type(value) is type(expected) and value == expected, "another format or version")
    return value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _count(value: Any, least: int = 0) -> int:
    _need(_is_int(value) and value >= least, f"not an integer from {least}")
    return value


def _op(value: Any) -> str:
    check_op_name(value)
    return value


def _backend(value: Any) -> KernelBackend:
    _need(isinstance(value, str), "not a string")
    return KernelBackend.of(value)


def _object(value: Any) -> dict[str, Any]:
    _need(isinstance(value, dict), "not an object")
    return value


def _tensors(value: Any) -> dict[str, TensorSignature]:
    for text in _object(value).values():
        _need(isinstance(text, str), f"{reprlib.repr(text)} is not a string")
    return {name: TensorSignature.parse(text) for name, text in value.items()}


def _scalars(value: Any) -> dict[str, Scalar]:
    for name, item in _object(value).items():
        _need(item is None or isinstance(item, bool | int | float | str), f"'{name}' is none of them")
        _need(not isinstance(item, float) or math.isfinite(item), f"'{name}' is not finite")
    return value


def _samples(value: Any) -> list[Values]:
    _need(isinstance(value, list), "not a list")
    return [{name: _elements(items) for name, items in _object(sample).items()} for sample in value]


def _elements(value: Any) -> tuple[Any, ...]:
    _need(isinstance(value, list) and len(value) <= MAX_VALUES_PER_SAMPLE, "not a list of that length")
    if all(map(_is_int, value)):
        return tuple(value)
    for pair in value:
        _need(
            isinstance(pair, list) and len(pair) == 2 and all(map(_is_int, pair)), f"{reprlib.repr(pair)} in a sample"
        )
    return tuple((element, count) for element, count in value)
