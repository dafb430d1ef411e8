"""Runs one compile through `torch.utils.cpp_extension.load_inline`, inside a private folder.

torch's build takes some things from its surroundings, and this file controls each of them for the time of the call:

- `CUDA_HOME` and torch's library folder become the relative names `cuda` and `lib` inside the build folder: links to
  the toolkit that we found, and empty archives in place of torch's libraries (a CPU build of torch lacks some of them,
  our binaries need none). torch puts both on the link line unquoted, so a path with a space would break it.
- `ninja` is found through a script of ours: it keeps the full log and the compiler's temporary files in the build
  folder, finds ninja where PATH does not show it, and ends the compiler when this process dies (`setpriv` delivers the
  parent's death as a signal, and ninja ends its children on that).
- `PYTORCH_NVCC` is ignored; the compiler is the one whose version is in the key.
- nvcc lists no dependencies: that takes one more pass over all headers, and nothing here is built twice.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcjit import toolchain
from hpcjit.errors import CompileError
from hpcjit.toolchain import Toolchain

BASE_FLAGS: tuple[str, ...] = (
    "-O1",  # of the host half, which only starts kernels; device code is optimised in full whatever this says
    "--threads=2",  # preprocesses for host and device side by side
    "-std=c++17",
    "--expt-relaxed-constexpr",
    "-Xptxas",
    "-v",
    # torch's defaults forbid the operators of half types; templates see the toolkit as it is.
    "-U__CUDA_NO_HALF_OPERATORS__",
    "-U__CUDA_NO_HALF_CONVERSIONS__",
    "-U__CUDA_NO_HALF2_OPERATORS__",
    "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
)
# Leaves the special functions of C++17 (Bessel, zeta, ...) out of libstdc++'s <cmath>, which every .cu includes: a third of
# what the compilers parse. A template must then include <limits> and <algorithm> itself for what it uses of them.
LEAN_FLAGS: tuple[str, ...] = ("-D_GLIBCXX_BITS_SPECFUN_H=1",)
LINK_FLAGS: tuple[str, ...] = (
    "-Llib",
    "-Wl,--as-needed",
    "-Wl,--no-undefined",
    "-Wl,--version-script=exports.map",
)
# A weak symbol of one binary must not be shared with another binary's: their templates have equal mangled names.
_EXPORTS = "{ global: hpcjit_launch; hpcjit_prepare; hpcjit_error; local: *; };\n"
_EMPTY_ARCHIVE = b"!<arch>\n"
_TORCH_LIBRARIES = ("c10", "c10_cuda", "torch", "torch_cpu", "torch_cuda", "torch_python")
LOG = "build.log"
_SPLITS_COMPILES = (12, 4)  # the first nvcc that is asked to


@dataclass(frozen=True)
class Job:
    """One translation unit and how to compile it."""

    title: str  # for messages: op, config, arch
    name: str  # short and unique, for files
    source: str
    arch: str
    flags: tuple[str, ...]
    include: tuple[Path, ...]
    threads: int = 1  # that optimise its kernels side by side


@dataclass(frozen=True)
class Compiled:
    """A finished binary in its build folder, with what the compiler said."""

    binary: Path
    seconds: float
    command: str
    log: str


def compile_job(job: Job, tools: Toolchain, folder: Path, logs: Path) -> Compiled:
    """Compile and link `job` in `folder`. Raises CompileError, with log and source kept in `logs`."""
    _prepare_folder(folder, tools)
    started = time.perf_counter()
    with _patches.applied(), _name_for_ninja(folder) as name:
        try:
            _load_inline(job, tools, name)
        except (RuntimeError, OSError) as problem:
            raise _compile_error(job, tools, folder, logs, problem) from None
    binaries = sorted(folder.glob("*.so"))
    if not binaries or binaries[0].stat().st_size == 0:
        raise _compile_error(
            job, tools, folder, logs, RuntimeError("the compiler reported success and wrote no binary")
        )
    seconds = time.perf_counter() - started
    return Compiled(binaries[0], seconds, repeat_command(job, tools, "kernel.cu"), read_log(folder))


def repeat_command(job: Job, tools: Toolchain, source: str) -> str:
    """A command line that repeats the compile of `source` by hand."""
    include = [part for path in job.include for part in ("-I", str(path))]
    flags = [flag for flag in job.flags if not flag.startswith("-U")]
    return shlex.join(
        [tools.nvcc.path, *flags, toolchain.gencode(job.arch), *include, "-Xcompiler", "-fPIC", "-c", source]
    )


@contextlib.contextmanager
def _name_for_ninja(folder: Path) -> Iterator[str]:
    """A name of `folder` without the characters that torch does not escape in ninja's file."""
    if not set(str(folder)) & set("$:\n"):
        yield str(folder)
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        yield f"/proc/{os.getpid()}/fd/{handle}"
    finally:
        os.close(handle)


def _flags(job: Job, tools: Toolchain) -> list[str]:
    flags = [*job.flags, toolchain.gencode(job.arch)]
    if job.threads > 1 and tools.nvcc.release >= _SPLITS_COMPILES:
        flags.append(f"--split-compile={job.threads}")
    if not os.environ.get("CC"):
        flags.append(f"-ccbin={shlex.quote(tools.host.path)}")
    return flags


def _load_inline(job: Job, tools: Toolchain, folder: str) -> None:
    from torch.utils.cpp_extension import load_inline

    load_inline(
        name=job.name,
        cpp_sources="",
        cuda_sources=job.source,
        extra_cflags=["-std=c++17"],
        extra_cuda_cflags=_flags(job, tools),
        extra_ldflags=list(LINK_FLAGS),
        extra_include_paths=[
            str(path).replace("$", "$$") for path in job.include
        ],  # torch writes them into ninja's file
        build_directory=folder,
        with_cuda=True,
        is_python_module=False,
        no_implicit_headers=True,
        verbose=False,
    )


def _prepare_folder(folder: Path, tools: Toolchain) -> None:
    cuda, lib = folder / "cuda", folder / "lib"
    cuda.mkdir()
    lib.mkdir()
    (cuda / "bin").symlink_to(Path(tools.nvcc.path).parent)
    include = Path(tools.nvcc.home) / "include"
    if include.resolve() == Path("/usr/include"):
        (cuda / "include").mkdir()  # naming /usr/include explicitly breaks the host compiler's header order
    else:
        (cuda / "include").symlink_to(include)
    for name in _TORCH_LIBRARIES:
        (lib / f"lib{name}.a").write_bytes(_EMPTY_ARCHIVE)
    (lib / "libcudart.so").symlink_to(tools.nvcc.cudart)
    (folder / "exports.map").write_text(_EXPORTS)


# --- torch's surroundings -------------------------------------------------------------------------------------------


class _Patches:
    """What is changed around torch's build, shared by the threads that compile at the same time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0
        self.scripts: str | None = None
        self.undo = contextlib.ExitStack()

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        with self.lock:
            if self.users == 0:
                self._apply()
            self.users += 1
        try:
            yield
        finally:
            with self.lock:
                self.users -= 1
                if self.users == 0:
                    self._revert()

    def _apply(self) -> None:
        ninja = toolchain.find_ninja()
        self.scripts = tempfile.mkdtemp(prefix="hpcjit-ninja-")
        _write_ninja_script(Path(self.scripts, "ninja"), ninja)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_environment("PATH", f"{self.scripts}{os.pathsep}{os.environ.get('PATH', os.defpath)}"))
            stack.enter_context(_environment("PYTORCH_NVCC", None))
            stack.enter_context(_environment("TORCH_EXTENSION_SKIP_NVCC_GEN_DEPENDENCIES", "1"))
            extension = _import_extension()
            stack.enter_context(_attribute(extension, "CUDA_HOME", "cuda"))
            stack.enter_context(_attribute(extension, "TORCH_LIB_PATH", "lib"))
            # torch 2.8 adds the architectures of all visible GPUs although our flags name one, and fails where there is none.
            if hasattr(extension, "_get_cuda_arch_flags"):
                stack.enter_context(_attribute(extension, "_get_cuda_arch_flags", lambda cflags=None: []))
            if hasattr(extension, "FileLock"):  # torch locks the build folder, which is private and may be on a disk
                stack.enter_context(_attribute(extension, "FileLock", contextlib.nullcontext))  # without locks
            self.undo = stack.pop_all()

    def _revert(self) -> None:
        self.undo.close()
        if self.scripts:
            shutil.rmtree(self.scripts, ignore_errors=True)


_patches = _Patches()


def reset_after_fork() -> None:
    """In a forked child: undo what another thread of the parent had changed, with a lock that nobody holds."""
    global _patches
    if _patches.users:
        _patches.undo.close()  # the script folder stays: it is the parent's
    _patches = _Patches()


os.register_at_fork(after_in_child=reset_after_fork)


def _write_ninja_script(path: Path, real: str) -> None:
    ninja = shlex.quote(real)
    setpriv = shutil.which("setpriv")
    leash = f"{shlex.quote(setpriv)} --pdeathsig TERM " if setpriv else ""
    path.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exec {ninja} --version\nTMPDIR=. exec {leash}{ninja} "$@" >{LOG} 2>&1 </dev/null\n'
    )
    path.chmod(0o700)


def _import_extension() -> object:
    # Its import asks whether CUDA is available. Through NVML that leaves CUDA uninitialised: fork keeps working.
    logger = logging.getLogger("torch.utils.cpp_extension")
    level = logger.level
    logger.setLevel(logging.ERROR)  # "No CUDA runtime is found": compiling without a GPU is normal here
    try:
        with _environment("PYTORCH_NVML_BASED_CUDA_CHECK", "1"):
            from torch.utils import cpp_extension
    finally:
        logger.setLevel(level)
    return cpp_extension


@contextlib.contextmanager
def _environment(name: str, value: str | None) -> Iterator[None]:
    before = os.environ.get(name)
    _set_environment(name, value)
    try:
        yield
    finally:
        _set_environment(name, before)


def _set_environment(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


@contextlib.contextmanager
def _attribute(owner: object, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


# --- what the compiler said -----------------------------------------------------------------------------------------

_ERROR_LINE = re.compile(
    r"\berror\b|\bfatal\b|undefined reference|cannot find|No space left|Killed|not found|failed to", re.IGNORECASE
)
_MAX_ERROR_LINES = 12
_MAX_LINE = 400


def read_log(folder: Path) -> str:
    """The full output of the build in `folder`."""
    try:
        return (folder / LOG).read_text(errors="replace")
    except OSError:
        return ""


def _compile_error(job: Job, tools: Toolchain, folder: Path, logs: Path, problem: Exception) -> CompileError:
    log = read_log(folder)
    if "FAILED:" not in log:  # not a compiler's failure: ninja did not start, or the binary could not be opened
        log += "".join(f"\n{type(e).__name__}: {e}" for e in (problem, problem.__cause__) if e)
    kept = _keep(job, logs, log)
    source = str(kept.with_suffix(".cu")) if kept else "kernel.cu"
    message = [
        f"{job.title}: the compiler failed",
        *first_errors(log),
        f"full log: {kept or 'could not be written'}",
        f"repeat:   {repeat_command(job, tools, source)} -o /dev/null",
        f"compilers: nvcc {tools.nvcc.version}, {tools.host.path} ({tools.host.version})",
    ]
    error = CompileError("\n".join(message))
    error.log = log  # type: ignore[attr-defined]
    return error


def first_errors(log: str) -> list[str]:
    """The first lines of a build log that say what went wrong, each with a little of what follows it."""
    lines = [
        line.rstrip()
        for line in log.splitlines()
        if line.strip() and not line.startswith(("[", "ninja: build stopped"))
    ]
    chosen: list[str] = []
    for index, line in enumerate(lines):
        is_command = len(line) > _MAX_LINE or line.startswith("FAILED")
        if _ERROR_LINE.search(line) and not is_command and line not in chosen:
            chosen += [text[:_MAX_LINE] for text in lines[index : index + 3] if text not in chosen]
        if len(chosen) >= _MAX_ERROR_LINES:
            break
    return [f"  {line}" for line in (chosen or [text[:_MAX_LINE] for text in lines[-5:]])[:_MAX_ERROR_LINES]]


def _keep(job: Job, logs: Path, log: str) -> Path | None:
    try:
        logs.mkdir(mode=0o700, exist_ok=True)
        path = logs / f"{job.name}.log"
        path.write_text(log)
        path.with_suffix(".cu").write_text(job.source)
    except OSError:
        return None
    return path


_PTXAS_KERNEL = re.compile(r"Compiling entry function '(\w+)'")
_PTXAS_FUNCTION = re.compile(r"Function properties for (\w+)")
_PTXAS_SERIALIZED = re.compile(r"wgmma\.mma_async instructions are serialized .* in the function '(\w+)'")
_PTXAS_SPILL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_PTXAS_USED = re.compile(r"Used (\d+) registers")
_PTXAS_SHARED = re.compile(r"(\d+) bytes smem")


def resources(log: str) -> list[dict[str, Any]]:
    """What `ptxas -v` says about each kernel: registers, static shared memory, stack and spills, and whether each of its
    warpgroup products waits for the one before, for want of registers, say.
    """
    kernels: list[dict[str, Any]] = []
    serialized = set(_PTXAS_SERIALIZED.findall(log))
    function = ""  # functions that are not inlined have properties of their own
    for line in log.splitlines():
        if match := _PTXAS_KERNEL.search(line):
            kernels.append(
                {"name": match.group(1), "registers": 0, "shared_bytes": 0, "spill_bytes": 0, "stack_bytes": 0}
            )
        elif match := _PTXAS_FUNCTION.search(line):
            function = match.group(1)
        elif kernels and function == kernels[-1]["name"] and (match := _PTXAS_SPILL.search(line)):
            kernels[-1] |= {
                "stack_bytes": int(match.group(1)),
                "spill_bytes": int(match.group(2)) + int(match.group(3)),
            }
        elif kernels and (match := _PTXAS_USED.search(line)):
            shared = _PTXAS_SHARED.search(line)
            kernels[-1] |= {"registers": int(match.group(1)), "shared_bytes": int(shared.group(1)) if shared else 0}
    return [{**kernel, "serialized": kernel["name"] in serialized} for kernel in kernels]


def flags_for(debug: bool, extra: Sequence[str] = ()) -> tuple[str, ...]:
    """The nvcc flags of a compile, without architecture and folders."""
    return (*BASE_FLAGS, *(("-lineinfo", "-DHPCJIT_DEBUG=1") if debug else ()), *extra)
