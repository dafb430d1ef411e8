"""Headers that host and device share, compiled for the host."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

from hpcjit import build, toolchain

_FLAGS = ("-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")


def compile_library(folder: Path, name: str, source: str) -> ctypes.CDLL:
    """Raises ToolchainError where there is no host compiler."""
    path, library = folder / f"{name}.cpp", folder / f"{name}.so"
    path.write_text(source)
    command = [toolchain.find_host_compiler().path, *_FLAGS, "-I", str(build.PACKAGE / "include")]
    subprocess.run([*command, "-o", str(library), str(path)], check=True)
    return ctypes.CDLL(str(library))
