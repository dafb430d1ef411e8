"""Cache entries in one file, to move them to machines that do not compile.

A bundle is a gzipped tar: first `bundle.json` with the size and SHA-256 of every file, then exactly those files, named
`<arch>/<op>/<entry>/kernel.so` and `.../manifest.json`. Import takes nothing else: no other names, no links, no `..`, no
wrong sizes or hashes. Everything is checked in a staging folder before the first entry moves into the cache, one rename
each. The hashes protect against damage; whoever may import a bundle trusts its sender with running code.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import IO, Any

from hpcjit import cache, folders
from hpcjit.cache import BINARY, EVERYTHING, MANIFEST, Entry, Selection
from hpcjit.errors import CacheError

FORMAT = 1
INDEX = "bundle.json"
MAX_INDEX_BYTES = 16 << 20
MAX_FILE_BYTES = 256 << 20

_NAME = re.compile(rf"sm_\d{{2,3}}[af]?/[a-z0-9_]+\.[a-z0-9_]+/[A-Za-z0-9-]{{1,80}}/({BINARY}|{MANIFEST})")


def export_bundle(path: Path, selection: Selection = EVERYTHING) -> list[Entry]:
    """Write the selected entries of all cache folders to `path` and return them. Each is verified first."""
    chosen = {_name_of(entry): entry for entry in reversed(cache.entries(selection))}
    if not chosen:
        raise CacheError("no cache entry matches: nothing to export")
    contents: dict[str, bytes] = {}
    for name, entry in sorted(chosen.items()):
        entry.verify()
        contents |= {f"{name}/{file}": (entry.path / file).read_bytes() for file in (BINARY, MANIFEST)}
    index = {"format": FORMAT, "files": {name: _facts(content) for name, content in contents.items()}}
    try:
        _write(path, index, contents)
    except OSError as failure:  # names a temporary file
        raise CacheError(f"bundle {path} cannot be written: {failure.strerror}") from failure
    return list(chosen.values())


def _write(path: Path, index: dict[str, Any], contents: dict[str, bytes]) -> None:
    """The file appears whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            _add(archive, INDEX, json.dumps(index, indent=1).encode())
            for name, content in contents.items():
                _add(archive, name, content)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def import_bundle(path: Path) -> list[Entry]:
    """Add the entries of a bundle to the writable cache folder and return them; CacheError, and no change, if it is bad."""
    problem, root = folders.root_problem(), folders.usable_root()
    if root is None:
        raise CacheError(f"nothing can be imported: {problem}")
    staging = cache.new_staging(root)
    try:
        try:
            with tarfile.open(path, mode="r:*") as archive:
                names = _unpack(archive, staging)
        except (OSError, EOFError, ValueError, tarfile.TarError) as failure:
            why = getattr(failure, "strerror", None) or str(failure).partition("\n")[0].rstrip(":")
            raise CacheError(f"it is not a readable bundle: {why}") from failure
        staged = [_checked(staging / name) for name in names]
        return [cache.publish(entry.path, root / _name_of(entry)) for entry in staged]
    except CacheError as failure:
        raise CacheError(f"bundle {path} was not imported: {failure}") from failure
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _name_of(entry: Entry) -> str:
    return "/".join(entry.path.parts[-3:])


def _facts(content: bytes) -> dict[str, Any]:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), 0o600
    archive.addfile(member, io.BytesIO(content))


def _unpack(archive: tarfile.TarFile, staging: Path) -> list[str]:
    """Write every listed file below `staging` and return the names of the entries."""
    expected = _read_index(archive)
    missing = set(expected)
    for member in archive:
        if member.name == INDEX:
            continue
        if member.name not in missing:
            raise CacheError(f"it holds {member.name!r}, which its index does not list or lists once")
        missing.remove(member.name)
        content = _content(archive, member)
        if _facts(content) != expected[member.name]:
            raise CacheError(f"{member.name} differs from its size or hash in the index")
        target = staging / member.name
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        target.write_bytes(content)
        target.chmod(0o700)
    if missing:
        raise CacheError(f"it lacks {min(missing)!r}, which its index lists")
    return sorted({name.rpartition("/")[0] for name in expected})


def _read_index(archive: tarfile.TarFile) -> dict[str, dict[str, Any]]:
    first = archive.next()
    if first is None or first.name != INDEX or not first.isreg() or first.size > MAX_INDEX_BYTES:
        raise CacheError(f"its first file is not {INDEX}")
    index = json.loads(_stream(archive, first).read())
    files = index.get("files") if isinstance(index, dict) and index.get("format") == FORMAT else None
    if not isinstance(files, dict) or not files:
        raise CacheError(f"its index is not of format {FORMAT} or lists no files")
    for name in files:
        if not _NAME.fullmatch(name):
            raise CacheError(f"its index lists {name!r}, which is no file of a cache entry")
        other = MANIFEST if name.endswith(BINARY) else BINARY
        if f"{name.rpartition('/')[0]}/{other}" not in files:
            raise CacheError(f"its index lists {name!r} without its {other}")
    return files


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    if not member.isreg():
        raise CacheError(f"{member.name} is not a regular file")
    if member.size > MAX_FILE_BYTES:
        raise CacheError(f"{member.name} is larger than {MAX_FILE_BYTES >> 20} MiB")
    return _stream(archive, member).read()


def _stream(archive: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    stream = archive.extractfile(member)
    if stream is None:
        raise CacheError(f"{member.name} has no content")
    return stream


def _checked(folder: Path) -> Entry:
    """A staged entry whose manifest agrees with its place and its binary."""
    entry = cache.read_entry(folder)
    arch, op, name = folder.parts[-3:]
    if (entry.arch, entry.op) != (arch, op) or not name.endswith(f"-{entry.key[:12]}"):
        raise CacheError(f"{arch}/{op}/{name} describes {entry.op} for {entry.arch}, key {entry.key[:12]}")
    entry.verify()
    return entry
