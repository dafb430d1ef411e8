"""The folders of the kernel cache: which there are, which may be trusted, and what to do when none can be written.

Folders are made for their owner alone (0700). A layer that root bakes into an image for other users is opened to them
with `chmod -R a+rX`; folders and files that belong to root and that nobody else can write are trusted.
"""

from __future__ import annotations

import atexit
import os
import shutil
import stat
import tempfile
import warnings
from pathlib import Path

from hpcjit import settings
from hpcjit.errors import CacheError


class CacheWarning(UserWarning):
    """Something about the cache that costs time but not correctness."""


def configured_root() -> Path | None:
    """The writable folder by configuration: HPCJIT_CACHE_DIR, else the user's cache folder; None without a home."""
    chosen = settings.read().cache_dir
    if chosen:
        return chosen.absolute()
    # The same folder as platformdirs.user_cache_dir, whose import takes longer than opening a binary.
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    if not base:
        home = os.path.expanduser("~")
        base = os.path.join(home, ".cache") if os.path.isabs(home) else ""
    return Path(base) / "hpcjit" if os.path.isabs(base) else None


def layers() -> list[Path]:
    """Read-only folders that are searched before the writable one."""
    return [path.absolute() for path in settings.read().cache_path]


_checked: dict[Path, str] = {}  # root -> "" when usable, else what is wrong with it


def root_problem() -> str:
    """Why the configured root cannot be written, with the remedy; empty when it can."""
    root = configured_root()
    if root is None:
        return "there is no home folder; set HPCJIT_CACHE_DIR to a folder for the kernel cache"
    if _checked.get(root) != "" or not os.path.isdir(root):
        _checked[root] = _open_root(root)
    return _checked[root]


def _open_root(root: Path) -> str:
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_trust(root)
    except CacheError as problem:
        return str(problem)
    except OSError as problem:
        return f"{root} cannot be created ({problem.strerror or problem}); set HPCJIT_CACHE_DIR to a writable folder"
    if not os.access(root, os.W_OK | os.X_OK):
        return f"{root} is read-only; set HPCJIT_CACHE_DIR to a writable folder"
    return ""


def usable_root() -> Path | None:
    """The writable root if it can be used, without a word if not."""
    return None if root_problem() else configured_root()


def search_roots() -> list[Path]:
    """Every folder that is searched, in order. A read-only one is searched too; untrusted entries are passed over."""
    root = configured_root()
    return [p for p in [*layers(), *([root] if root else []), *_private.values()] if _readable(p)]


def _readable(folder: Path) -> bool:
    # Not Path.is_dir, which raises where a folder above may not be entered.
    if not os.path.isdir(folder):
        return False
    if os.access(folder, os.R_OK | os.X_OK):
        return True
    warn_once(str(folder), f"hpcjit cannot read the kernel cache {folder}; its owner can run: chmod -R a+rX '{folder}'")
    return False


_private: dict[int, Path] = {}  # by process, so that a forked child does not share (or delete) its parent's


def private_root(reason: str) -> Path:
    """A folder of this process for when the configured one cannot be written. Warns once."""
    warn_once("private", f"hpcjit cannot use its kernel cache, so this process compiles for itself: {reason}")
    pid = os.getpid()
    if pid not in _private:
        _private.clear()
        try:
            _private[pid] = Path(tempfile.mkdtemp(prefix="hpcjit-"))
        except OSError as problem:
            raise CacheError(
                f"no folder can be written for a compile: {reason}; and the temporary one: {problem}"
            ) from problem
        atexit.register(_remove_private, pid)
    return _private[pid]


def existing_private_root() -> Path | None:
    """The folder of this process, if it already had to make one."""
    return _private.get(os.getpid())


def _remove_private(pid: int) -> None:
    if pid == os.getpid() and pid in _private:
        shutil.rmtree(_private[pid], ignore_errors=True)


_warned: set[str] = set()


def warn_once(topic: str, message: str) -> None:
    """Emit a CacheWarning, once per process and topic."""
    if topic not in _warned:
        _warned.add(topic)
        warnings.warn(message, CacheWarning, stacklevel=2)


def check_trust(path: Path) -> None:
    """Raise CacheError when somebody else could have written `path`: another owner, or write access for others."""
    try:
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            status = os.stat(path)
    except OSError as problem:
        raise CacheError(f"{path}: {problem.strerror or problem}") from problem
    if status.st_uid not in (os.geteuid(), 0):
        raise CacheError(
            f"{path} belongs to another user (uid {status.st_uid}), who could plant code in it; "
            "take it over with chown, or set HPCJIT_CACHE_DIR to a folder of your own"
        )
    if status.st_mode & 0o022:
        raise CacheError(
            f"{path} can be written by others (mode {stat.S_IMODE(status.st_mode):o}), who could plant code in it; "
            f"run: chmod -R go-w '{path}', or set HPCJIT_CACHE_DIR to a folder of your own"
        )
