"""`hpcjit ops`: the table of operators, and one operator in detail."""

from __future__ import annotations

import argparse
import importlib
import inspect
from typing import Any

from rich.markup import escape
from rich.table import Table

from hpcjit.cli import _show
from hpcjit.naming import resolve_op
from hpcjit.registry import ops, registry
from hpcjit.spec import KernelSpec, PlatformInfo


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=("list", "show"), default="list", help="list (default) or show OP")
    parser.add_argument("op", nargs="?", metavar="OP", help="operator to show, with or without its group")
    _show.add_json(parser)
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    if options.action == "show":
        if options.op is None:
            options.parser.error("show needs an operator")
        facts = _details(resolve_op(options.op))
        _show.print_json(facts) if options.json else _print_details(facts)
    elif options.op is not None:
        options.parser.error(f"list takes no operator; hpcjit ops show {options.op} explains one")
    else:
        rows = [_row(op, PlatformInfo.detect()) for op in ops()]
        _show.print_json(rows) if options.json else _print_rows(rows)
    return 0


def _row(op: str, platform: PlatformInfo) -> dict[str, Any]:
    specs = registry.specs(op)
    return {
        "op": op,
        "backends": [spec.backend.value for spec in specs],
        "usable": [spec.backend.value for spec in specs if spec.is_available(platform)],
        "summary": _docstring(op).partition("\n")[0],
    }


def _docstring(op: str) -> str:
    group, _, name = op.partition(".")
    return inspect.getdoc(getattr(importlib.import_module(f"hpcjit.ops.{group}"), name, None)) or ""


def _print_rows(rows: list[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    # What does not fit is cut off at the right, never a name.
    table.add_column("operator", no_wrap=True, min_width=max(len(row["op"]) for row in rows))
    widest = max(len(" ".join(row["backends"])) for row in rows)
    table.add_column("backends (bold: run here)", no_wrap=True, min_width=widest)
    table.add_column("what it does", overflow="ellipsis", no_wrap=True)
    for row in rows:
        order = sorted(row["backends"], key=lambda name: (name != "jit", name.startswith("torch"), name))
        names = [f"[bold]{name}[/]" if name in row["usable"] else f"[dim]{name}[/]" for name in order]
        table.add_row(row["op"], " ".join(names), escape(row["summary"]))
    out = _show.console()
    out.print(table)
    out.print(f"\n{len(rows)} operators; hpcjit ops show OP explains one")


def _details(op: str) -> dict[str, Any]:
    from hpcjit.cases import cases_of

    return {
        "op": op,
        "doc": _docstring(op),
        "backends": [_backend(spec) for spec in registry.specs(op)],
        "cases": [{"name": case.name, "bytes": case.bytes, "tags": sorted(case.tags)} for case in cases_of(op)],
    }


def _backend(spec: KernelSpec) -> dict[str, Any]:
    return {
        "backend": spec.backend.value,
        "needs": " or ".join(sorted(map(str, spec.capabilities))),
        "why_not": spec.why_not(),
        "target": spec.target,
    }


def _print_details(facts: dict[str, Any]) -> None:
    out = _show.console()
    out.print(f"[bold]{facts['op']}[/]\n")
    out.print(facts["doc"], markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("backend", "needs", "runs here"):
        table.add_column(heading)
    for backend in facts["backends"]:
        reason = backend["why_not"]
        here = f"[yellow]no:[/] {escape(reason)}" if reason else "[green]yes[/]"
        table.add_row(backend["backend"], escape(backend["needs"] or "nothing"), here)
    out.print()
    out.print(table)
    names = ", ".join(case["name"] for case in facts["cases"])
    out.print(f"\n[bold]cases[/]  {escape(names)}")
