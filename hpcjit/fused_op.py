"""One operator, several interchangeable backends.

An operator is a subclass of `BaseFusedOp` with one instance at module level. A call picks, in this order: the backend
named in the call; the one forced for the process, if it can run the call; the first of `priority` that can; the torch
reference. The choice is made once per device and remembered, so a repeated call costs one dictionary look-up.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from hpcjit import settings, trace
from hpcjit.errors import BackendError, RegistrationError
from hpcjit.registry import registry
from hpcjit.spec import (
    Capabilities,
    FormatSignature,
    KernelBackend,
    PlatformInfo,
    check_capabilities,
    check_op_name,
    why_unsatisfied,
)

# TORCH_COMPILE is left out: it would compile in the middle of serving without anyone having asked for it. So are CUBLAS_TF32,
# whose results are worse than what the operators promise, and JIT_STEPS, which is there to be compared with.
DEFAULT_PRIORITY: tuple[KernelBackend, ...] = (
    KernelBackend.JIT,
    KernelBackend.AOT,
    KernelBackend.FLASHINFER,
    KernelBackend.FLASHINFER_XQA,
    KernelBackend.FLASH_ATTN,
    KernelBackend.DEEPGEMM,
    KernelBackend.TRITON,
    KernelBackend.TORCH,
)

_ALWAYS_DECLARED = (KernelBackend.TORCH, KernelBackend.TORCH_COMPILE)

_SCHEMA_NAME = re.compile(r"([A-Za-z_]\w*)(?:\s*=[^,)]*)?\s*(?:,|\)\s*->)")

_lock = threading.RLock()
_epoch = 0
_forced: KernelBackend | None = None
_instances: weakref.WeakSet[BaseFusedOp] = weakref.WeakSet()


def reset_decisions() -> None:
    """Make every operator choose its backend anew, for when `HPCJIT_BACKEND` or the installed packages changed."""
    global _epoch
    with _lock:
        _epoch += 1
        for op in _instances:
            op._forget()


trace.on_change(reset_decisions)


def set_fused_op_backend(backend: KernelBackend | str | None) -> None:
    """Make every operator of the process use `backend` where it can; None returns to `HPCJIT_BACKEND` or automatic.

    An operator that cannot use it warns once and chooses as if nothing were forced.

    Raises:
        BackendError: there is no backend of that name.
    """
    global _forced
    _forced = None if backend is None else KernelBackend.of(backend)
    reset_decisions()


def get_fused_op_backend() -> KernelBackend | None:
    """The backend forced by `set_fused_op_backend`, else by `HPCJIT_BACKEND`, else None."""
    if _forced is not None:
        return _forced
    name = settings.read().backend
    try:
        return None if name is None else KernelBackend.of(name)
    except BackendError as error:
        raise BackendError(f"HPCJIT_BACKEND: {error}") from None


@contextlib.contextmanager
def use_backend(backend: KernelBackend | str | None) -> Iterator[None]:
    """`set_fused_op_backend` for the length of a `with` block. It acts on the process, not on the thread."""
    before = _forced
    set_fused_op_backend(backend)
    try:
        yield
    finally:
        set_fused_op_backend(before)


class BaseFusedOp(ABC):
    """Base of an operator with interchangeable backends that share one signature.

    A subclass sets `op` (`"group.name"`), implements `forward_native`, the reference in plain torch, and for each
    further backend overrides `forward_<backend>` and declares in `capabilities` where that one runs; a backend counts
    only when both are there. `capabilities` left out is what the group's `register_fused_op` declares. Overriding
    `backend_eligible` makes the choice depend on the call. `schema` and `define` add a torch operator.
    """

    op: ClassVar[str]
    priority: ClassVar[tuple[KernelBackend, ...]] = DEFAULT_PRIORITY
    capabilities: ClassVar[Mapping[KernelBackend, Capabilities]] = {}
    format_signature: ClassVar[FormatSignature | None] = None
    schema: ClassVar[str | None] = None  # "(Tensor input, float eps, Tensor(a!) out) -> ()"
    arguments: ClassVar[tuple[str, ...]]  # names, in order: of `schema`, or without one of `forward_native`
    _tabled: ClassVar[bool] = True  # no class up to here sets `capabilities` itself
    trace_values: ClassVar[tuple[str, ...]] = ()  # integer inputs a trace may keep: "seq_lens", "topk_ids:histogram"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        op = cls.__dict__.get("op")
        cls._tabled = cls._tabled and ("capabilities" not in cls.__dict__)
        if op is None:  # a shared base of several operators
            return
        check_op_name(op)
        cls.arguments = _argument_names(cls)
        if cls._tabled:
            cls.capabilities = registry.declared(op)
        for backend, required in cls.capabilities.items():
            KernelBackend.of(backend)
            check_capabilities(f"{op} ({backend})", required)

    def __init__(self) -> None:
        if not hasattr(self, "op"):
            raise RegistrationError(f"{type(self).__name__} must set op = 'group.name'")
        self._decisions: dict[int | tuple[str, int], Callable[..., Any]] = {}  # by device, or (backend, device)
        self._compiled: Callable[..., Any] | None = None
        self._warned = False
        self._per_call = type(self).backend_eligible is not BaseFusedOp.backend_eligible
        _instances.add(self)

    def _forget(self) -> None:
        """Drop what was decided under a force, a trace or an environment that no longer holds."""
        self._decisions.clear()
        self._warned = False

    @abstractmethod
    def forward_native(self, *args: Any, **kwargs: Any) -> Any:
        """The reference in plain torch; it runs everywhere and takes every call."""

    def forward_torch_compile(self, *args: Any, **kwargs: Any) -> Any:
        """The reference through `torch.compile`, compiled at the first call."""
        with _lock:
            if self._compiled is None:
                import torch

                self._compiled = torch.compile(self.forward_native)
        return self._compiled(*args, **kwargs)

    def forward_jit(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def forward_jit_steps(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def forward_triton(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def forward_flashinfer(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def forward_flashinfer_xqa(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def forward_flash_attn(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def forward_deepgemm(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def forward_cublas_tf32(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def forward_aot(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def backend_eligible(self, backend: KernelBackend, *args: Any, **kwargs: Any) -> bool | str:
        """Whether `backend` takes this call: True, or False, or the reason why not. Never asked about TORCH."""
        return True

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """What the torch operator calls, with exactly the arguments of `schema`."""
        return self(*args, **kwargs)

    def __call__(self, *args: Any, backend: KernelBackend | str | None = None, **kwargs: Any) -> Any:
        """Run the operator, on `backend` if one is named.

        Raises:
            BackendError: the named backend does not exist or cannot run this call; says why.
        """
        if backend is None:
            try:
                forward = self._decisions[args[0].get_device()]
            except (LookupError, AttributeError):  # not chosen yet, or the first argument is not a tensor
                forward = None
            if forward is None:  # outside the except block, so that errors of the call are not chained to it
                forward = self._decision(None, _device_index(args, kwargs))
        else:
            forward = self._decision(backend, _device_index(args, kwargs))
        return forward(*args, **kwargs)

    # Choosing

    def available_backends(self, platform: PlatformInfo | None = None) -> tuple[KernelBackend, ...]:
        """Backends that can run on `platform` (by default this process's accelerator), best first."""
        platform = platform or PlatformInfo.detect()
        order = dict.fromkeys((*self.priority, *KernelBackend))
        return tuple(backend for backend in order if self._why_not_on(backend, platform) is None)

    def auto_selected_backend(self, device: int | PlatformInfo | None = None) -> KernelBackend:
        """The first of `priority` that can run on a device (an index, -1 the CPU), when nothing is forced."""
        platform = device if isinstance(device, PlatformInfo) else PlatformInfo.detect(device)
        return self._candidates(platform)[0]

    def why_not(self, backend: KernelBackend | str, *args: Any, **kwargs: Any) -> str | None:
        """Why `backend` cannot run here, or None. With call arguments: why it cannot run that call."""
        backend = KernelBackend.of(backend)
        if not args and not kwargs:
            return self._why_not_on(backend, PlatformInfo.detect())
        platform = PlatformInfo.detect(_device_index(args, kwargs))
        return self._why_not_on(backend, platform) or self._why_ineligible(backend, args, kwargs)

    def _why_not_on(self, backend: KernelBackend, platform: PlatformInfo) -> str | None:
        if getattr(type(self), backend.method) is getattr(BaseFusedOp, backend.method):
            if backend is not KernelBackend.TORCH_COMPILE:
                return f"{self.op} has no {backend.method}"
        elif backend not in self.capabilities and backend not in _ALWAYS_DECLARED:
            return f"{self.op} does not declare {backend} in its capabilities"
        return why_unsatisfied(self.capabilities.get(backend, frozenset()), platform)

    def _why_ineligible(self, backend: KernelBackend, args: Any, kwargs: Mapping[str, Any]) -> str | None:
        if backend is KernelBackend.TORCH:
            return None
        answer = self.backend_eligible(backend, *args, **kwargs)
        if isinstance(answer, str):
            return answer
        return None if answer else f"{self.op} finds {backend} not eligible for these arguments"

    def _candidates(self, platform: PlatformInfo) -> tuple[KernelBackend, ...]:
        """What automatic selection tries on `platform`, in order, up to TORCH."""
        usable = [backend for backend in self.priority if self._why_not_on(backend, platform) is None]
        usable.append(KernelBackend.TORCH)
        return tuple(usable[: usable.index(KernelBackend.TORCH) + 1])

    def _decision(self, backend: KernelBackend | str | None, index: int) -> Callable[..., Any]:
        """The callable for a device, of the named backend if any. It stays valid until `reset_decisions`."""
        key = index if backend is None else (str(backend), index)
        found = self._decisions.get(key)
        if found is not None:
            return found
        epoch = _epoch
        platform = PlatformInfo.detect(index)
        named = None if backend is None else KernelBackend.of(backend)
        decision = self._decide_automatic(platform) if named is None else self._decide_named(named, platform)
        with _lock:
            if epoch == _epoch:  # else something changed meanwhile: this call may use it, later ones may not
                self._decisions[key] = decision
        return decision

    def _decide_named(self, backend: KernelBackend, platform: PlatformInfo) -> Callable[..., Any]:
        if reason := self._why_not_on(backend, platform):
            raise self._refusal(backend, reason)
        if self._is_fixed():
            return getattr(self, backend.method)

        def check_and_run(*args: Any, **kwargs: Any) -> Any:
            if reason := self._why_ineligible(backend, args, kwargs):
                raise self._refusal(backend, reason)
            return self._traced(backend, args, kwargs)

        return check_and_run

    def _decide_automatic(self, platform: PlatformInfo) -> Callable[..., Any]:
        candidates = self._candidates(platform)
        forced = get_fused_op_backend()
        if forced is not None:
            reason = self._why_not_on(forced, platform)
            if reason is None:
                candidates = (forced, *candidates)
            else:
                self._warn_forced(forced, reason)
                forced = None
        if self._is_fixed():
            return getattr(self, candidates[0].method)

        def choose_and_run(*args: Any, **kwargs: Any) -> Any:
            return self._traced(self._choose(candidates, forced, args, kwargs), args, kwargs)

        return choose_and_run

    def _is_fixed(self) -> bool:
        """Whether a decision holds for every call on its device, and nobody wants to know of the calls."""
        return not self._per_call and trace.active() is None

    def _refusal(self, backend: KernelBackend, reason: str) -> BackendError:
        return BackendError(f"{self.op}: backend {backend} cannot run this call: {reason}")

    def _choose(
        self,
        candidates: tuple[KernelBackend, ...],
        forced: KernelBackend | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> KernelBackend:
        for backend in candidates:
            reason = self._why_ineligible(backend, args, kwargs)
            if reason is None:
                return backend
            if backend is forced:
                self._warn_forced(backend, reason)
        return KernelBackend.TORCH

    def _traced(self, backend: KernelBackend, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        result = getattr(self, backend.method)(*args, **kwargs)
        if recorder := trace.active():
            recorder.record(self, backend, args, kwargs)
        return result

    def _warn_forced(self, backend: KernelBackend, reason: str) -> None:
        if not self._warned:
            self._warned = True
            message = f"{self.op}: the forced backend {backend} is not used: {reason}"
            warnings.warn(message, RuntimeWarning, stacklevel=_level_of_caller())


def _level_of_caller() -> int:
    """The `stacklevel` at which a warning of the calling function points outside of this package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "hpcjit":
        frame, level = frame.f_back, level + 1
    return level


def _argument_names(cls: type[BaseFusedOp]) -> tuple[str, ...]:
    if cls.schema is not None:
        return tuple(_SCHEMA_NAME.findall(cls.schema))
    return tuple(inspect.signature(cls.forward_native).parameters)[1:]


def _device_index(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Device of the first tensor among the arguments, also inside lists; -1 is the CPU, and what no tensor means."""
    for value in (*args, *kwargs.values()):
        for item in value if isinstance(value, list | tuple) else (value,):
            get_device = getattr(item, "get_device", None)
            if get_device is not None:
                return get_device()
    return -1


# The torch library

_library: Any = None
_defined: dict[str, BaseFusedOp] = {}


def define(op: BaseFusedOp) -> None:
    """Define `torch.ops.hpcjit.<group>_<name>` with `op.schema`: what the operator is while torch.compile traces.

    The schema mutates its outputs and returns nothing; the implementation calls `op.run` with its arguments. Defining
    the same operator again, as a module reload does, replaces the instance.

    Raises:
        RegistrationError: no schema, one that returns something, or another one than before.
    """
    global _library
    import torch

    if op.schema is None or not op.schema.replace(" ", "").endswith("->()"):
        raise RegistrationError(f"{op.op}: schema must mutate its outputs and end in '-> ()', got {op.schema!r}")
    name = op.op.replace(".", "_")
    with _lock:
        known = _defined.get(name)
        if known is not None and known.schema != op.schema:
            raise RegistrationError(f"{op.op}: already defined with schema {known.schema!r}, not {op.schema!r}")
        if known is not None:
            _defined[name] = op
            return
        if _library is None:
            _library = torch.library.Library("hpcjit", "FRAGMENT")

        def run(*args: Any, **kwargs: Any) -> None:
            _defined[name].run(*args, **kwargs)

        def fake(*args: Any, **kwargs: Any) -> None:
            """Outputs are arguments, so there is nothing to infer."""

        _library.define(name + op.schema, tags=(torch.Tag.pt2_compliant_tag,))
        for key in ("CPU", "CUDA"):
            _library.impl(name, run, key)
        torch.library.register_fake(f"hpcjit::{name}", fake, lib=_library)
        _defined[name] = op
