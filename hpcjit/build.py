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
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcjit import binder, cache, compiler, folders, headers, locking, progress, settings, toolchain
from hpcjit.errors import CacheError, CaptureError, CompileError, ToolchainError
from hpcjit.launch import Kernel, capture_text, capturing

ABI_VERSION = 1
MAX_SLOTS = 64
TYPES = ("bf16", "fp16", "fp32", "e4m3", "int32", "int64")
PACKAGE = Path(__file__).parent


@dataclass(frozen=True)
class Config:
    """Base of a template's compile-time parameters; subclasses are frozen dataclasses.

    A `str` field must end in `_t` and names an element type of `TYPES`; `int`, `bool` and `float` fields become
    constants (`head_dim` -> `kHeadDim`).
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
        f"{config}.{name} = {value!r}: a field is an int, a bool, a finite float, or, if named ..._t, "
        f"one of {', '.join(TYPES)}"
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
    threads: int = 1  # that optimise its kernels side by side, where the code stays the same: no part of the key

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


# --- loading --------------------------------------------------------------------------------------------------------

_ready: dict[tuple[Template, Config, int | None, str | None], Kernel] = {}  # by the arguments of `load`
_loaded: dict[tuple[Template, Config, str], Kernel] = {}
_locks: dict[tuple[Template, Config, str], threading.Lock] = {}
_locks_guard = threading.Lock()


def load(
    template: Template, config: Config, *, device: int | None = None, arch: str | None = None, op: str | None = None
) -> Kernel:
    """The kernel for this template and config: from memory, from the cache, or compiled now.

    The architecture is that of `device` unless it is given; with a GPU the kernel is also prepared on `device`. `op` is the
    operator that asks, for messages that say how to prewarm it (several may share a template). Raises CaptureError rather
    than build or load while a CUDA graph is being captured, CacheError rather than compile when HPCJIT_REQUIRE_WARM is
    set, ToolchainError and CompileError.
    """
    kernel = _ready.get((template, config, device, arch))
    return kernel if kernel is not None else _load(template, config, device, arch, op or template.op)


def _load(template: Template, config: Config, device: int | None, arch: str | None, op: str) -> Kernel:
    target = arch or toolchain.arch_of_device(device)
    kernel = _loaded.get((template, config, target))
    if kernel is None:
        with _locks_guard:
            lock = _locks.setdefault((template, config, target), threading.Lock())
        with lock:
            kernel = _loaded.get((template, config, target)) or _open(template, config, target, op)
            _loaded[template, config, target] = kernel
    if device is not None and toolchain.has_gpu():
        kernel.prepare(device)
    _ready[template, config, device, arch] = kernel
    return kernel


def _open(template: Template, config: Config, arch: str, op: str) -> Kernel:
    title, prewarm = template.title(config, arch), f"hpcjit prewarm {op} --arch {arch}"
    if capturing():
        raise CaptureError(capture_text(title, "built or loaded", prewarm))
    entry = compile_only(template, config, arch, op)
    return Kernel(title, entry.binary, template.params, prewarm)


def forget() -> None:
    """Drop every kernel from memory, so that the next `load` looks at the cache and the variables again."""
    _ready.clear()
    _loaded.clear()


def _reset_after_fork() -> None:
    global _locks_guard
    _locks_guard = threading.Lock()
    _locks.clear()
    for kernel in _loaded.values():
        kernel.reset_lock()


os.register_at_fork(after_in_child=_reset_after_fork)


def compile_only(template: Template, config: Config, arch: str, op: str | None = None) -> cache.Entry:
    """The cache entry of this template, config and architecture, compiled if it is not there. Needs no GPU."""
    request = _request(template, config, arch)
    may_compile = request.tools is not None and not settings.read().require_warm
    entry = cache.find(request.wanted, any_compiler=not may_compile)
    if entry:
        return entry
    if settings.read().require_warm:
        raise CacheError(
            f"{request.job.title} is not in the kernel cache and HPCJIT_REQUIRE_WARM forbids to compile it. Looked in "
            f"{', '.join(map(str, folders.search_roots())) or 'no folder'}. "
            f"Run: hpcjit prewarm {op or template.op} --arch {arch}"
        )
    if request.missing:
        raise ToolchainError(
            f"{request.job.title} is not in the kernel cache and cannot be compiled: {request.missing}"
        )
    return _build(request)


# --- keys and compiling ---------------------------------------------------------------------------------------------


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
    lean = () if template.include else compiler.LEAN_FLAGS  # kernels of others may rely on a whole <cmath>
    flags = compiler.flags_for(settings.read().debug, (*lean, *template.flags))
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
    searched = (*include, library) if library else include
    name = f"k{(key or source_key)[:12]}"
    job = compiler.Job(template.title(config, arch), name, text, arch, flags, searched, template.threads)
    return _Request(
        template, config, cache.Wanted(template.op, arch, _slug(config), source_key, key), job, tools, missing
    )


def _slug(config: Config) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", str(config).replace("=", "")).strip("-")[:48] or "default"


# What a compiler or the linker prints when the folder, and not the code, is the problem.
_FOLDER_TROUBLE = re.compile(
    r"[^\n]*(No space left on device|Disk quota exceeded|Read-only file system|File too large|"
    r"File size limit exceeded|failed to map segment)[^\n]*"
)


def _build(request: _Request) -> cache.Entry:
    """Compile into the cache folder, or into a private one when that folder cannot be used."""
    problem, root = folders.root_problem(), folders.usable_root()
    if root is not None:
        try:
            return _build_in(request, root)
        except (OSError, CompileError) as failure:
            problem = _folder_trouble(failure, root)
            if not problem:
                raise
    try:
        return _build_in(request, folders.private_root(problem))
    except OSError as failure:
        raise CacheError(f"{request.job.title}: no folder to compile in: {problem}; then {failure}") from failure


def _folder_trouble(failure: OSError | CompileError, root: Path) -> str:
    """The problem of the folder behind a failed build; empty when the code is to blame."""
    remedy = "free some space, or set HPCJIT_CACHE_DIR to another folder"
    if isinstance(failure, OSError):
        return f"{root}: {failure.strerror or failure}; {remedy}"
    trouble = _FOLDER_TROUBLE.search(getattr(failure, "log", ""))
    return f"{root}: {trouble.group(0).strip()[:200]}; {remedy}" if trouble else ""


def _build_in(request: _Request, root: Path) -> cache.Entry:
    key = request.wanted.key or request.wanted.source_key
    with locking.held(root, key, request.job.title):
        return cache.find(request.wanted) or _compile(request, root)


def _compile(request: _Request, root: Path) -> cache.Entry:
    assert request.tools is not None
    final = request.wanted.folder(root)
    staging = cache.new_staging(root)
    binder.start()  # needed next; its compile fits beside nvcc's
    try:
        (staging / "build").mkdir(mode=0o700)
        with progress.compiling(request.job.title, str(root)):
            compiled = compiler.compile_job(request.job, request.tools, staging / "build", root / "logs")
        progress.show_log(compiled.log)
        staged = staging / "entry"
        staged.mkdir(mode=0o700)
        os.rename(compiled.binary, staged / cache.BINARY)
        cache.write_manifest(staged, _manifest(request, compiled))
        entry = cache.publish(staged, final)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    if entry.path == final:
        shutil.rmtree(staging, ignore_errors=True)
    return entry


def _manifest(request: _Request, compiled: compiler.Compiled) -> dict[str, Any]:
    config = dataclasses.asdict(request.config)
    facts = cache.describe(request.wanted, config, str(request.config), compiled.command, compiled.seconds)
    kernels = compiler.resources(compiled.log)
    totals = {name: max((k[name] for k in kernels), default=0) for name in ("registers", "shared_bytes", "spill_bytes")}
    return {**facts, **totals, "kernels": kernels, "toolchain": request.tools.identity if request.tools else ""}
