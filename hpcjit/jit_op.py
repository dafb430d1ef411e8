"""Operators whose JIT backend is planned once per call signature.

The signature is everything that may change the code or the constants of a launch: dtypes, shapes, strides, 16-byte
alignment, device, and every argument that is not a float. Floats are run-time arguments. A plan is made, and everything
that can be wrong with a call checked, when a signature is first seen; a repeated one costs a look-up and the launch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from hpcjit import build, launch, settings
from hpcjit.errors import ArgumentError
from hpcjit.fused_op import BaseFusedOp

MAX_PLANS = 8192  # per operator; a server sees a few hundred signatures, unbounded sequence lengths must not leak

_ARGUMENT = re.compile(r"(Tensor|float|int|bool|str|ScalarType)(\([a-z]!\))?\??\s+(\w+)")
_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class Plan:
    """What one signature launches: a template, its config and the value of each launch parameter.

    A launch parameter that carries the name of an operator argument takes that argument: the address of a tensor, or a
    float. `values` gives the others: a number, or the name of the tensor argument whose address it takes. The parameter
    `workspace` is the address of `workspace_bytes` of scratch; `fault` that of a record that device code fills in debug
    mode when it meets a bad index (0 otherwise), explained by `fault_text`.
    """

    template: build.Template
    config: build.Config
    values: Mapping[str, int | float | str] = field(default_factory=dict)
    workspace_bytes: int = 0
    fault_text: str = ""


NOTHING = "nothing to launch"  # a plan for empty inputs


class JitOp(BaseFusedOp):
    """`BaseFusedOp` with `forward_jit` made from `check` and `plan`; the arguments are those of `schema`, in order."""

    arguments: ClassVar[tuple[str, ...]]
    kinds: ClassVar[tuple[str, ...]]  # of each argument: "tensor", "float", "int", "bool", ...
    mutated: ClassVar[tuple[str, ...]]  # the arguments that receive the result

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.schema is not None:
            found = _ARGUMENT.findall(cls.schema.split("->")[0])
            cls.arguments = tuple(name for _, _, name in found)
            cls.kinds = tuple(kind.lower() for kind, _, _ in found)
            cls.mutated = tuple(name for _, alias, name in found if alias)

    def __init__(self) -> None:
        super().__init__()
        self._plans: dict[tuple[Any, ...], Callable[..., None]] = {}

    def check(self, *args: Any) -> None:
        """Raise an `ArgumentError` if the call is not one that the operator takes, on any device."""
        raise NotImplementedError

    def plan(self, *args: Any) -> Plan | str:
        """The plan for arguments that passed `check`, or NOTHING. Meta tensors do: prewarming makes plans without memory."""
        raise NotImplementedError

    def reference(self, *args: Any) -> None:
        """The operator in plain torch, in float32 or, when the inputs are float64, in float64 throughout."""
        raise NotImplementedError

    def forward_native(self, *args: Any) -> None:
        self.check(*args)
        self.reference(*args)

    def forward_jit(self, *args: Any) -> None:
        try:
            key = self._signature(args)
        except (AttributeError, RuntimeError):
            key = None  # not a tensor, or one without memory (a fake tensor)
        run = self._plans.get(key) if key is not None else None
        if run is None:
            run = self._bind(key, args)
        run(*args)

    def _signature(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        key: list[Any] = []
        addresses = 0
        for kind, value in zip(self.kinds, args, strict=True):
            if kind == "tensor" and value is not None:
                addresses |= value.data_ptr()
                key += (value.shape, value.stride(), value.dtype, value.device, value.requires_grad)
            elif kind != "float":
                key.append(value)
        return (*key, addresses & 15, torch.is_grad_enabled())

    def _bind(self, key: tuple[Any, ...] | None, args: tuple[Any, ...]) -> Callable[..., None]:
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        if any(type(value) not in _PLAIN for value in tensors):
            return getattr(torch.ops.hpcjit, self.op.replace(".", "_"))
        self.check(*args)
        if key is None:  # no signature can be made, yet check found nothing wrong with it
            raise ArgumentError(self.op, self.arguments[0], "a tensor with memory of its own", tensors)
        plan = self.plan(*args)
        run = _do_nothing if isinstance(plan, str) else bind(self, plan, tensors[0].get_device())
        if len(self._plans) >= MAX_PLANS:
            self._plans.clear()
        self._plans[key] = run
        return run


def _do_nothing(*args: Any) -> None:
    pass


def bind(op: JitOp, plan: Plan, device: int) -> Callable[..., None]:
    """The callable that launches `plan` with the arguments of one call."""
    kernel = build.load(plan.template, plan.config, device=device)
    values = dict(plan.values)
    position = {name: i for i, name in enumerate(op.arguments)}
    debug = settings.read().debug
    slots: list[Callable[[tuple[Any, ...], dict[str, int]], Any]] = []
    for name in plan.template.params:
        slots.append(_slot(op, name, values.get(name, name), position))

    def run(*args: Any) -> None:
        scratch = {"fault": 0, "workspace": 0}
        if plan.workspace_bytes:
            memory = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=device)
            scratch["workspace"] = memory.data_ptr()
        if debug and plan.fault_text:
            fault = torch.zeros(4, dtype=torch.int64, device=device)
            scratch["fault"] = fault.data_ptr()
        kernel.launch(device, launch.raw_stream(device), *[slot(args, scratch) for slot in slots])
        if debug and not launch.capturing():
            torch.cuda.synchronize(device)
            if plan.fault_text:
                raise_fault(op.op, plan.fault_text, fault.tolist())

    return run


def _slot(
    op: JitOp, name: str, value: int | float | str, position: Mapping[str, int]
) -> Callable[[tuple[Any, ...], dict[str, int]], Any]:
    if name in ("fault", "workspace"):
        return lambda args, scratch: scratch[name]
    if not isinstance(value, str):
        return lambda args, scratch: value
    index = position.get(value)
    if index is None:
        raise TypeError(f"{op.op}: launch parameter '{name}' has no value")
    if op.kinds[index] == "tensor":
        return lambda args, scratch: 0 if args[index] is None else args[index].data_ptr()
    return lambda args, scratch: float(args[index])


def raise_fault(op: str, text: str, record: list[int]) -> None:
    """Raise what device code found wrong: `record` is [count, position, value, limit]."""
    count, position, value, limit = record
    if count:
        argument, _, expected = text.partition(": ")
        raise ArgumentError(
            op, argument, expected.format(limit=limit), f"{value} at position {position} ({count} such entries)"
        )
