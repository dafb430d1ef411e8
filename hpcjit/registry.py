"""The table of operators: which implementations exist and which one a name means here. No torch, no kernels.

A group's metadata is imported when one of its names is first asked for. `select_kernel` is a fixed resolution without
preference: several usable implementations are an error that lists them. Choosing among interchangeable ones is what
`hpcjit.fused_op.BaseFusedOp` does.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

from hpcjit.errors import BackendError, RegistrationError, UnknownOpError
from hpcjit.spec import GROUPS, Capabilities, FormatSignature, KernelBackend, KernelSpec, PlatformInfo, did_you_mean


class KernelRegistry:
    """Specs by operator and backend. `load_group(group)` is called before a group's names are looked up."""

    def __init__(self, load_group: Callable[[str], object] | None = None) -> None:
        self._specs: dict[str, dict[KernelBackend, KernelSpec]] = {}
        self._loaded: dict[tuple[str, KernelBackend | str | None], Callable[..., Any]] = {}
        self._load_group = load_group
        self._lock = threading.Lock()

    def register(self, spec: KernelSpec) -> None:
        """Add a spec. Adding an equal one again changes nothing.

        Raises:
            RegistrationError: another spec is registered for the same operator and backend.
        """
        with self._lock:
            known = self._specs.setdefault(spec.op, {}).setdefault(spec.backend, spec)
        if known != spec:
            raise RegistrationError(f"{spec.op}: backend {spec.backend} is already registered as {known}, not {spec}")

    def declared(self, op: str) -> dict[KernelBackend, Capabilities]:
        """Capabilities by backend of what is registered for `op` so far, in order; imports no group."""
        return {backend: spec.capabilities for backend, spec in self._specs.get(op, {}).items()}

    def specs(self, op: str) -> list[KernelSpec]:
        """Every implementation of `op`, in order of registration.

        Raises:
            UnknownOpError: no such operator; suggests the closest name.
        """
        group = str(op).partition(".")[0]
        if self._load_group is not None and group in GROUPS:
            self._load_group(group)  # also when op is known: another thread may be half way through the group
        if op not in self._specs:
            raise UnknownOpError(f"unknown operator {op!r}{did_you_mean(op, self.ops())}")
        return list(self._specs[op].values())

    def get(self, op: str, backend: KernelBackend | str) -> KernelSpec:
        """The spec of one backend.

        Raises:
            UnknownOpError: no such operator.
            BackendError: no such backend, or this operator does not have it.
        """
        specs = self.specs(op)
        backend = KernelBackend.of(backend)
        for spec in specs:
            if spec.backend is backend:
                return spec
        raise BackendError(f"{op} has no backend {backend}; it has {', '.join(s.backend.value for s in specs)}")

    def ops(self) -> list[str]:
        """Every operator's name, sorted."""
        if self._load_group is not None:
            for group in GROUPS:
                self._load_group(group)
        return sorted(self._specs)

    def all_specs(self) -> list[KernelSpec]:
        """Every spec, sorted by operator."""
        return [spec for op in self.ops() for spec in self._specs[op].values()]

    def select(
        self, op: str, backend: KernelBackend | str | None = None, platform: PlatformInfo | None = None
    ) -> KernelSpec:
        """The one implementation that `op` means on `platform` (by default this process's accelerator).

        Raises:
            UnknownOpError: no such operator.
            BackendError: the named backend does not exist or cannot run there; or none is named and none, or more
                than one, can.
        """
        candidates = self.specs(op) if backend is None else [self.get(op, backend)]
        platform = platform or PlatformInfo.detect()
        reasons = {spec.backend: spec.why_not(platform) for spec in candidates}
        usable = [spec for spec in candidates if reasons[spec.backend] is None]
        if len(usable) == 1:
            return usable[0]
        if not usable:
            lines = "; ".join(f"backend {name}: {reason}" for name, reason in reasons.items())
            raise BackendError(f"{op} cannot run on {platform}: {lines}")
        names = ", ".join(spec.backend.value for spec in usable)
        raise BackendError(f"{op} has several backends on {platform}: {names}. Name one with backend=")

    def load(self, op: str, backend: KernelBackend | str | None = None) -> Callable[..., Any]:
        """The callable of `select(op, backend)` on this process's accelerator, imported once and cached."""
        key = (op, backend)
        found = self._loaded.get(key)
        if found is None:
            found = self._loaded[key] = self.select(op, backend).load()
        return found

    def clear_cache(self) -> None:
        """Forget what `load` resolved, for when the platform or the registrations changed."""
        self._loaded.clear()

    def why_not(self, op: str, backend: KernelBackend | str, *args: Any, **kwargs: Any) -> str | None:
        """The requirement that keeps `backend` from running `op` here, or None if nothing does.

        With call arguments a fused operator also checks the call itself, on the device of its first tensor.
        """
        spec = self.get(op, backend)
        if not args and not kwargs:
            return spec.why_not()
        check = getattr(spec.load_owner(), "why_not", None)
        return spec.why_not() if check is None else check(spec.backend, *args, **kwargs)


def _load_group(group: str) -> None:
    importlib.import_module(f"hpcjit.ops.{group}")


registry = KernelRegistry(_load_group)


def register_kernel(spec: KernelSpec) -> None:
    """Add one implementation to the global registry; see `KernelRegistry.register`."""
    registry.register(spec)


def register_fused_op(
    op: str,
    module: str,
    attr: str,
    capabilities: Mapping[KernelBackend, Capabilities],
    format_signature: FormatSignature | None = None,
    description: str = "",
) -> None:
    """Register every backend of the `BaseFusedOp` instance `attr` of `module`, without importing the module.

    TORCH and TORCH_COMPILE exist for every fused operator and are added when `capabilities` leaves them out.
    """
    everywhere: dict[KernelBackend, Capabilities] = {
        KernelBackend.TORCH: frozenset(),
        KernelBackend.TORCH_COMPILE: frozenset(),
    }
    for backend, required in {**everywhere, **capabilities}.items():
        target = f"{module}:{attr}.{backend.method}"
        register_kernel(KernelSpec(op, backend, target, required, format_signature, description))


def select_kernel(
    op: str, backend: KernelBackend | str | None = None, platform: PlatformInfo | None = None
) -> KernelSpec:
    """The one spec that `op` means here; see `KernelRegistry.select`."""
    return registry.select(op, backend, platform)


def get_kernel(op: str, backend: KernelBackend | str | None = None) -> Callable[..., Any]:
    """The one callable that `op` means here, cached; see `KernelRegistry.load`."""
    return registry.load(op, backend)


def why_not(op: str, backend: KernelBackend | str, *args: Any, **kwargs: Any) -> str | None:
    """Why `backend` cannot run `op` here, or None; see `KernelRegistry.why_not`."""
    return registry.why_not(op, backend, *args, **kwargs)


def ops() -> list[str]:
    """Every operator's name, sorted."""
    return registry.ops()


def all_specs() -> list[KernelSpec]:
    """Every implementation of every operator, sorted by operator."""
    return registry.all_specs()


def clear_cache() -> None:
    """Forget what `get_kernel` resolved."""
    registry.clear_cache()
