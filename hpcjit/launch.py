"""The call into a finished binary: `Kernel.launch`, the current stream, and whether a graph is being captured."""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import re
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpcjit import binder, toolchain
from hpcjit.errors import ArgumentTypeError, CacheError, CaptureError, LaunchError, ToolchainError

Launcher = Callable[..., None]
Fail = Callable[[int, tuple[Any, ...]], None]

ARGUMENTS_DO_NOT_FIT = -1  # `fail` gets this in place of a CUDA error
_KIND_NAMES = {"p": "a pointer (int or None)", "i": "a 64-bit integer", "d": "a number"}


def capturing() -> bool:
    """Whether the current CUDA stream is being captured into a graph. Never initialises CUDA or imports torch."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    return bool(cuda and cuda.is_initialized() and cuda.is_current_stream_capturing())


def __getattr__(name: str) -> Any:
    # `raw_stream(device_index) -> int` is torch's own function, found at first use: importing this costs no torch,
    # and a call costs no wrapper.
    if name != "raw_stream":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import torch

    function = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (lambda device_index: 0)
    globals()[name] = function
    return function


class Kernel:
    """A loaded binary.

    `kernel.launch(device, stream, *slots)` takes one value per name in the template's `params`: an address or None for a
    pointer, an int for an integer, an int or float for a double. It raises LaunchError with the CUDA error, and
    ArgumentTypeError for a value of the wrong kind or a wrong number of them.
    """

    launch: Launcher

    def __init__(self, title: str, path: Path, params: tuple[str, ...], prewarm: str = "") -> None:
        self.title = title
        self.path = path
        self.params = params
        self._prewarm = prewarm
        self._prepared: set[int] = set()
        self._lock = threading.Lock()
        self._library = open_library(path)
        self._library.hpcjit_error.restype = ctypes.c_char_p
        self._library.hpcjit_prepare.argtypes = [ctypes.c_int]
        self.kinds = self.error_text(-1)
        if len(self.kinds) != len(params):
            raise CacheError(f"{path}: takes {len(self.kinds)} slots, its template names {len(params)}")
        self.address = ctypes.cast(self._library.hpcjit_launch, ctypes.c_void_p).value or 0
        self.launch = make_launcher(self.address, self.kinds, self._fail)

    def error_text(self, code: int) -> str:
        """The CUDA runtime's text for an error code."""
        return (self._library.hpcjit_error(code) or b"").decode(errors="replace")

    def prepare(self, device: int) -> None:
        """Load the module on a device and set its attributes; once per device, never while a graph is captured."""
        if device in self._prepared:
            return
        with self._lock:
            if device not in self._prepared:
                if capturing():
                    raise CaptureError(capture_text(self.title, "loaded", self._prewarm))
                self._check(self._library.hpcjit_prepare(device), f"preparing device {device}")
                self._prepared.add(device)

    def reset_lock(self) -> None:
        """In a forked child: another thread of the parent may have held the lock."""
        self._lock = threading.Lock()

    def _check(self, code: int, what: str) -> None:
        if code:
            raise LaunchError(f"{self.title}: {what} failed: {self.error_text(code)} (CUDA error {code})")

    def _fail(self, code: int, arguments: tuple[Any, ...]) -> None:
        if code == ARGUMENTS_DO_NOT_FIT:
            raise self._misfit(arguments)
        self._check(code, "launch")

    def _misfit(self, arguments: tuple[Any, ...]) -> Exception:
        names = ("device", "stream", *self.params)
        if len(arguments) != len(names):
            got = f"{len(arguments)}"
            return ArgumentTypeError(self.title, "*slots", f"{len(names)} values ({', '.join(names)})", got)
        for name, kind, value in zip(names, "ip" + self.kinds, arguments, strict=True):
            if not _fits(kind, value):
                return ArgumentTypeError(self.title, name, _KIND_NAMES[kind], f"{type(value).__name__} {value!r}")
        return LaunchError(f"{self.title}: the launcher refused {arguments!r}")

    def __repr__(self) -> str:
        return f"<Kernel {self.title}>"


def _fits(kind: str, value: Any) -> bool:
    try:
        _word(kind, value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def capture_text(title: str, what: str, prewarm: str) -> str:
    """The message of CaptureError: what would have happened, and the two ways to have it happen earlier."""
    return (
        f"{title} would have to be {what} while a CUDA graph is being captured. Call it once before capture, "
        f"with the same shapes and dtypes; `{prewarm}` compiles it ahead of time"
    )


def make_launcher(address: int, kinds: str, fail: Fail) -> Launcher:
    """A callable (device, stream, *slots) for the launch function at `address`: the binder's, or one over ctypes."""
    fast = binder.module()
    return fast.make(address, kinds, fail) if fast else ctypes_launcher(address, kinds, fail)


def ctypes_launcher(address: int, kinds: str, fail: Fail) -> Launcher:
    """The launcher that works without a C compiler; same behaviour as the binder's, several times slower."""
    call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p)(address)
    pack = struct.Struct("=" + kinds.translate(str.maketrans("pid", "Qqd"))).pack

    def launch(*arguments: Any) -> None:
        device, stream, *slots = arguments if len(arguments) == len(kinds) + 2 else (None,) * 2
        try:
            code = call(pack(*slots), device, stream)
        except (struct.error, ctypes.ArgumentError, TypeError, OverflowError):
            code = call_slowly(arguments)
        if code:
            fail(code, arguments)

    def call_slowly(arguments: tuple[Any, ...]) -> int:
        try:
            device, stream, *words = [_word(k, v) for k, v in zip("ip" + kinds, arguments, strict=True)]
        except (TypeError, ValueError, OverflowError):
            return ARGUMENTS_DO_NOT_FIT
        return call(pack(*words), device, stream)

    return launch


def _word(kind: str, value: Any) -> Any:
    """One slot's value as `struct` packs it; raises TypeError or OverflowError if it does not fit."""
    if kind == "d":
        return float(value) if not isinstance(value, (str, bytes)) else _refuse(value)
    if kind == "p" and value is None:
        return 0
    number = value.__index__() if hasattr(value, "__index__") else _refuse(value)
    if not -(2**63) <= number < (2**64 if kind == "p" else 2**63):
        raise OverflowError(value)
    return number % 2**64 if kind == "p" else number


def _refuse(value: Any) -> Any:
    raise TypeError(f"{value!r} is no number")


# --- opening a binary -----------------------------------------------------------------------------------------------

_MISSING_RUNTIME = re.compile(r"(libcudart\.so\.\d+): cannot open")


def open_library(path: Path) -> ctypes.CDLL:
    """dlopen a finished binary, bringing in the CUDA runtime that it needs if the process has none yet."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as problem:
        missing = _MISSING_RUNTIME.search(str(problem))
        if not missing:
            raise CacheError(f"{path} cannot be opened: {problem}") from problem
        _open_runtime(missing.group(1), path)
    return ctypes.CDLL(str(path))


def _open_runtime(name: str, needed_by: Path) -> None:
    # torch's own copy comes first: torch, imported later, must not meet an older runtime under the same name.
    for candidate in _runtime_candidates(name):
        try:
            ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return
    raise CacheError(
        f"{needed_by} needs {name}, which was found nowhere; pip install nvidia-cuda-runtime, or import torch"
    )


def _runtime_candidates(name: str) -> list[str]:
    places = [os.path.join(glob.escape(folder), "nvidia", "*", "lib", name) for folder in sys.path if folder]
    found = [match for place in places for match in glob.glob(place)]
    with contextlib.suppress(ToolchainError):
        found.append(str(Path(toolchain.find_nvcc().cudart).with_name(name)))
    return found
