"""Finds what a compile needs: nvcc and its toolkit, the host compiler, ninja, the CuTe headers, the architecture.

nvcc is looked for in HPCJIT_CUDA_HOME (which must then work), CUDA_HOME, CUDA_PATH, PATH, the default toolkit folders
and pip's `nvidia` packages. The first one that is complete and whose CUDA major version fits torch's wins. An nvcc that
is a wrapper script or a link in some bin folder is asked for its real toolkit (`nvcc -dryrun` prints it), because a
toolkit guessed from the wrapper's place has no headers and no libraries.

Versions are part of every cache key, and asking a compiler costs 50 ms. The answers are kept in `toolchain.json` in the
cache folder, under the compiler's path; the size and times of the file that is finally executed guard them.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hpcjit import memo, settings
from hpcjit.errors import ToolchainError

DEFAULT_HOMES: tuple[str, ...] = ("/usr/local/cuda", "/usr/lib/nvidia-cuda-toolkit", "/usr/lib/cuda")
DEFAULT_ARCH = "sm_90a"
FIRST_PIP_NVCC = 13  # nvidia-cuda-nvcc-cu12 holds ptxas and no nvcc
REMEDY = "pip install 'hpcjit[nvcc]', or set HPCJIT_CUDA_HOME to a CUDA toolkit"

_ARCH = re.compile(r"sm_(\d{2,3})([af]?)")
_TOOL_TIMEOUT_S = 60


@dataclass(frozen=True)
class Nvcc:
    """One CUDA compiler and the toolkit around it."""

    path: str  # the nvcc that is executed
    home: str  # its toolkit, holding include/ and lib64/ or lib/
    version: str  # release and build, as `nvcc --version` prints them
    cudart: str  # the exact libcudart file that binaries are linked with

    @property
    def cuda_major(self) -> int:
        return self.release[0]

    @property
    def release(self) -> tuple[int, int]:
        major, _, rest = self.version.partition(".")
        minor = re.match(r"\d+", rest)
        return int(major), int(minor.group()) if minor else 0


@dataclass(frozen=True)
class Compiler:
    """The host compiler that nvcc calls."""

    path: str
    version: str


@dataclass(frozen=True)
class Toolchain:
    """Everything that a compile needs."""

    nvcc: Nvcc
    host: Compiler

    @property
    def identity(self) -> str:
        """What the cache key takes from the compilers: versions, no paths."""
        return f"nvcc {self.nvcc.version}; host {self.host.version}"


# --- architecture ---------------------------------------------------------------------------------------------------


def arch_of_capability(major: int, minor: int) -> str:
    """The architecture name that a device of this compute capability runs; 9.0 and later get their `a` features."""
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def check_arch(arch: str) -> str:
    """Return `arch` if it is a well-formed name such as sm_90a."""
    if not _ARCH.fullmatch(arch):
        raise ToolchainError(f"architecture must look like sm_90a or sm_80, got {arch!r}")
    return arch


def arch_of_device(device: int | None = None) -> str:
    """The architecture of a CUDA device (the current one for None), or HPCJIT_ARCH or sm_90a when there is no GPU."""
    if has_gpu():
        import torch

        index = torch.cuda.current_device() if device is None else device
        return arch_of_capability(*torch.cuda.get_device_capability(index))
    return check_arch(settings.read().arch or DEFAULT_ARCH)


def has_gpu() -> bool:
    """Whether torch sees a CUDA device."""
    import torch

    return torch.cuda.is_available()


def gencode(arch: str) -> str:
    """The one nvcc flag for `arch`: machine code only, no PTX."""
    number = check_arch(arch).removeprefix("sm_")
    return f"-gencode=arch=compute_{number},code=sm_{number}"


# --- nvcc -----------------------------------------------------------------------------------------------------------


def find_nvcc() -> Nvcc:
    """The CUDA compiler to use. Raises ToolchainError with every place that was looked at."""
    wanted = torch_cuda_major()
    looked: list[str] = []
    misfits: list[str] = []
    for origin, path in _nvcc_candidates():
        forced = origin == "HPCJIT_CUDA_HOME"
        try:
            nvcc = _probe_nvcc(path)
        except ToolchainError as problem:
            looked.append(f"  {origin}: {problem}")
        else:
            if wanted is None or nvcc.cuda_major == wanted:
                return nvcc
            misfits.append(f"  {origin}: {nvcc.path} is CUDA {nvcc.version}")
        if forced:
            break
    if misfits:
        raise ToolchainError(
            f"torch {_torch_version()} uses CUDA {wanted} and kernels must be compiled by an nvcc of that major version; "
            "found only\n" + "\n".join(misfits) + f"\nRemedy: {_remedy(wanted)}."
        )
    raise ToolchainError("no usable nvcc found. Looked in\n" + "\n".join(looked) + f"\nRemedy: {_remedy(wanted)}.")


def _remedy(cuda_major: int | None) -> str:
    if cuda_major is None or cuda_major >= FIRST_PIP_NVCC:
        return REMEDY
    return (
        f"set HPCJIT_CUDA_HOME to a CUDA {cuda_major} toolkit (pip's packages hold no nvcc before CUDA {FIRST_PIP_NVCC}), "
        f"or install a torch that uses CUDA {FIRST_PIP_NVCC}"
    )


def _nvcc_candidates() -> Iterator[tuple[str, Path | None]]:
    forced = settings.read().cuda_home
    if forced:
        yield "HPCJIT_CUDA_HOME", forced / "bin" / "nvcc"
    for name in ("CUDA_HOME", "CUDA_PATH"):
        # A leading colon comes from shell snippets like CUDA_HOME=$CUDA_HOME:/some/cuda.
        value = os.environ.get(name, "").strip().strip(os.pathsep)
        yield name, Path(value) / "bin" / "nvcc" if value else None
    on_path = shutil.which("nvcc")
    yield "PATH", Path(on_path) if on_path else None
    for default in DEFAULT_HOMES:
        yield default, Path(default) / "bin" / "nvcc"
    pip_homes = pip_toolkits()
    for home in pip_homes:
        yield "pip", home / "bin" / "nvcc"
    if not pip_homes:
        yield "pip", None


def pip_toolkits() -> list[Path]:
    """Toolkit folders that pip's nvidia packages put on the import path, newest first, then in the path's order."""
    pattern = [os.path.join(glob.escape(folder), "nvidia", "cu[0-9]*") for folder in sys.path if folder]
    found = (Path(match) for entry in pattern for match in glob.glob(entry))
    usable = dict.fromkeys(p for p in found if (p / "bin" / "nvcc").is_file())
    return sorted(usable, key=lambda p: p.name, reverse=True)


def _probe_nvcc(path: Path | None) -> Nvcc:
    if path is None:
        raise ToolchainError("not set, or no nvcc there")
    if not os.access(path, os.X_OK) or path.is_dir():
        raise ToolchainError(f"{path} does not exist or cannot be executed")
    home, nvcc = _toolkit_of(path)
    return Nvcc(nvcc, home, _nvcc_version(nvcc), _cudart_of(home) or "")


def _toolkit_of(path: Path) -> tuple[str, str]:
    """The toolkit folder that an nvcc belongs to, and the nvcc to run: seen through links and wrapper scripts."""
    for nvcc in (os.path.abspath(path), os.path.realpath(path)):
        home = os.path.dirname(os.path.dirname(nvcc))
        if _is_toolkit(home):
            return home, nvcc
    home = _remembered(f"{path} -dryrun", str(path), lambda: _dryrun_home(path))
    nvcc = os.path.join(home, "bin", "nvcc")
    if not _is_toolkit(home) or not os.path.isfile(nvcc):
        raise ToolchainError(f"{path} belongs to no toolkit with headers and a CUDA runtime library")
    return home, nvcc


def _is_toolkit(home: str) -> bool:
    return os.path.isfile(os.path.join(home, "include", "cuda_runtime.h")) and _cudart_of(home) is not None


def _dryrun_home(path: Path) -> str:
    text = _output([str(path), "-dryrun", "-c", "none.cu"])
    top = re.search(r"^#\$ TOP=(.*)$", text, re.MULTILINE)
    if not top:
        raise ToolchainError(f"{path} does not say where its toolkit is: {text.strip()[:200]}")
    return os.path.realpath(top.group(1).strip())


_LIBRARY_FOLDERS = ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib", "lib/x86_64-linux-gnu")


def _cudart_of(home: str) -> str | None:
    # pip's packages hold only the versioned name, which a plain -lcudart does not find.
    for folder in _LIBRARY_FOLDERS:
        plain = os.path.join(home, folder, "libcudart.so")
        names = [plain] if os.path.exists(plain) else sorted(glob.glob(f"{glob.escape(plain)}.*"), key=len)
        if names:
            return os.path.realpath(names[0])
    return None


def _nvcc_version(nvcc: str) -> str:
    def ask() -> str:
        text = _output([nvcc, "--version"])
        release = re.search(r"release [\d.]+, V([\d.]+)", text)
        build = re.search(r"^Build (\S+)", text, re.MULTILINE)
        if not release:
            raise ToolchainError(f"{nvcc} does not behave like nvcc: {text.strip()[:200]}")
        return release.group(1) + (f" ({build.group(1)})" if build else "")

    return _remembered(f"{nvcc} --version", nvcc, ask)


# --- the other tools ------------------------------------------------------------------------------------------------


def find_host_compiler() -> Compiler:
    """The C++ compiler behind nvcc: CXX, else c++, g++ or clang++ on PATH. torch links with the same one."""
    named = os.environ.get("CXX", "").strip()
    for name in [named] if named else ["c++", "g++", "clang++"]:
        path = shutil.which(name)
        if path:
            return Compiler(path, _host_version(path))
    places = f"CXX={named}" if named else "c++, g++, clang++ on PATH"
    raise ToolchainError(
        f"no host C++ compiler found (looked for {places}). nvcc needs one: install g++ (apt-get install g++), "
        "or set CXX to a compiler"
    )


def nvcc_host_compiler() -> Compiler:
    """The compiler that nvcc calls: torch passes CC as -ccbin when it is set, and hpcjit the C++ compiler otherwise."""
    named = os.environ.get("CC", "").strip()
    if not named:
        return find_host_compiler()
    path = shutil.which(named)
    if not path:
        raise ToolchainError(f"CC={named} names no executable; unset CC or set it to a C or C++ compiler")
    return Compiler(path, _host_version(path))


def _host_version(path: str) -> str:
    return _remembered(f"{path} --version", path, lambda: _output([path, "--version"]).splitlines()[0].strip())


def find_ninja() -> str:
    """The ninja that torch's build needs, on PATH or in its Python package."""
    on_path = shutil.which("ninja")
    if on_path:
        return on_path
    spec = importlib.util.find_spec("ninja")
    if spec and spec.origin:
        package = Path(spec.origin).parent
        for candidate in (package / "data" / "bin" / "ninja", Path(sys.executable).parent / "ninja"):
            if os.access(candidate, os.X_OK):
                return str(candidate)
    raise ToolchainError(
        "ninja is needed to compile and was found neither on PATH nor as a Python package: pip install ninja"
    )


def find_cutlass_include() -> Path:
    """The folder with cute/ and cutlass/ headers from the nvidia-cutlass package (which is not imported)."""
    spec = importlib.util.find_spec("cutlass_library")
    if spec and spec.origin:
        folder = Path(spec.origin).parent / "source" / "include"
        if (folder / "cute" / "tensor.hpp").is_file():
            return folder
    raise ToolchainError("the CuTe headers were not found: pip install 'nvidia-cutlass>=4.2'")


def find() -> Toolchain:
    """nvcc and host compiler, or one ToolchainError that says what is missing and how to get it."""
    return Toolchain(find_nvcc(), nvcc_host_compiler())


# --- torch, without importing it ------------------------------------------------------------------------------------


def torch_cuda_major() -> int | None:
    """The CUDA major version that torch was built for; None for a CPU build or no torch."""
    version = _torch_constant("cuda")
    return int(version.split(".")[0]) if version else None


def _torch_version() -> str:
    return _torch_constant("__version__") or "?"


def _torch_constant(name: str) -> str | None:
    # torch/version.py is read as text: importing torch takes seconds, which a warm start must not pay.
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "version"):
        value = getattr(torch.version, name, None)
        return str(value) if value else None
    spec = importlib.util.find_spec("torch")
    if not spec or not spec.origin:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return None
    match = re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return match.group(1) if match else None


# --- asking a tool, and remembering the answer ----------------------------------------------------------------------


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=_TOOL_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as problem:
        raise ToolchainError(f"{shlex.join(command)} failed: {problem}") from problem
    return done.stdout.decode(errors="replace")


_answers: dict[str, str] = {}


def _remembered(question: str, file: str, ask: Callable[[], str]) -> str:
    """The answer to `question`, asked again only when the executed file changed."""
    real = os.path.realpath(file)
    key = f"{question} {memo.stamp(real)}"
    if key not in _answers:
        stored = memo.read("toolchain").get(question)
        if isinstance(stored, dict) and stored.get("file") == real and memo.unchanged(real, stored.get("stamp")):
            _answers[key] = str(stored["answer"])
        else:
            _answers[key] = ask()
            memo.write("toolchain", question, {"file": real, "stamp": memo.stamp(real), "answer": _answers[key]})
    return _answers[key]
