"""The environment variables of hpcjit: all of them, read here and nowhere else.

Values are read when they are needed, never at import, so a variable set after `import hpcjit` still counts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

VARIABLES: dict[str, str] = {
    "HPCJIT_CACHE_DIR": "folder of the writable kernel cache (default: the user's cache folder)",
    "HPCJIT_CACHE_PATH": "read-only cache folders searched first, separated like PATH",
    "HPCJIT_CUDA_HOME": "CUDA toolkit to compile with, before CUDA_HOME, CUDA_PATH and PATH",
    "HPCJIT_ARCH": "architecture to compile for when no GPU is present, such as sm_90a",
    "HPCJIT_VERBOSE": "0 silent, 1 one line per compile (default), 2 also the compiler's output",
    "HPCJIT_DEBUG": "1 checks indices on the device, synchronises after each launch, keeps line info",
    "HPCJIT_BACKEND": "backend that every operator uses when it can, such as torch",
    "HPCJIT_REQUIRE_WARM": "1 raises instead of compiling: only what the cache holds may run",
}


@dataclass(frozen=True)
class Settings:
    """A snapshot of the variables above, parsed."""

    cache_dir: Path | None
    cache_path: tuple[Path, ...]
    cuda_home: Path | None
    arch: str | None
    verbose: int
    debug: bool
    backend: str | None
    require_warm: bool


def _flag(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "on")


def _path(name: str) -> Path | None:
    # A leading colon or stray blanks come from shell snippets like CUDA_HOME=$CUDA_HOME:/usr/local/cuda.
    value = os.environ.get(name, "").strip().strip(os.pathsep)
    return Path(value).expanduser() if value else None


def _verbosity() -> int:
    value = os.environ.get("HPCJIT_VERBOSE", "").strip()
    return min(max(int(value), 0), 2) if value.isdigit() else 1


_parsed: tuple[tuple[str | None, ...], Settings] | None = None


def read() -> Settings:
    """The environment as it is now; parsed anew when one of the variables has changed."""
    global _parsed
    values = tuple(map(os.environ.get, (*VARIABLES, "HOME")))  # HOME decides what ~ means
    if _parsed is None or _parsed[0] != values:
        _parsed = values, _parse()
    return _parsed[1]


def _parse() -> Settings:
    layers = os.environ.get("HPCJIT_CACHE_PATH", "").split(os.pathsep)
    return Settings(
        cache_dir=_path("HPCJIT_CACHE_DIR"),
        cache_path=tuple(Path(p.strip()).expanduser() for p in layers if p.strip()),
        cuda_home=_path("HPCJIT_CUDA_HOME"),
        arch=os.environ.get("HPCJIT_ARCH", "").strip() or None,
        verbose=_verbosity(),
        debug=_flag("HPCJIT_DEBUG"),
        backend=os.environ.get("HPCJIT_BACKEND", "").strip().lower() or None,
        require_warm=_flag("HPCJIT_REQUIRE_WARM"),
    )
