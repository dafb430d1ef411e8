"""The kernel cache on disk: folders, trust, look-up, publishing, listing.

    <root>/<arch>/<op>/<readable-config>-<key12>/kernel.so, manifest.json     finished binaries
    <root>/staging/   builds in progress, one private folder per attempt
    <root>/locks/     one lock file per key, with a note of who holds it
    <root>/logs/      logs and sources of failed compiles
    <root>/toolchain.json, headers.json    memos

An entry has two keys. `source_key` is the SHA-256 of what is compiled: generated source, every reachable header, slots,
architecture, flags, host machine, ABI version. `key` adds the versions of nvcc and the host compiler. A process that
can compile asks for `key`. One that cannot (no nvcc in a runtime image) or must not (HPCJIT_REQUIRE_WARM) takes the
newest valid entry with its `source_key`: the same code, built by whichever compiler baked the image.

A binary is machine code that runs with our rights, so nothing is opened from a folder that somebody else can write.
Correctness rests on private staging, verification and an atomic rename; locks only save work.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hpcjit.errors import CacheError
from hpcjit.folders import check_trust, root_problem, search_roots, usable_root, warn_once

FORMAT = 1
BINARY = "kernel.so"
MANIFEST = "manifest.json"
STALE_AFTER_S = 3600
_TOUCH_AFTER_S = 3600


@dataclass(frozen=True)
class Wanted:
    """What a caller looks for: the names that give the folder, and the two keys (`key` is None without a compiler)."""

    op: str
    arch: str
    config: str
    source_key: str
    key: str | None

    def folder(self, root: Path) -> Path:
        return root / self.arch / self.op / f"{self.config}-{(self.key or self.source_key)[:12]}"


@dataclass(frozen=True)
class Entry:
    """One finished binary with its manifest."""

    path: Path
    manifest: dict[str, Any]

    @property
    def binary(self) -> Path:
        return self.path / BINARY

    @property
    def op(self) -> str:
        return str(self.manifest["op"])

    @property
    def arch(self) -> str:
        return str(self.manifest["arch"])

    @property
    def key(self) -> str:
        return str(self.manifest["key"])

    @property
    def identity(self) -> tuple[str, ...]:
        """What the entry claims to be."""
        return tuple(str(self.manifest[name]) for name in ("op", "arch", "key", "source_key"))

    @property
    def config(self) -> str:
        """The config as one readable line."""
        return str(self.manifest["config_text"])

    @property
    def size(self) -> int:
        """Bytes of the binary."""
        return int(self.manifest["binary_bytes"])

    @property
    def last_used(self) -> float:
        """Unix time of the last load, to within an hour."""
        try:
            return (self.path / MANIFEST).stat().st_mtime
        except OSError:
            return 0.0

    def verify(self) -> None:
        """Raise CacheError unless folder and binary are trusted and the binary is the one the manifest describes."""
        check_trust(self.path)
        check_trust(self.binary)
        try:
            content = self.binary.read_bytes()
        except OSError as problem:
            raise CacheError(f"{self.binary}: {problem.strerror or problem}") from problem
        if len(content) != self.size:
            raise CacheError(f"{self.binary}: has {len(content)} bytes, its manifest says {self.size}")
        if hashlib.sha256(content).hexdigest() != self.manifest["sha256"]:
            raise CacheError(f"{self.binary}: content differs from the hash in its manifest")

    def touch(self) -> None:
        """Note the use, at most once an hour; silently not on a read-only disk."""
        if time.time() - self.last_used > _TOUCH_AFTER_S:
            with contextlib.suppress(OSError):
                os.utime(self.path / MANIFEST)


# --- look-up --------------------------------------------------------------------------------------------------------


def find(wanted: Wanted, any_compiler: bool = False) -> Entry | None:
    """The verified entry for `wanted`, or None. Damaged and untrusted ones are reported once and passed over."""
    for root in search_roots():
        for entry in _candidates(root, wanted, any_compiler or wanted.key is None):
            try:
                for folder in (root, root / wanted.arch, root / wanted.arch / wanted.op):
                    check_trust(folder)
                entry.verify()
            except CacheError as problem:
                warn_once(str(entry.path), f"hpcjit does not use a cached kernel: {problem}")
                continue
            entry.touch()
            return entry
    return None


def _candidates(root: Path, wanted: Wanted, any_compiler: bool) -> list[Entry]:
    """Entries with a whole manifest that are about what is wanted, newest first."""
    if any_compiler:
        found = [e for f in _folders_like(root / wanted.arch / wanted.op, wanted.config) for e in _read_or_warn(f)]
        fitting = [e for e in found if e.manifest["source_key"] == wanted.source_key and e.arch == wanted.arch]
        return sorted(fitting, key=lambda e: float(e.manifest.get("created", 0)), reverse=True)
    folder = wanted.folder(root)
    if not os.path.isdir(folder):
        return []
    found = _read_or_warn(folder)
    if found and found[0].identity != (wanted.op, wanted.arch, wanted.key, wanted.source_key):
        warn_once(str(folder), f"hpcjit does not use a cached kernel: {folder} holds {found[0].op} for {found[0].arch}")
        return []
    return found


def _folders_like(parent: Path, config: str) -> list[Path]:
    try:
        return [folder for folder in parent.iterdir() if folder.name.startswith(f"{config}-")]
    except OSError:
        return []


def _read_or_warn(folder: Path) -> list[Entry]:
    try:
        return [read_entry(folder)]
    except CacheError as problem:
        warn_once(str(folder), f"hpcjit does not use a cached kernel: {problem}")
        return []


_MANIFEST_TYPES: dict[str, type] = {
    "op": str,
    "arch": str,
    "config": dict,
    "config_text": str,
    "key": str,
    "source_key": str,
    "sha256": str,
    "binary_bytes": int,
}


def read_entry(folder: Path) -> Entry:
    """Read the manifest of an entry; CacheError if it is missing, damaged or of another format."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError) as problem:
        raise CacheError(f"{folder}: no readable {MANIFEST} ({problem})") from problem
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CacheError(f"{folder}: {MANIFEST} is not of format {FORMAT}")
    wrong = [name for name, kind in _MANIFEST_TYPES.items() if not isinstance(manifest.get(name), kind)]
    if wrong:
        raise CacheError(f"{folder}: {MANIFEST} lacks {', '.join(wrong)}")
    return Entry(folder, manifest)


# --- publishing -----------------------------------------------------------------------------------------------------


def new_staging(root: Path) -> Path:
    """A fresh private folder under `root` for one attempt; leftovers of killed builds are removed on the way."""
    base = root / "staging"
    base.mkdir(mode=0o700, exist_ok=True)
    _sweep(base)
    folder = base / f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
    folder.mkdir(mode=0o700)
    return folder


def _sweep(base: Path) -> None:
    oldest = time.time() - STALE_AFTER_S
    with contextlib.suppress(OSError):
        for folder in base.iterdir():
            with contextlib.suppress(OSError):
                if folder.stat().st_mtime < oldest:
                    shutil.rmtree(folder, ignore_errors=True)


def describe(wanted: Wanted, config: dict[str, Any], text: str, command: str, seconds: float) -> dict[str, Any]:
    """The part of a manifest that every entry has, before its binary is measured."""
    return {
        "op": wanted.op,
        "arch": wanted.arch,
        "config": config,
        "config_text": text,
        "key": wanted.key,
        "source_key": wanted.source_key,
        "command": command,
        "compile_seconds": round(seconds, 3),
        "created": time.time(),
    }


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Complete a staged entry: size and hash of its binary, then the manifest, all on disk before it returns."""
    content = (folder / BINARY).read_bytes()
    facts = {"format": FORMAT, **manifest, "binary_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / MANIFEST).write_text(json.dumps(facts, indent=1) + "\n")
    os.chmod(folder / BINARY, 0o700)
    for path in (folder / BINARY, folder / MANIFEST, folder):
        _fsync(path)


def publish(staged: Path, final: Path) -> Entry:
    """Move a complete staged entry into place in one step. A valid entry that is already there wins.

    When the move keeps failing (a network file system that contradicts itself) the staged folder itself is the result:
    it serves this process and is swept later.
    """
    ours = read_entry(staged)
    for attempt in range(5):
        try:
            for folder in (final.parent.parent, final.parent):
                folder.mkdir(mode=0o700, exist_ok=True)
            os.rename(staged, final)
        except OSError:
            with contextlib.suppress(CacheError):
                winner = read_entry(final)
                winner.verify()
                if winner.identity == ours.identity:
                    return winner
            _set_aside(final, staged.parent)
            time.sleep(0.01 * attempt)
        else:
            with contextlib.suppress(OSError):
                _fsync(final.parent)
            return read_entry(final)
    return ours


def _set_aside(bad: Path, staging: Path) -> None:
    """Take a bad entry out of the way. Processes that have it mapped keep their copy."""
    with contextlib.suppress(OSError):
        grave = staging / f"replaced-{uuid.uuid4().hex[:12]}"
        os.rename(bad, grave)
        shutil.rmtree(grave, ignore_errors=True)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- listing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Selection:
    """Which entries an operation is about; an empty selection is all of them."""

    op: str = "*"  # shell pattern
    arch: str = "*"  # shell pattern
    key: str = ""  # prefix
    unused_for_s: float = 0.0

    def matches(self, entry: Entry) -> bool:
        return (
            fnmatchcase(entry.op, self.op)
            and fnmatchcase(entry.arch, self.arch)
            and entry.key.startswith(self.key)
            and time.time() - entry.last_used >= self.unused_for_s
        )


EVERYTHING = Selection()


def entries(selection: Selection = EVERYTHING, root: Path | None = None) -> list[Entry]:
    """Entries with a readable manifest in `root`, or in all layers and the configured folder. Not verified."""
    found = []
    for folder in entry_folders(root):
        with contextlib.suppress(CacheError):
            entry = read_entry(folder)
            if selection.matches(entry):
                found.append(entry)
    return found


def entry_folders(root: Path | None = None) -> Iterator[Path]:
    """Every folder in the place of an entry, readable or not."""
    for base in [root] if root else search_roots():
        for manifest in sorted(base.glob(f"sm_*/*/*/{MANIFEST}")):
            yield manifest.parent


def remove(selection: Selection = EVERYTHING) -> list[Entry]:
    """Delete the selected entries of the writable folder and return them."""
    root = usable_root()
    if root is None:
        raise CacheError(f"nothing can be removed: {root_problem()}")
    gone = entries(selection, root)
    (root / "staging").mkdir(mode=0o700, exist_ok=True)
    for entry in gone:
        _set_aside(entry.path, root / "staging")
    return gone
