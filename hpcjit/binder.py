"""Builds `binder.c`, the fast launcher, once per machine and Python version, and keeps it in the kernel cache.

Everything that can go wrong here (no Python.h, no C compiler, no folder) only means that launches go through ctypes.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import shutil
import subprocess
import sysconfig
import threading
import time
from pathlib import Path
from types import ModuleType

from hpcjit import cache, folders, settings
from hpcjit.errors import CacheError

SOURCE = Path(__file__).with_name("binder.c")
HEADER = Path(__file__).with_name("caller.h")
_TIMEOUT_S = 120
_UNTRIED = object()

_lock = threading.Lock()
_module: object = _UNTRIED


def module() -> ModuleType | None:
    """The loaded binder, built at first need; None where that is not possible."""
    global _module
    if _module is _UNTRIED:
        with _lock:
            if _module is _UNTRIED:
                _module = _obtain()
    return _module if isinstance(_module, ModuleType) else None


def start() -> None:
    """Begin to obtain the binder in the background, while a compile runs that will need it."""
    if _module is _UNTRIED:
        threading.Thread(target=module, daemon=True).start()


def _reset_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_reset_lock)


def wanted() -> cache.Wanted:
    """The cache entry of this Python's binder."""
    abi = importlib.machinery.EXTENSION_SUFFIXES[0].strip(".").removesuffix(".so")
    facts = [SOURCE.read_text(), HEADER.read_text(), abi, platform.machine(), platform.python_version()]
    key = hashlib.sha256("\n".join(facts).encode()).hexdigest()
    return cache.Wanted(op=abi, arch="binder", config="binder", source_key=key, key=key)


def _obtain() -> ModuleType | None:
    with contextlib.suppress(CacheError, OSError, ImportError, subprocess.SubprocessError):
        target = wanted()
        entry = cache.find(target) or _build(target)
        return _load(entry.binary) if entry else None
    return None


def _load(path: Path) -> ModuleType | None:
    loader = importlib.machinery.ExtensionFileLoader("hpcjit_binder", str(path))
    spec = importlib.util.spec_from_file_location("hpcjit_binder", path, loader=loader)
    if spec is None:
        return None
    loaded = importlib.util.module_from_spec(spec)
    loader.exec_module(loaded)
    return loaded


def _build(target: cache.Wanted) -> cache.Entry | None:
    root = folders.usable_root() or folders.existing_private_root()
    include = sysconfig.get_path("include")
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))), None)
    if settings.read().require_warm or root is None or compiler is None or not Path(include, "Python.h").is_file():
        return None
    staging = cache.new_staging(root)
    try:
        staged = staging / "entry"
        staged.mkdir(mode=0o700)
        command = [compiler, "-O2", "-fPIC", "-shared", "-I", include, str(SOURCE), "-o", str(staged / cache.BINARY)]
        started = time.perf_counter()
        done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False)
        if done.returncode:
            return None
        seconds = time.perf_counter() - started
        cache.write_manifest(staged, cache.describe(target, {}, "launch binder", " ".join(command), seconds))
        return cache.publish(staged, target.folder(root))
    finally:
        shutil.rmtree(staging, ignore_errors=True)
