"""The call into a finished binary."""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from hpcjit.errors import CacheError, CaptureError, LaunchError

Launcher = Callable[..., None]


def capturing() -> bool:
    """Whether the current CUDA stream is being captured into a graph. Never initialises CUDA or imports torch."""
    torch = sys.modules.get("torch")
    return bool(torch and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def __getattr__(name: str) -> Any:
    # `raw_stream(device_index)` is torch's own function, looked up at first use so that importing this costs no torch.
    if name != "raw_stream":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import torch

    function = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (lambda device_index: 0)
    globals()[name] = function
    return function


class Kernel:
    """A loaded binary. `kernel.launch(device, stream, *slots)` takes ints, floats, bools and None (a null pointer)."""

    launch: Launcher

    def __init__(self, title: str, path: Path, slots: tuple[str, ...], prewarm: str) -> None:
        self.title = title
        self.path = path
        self.slots = slots
        self._prewarm = prewarm
        self._prepared: set[int] = set()
        self._lock = threading.Lock()
        self._library = _open(path)
        self._library.hpcjit_error.restype = ctypes.c_char_p
        self._library.hpcjit_prepare.argtypes = [ctypes.c_int]
        self.kinds = self.error_text(-1)
        if len(self.kinds) != len(slots):
            raise CacheError(f"{path}: takes {len(self.kinds)} slots, the template names {len(slots)}")
        address = ctypes.cast(self._library.hpcjit_launch, ctypes.c_void_p).value
        self.launch = make_launcher(address or 0, self.kinds, self._fail)

    def error_text(self, code: int) -> str:
        """The CUDA runtime's text for an error code."""
        return (self._library.hpcjit_error(code) or b"").decode(errors="replace")

    def prepare(self, device: int) -> None:
        """Load the module on a device and set its attributes; once per device, never while a graph is captured."""
        if device in self._prepared:
            return
        with self._lock:
            if device in self._prepared:
                return
            if capturing():
                raise CaptureError(capture_text(self.title, "loaded", self._prewarm))
            code = self._library.hpcjit_prepare(device)
            if code:
                raise LaunchError(
                    f"{self.title}: preparing device {device} failed: {self.error_text(code)} (CUDA error {code})"
                )
            self._prepared.add(device)

    def _fail(self, code: int) -> NoReturn:
        raise LaunchError(f"{self.title}: launch failed: {self.error_text(code)} (CUDA error {code})")

    def __repr__(self) -> str:
        return f"<Kernel {self.title}>"


def capture_text(title: str, what: str, prewarm: str) -> str:
    """The message of CaptureError: what would have happened, and the two ways to have it happen earlier."""
    return (
        f"{title} would have to be {what} while a CUDA graph is being captured. Call it once before capture, "
        f"with the same shapes and dtypes; `{prewarm}` compiles it ahead of time"
    )


def make_launcher(address: int, kinds: str, fail: Callable[[int], NoReturn]) -> Launcher:
    """A callable (device, stream, *slots) for the launch function at `address`."""
    return ctypes_launcher(address, kinds, fail)


def ctypes_launcher(address: int, kinds: str, fail: Callable[[int], NoReturn]) -> Launcher:
    """The launcher that works everywhere."""
    call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p)(address)
    pack = struct.Struct("=" + kinds.translate(str.maketrans("pid", "Qqd"))).pack

    def launch(device: int, stream: int, *slots: Any) -> None:
        try:
            params = pack(*slots)
        except struct.error:
            params = pack(*[0 if slot is None else slot for slot in slots])
        code = call(params, device, stream)
        if code:
            fail(code)

    return launch


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as problem:
        raise CacheError(f"{path} cannot be opened: {problem}") from problem
