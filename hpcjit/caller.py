"""The eager path of an operator: arguments -> signature -> what is remembered for it -> launch.

`make` gives a callable object of `caller.h`, or, where the binder cannot be built or torch publishes no DLPack exchange
functions, a `PythonCaller` that does the same several microseconds slower. Both look a call's signature up in `remembered`
and run what they find with the call's arguments; a new signature goes to `miss(key, args)`, and a call that has none (a
tensor subclass, a tensor without memory, one that autograd follows) to `miss(None, args)`.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Hashable
from typing import Any

import torch

from hpcjit import binder, workspace
from hpcjit.launch import Kernel, raw_stream

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
Miss = Callable[[Any, tuple[Any, ...]], None]
# Where a launch slot comes from: ("constant", value), ("address", argument), ("float", argument), or ("memory", 0 or 1):
# the stream's scratch or counters.
Source = tuple[str, Any]

_FROM = {"constant": 0, "address": 1, "float": 2, "memory": 3}


class PythonCaller:
    """The fallback. `kinds` has a letter per argument: t tensor or None, f float, k anything hashable."""

    def __init__(self, kinds: str, miss: Miss) -> None:
        self.kinds = kinds
        self.miss = miss
        self.remembered: dict[Hashable, Callable[..., None]] = {}

    def __call__(self, *args: Any) -> None:
        key = self._signature(args)
        run = self.remembered.get(key) if key is not None else None
        if run is None:
            self.miss(key, args)
        else:
            run(*args)

    def _signature(self, args: tuple[Any, ...]) -> Hashable | None:
        key: list[Any] = []
        seen: dict[int, int] = {}  # first argument at each address
        grad = torch.is_grad_enabled()
        for kind, value in zip(self.kinds, args, strict=True):
            if kind != "t" or value is None:
                key += (type(value), value)  # 1, 1.0 and True are equal but not the same call
            elif not _plain(value) or (grad and value.requires_grad):
                return None
            else:
                address = value.data_ptr()
                first = seen.setdefault(address, len(key)) if address else len(key)
                same = None if first == len(key) else first
                key += (value.shape, value.stride(), value.dtype, value.device, address & 15, same)
        return tuple(key)


def _plain(tensor: Any) -> bool:
    """Whether sizes, strides and an address say all about it."""
    return type(tensor) in PLAIN_TENSORS and tensor.layout == torch.strided and not tensor.is_nested


def make(kinds: str, miss: Miss) -> Any:
    """The fastest caller that works here."""
    fast = binder.module()
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if fast is not None and exchange is not None:
        with contextlib.suppress(ValueError):  # an exchange table of another major version, or without what we need
            return fast.caller(kinds, exchange, *PLAIN_TENSORS, torch.is_grad_enabled, miss)
    return PythonCaller(kinds, miss)


def bound(caller: Any, kernel: Kernel, device: int, sources: list[Source], need: workspace.Need | None = None) -> Any:
    """What `caller` may remember for a launch of `kernel` whose slots come from `sources`."""
    if isinstance(caller, PythonCaller):
        return _bound_in_python(kernel, device, sources, need)
    slots = []
    for kind, (source, value) in zip(kernel.kinds, sources, strict=True):
        constant = source == "constant"
        slots.append((_FROM[source], 0 if constant else value, _word(kind, value) if constant else 0))
    fast = binder.module()
    assert fast is not None
    memory: tuple[Any, ...] = ()
    if need is not None:
        sizes = (need.scratch_bytes, need.counter_bytes)
        memory = ((need.streams, need.provide, workspace.capture_query_address(), *sizes),)
    return fast.bound(kernel.address, device, kernel, kernel._fail, tuple(slots), *memory)


def _word(kind: str, value: Any) -> int:
    if kind == "d":
        return int.from_bytes(struct.pack("<d", value), "little")
    return int(value) % 2**64


def _bound_in_python(
    kernel: Kernel, device: int, sources: list[Source], need: workspace.Need | None
) -> Callable[..., None]:
    def run(*args: Any) -> None:
        stream = raw_stream(device)
        block = workspace.NO_BLOCK if need is None else need.provide(stream)
        kernel.launch(device, stream, *[slot_value(source, value, args, block) for source, value in sources])

    return run


def slot_value(source: str, value: Any, args: tuple[Any, ...], block: workspace.Block) -> Any:
    """The value of one slot in a call."""
    if source == "constant":
        return value
    if source == "memory":
        return block[2 * value]
    if source == "float":
        return float(args[value])
    return 0 if args[value] is None else args[value].data_ptr()
