"""From a template and a config to a loaded kernel: source, key, cache, compile."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import platform
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcjit import cache, compiler, headers, settings, toolchain
from hpcjit.errors import CacheError, CaptureError, ToolchainError
from hpcjit.launch import Kernel, capture_text, capturing

ABI_VERSION = 1
MAX_SLOTS = 32
TYPES = ("bf16", "fp16", "fp32", "e4m3", "int32", "int64")
PACKAGE = Path(__file__).parent


@dataclass(frozen=True)
class Config:
    """Base of a template's compile-time parameters; subclasses are frozen dataclasses.

    A `str` field must end in `_t` and names an element type of `TYPES`; `int`, `bool` and `float` fields become constants
    (`head_dim` -> `kHeadDim`).
    """

    def cpp(self) -> str:
        """The C++ struct."""
        lines = [_member(type(self).__name__, f.name, getattr(self, f.name)) for f in dataclasses.fields(self)]
        return "struct Config {\n" + "".join(f"  {line}\n" for line in lines) + "};\n"

    def __str__(self) -> str:
        words = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool):
                words += [field.name] if value else []
            else:
                words.append(value if isinstance(value, str) else f"{field.name}={value}")
        return ", ".join(words)


def _member(config: str, name: str, value: object) -> str:
    constant = "k" + "".join(part.capitalize() for part in name.split("_"))
    if isinstance(value, bool):
        return f"static constexpr bool {constant} = {str(value).lower()};"
    if isinstance(value, int):
        kind = "int" if -(2**31) <= value < 2**31 else "long long"
        return f"static constexpr {kind} {constant} = {value};"
    if isinstance(value, float) and math.isfinite(value):
        return f"static constexpr float {constant} = {value!r}f;"
    if isinstance(value, str) and name.endswith("_t") and value in TYPES:
        return f"using {name} = hpcjit::{value};"
    raise TypeError(
        f"{config}.{name} = {value!r}: a field is an int, a bool, a finite float, or (named ..._t) one of {', '.join(TYPES)}"
    )


@dataclass(frozen=True, eq=False)
class Template:
    """A kernel template: a header below an include folder, and the names of its launch slots."""

    op: str
    header: str
    entry: str
    config: type[Config]
    params: tuple[str, ...]
    cutlass: bool = False
    include: tuple[Path, ...] = ()  # folders searched before the package's own, for kernels outside of it
    flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9_]+\.[a-z0-9_]+", self.op):
            raise ValueError(f"op must look like group.name, got {self.op!r}")
        if not 1 <= len(self.params) <= MAX_SLOTS or len(set(self.params)) != len(self.params):
            raise ValueError(f"{self.op}: params must be 1 to {MAX_SLOTS} different names, got {self.params}")

    def title(self, config: Config, arch: str) -> str:
        """How this kernel is called in messages."""
        return f"{self.op} [{config}] for {arch}"


def source(template: Template, config: Config) -> str:
    """The generated translation unit."""
    if not isinstance(config, template.config):
        raise TypeError(f"{template.op} takes a {template.config.__name__}, got {type(config).__name__}")
    return (
        f'#include "hpcjit/export.cuh"\n#include "{template.header}"\n'
        f"{config.cpp()}HPCJIT_EXPORT({template.entry}<Config>, {len(template.params)})\n"
    )


_kernels: dict[tuple[Template, Config, str], Kernel] = {}


def load(template: Template, config: Config, *, device: int | None = None, arch: str | None = None) -> Kernel:
    """The kernel for this template and config: from memory, from the cache, or compiled now."""
    arch = arch or toolchain.arch_of_device(device)
    kernel = _kernels.get((template, config, arch))
    if kernel is None:
        prewarm = f"hpcjit prewarm {template.op} --arch {arch}"
        if capturing():
            raise CaptureError(capture_text(template.title(config, arch), "built or loaded", prewarm))
        entry = compile_only(template, config, arch)
        kernel = Kernel(template.title(config, arch), entry.binary, template.params, prewarm)
        _kernels[template, config, arch] = kernel
    if device is not None and _has_gpu():
        kernel.prepare(device)
    return kernel


def compile_only(template: Template, config: Config, arch: str) -> cache.Entry:
    """The cache entry of this template, config and architecture, compiled if it is not there."""
    request = _request(template, config, arch)
    entry = cache.find(request.wanted)
    return entry or _build(request)


@dataclass(frozen=True)
class _Request:
    template: Template
    config: Config
    wanted: cache.Wanted
    job: compiler.Job
    tools: toolchain.Toolchain | None
    missing: ToolchainError | None


def _request(template: Template, config: Config, arch: str) -> _Request:
    toolchain.check_arch(arch)
    text = source(template, config)
    flags = compiler.flags_for(settings.read().debug, template.flags)
    include = (*template.include, PACKAGE / "include", PACKAGE / "csrc")
    library = toolchain.find_cutlass_include() if template.cutlass else None
    facts = {
        "abi": ABI_VERSION,
        "op": template.op,
        "source": text,
        "params": template.params,
        "headers": headers.digest(text, include, library),
        "arch": arch,
        "flags": flags,
        "nvcc_flags": [os.environ.get(name, "") for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")],
        "link": compiler.LINK_FLAGS,
        "machine": platform.machine(),
    }
    source_key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    tools, missing = None, None
    try:
        tools = toolchain.find()
    except ToolchainError as problem:
        missing = problem
    key = hashlib.sha256(f"{source_key} {tools.identity}".encode()).hexdigest() if tools else None
    folders = (*include, library) if library else include
    job = compiler.Job(template.title(config, arch), f"k{(key or source_key)[:12]}", text, arch, flags, folders)
    return _Request(
        template, config, cache.Wanted(template.op, arch, _slug(config), source_key, key), job, tools, missing
    )


def _slug(config: Config) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", str(config).replace("=", "")).strip("-")[:48] or "default"


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _build(request: _Request) -> cache.Entry:
    if request.tools is None or request.wanted.key is None:
        raise request.missing or CacheError("no compiler")
    problem = cache.root_problem()
    root = cache.private_root(problem) if problem else cache.usable_root()
    assert root is not None
    staging = cache.new_staging(root)
    try:
        (staging / "build").mkdir(mode=0o700)
        compiled = compiler.compile_job(request.job, request.tools, staging / "build", root / "logs")
        (staging / "entry").mkdir(mode=0o700)
        os.rename(compiled.binary, staging / "entry" / cache.BINARY)
        cache.write_manifest(staging / "entry", _manifest(request, compiled))
        return cache.publish(staging / "entry", request.wanted.folder(root))
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _manifest(request: _Request, compiled: compiler.Compiled) -> dict[str, Any]:
    import time

    kernels = compiler.resources(compiled.log)
    assert request.tools is not None
    return {
        "op": request.wanted.op,
        "arch": request.wanted.arch,
        "config": dataclasses.asdict(request.config),
        "config_text": str(request.config),
        "key": request.wanted.key,
        "source_key": request.wanted.source_key,
        "toolchain": request.tools.identity,
        "command": compiled.command,
        "compile_seconds": round(compiled.seconds, 3),
        "kernels": kernels,
        "created": time.time(),
    }
