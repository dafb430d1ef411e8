"""What an operator's implementation is and where it can run: plain metadata, without torch.

A `KernelBackend` says where an implementation comes from, never where it runs; that is what a set of
`CapabilityRequirement` says. A `KernelSpec` joins the two with the place of the callable, which nothing imports
until `KernelSpec.load` is called.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import re
import reprlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

from hpcjit.errors import BackendError, RegistrationError

if TYPE_CHECKING:
    import logging

GROUPS: tuple[str, ...] = (
    "activation",
    "attention",
    "communication",
    "diffusion",
    "elementwise",
    "embeddings",
    "gemm",
    "grammar",
    "kv_canary",
    "kvcache",
    "layernorm",
    "lplb",
    "mamba",
    "memory",
    "moe",
    "quantization",
    "sampling",
    "speculative",
)

_OP = re.compile(r"(?P<group>[a-z]\w{0,63})\.(?P<name>[a-z]\w{0,63})", re.ASCII)
_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


class KernelBackend(str, Enum):
    """Where an implementation comes from."""

    JIT = "jit"  # hpcjit's own templates
    JIT_STEPS = "jit_steps"  # several of hpcjit's operators in a row, which a fused one replaces
    TORCH = "torch"  # the reference in plain torch
    TORCH_COMPILE = "torch_compile"  # the reference through torch.compile
    TRITON = "triton"
    FLASHINFER = "flashinfer"
    FLASHINFER_XQA = "flashinfer_xqa"  # the XQA kernels in FlashInfer, which rival its own
    FLASH_ATTN = "flash_attn"
    DEEPGEMM = "deepgemm"
    CUBLAS_TF32 = "cublas_tf32"  # torch's product where it may round float32 to TF32
    AOT = "aot"  # ahead-of-time binaries of other packages, such as sgl_kernel

    def __str__(self) -> str:
        return self.value

    @property
    def method(self) -> str:
        """Name of the method that holds this backend in a `BaseFusedOp`."""
        return "forward_native" if self is KernelBackend.TORCH else f"forward_{self.value}"

    @classmethod
    def of(cls, value: KernelBackend | str) -> KernelBackend:
        """Parse a backend name, ignoring case.

        Raises:
            BackendError: there is no backend of that name.
        """
        try:
            return cls(value.lower()) if isinstance(value, str) else cls(value)
        except ValueError:
            names = [b.value for b in cls]
            hint = f"{reprlib.repr(value)}{did_you_mean(value, names)}"
            raise BackendError(f"unknown backend {hint}; one of {', '.join(names)}") from None


class DeviceType(str, Enum):
    """Kind of device that a tensor lives on."""

    CUDA = "cuda"
    HIP = "hip"
    NPU = "npu"
    CPU = "cpu"
    MPS = "mps"

    def __str__(self) -> str:
        return self.value


def did_you_mean(value: object, names: Iterable[str]) -> str:
    """`", did you mean 'x'?"` for the closest of `names`, or nothing."""
    from difflib import get_close_matches  # here, as logging below: importing the package stays fast

    close = get_close_matches(str(value)[:128].lower(), list(names), n=1, cutoff=0.6)
    return f", did you mean '{close[0]}'?" if close else ""


@dataclass(frozen=True)
class PlatformInfo:
    """The device that a call would run on. `cuda_arch_major` and `_minor` are 0 unless it is a CUDA or HIP device."""

    device_type: DeviceType = DeviceType.CPU
    cuda_arch_major: int = 0
    cuda_arch_minor: int = 0

    @property
    def device(self) -> str:
        """Device type as torch spells it: a HIP device is called `cuda`."""
        return "cuda" if self.device_type is DeviceType.HIP else self.device_type.value

    @property
    def is_cuda(self) -> bool:
        return self.device_type is DeviceType.CUDA

    @property
    def sm(self) -> tuple[int, int]:
        return self.cuda_arch_major, self.cuda_arch_minor

    def __str__(self) -> str:
        return f"cuda SM {self.sm[0]}.{self.sm[1]}" if self.is_cuda else self.device_type.value

    @classmethod
    def detect(cls, device_index: int | None = None) -> PlatformInfo:
        """Describe a device of this process, importing torch.

        `device_index` is what `Tensor.get_device()` returns: -1 is the CPU, None the current accelerator if there is
        one. Never raises: a missing or broken torch counts as CPU, logged at debug level when that is an ordinary
        state of a machine and as a warning with its traceback when it is not.
        """
        if device_index is not None and device_index < 0:
            return cls()
        try:
            return _detect_accelerator(device_index)
        except (ImportError, RuntimeError) as error:  # no torch; no driver, or CUDA initialised before a fork
            _logger().debug("no accelerator: %s", error)
        except Exception:
            _logger().warning("asking torch for its devices failed unexpectedly; taking the CPU", exc_info=True)
        return cls()


def _logger() -> logging.Logger:
    import logging

    return logging.getLogger(__name__)


def _detect_accelerator(index: int | None) -> PlatformInfo:
    import torch

    if torch.cuda.is_available():
        if index is not None and index >= torch.cuda.device_count():
            _logger().debug("no CUDA device %d, there are %d", index, torch.cuda.device_count())
            return PlatformInfo()
        kind = DeviceType.HIP if torch.version.hip else DeviceType.CUDA
        return PlatformInfo(kind, *torch.cuda.get_device_capability(index))
    if hasattr(torch, "npu") and torch.npu.is_available():
        return PlatformInfo(DeviceType.NPU)
    if torch.backends.mps.is_available():
        return PlatformInfo(DeviceType.MPS)
    return PlatformInfo()


def package_available(name: str) -> bool:
    """Whether `import name` would find a module. Imports nothing, not even the parents of a dotted name."""
    path: Any = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        full = ".".join(parts[:depth])
        if full in sys.modules:
            if sys.modules[full] is None:  # import is blocked
                return False
            path = getattr(sys.modules[full], "__path__", ())
            continue
        spec = _find_spec(full, path)
        if spec is None:
            return False
        path = spec.submodule_search_locations or ()
    return True


def _find_spec(name: str, path: Any) -> importlib.machinery.ModuleSpec | None:
    # Not importlib.util.find_spec: for "a.b" it imports "a", and importing a peer can take seconds.
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path)
        if spec is not None:
            return spec
    return None


@dataclass(frozen=True)
class CapabilityRequirement:
    """A device type, for CUDA an inclusive window of compute capabilities, and a package that must be installed."""

    device: DeviceType
    min_sm: tuple[int, int] | None = None
    max_sm: tuple[int, int] | None = None
    package: str | None = None

    CUDA: ClassVar[CapabilityRequirement]
    HIP: ClassVar[CapabilityRequirement]
    NPU: ClassVar[CapabilityRequirement]
    CPU: ClassVar[CapabilityRequirement]
    MPS: ClassVar[CapabilityRequirement]

    def __post_init__(self) -> None:
        if (self.min_sm or self.max_sm) and self.device is not DeviceType.CUDA:
            raise RegistrationError(f"a window of compute capabilities needs device cuda, not {self.device}")
        if self.min_sm and self.max_sm and self.min_sm > self.max_sm:
            raise RegistrationError(f"min_sm {self.min_sm} is above max_sm {self.max_sm}")

    @classmethod
    def cuda(
        cls,
        min_sm: tuple[int, int] | None = (8, 0),
        max_sm: tuple[int, int] | None = None,
        package: str | None = None,
    ) -> CapabilityRequirement:
        """CUDA devices with `min_sm <= compute capability <= max_sm`."""
        return cls(DeviceType.CUDA, min_sm, max_sm, package)

    def is_satisfied_by(self, platform: PlatformInfo) -> bool:
        return self.why_not(platform) is None

    def why_not(self, platform: PlatformInfo) -> str | None:
        """What `platform` lacks, as `"needs X, this is Y"`; None when it lacks nothing."""
        if platform.device_type is not self.device:
            return f"needs {self}, this is {platform}"
        if self.min_sm and platform.sm < self.min_sm:
            return f"needs {self}, this is {platform}"
        if self.max_sm and platform.sm > self.max_sm:
            return f"needs {self}, this is {platform}"
        if self.package and not package_available(self.package):
            return f"needs the package '{self.package}', which is not installed"
        return None

    def __str__(self) -> str:
        text = self.device.value
        if self.min_sm:
            text += f" SM >= {self.min_sm[0]}.{self.min_sm[1]}"
        if self.max_sm:
            text += f" SM <= {self.max_sm[0]}.{self.max_sm[1]}"
        return f"{text} with {self.package}" if self.package else text


for _device in DeviceType:
    setattr(CapabilityRequirement, _device.name, CapabilityRequirement(_device))

Capabilities = frozenset[CapabilityRequirement]


def capabilities_satisfied(capabilities: Capabilities, platform: PlatformInfo) -> bool:
    """Whether any of `capabilities` holds on `platform`; the empty set holds everywhere."""
    return why_unsatisfied(capabilities, platform) is None


def why_unsatisfied(capabilities: Capabilities, platform: PlatformInfo) -> str | None:
    """The reasons that no capability holds on `platform`, or None when one does or none is required."""
    reasons = sorted({requirement.why_not(platform) or "" for requirement in capabilities})
    return "; or ".join(reasons) if reasons and "" not in reasons else None


@dataclass(frozen=True)
class FormatSignature:
    """What an operator takes, for people and tools to read: dtype names such as `bfloat16`, and whether it mutates."""

    supported_dtypes: frozenset[str] = frozenset()
    in_place: bool = False
    description: str = ""


def check_op_name(op: str) -> None:
    """Raise RegistrationError unless `op` is `"group.name"` with one of the 18 groups."""
    match = _OP.fullmatch(op) if isinstance(op, str) else None
    if match is None:
        raise RegistrationError(f"operator name must look like 'group.name', got {reprlib.repr(op)}")
    if match["group"] not in GROUPS:
        raise RegistrationError(f"{op}: unknown group '{match['group']}'{did_you_mean(match['group'], GROUPS)}")


@dataclass(frozen=True)
class KernelSpec:
    """One implementation of an operator.

    `op` is `"group.name"`; `target` is `"module:attribute"`, where the attribute may be dotted; `capabilities` are
    alternatives, and none means that it runs everywhere.
    """

    op: str
    backend: KernelBackend
    target: str
    capabilities: Capabilities = frozenset()
    format_signature: FormatSignature | None = None
    description: str = ""

    def __post_init__(self) -> None:
        check_op_name(self.op)
        if not isinstance(self.backend, KernelBackend):
            raise RegistrationError(f"{self.op}: backend must be a KernelBackend, got {self.backend!r}")
        if not isinstance(self.target, str) or not _TARGET.fullmatch(self.target):
            raise RegistrationError(f"{self.op}: target must look like 'module:attribute', got {self.target!r}")
        check_capabilities(self.op, self.capabilities)

    @property
    def group(self) -> str:
        return self.op.partition(".")[0]

    @property
    def name(self) -> str:
        return self.op.partition(".")[2]

    def is_available(self, platform: PlatformInfo | None = None) -> bool:
        return self.why_not(platform) is None

    def why_not(self, platform: PlatformInfo | None = None) -> str | None:
        """The requirement that `platform` (by default this process's accelerator) fails, or None."""
        return why_unsatisfied(self.capabilities, platform or PlatformInfo.detect())

    def load(self) -> Callable[..., Any]:
        """Import the target. ImportError and AttributeError come through as they are."""
        return _resolve(self.target)

    def load_owner(self) -> Any:
        """The object whose attribute a dotted target is, such as the fused operator; None for a plain function."""
        owner = self.target.rpartition(".")[0]
        return _resolve(owner) if ":" in owner else None


def check_capabilities(op: str, capabilities: object) -> None:
    """Raise RegistrationError unless `capabilities` is a frozenset of CapabilityRequirement."""
    if not isinstance(capabilities, frozenset) or not all(isinstance(c, CapabilityRequirement) for c in capabilities):
        raise RegistrationError(
            f"{op}: capabilities must be a frozenset of CapabilityRequirement, got {capabilities!r}"
        )


def _resolve(target: str) -> Any:
    module, _, attribute = target.partition(":")
    value: Any = importlib.import_module(module)
    for part in attribute.split("."):
        value = getattr(value, part)
    return value
