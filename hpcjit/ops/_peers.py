"""Functions of other kernel packages, imported when an adapter first calls them.

Every operator that FlashInfer or SGLang also has can run on it (`backend="flashinfer"`, `backend="aot"`), so that results
and times are compared through the registry. An adapter passes our arguments on and adds nothing: no copies, no fallbacks;
what the peer cannot do it refuses in its own words. (A peer that plans its calls is another matter: see
`attention/_decode_peers.py`; one that has the products of an operator only: `moe/_deepgemm_fused_moe.py`.)
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

from hpcjit.errors import BackendError
from hpcjit.spec import CapabilityRequirement, KernelBackend

Capabilities = frozenset[CapabilityRequirement]

# These compile with nvcc at their first call and need SM 8.0, as ours does.
FLASHINFER: dict[KernelBackend, Capabilities] = {
    KernelBackend.FLASHINFER: frozenset({CapabilityRequirement.cuda(min_sm=(8, 0), package="flashinfer")})
}
# Kernels for Hopper.
FLASHINFER_XQA: dict[KernelBackend, Capabilities] = {
    KernelBackend.FLASHINFER_XQA: frozenset({CapabilityRequirement.cuda(min_sm=(9, 0), package="flashinfer")})
}
FLASH_ATTN: dict[KernelBackend, Capabilities] = {
    KernelBackend.FLASH_ATTN: frozenset(
        {CapabilityRequirement.cuda(min_sm=(9, 0), max_sm=(9, 0), package="flash_attn_interface")}
    )
}
SGLANG: dict[KernelBackend, Capabilities] = {
    KernelBackend.AOT: frozenset({CapabilityRequirement.cuda(min_sm=(8, 0), package="sglang.kernels")})
}
# Grouped products with scales of blocks in float32 are those for Hopper.
DEEPGEMM: dict[KernelBackend, Capabilities] = {
    KernelBackend.DEEPGEMM: frozenset({CapabilityRequirement.cuda(min_sm=(9, 0), max_sm=(9, 0), package="deep_gemm")})
}
CUBLAS_TF32: dict[KernelBackend, Capabilities] = {
    KernelBackend.CUBLAS_TF32: frozenset({CapabilityRequirement.cuda(min_sm=(8, 0))})
}
# Our own baselines: they need nothing of a peer but its compiler, which converts to float8 from SM 8.9 on.
TRITON: dict[KernelBackend, Capabilities] = {
    KernelBackend.TRITON: frozenset({CapabilityRequirement.cuda(min_sm=(8, 0), package="triton")})
}
TRITON_FP8: dict[KernelBackend, Capabilities] = {
    KernelBackend.TRITON: frozenset({CapabilityRequirement.cuda(min_sm=(8, 9), package="triton")})
}


@functools.cache
def flashinfer(module: str, name: str) -> Callable[..., Any]:
    """`flashinfer.<module>.<name>`."""
    return getattr(importlib.import_module(f"flashinfer.{module}"), name)


@functools.cache
def flash_attn(name: str) -> Any:
    """`flash_attn_interface.<name>`, FlashAttention-3's module."""
    return getattr(importlib.import_module("flash_attn_interface"), name)


@functools.cache
def deep_gemm(name: str) -> Callable[..., Any]:
    """`deep_gemm.<name>`."""
    return getattr(importlib.import_module("deep_gemm"), name)


@functools.cache
def sglang(module: str, name: str) -> Callable[..., Any]:
    """`sglang.kernels.ops.<module>.<name>`, without the server around it."""
    _light_sglang()
    return getattr(importlib.import_module(f"sglang.kernels.ops.{module}"), name)


def refuse(op: str, backend: KernelBackend, reason: str) -> NoReturn:
    """Say that an adapter cannot express a call to its peer."""
    raise BackendError(f"{op}: backend {backend} cannot run this call: {reason}")


def _light_sglang() -> None:
    """Let `sglang.kernels` be imported without the packages above it, which import a server and all that it needs.

    Modules that only hold folders take their place, and the few helpers that the kernels take from the server are given in
    their simplest form. A process that already has the real package keeps it; one that used this can no longer import
    the server.
    """
    if "sglang" in sys.modules:
        return
    spec = importlib.util.find_spec("sglang")  # of a top-level package this imports nothing
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("the package 'sglang' is not installed")
    folders = list(spec.submodule_search_locations)
    for name in ("sglang", "sglang.kernels", "sglang.kernels.ops", "sglang.srt", "sglang.srt.utils"):
        _place(name, [f"{folder}{name.removeprefix('sglang').replace('.', '/')}" for folder in folders])
    for group in ("activation", "attention", "layernorm", "moe", "quantization"):
        _place(f"sglang.kernels.ops.{group}", [f"{folder}/kernels/ops/{group}" for folder in folders])
    _place("sglang.srt.utils.custom_op").register_custom_op = _undecorated  # type: ignore[attr-defined]
    common = _place("sglang.srt.utils.common")
    common.is_cuda = lambda: True  # type: ignore[attr-defined]
    common.get_cuda_version = _cuda_version  # type: ignore[attr-defined]
    if importlib.util.find_spec("sglang.srt.environ") is None:  # an installation of the kernels alone
        _place("sglang.srt.environ").envs = _Variables()  # type: ignore[attr-defined]


def _place(name: str, folders: list[str] | None = None) -> ModuleType:
    module = ModuleType(name)
    if folders is not None:
        module.__path__ = folders
    sys.modules[name] = module
    return module


def _undecorated(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """A decorator that registers no torch operator."""
    return function if function is not None else lambda wrapped: wrapped


class _Variables:
    """`envs.NAME.get()`: the environment variable NAME, or None."""

    def __getattr__(self, name: str) -> _Variables:
        found = _Variables()
        found.__dict__["get"] = lambda: os.environ.get(name)
        return found


def _cuda_version() -> tuple[int, ...]:
    import torch

    return tuple(int(part) for part in (torch.version.cuda or "0.0").split("."))
