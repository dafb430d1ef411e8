"""Tables of targets: JSON files with lists of rows, each with an operator, its shape in some form, and `target_us`."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcjit.errors import FormatError


@dataclass(frozen=True)
class Target:
    """What a case should reach, and what others were measured at."""

    target_us: float
    peers_us: dict[str, float] = field(default_factory=dict)


class Targets:
    """Targets by operator and case. An operator may be given without its group, a case as its name or as `shape`."""

    def __init__(self, rows: dict[tuple[str, str], Target]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def of(self, op: str, case: str) -> Target | None:
        """The target of one case, or None."""
        for name in (op, op.partition(".")[2]):
            for label in (case, _shape_label(re.findall(r"\d+", case))):
                if found := self._rows.get((name, label)):
                    return found
        return None


def load(path: str | os.PathLike[str]) -> Targets:
    """Read a table of targets.

    Raises:
        FormatError: not such a file; names the row.
        OSError: it cannot be read.
    """
    where = os.fspath(path)
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: not JSON: {error}") from None
    if not isinstance(document, dict):
        raise FormatError(f"{where}: must be a JSON object of lists of rows, got a {type(document).__name__}")
    rows: dict[tuple[str, str], Target] = {}
    for section, entries in document.items():
        for number, row in enumerate(entries if isinstance(entries, list) else ()):
            if isinstance(row, dict) and "op" in row and "target_us" in row:
                key, target = _row(f"{where}: {section}[{number}]", row)
                rows[key] = target
    if not rows:
        raise FormatError(f"{where}: holds no row with 'op' and 'target_us'")
    return Targets(rows)


def _row(where: str, row: dict[str, Any]) -> tuple[tuple[str, str], Target]:
    op, target, peers = row["op"], row["target_us"], row.get("peers_us") or {}
    if not isinstance(op, str):
        raise FormatError(f"{where}: 'op' must be a string, got {op!r}")
    if not _positive(target):
        raise FormatError(f"{where}: 'target_us' must be a positive number, got {target!r}")
    if not isinstance(peers, dict):
        raise FormatError(f"{where}: 'peers_us' must be an object, got {peers!r}")
    return (op, _label(where, row)), Target(float(target), {k: float(v) for k, v in peers.items() if _positive(v)})


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _label(where: str, row: dict[str, Any]) -> str:
    """The name that the case of a row carries."""
    if isinstance(row.get("shape"), list):
        return _shape_label(row["shape"])
    for words in (("heads", "dtype", "case"), ("model", "mode", "num_tokens"), ("case",)):
        if all(word in row for word in words):
            return " ".join(str(row[word]) for word in words)
    if all(word in row for word in "NKM"):
        return f"N={row['N']} K={row['K']} M={row['M']}"
    raise FormatError(
        f"{where}: names no case: needs 'shape', 'case', 'model' with 'mode' and 'num_tokens', or N, K, M"
    )


def _shape_label(sizes: list[Any]) -> str:
    return "x".join(str(size) for size in sizes)
