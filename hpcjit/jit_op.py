"""Operators whose JIT backend is planned once per call signature.

The signature is all that may change the code or the constants of a launch, or make the call wrong: dtypes, shapes,
strides, 16-byte alignment, device, and every other argument. A plan is made, and everything that can be wrong with a call
checked, when a signature is first seen; a repeated one costs a look-up and the launch (see `caller.h`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from hpcjit import build, caller, launch, settings, workspace
from hpcjit.errors import ArgumentError
from hpcjit.fused_op import BaseFusedOp

MAX_PLANS = 8192  # per operator; a server sees a few hundred signatures, unbounded sequence lengths must not leak

_MEMORY = ("workspace", "counters")  # launch parameters, as caller.h numbers them
_ARGUMENT = re.compile(r"(Tensor|float|int|bool|str|ScalarType)(\([a-z]!\))?\??\s+(\w+)")


@dataclass(frozen=True)
class Plan:
    """What one signature launches: a template, its config and the value of each launch parameter.

    A launch parameter that carries the name of an operator argument takes that argument: the address of a tensor, or a
    float. `values` gives the others: a number, or the name of the tensor argument whose address it takes. The parameter
    `workspace` is the address of `workspace_bytes` of scratch, which holds anything; `counters` that of `counter_bytes` that
    are zero, and that the launch leaves zero (`workspace.py`). `fault` is the address of a record that device code fills in
    debug mode when it meets a bad index (0 otherwise), explained by `fault_text`. With a `fault_width` positions count along
    the rows of a table, one per request, and the second line of `fault_text` explains those of requests (-1 - request).
    """

    template: build.Template
    config: build.Config
    values: Mapping[str, int | float | str] = field(default_factory=dict)
    workspace_bytes: int = 0
    counter_bytes: int = 0
    fault_text: str = ""
    fault_width: int = 0


NOTHING = "nothing to launch"  # a plan for empty inputs


@contextlib.contextmanager
def own_precision(args: Iterable[Any]) -> Iterator[None]:
    """Without autocast: references choose their precision themselves."""
    kinds = {value.device.type for value in args if isinstance(value, torch.Tensor)} & {"cpu", "cuda"}
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


class JitOp(BaseFusedOp):
    """`BaseFusedOp` with `forward_jit` made from `check` and `plan`; the arguments are those of `schema`, in order."""

    arguments: ClassVar[tuple[str, ...]]
    kinds: ClassVar[tuple[str, ...]]  # of each argument: "tensor", "float", "int", "bool", ...
    mutated: ClassVar[tuple[str, ...]]  # the arguments that receive the result
    tensor_core_sums: ClassVar[tuple[str, ...]] = ()  # float32 outputs that show such sums unrounded; see numerics.py
    tuned_table: ClassVar[str] = ""  # of measured configurations (tune.py), for operators that have one

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.schema is not None:
            found = _ARGUMENT.findall(cls.schema.split("->")[0])
            cls.arguments = tuple(name for _, _, name in found)
            cls.kinds = tuple(kind.lower() for kind, _, _ in found)
            cls.mutated = tuple(name for _, alias, name in found if alias)

    def __init__(self) -> None:
        super().__init__()
        self._caller: Any = None
        self.fast: Callable[..., None] = self._dispatch

    def _forget(self) -> None:
        super()._forget()
        self.fast = self._dispatch
        if self._caller is not None:
            self._caller.remembered.clear()

    def _dispatch(self, *args: Any) -> None:
        """`fast` until the automatic choice has turned out to be the JIT backend: then the caller takes its place.

        `fast(*args)` does what `self(*args)` does, for positional arguments, without Python code in between.
        """
        self(*args)
        automatic = [choice for device, choice in self._decisions.items() if isinstance(device, int)]
        if self._caller is not None and self._caller in automatic:
            self.fast = self._caller

    def check(self, *args: Any) -> None:
        """Raise an `ArgumentError` if the call is not one that the operator takes, on any device."""
        raise NotImplementedError

    def check_values(self, *args: Any) -> None:
        """Raise an `ArgumentError` for values that no call may have, such as ids out of range; may read from the device.

        Called in debug mode, before the launch or the reference, unless a graph is being captured. For operators whose device
        code looks at every such value anyway `Plan.fault_text` is the other way.
        """

    def plan(self, *args: Any) -> Plan | str:
        """The plan for arguments that passed `check`, or NOTHING. Meta tensors do: prewarming makes plans without memory."""
        raise NotImplementedError

    def tuned_shape(self, *args: Any) -> tuple[str, int]:
        """Under which shape and size `tuned_table` has this call."""
        raise NotImplementedError

    def alternatives(self, *args: Any) -> Iterable[tuple[Mapping[str, Any], Plan]]:
        """What `hpcjit tune` tries for this call: values for the table, and the plan that they lead to."""
        raise NotImplementedError

    def reference(self, *args: Any) -> None:
        """The operator in plain torch, in float32 or, when the inputs are float64, in float64 throughout."""
        raise NotImplementedError

    def forward_native(self, *args: Any) -> None:
        self.check(*args)
        if settings.read().debug and not launch.capturing():
            self.check_values(*args)
        with own_precision(args):
            self.reference(*args)

    def forward_jit(self, *args: Any) -> None:
        # The first call puts the caller itself in this method's place, so that later ones reach it directly. The kernel
        # comes before the caller: where both have to be compiled, the binder is compiled beside the kernel.
        if args and all(type(value) in caller.PLAIN_TENSORS for value in args if isinstance(value, torch.Tensor)):
            self.check(*args)
            plan = self.plan(*args)
            if isinstance(plan, Plan):
                build.load(plan.template, plan.config, device=args[0].get_device(), op=self.op)
        kinds = "".join({"tensor": "t", "float": "f"}.get(kind, "k") for kind in self.kinds)
        self._caller = caller.make(kinds, self._miss)
        self.forward_jit = self._caller  # type: ignore[method-assign]
        self._decisions.clear()
        self._caller(*args)

    def _miss(self, key: Any, args: tuple[Any, ...]) -> None:
        if len(args) != len(self.arguments):
            raise TypeError(f"{self.op}: expected {len(self.arguments)} arguments, got {len(args)}")
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        if not tensors:
            self.check(*args)
        device = tensors[0].get_device()
        if self.fast is self._caller and self._decision(None, device) is not self._caller:
            self(*args)  # came through `fast`, with tensors of a device that another backend serves
            return
        if any(type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for value in tensors):
            # A fake tensor, a distributed one, ...: torch's dispatcher knows what the operator means for it.
            getattr(torch.ops.hpcjit, self.op.replace(".", "_"))(*args)
            return
        self.check(*args)
        plan = self.plan(*args)
        run = _do_nothing if isinstance(plan, str) else self._runner(plan, device, anywhere=key is None)
        if key is None:
            run(*args)
            return
        if len(self._caller.remembered) >= MAX_PLANS:
            self._caller.remembered.clear()
        self._caller.remembered[key] = run
        self._caller(*args)

    def _runner(self, plan: Plan, device: int, anywhere: bool = False) -> Any:
        """What launches `plan`: a `caller.bound`, or Python where a launch needs more than a launch (or runs `anywhere`)."""
        kernel = build.load(plan.template, plan.config, device=device, op=self.op)
        debug = settings.read().debug
        sources = [self._source(name, plan.values.get(name, name)) for name in plan.template.params]
        needs = plan.workspace_bytes, plan.counter_bytes
        need = workspace.Need(device, *needs) if any(needs) else None
        if anywhere or debug:
            return _watched(self, plan, kernel, device, sources, need, debug)
        absent = {"fault"} if need else {"fault", "memory"}
        sources = [("constant", 0) if source in absent else (source, value) for source, value in sources]
        return caller.bound(self._caller, kernel, device, sources, need)

    def _source(self, name: str, value: int | float | str) -> caller.Source:
        if name == "fault":
            return "fault", 0
        if name in _MEMORY:
            return "memory", _MEMORY.index(name)
        if not isinstance(value, str):
            return "constant", value
        if value not in self.arguments:
            raise TypeError(f"{self.op}: launch parameter '{name}' has no value")
        index = self.arguments.index(value)
        return ("address" if self.kinds[index] == "tensor" else "float"), index


def _do_nothing(*args: Any) -> None:
    pass


def _watched(
    op: JitOp,
    plan: Plan,
    kernel: launch.Kernel,
    device: int,
    sources: list[caller.Source],
    need: workspace.Need | None,
    debug: bool,
) -> Callable[..., None]:
    def run(*args: Any) -> None:
        stream = launch.raw_stream(device)
        block = workspace.NO_BLOCK if need is None else need.provide(stream)
        record, address = None, 0
        watching = debug and not launch.capturing()
        if watching:
            op.check_values(*args)
        if watching and plan.fault_text:
            record = torch.zeros(4, dtype=torch.int64, device=f"cuda:{device}")
            address = record.data_ptr()
        slots = [
            address if source == "fault" else caller.slot_value(source, value, args, block) for source, value in sources
        ]
        kernel.launch(device, stream, *slots)
        if record is not None:
            raise_fault(op.op, plan.fault_text, record.tolist(), plan.fault_width)

    return run


def raise_fault(op: str, text: str, record: list[int], width: int = 0) -> None:
    """Raise what device code found wrong: `record` is [count, position, value, limit]; see `Plan` for the others."""
    count, position, value, limit = record
    if count:
        argument, _, expected = text.splitlines()[1 if width and position < 0 else 0].partition(": ")
        where = f"position {position}"
        if width:
            row, column = divmod(position, width)
            where = f"request {-1 - position}" if position < 0 else f"request {row}, position {column}"
        raise ArgumentError(op, argument, expected.format(limit=limit), f"{value} at {where} ({count} such entries)")
