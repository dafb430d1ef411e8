"""`hpcjit tune`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from hpcjit import registry, toolchain, tune
from hpcjit.bench import runner, tuning
from hpcjit.cases import Case, cases_of
from hpcjit.cli import _show
from hpcjit.errors import ArgumentError, BackendError, CacheError
from hpcjit.jit_op import JitOp
from hpcjit.naming import resolve_op
from hpcjit.replay import cases_of_trace, operator


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "What is found is used by every later process of this user, before the package's own tables. "
        "Exit code 1: for some case no alternative ran and was right."
    )
    parser.add_argument("op", metavar="OP", help="an operator with a table of measured configurations")
    parser.add_argument(
        "--case", action="append", default=[], help="a case's name, or a part of names; may be repeated"
    )
    parser.add_argument("--from", dest="trace", type=Path, metavar="TRACE", help="the calls of a recorded trace")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the table to add to (default: the user's own)")
    parser.add_argument(
        "--time-limit", type=float, default=float("inf"), metavar="S", help="time nothing after S seconds"
    )
    parser.add_argument("--device", type=int, default=0, metavar="N", help="number of the CUDA device")
    parser.add_argument("--list", action="store_true", help="show what would be measured, and stop")
    _show.add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    op = _operator(options.op)
    cases = _cases(op, options)
    findings = [tuning.alternatives(op, case) for case in cases]
    if options.list:
        _show_all(findings, options.json)
        return 0
    device = _device(options.device)
    path = options.out or _own(op)
    tuning.prepare(path)
    stop = time.monotonic() + options.time_limit
    tuning.compile_all(findings, toolchain.arch_of_device(options.device))
    with _show.progress_bar() as progress:
        task = progress.add_task("", total=len(cases))
        for case, finding in zip(cases, findings, strict=True):
            progress.update(task, description=case.name)
            tuning.measure(op, case, finding, device, stop)
            progress.update(task, advance=1)
    _show_all(findings, options.json)
    found = tuning.entries(findings)
    if found:
        tuning.write(path, found, device)
        _show.say(f"hpcjit tune: kept in {path}")
    return 0 if all(finding.best for finding in findings) else 1


def _operator(name: str) -> JitOp:
    op = operator(resolve_op(name))
    if not op.tuned_table:
        raise ArgumentError("tune", "OP", f"an operator with a table: {', '.join(_tunable())}", op.op)
    return op


def _tunable() -> list[str]:
    found = []
    for name in registry.ops():
        owners = (spec.load_owner() for spec in registry.registry.specs(name))
        if any(isinstance(owner, JitOp) and owner.tuned_table for owner in owners):
            found.append(name)
    return found


def _cases(op: JitOp, options: argparse.Namespace) -> list[Case]:
    if not options.time_limit > 0:
        raise ArgumentError("tune", "--time-limit", "a positive number of seconds", options.time_limit)
    if options.trace:
        if options.case:
            raise ArgumentError("tune", "--case", "not given with --from, whose calls are all measured", options.case)
        cases = cases_of_trace(options.trace, [op.op])
        if not cases:
            raise ArgumentError("tune", "--from", f"a trace with calls of {op.op}", str(options.trace))
        return cases
    if not options.case:
        return runner.choose_cases([op.op], [])
    known = cases_of(op.op)
    for pattern in options.case:
        if not pattern or not any(pattern in case.name for case in known):
            raise ArgumentError("tune", "--case", "a case's name or a part of names", pattern)
    exact = [case for case in known if case.name in options.case]
    return exact or [case for case in known if any(pattern in case.name for pattern in options.case)]


def _device(index: int) -> torch.device:
    if not torch.cuda.is_available():
        raise BackendError("tune needs a CUDA device and torch sees none; --list shows what would be measured")
    if not 0 <= index < torch.cuda.device_count():
        raise ArgumentError("tune", "--device", f"one of {torch.cuda.device_count()} CUDA devices", index)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _own(op: JitOp) -> Path:
    path = tune.own_path(op.tuned_table)
    if path is None:
        raise CacheError("there is no folder for the table: set HPCJIT_CACHE_DIR, or name a file with --out")
    return path


def _show_all(findings: list[tuning.Finding], as_json: bool) -> None:
    if as_json:
        _show.print_json([_as_json(finding) for finding in findings])
        return
    shown = Table("case", "us", "configuration", "tried", box=None)
    for finding in findings:
        best = finding.best
        errors = [choice.error for choice in finding.choices if choice.error]
        nothing = "" if finding.choices else "no alternatives for this shape"
        what = _text(best.values) if best else errors[0] if errors else nothing
        us = "" if best is None or best.us is None else f"{best.us:.2f}"
        shown.add_row(finding.case, us, what, str(len(finding.choices)))
    _show.console().print(shown)


def _text(values: Any) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


def _as_json(finding: tuning.Finding) -> dict[str, Any]:
    choices = [{"values": c.values, "us": c.us, "error": c.error} for c in finding.choices]
    return {"case": finding.case, "shape": finding.shape, "size": finding.size, "choices": choices}
