"""`hpcjit trace`: what a recorded trace holds."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from hpcjit import trace_file
from hpcjit.cli import _show
from hpcjit.naming import resolve_op
from hpcjit.trace_file import Trace, TraceRecord


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Record one with hpcjit.trace.enable_fused_op_trace() and hpcjit.trace.save(path). Traces also feed "
        "'hpcjit prewarm --trace' and 'hpcjit bench --from'."
    )
    parser.add_argument(
        "action", choices=("show", "summary"), help="show every record, or calls per operator and backend"
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="a saved trace")
    parser.add_argument("op", nargs="*", default=[], metavar="OP", help="operators to keep (default: all)")
    _show.add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    trace = trace_file.load(options.file)
    wanted = [resolve_op(name) for name in options.op]
    records = sorted(
        (record for record in trace if not wanted or record.op in wanted), key=lambda record: -record.count
    )
    if options.action == "summary":
        _summary(records, trace, options.json)
    elif options.json:
        _show.print_json([_as_json(record) for record in records])
    else:
        _print(records, trace)
    return 0


def _as_json(record: TraceRecord) -> dict[str, Any]:
    return {
        "op": record.op,
        "backend": record.backend.value,
        "count": record.count,
        "tensors": {name: str(signature) for name, signature in record.tensors.items()},
        "scalars": record.scalars,
        "samples": len(record.values),
    }


def _print(records: list[TraceRecord], trace: Trace) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("calls", justify="right")
    table.add_column("operator", no_wrap=True)
    table.add_column("backend")
    table.add_column("arguments")
    for record in records:
        words = [f"{name} {signature}" for name, signature in record.tensors.items()]
        words += [f"{name}={value}" for name, value in record.scalars.items()]
        table.add_row(str(record.count), record.op, record.backend.value, escape(", ".join(words)))
    out = _show.console()
    out.print(table)
    out.print(_total(records, trace))


def _total(records: list[TraceRecord], trace: Trace) -> str:
    text = f"{len(records)} signatures, {sum(record.count for record in records)} calls"
    return f"{text}; {trace.dropped_calls} calls beyond the limit" if trace.dropped_calls else text


def _summary(records: list[TraceRecord], trace: Trace, as_json: bool) -> None:
    calls: Counter[tuple[str, str]] = Counter()
    signatures: Counter[tuple[str, str]] = Counter()
    for record in records:
        key = record.op, record.backend.value
        calls[key] += record.count
        signatures[key] += 1
    rows = [
        {"op": op, "backend": backend, "calls": count, "signatures": signatures[op, backend]}
        for (op, backend), count in calls.most_common()
    ]
    if as_json:
        _show.print_json(rows)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("operator", "backend", "calls", "signatures"):
        table.add_column(heading, justify="right" if heading in ("calls", "signatures") else "left")
    for row in rows:
        table.add_row(*map(str, row.values()))
    out = _show.console()
    out.print(table)
    out.print(_total(records, trace))
