"""One lock per cache key, so that many processes that want the same kernel compile it once.

The lock only saves work. Whoever cannot have it (a file system without locks, a holder that hangs) builds on its own;
private staging and the atomic rename keep that correct. The operating system frees the lock of a dead holder.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpcjit import settings

WAIT_LIMIT_S = 600.0
FIRST_MESSAGE_S = 3.0
MESSAGE_EVERY_S = 15.0
_POLL_S = 0.05


@contextlib.contextmanager
def held(root: Path, key: str, title: str) -> Iterator[bool]:
    """Hold the lock of `key` below `root`; yields whether it is held. Never raises, never waits past the limit."""
    lock = _acquire(root / "locks" / f"{key[:32]}.lock", title)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            with contextlib.suppress(OSError):
                lock.release()


def _acquire(path: Path, title: str) -> Any:
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        lock = _file_lock(path)
        if _wait(lock, path, title):
            _note_owner(path)
            return lock
    except OSError:  # ENOLCK, ENOSYS, a full or read-only disk
        pass
    return None


def _file_lock(path: Path) -> Any:
    import filelock

    try:
        # Without real locks, filelock would fall back to a file whose existence is the lock and outlives its holder.
        return filelock.FileLock(path, thread_local=False, fallback_to_soft=False)  # type: ignore[call-arg]
    except TypeError:
        return filelock.FileLock(path, thread_local=False)


def _wait(lock: Any, path: Path, title: str) -> bool:
    import filelock

    started = time.monotonic()
    next_message = started + FIRST_MESSAGE_S
    while True:
        now = time.monotonic()
        left = started + WAIT_LIMIT_S - now
        with contextlib.suppress(filelock.Timeout):
            lock.acquire(timeout=max(0.0, min(left, next_message - now)), poll_interval=_POLL_S)
            return True
        if left <= 0:
            _say(f"hpcjit: gave up waiting for {title} after {WAIT_LIMIT_S:.0f} s; compiling it here")
            return False
        if time.monotonic() >= next_message:
            next_message += MESSAGE_EVERY_S
            waited = time.monotonic() - started
            _say(f"hpcjit: waiting {waited:.0f} s for {title}, compiled by {owner_of(path)}; lock {path}")


def owner_of(path: Path) -> str:
    """Who holds the lock file `path`, by the note beside it."""
    try:
        note = json.loads(path.with_suffix(".owner").read_text())
        return f"process {note['pid']} on {note['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "an unknown process"


def _note_owner(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.with_suffix(".owner").write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))


def _say(message: str) -> None:
    if settings.read().verbose and sys.stderr is not None:
        print(message, file=sys.stderr, flush=True)
