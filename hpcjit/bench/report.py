"""Benchmark rows as a terminal table, Markdown and JSONL."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hpcjit.bench.environment import Ceilings, Environment
from hpcjit.bench.runner import ORDER, Row
from hpcjit.errors import FormatError
from hpcjit.spec import KernelBackend

RESULTS = "results.jsonl"
TABLES = "results.md"

_JIT = KernelBackend.JIT.value
_BACKENDS = [backend.value for backend in ORDER]
_NOT_IN_JSON = ("environment", "load")
_ONLY_IN_FILES = ("p20-p80", "floor us")  # a terminal is not wide enough


Cell = Callable[[Row], str]


def _number(value: float | None, digits: int = 2) -> str:
    if value is None:
        return ""
    return f"{value:.{digits}f}" if value < 1000 else f"{value:.0f}"


def _spread(row: Row) -> str:
    return "" if row.cold_p20 is None else f"{_number(row.cold_p20)}-{_number(row.cold_p80)}"


def _rate(row: Row) -> str:
    return _number(row.gbps, 0) if row.gbps is not None else _number(row.tflops, 1)


def _error(row: Row) -> str:
    return "" if row.err is None else f"{row.err:.1e}" + ("" if row.ok else "!")


def _over(peer: str) -> Cell:
    """Of the JIT row: the time of `peer` over its own."""
    return lambda row: f"{row.speedup[peer]:.2f}" if peer in row.speedup else ""


def _verdict(row: Row) -> str:
    if row.target_us is None or row.us is None:
        return ""
    ratio = row.us / row.target_us
    return "met" if ratio <= 1 else f"{ratio:.2f}x"


# Heading, cell, whether it is a number.
COLUMNS: tuple[tuple[str, Cell, bool], ...] = (
    ("case", lambda row: row.case, False),
    ("backend", lambda row: row.backend, False),
    ("cold us", lambda row: _number(row.cold_us), True),
    ("p20-p80", _spread, True),
    ("hot us", lambda row: _number(row.hot_us), True),
    ("host us", lambda row: _number(row.host_us), True),
    ("GB/s", _rate, True),
    ("% ceiling", lambda row: _number(row.pct_of_ceiling, 1), True),
    ("floor us", lambda row: _number(row.floor_us), True),
    ("error", _error, True),
)
TARGET_COLUMNS: tuple[tuple[str, Cell, bool], ...] = (
    ("target us", lambda row: _number(row.target_us), True),
    ("verdict", _verdict, True),
)


def _columns(rows: Sequence[Row]) -> tuple[tuple[str, Cell, bool], ...]:
    """Columns for these rows: the speed-up over each backend that hpcjit was compared with, and targets if there are any."""
    peers = [name for name in _BACKENDS if any(name in row.speedup for row in rows)]
    speedups = tuple((f"x {name}", _over(name), True) for name in peers)
    return COLUMNS + speedups + (TARGET_COLUMNS if any(row.target_us is not None for row in rows) else ())


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Rows by operator, then case as it came, then backend."""
    cases = {key: i for i, key in enumerate(dict.fromkeys((row.op, row.case) for row in rows))}
    return sorted(rows, key=lambda row: (row.op, cases[row.op, row.case], _BACKENDS.index(row.backend)))


# --- terminal -------------------------------------------------------------------------------------------------------


def print_tables(console: Console, rows: Sequence[Row], environment: Environment, ceilings: Ceilings) -> None:
    """One table per operator and the footer."""
    for op in dict.fromkeys(row.op for row in rows):
        console.print(_table(op, [row for row in rows if row.op == op]))
    for row in rows:
        if row.error:
            console.print(f"failed: {row.command}: {row.error}", style="red", highlight=False, markup=False)
    for line in footer(rows, environment, ceilings):
        console.print(line, highlight=False, markup=False)


def _table(op: str, rows: Sequence[Row]) -> Table:
    table = Table(title=op, title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False)
    columns = [column for column in _columns(rows) if column[0] not in _ONLY_IN_FILES]
    for heading, _, numeric in columns:
        table.add_column(heading, justify="right" if numeric else "left", no_wrap=True)
    last = ""
    for row in rows:
        cells = [_escape(cell(row)) for _, cell, _ in columns]
        if row.error:
            cells[2] = "failed"
        if row.case == last:
            cells[0] = ""
        last = row.case
        table.add_row(*cells, style=_style(row))
    return table


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _style(row: Row) -> str:
    if not row.ok:
        return "red"
    return "bold" if row.backend == _JIT else ""


# --- summary --------------------------------------------------------------------------------------------------------


def footer(rows: Sequence[Row], environment: Environment, ceilings: Ceilings) -> list[str]:
    """Geometric means, worst ratios, what it ran on, and how to repeat it."""
    facts = environment
    versions = f"torch {facts.torch}, CUDA {facts.cuda or 'none'}, python {facts.python}"
    lines = [_summary(peer, ratios) for peer, ratios in _ratios(rows).items()]
    graded = [row for row in rows if row.target_us and row.us and row.backend == _JIT]
    if graded:
        met = sum(row.us <= row.target_us for row in graded if row.us and row.target_us)
        lines.append(f"targets met: {met} of {len(graded)}")
    known = {"driver": facts.driver, "clocks": facts.clocks}  # none of a CPU
    lines.append(", ".join([facts.gpu, *(f"{name} {text}" for name, text in known.items() if text), versions]))
    if ceilings.copy:
        lines.append(f"ceiling: copy {ceilings.copy / 1e12:.2f} TB/s ({ceilings.source})")
    lines.append(f"hpcjit {facts.hpcjit}, commit {facts.commit}")
    lines.append("cold: graph of rotating copies (at most 200); hot: graph over one copy; host: one eager call")
    lines.append("x BACKEND: its time over ours. Repeat a row: hpcjit bench OPERATOR --case CASE --backend BACKEND")
    return lines


def _ratios(rows: Sequence[Row]) -> dict[str, list[tuple[float, str]]]:
    found: dict[str, list[tuple[float, str]]] = {}
    for row in rows:
        for peer, ratio in row.speedup.items():
            found.setdefault(peer, []).append((ratio, f"{row.op} {row.case}"))
    return found


def _summary(peer: str, ratios: Sequence[tuple[float, str]]) -> str:
    mean = math.exp(sum(math.log(ratio) for ratio, _ in ratios) / len(ratios))
    worst, where = min(ratios)
    return f"over {peer}: geometric mean {mean:.2f}x of {len(ratios)} cases, worst {worst:.2f}x ({where})"


# --- files ----------------------------------------------------------------------------------------------------------


def to_json(row: Row) -> dict[str, Any]:
    """The row as it stands in a JSONL file."""
    facts = {name: _rounded(value) for name, value in dataclasses.asdict(row).items() if name not in _NOT_IN_JSON}
    if row.target_us is not None:
        facts["verdict"] = _verdict(row)
    return {**facts, **row.environment}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    return value


def from_json(where: str, line: str) -> Row:
    """Inverse of `to_json`.

    Raises:
        FormatError: not such a row.
    """
    try:
        facts = json.loads(line)
    except ValueError as error:
        raise FormatError(f"{where}: not JSON: {error}") from None
    fields = {field.name for field in dataclasses.fields(Row)}
    if not isinstance(facts, dict) or not all(isinstance(facts.get(name), str) for name in ("op", "case", "backend")):
        raise FormatError(f"{where}: must be an object with strings 'op', 'case' and 'backend'")
    if facts["backend"] not in _BACKENDS:
        raise FormatError(f"{where}: field 'backend' must be one of {', '.join(_BACKENDS)}, got {facts['backend']!r}")
    rest = {name: value for name, value in facts.items() if name not in fields and name != "verdict"}
    return Row(**{name: value for name, value in facts.items() if name in fields}, environment=rest)


def read_rows(path: str | os.PathLike[str]) -> list[Row]:
    """Rows of a results file; none when there is no such file."""
    path = Path(path)
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [from_json(f"{path}: line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]


def merged(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """Old rows with the new ones in their place."""
    return list({**{row.key: row for row in old}, **{row.key: row for row in new}}.values())


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Replace a results file as a whole."""
    text = "".join(json.dumps(to_json(row), allow_nan=False) + "\n" for row in rows)
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    staged.write_text(text, encoding="utf-8")
    os.replace(staged, path)


def markdown(rows: Sequence[Row], environment: Environment, ceilings: Ceilings) -> str:
    """All tables and the footer as one Markdown page."""
    parts = [f"# Benchmark on {environment.gpu}", ""]
    for op in dict.fromkeys(row.op for row in rows):
        parts += [f"## {op}", "", *_markdown_table([row for row in rows if row.op == op]), ""]
    parts += ["## Summary", "", *(f"- {line}" for line in footer(rows, environment, ceilings)), ""]
    return "\n".join(parts)


def _markdown_table(rows: Sequence[Row]) -> list[str]:
    columns = _columns(rows)
    lines = [
        "| " + " | ".join(heading for heading, _, _ in columns) + " |",
        "|" + "|".join("--:" if numeric else "--" for _, _, numeric in columns) + "|",
    ]
    for row in rows:
        cells = [cell(row).replace("|", "\\|") for _, cell, _ in columns]
        if row.error:
            cells[2] = "failed"
        lines.append("| " + " | ".join(cells) + " |")
    return lines
