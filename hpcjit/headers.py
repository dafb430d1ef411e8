"""Content digest of every header that a generated source can reach, for the cache key.

`#include` lines are resolved as text, in the compiler's search order, against our own include folders; conditionals
are ignored, so the digest covers at least what the compiler reads. Headers found in none of the folders (the CUDA
toolkit's, the system's) are covered by the compiler versions in the key. A computed `#include MACRO` pulls in its whole
folder.

Names in the digest are relative to their folder: moving an installation changes nothing. File times play no role in it,
but a file whose size, mtime and ctime did not change is not read again in the same process. CuTe's closure is hundreds
of files, so its digest is also kept in `headers.json` in the cache folder, guarded by these three values of each.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from hpcjit import memo

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>|([A-Za-z_]\w*))', re.MULTILINE)

Includes = tuple[tuple[str, str], ...]  # (form, name); form is "quote", "angle" or "macro"

_scans: dict[str, tuple[memo.Stamp, str, Includes]] = {}


def digest(source: str, folders: Sequence[Path], library: Path | None = None) -> str:
    """SHA-256 over all headers reachable from `source` in `folders`, and in the big `library` folder."""
    found, entries = _closure(_includes(source.encode()), [str(f) for f in folders], str(library) if library else None)
    return _summary(found, _library_digest(str(library), entries) if entries else "")


def reachable(source: str, folders: Sequence[Path]) -> list[str]:
    """Relative names of the headers of `folders` that `digest` covers."""
    return sorted(_closure(_includes(source.encode()), [str(f) for f in folders], None)[0])


def _summary(found: dict[str, str], extra: str = "") -> str:
    lines = [f"{name} {_scan(path)[0]}" for name, path in sorted(found.items())]
    return hashlib.sha256("\n".join([*lines, extra]).encode(errors="surrogateescape")).hexdigest()


def _closure(includes: Includes, roots: list[str], library: str | None) -> tuple[dict[str, str], set[str]]:
    """Headers under `roots` by relative name, and the names that only `library` has."""
    found: dict[str, str] = {}
    entries: set[str] = set()
    todo = [("", includes)]
    while todo:
        folder, names = todo.pop()
        for form, name in names:
            targets = _targets(form, name, folder, roots)
            if not targets and library and os.path.isfile(os.path.join(library, name)):
                entries.add(name)
            for relative, path in targets:
                if relative not in found:
                    found[relative] = path
                    todo.append((os.path.dirname(path), _scan(path)[1]))
    return found, entries


def _targets(form: str, name: str, folder: str, roots: list[str]) -> list[tuple[str, str]]:
    """(relative name, path) of what one include line may read."""
    if form == "macro":
        return _everything(folder, roots)
    for base in ([folder] if form == "quote" and folder else []) + roots:
        path = os.path.normpath(os.path.join(base, name))
        if os.path.isfile(path):
            root = next((r for r in roots if path.startswith(r + os.sep)), base)
            return [(os.path.relpath(path, root), path)]
    return []


def _everything(folder: str, roots: list[str]) -> list[tuple[str, str]]:
    # CuTe computes the names of standard headers only, which the compiler version covers.
    root = next((r for r in roots if (folder + os.sep).startswith(r + os.sep)), "")
    if not root or os.path.isdir(os.path.join(root, "cutlass")):
        return []
    files = (os.path.join(parent, name) for parent, _, names in os.walk(root) for name in names)
    return [(os.path.relpath(path, root), path) for path in files]


def _includes(text: bytes) -> Includes:
    names = []
    for quoted, angled, macro in _INCLUDE.findall(text):
        form = "quote" if quoted else "angle" if angled else "macro"
        names.append((form, (quoted or angled or macro).decode(errors="surrogateescape")))
    return tuple(names)


def _scan(path: str) -> tuple[str, Includes]:
    """Digest and include lines of one file, read again only when its stamp changed (ctime cannot be set back)."""
    stamp = memo.stamp(path)
    known = _scans.get(path)
    if known and known[0] == stamp:
        return known[1], known[2]
    with open(path, "rb") as file:
        text = file.read()
    result = hashlib.sha256(text).hexdigest(), _includes(text)
    _scans[path] = (stamp, *result)
    return result


# --- the big library ------------------------------------------------------------------------------------------------


def _library_digest(root: str, entries: set[str]) -> str:
    question = f"{root}: {' '.join(sorted(entries))}"
    stored = memo.read("headers").get(question)
    if stored and all(memo.unchanged(os.path.join(root, name), stamp) for name, stamp in stored["files"].items()):
        return str(stored["digest"])
    found = _closure(tuple(("angle", name) for name in sorted(entries)), [root], None)[0]
    answer = _summary(found)
    memo.write("headers", question, {"digest": answer, "files": {name: memo.stamp(found[name]) for name in found}})
    return answer
