"""Small JSON files in the cache folder that remember answers which are slow to get (compiler versions, header digests).

A memo is a convenience: it may be missing, damaged or unwritable at any time, and two writers may lose each other's
answer. Each answer carries the state of the files that it depends on, so a stale one is never used.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from hpcjit import folders

Stamp = tuple[int, int, int]


def stamp(path: str | Path) -> Stamp:
    """Size, mtime and ctime of a file. ctime cannot be set back, so a replaced file with an old mtime is noticed."""
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def unchanged(path: str | Path, known: object) -> bool:
    """Whether a file still has the stamp `known`, which may have been through JSON."""
    try:
        return isinstance(known, (list, tuple)) and stamp(path) == tuple(known)
    except OSError:
        return False


def read(name: str) -> dict[str, Any]:
    """All answers of the memo `name`."""
    path = _path(name)
    if path is None:
        return {}
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def write(name: str, question: str, answer: object) -> None:
    """Add one answer. A reader never sees half a file."""
    path = _path(name)
    if path is None:
        return
    content = read(name) | {question: answer}
    with contextlib.suppress(OSError):
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{name}-")
        with os.fdopen(handle, "w") as file:
            json.dump(content, file, indent=1)
        os.replace(temporary, path)


def _path(name: str) -> Path | None:
    root = folders.usable_root()
    return root / f"{name}.json" if root else None
