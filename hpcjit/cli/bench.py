"""`hpcjit bench`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from hpcjit.bench import environment, report, runner, targets
from hpcjit.bench.runner import Bench, Job, Row
from hpcjit.cli import _show
from hpcjit.errors import ArgumentError, BackendError
from hpcjit.naming import resolve_op


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Without OP every benchmark case runs. Exit code 1: a result of hpcjit's own was wrong or missing."
    parser.add_argument("op", nargs="*", metavar="OP", help="operator, with or without its group (default: all)")
    parser.add_argument(
        "--case", action="append", default=[], help="a case's name, or a part of names; may be repeated"
    )
    parser.add_argument("--backend", default="", metavar="A,B", help="backends (default: all that can run here)")
    parser.add_argument("--l2", choices=runner.L2_MODES, default="both", help="inputs in L2, in memory, or both")
    parser.add_argument("--no-host", action="store_true", help="do not time the host side of a call")
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of tables")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help=f"keep {report.RESULTS} and {report.TABLES} there; rows add up"
    )
    parser.add_argument("--resume", action="store_true", help="skip rows that DIR already has")
    parser.add_argument("--against", type=Path, metavar="FILE", help="JSON table of targets to grade the rows by")
    parser.add_argument("--from", dest="trace", type=Path, metavar="TRACE", help="time the calls of a recorded trace")
    parser.add_argument("--plots", action="store_true", help="draw the latencies into DIR (extra: hpcjit[bench])")
    parser.add_argument("--time-limit", type=float, metavar="S", help="start no new row after so many seconds")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu (references by wall clock)")
    parser.add_argument("--commit", help="commit to note in the rows, when this is not a checkout")
    parser.add_argument(
        "--list", action="store_true", help="list the rows (without a GPU: those of a Hopper one) and stop"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    device = _device(options.device, listing=options.list)
    if options.time_limit is not None and not options.time_limit > 0:
        raise ArgumentError("bench", "--time-limit", "a positive number of seconds", options.time_limit)
    if (options.plots or options.resume) and options.out is None:
        raise ArgumentError("bench", "--out", "given with --plots and --resume", None)
    grades = targets.load(options.against) if options.against else None
    jobs = _jobs(options, device)
    if options.list:
        for job in jobs:
            print(job.command)
        return 0
    old = _prepare(options.out)
    known = {row.key for row in old if not row.error}
    facts = environment.describe(device, options.commit)
    limits = environment.ceilings(device)
    bench = Bench(device, facts, limits, options.l2, not options.no_host, grades)
    rows = _measure(bench, [job for job in jobs if not (options.resume and job.key in known)], options)
    every = report.in_order(runner.with_speedups(report.merged(old, rows)))
    if options.out:
        _write(options, every, facts, limits)
    measured = {row.key for row in rows}
    shown = [row for row in every if row.key in measured]
    if not options.json:
        report.print_tables(_console(), shown, facts, limits)
    return 1 if any(row.failed for row in rows) else 0


def _device(name: str, *, listing: bool) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ArgumentError("bench", "--device", "cuda, cuda:N or cpu", name) from None
    if device.type not in ("cuda", "cpu"):
        raise ArgumentError("bench", "--device", "cuda, cuda:N or cpu", name)
    if device.type == "cuda" and not torch.cuda.is_available():
        if listing:
            return device
        raise BackendError(
            "bench needs a CUDA device and torch sees none; --device cpu times the references by wall clock, "
            "--list shows the rows"
        )
    if device.type == "cuda":
        if (device.index or 0) >= torch.cuda.device_count():
            raise ArgumentError("bench", "--device", f"one of {torch.cuda.device_count()} CUDA devices", name)
        torch.cuda.set_device(device if device.index is not None else torch.cuda.current_device())
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _jobs(options: argparse.Namespace, device: torch.device) -> list[Job]:
    backends = [name for name in options.backend.split(",") if name]
    if options.trace:
        from hpcjit.replay import cases_of_trace

        cases = cases_of_trace(options.trace, [resolve_op(name) for name in options.op])
    else:
        cases = runner.choose_cases(options.op, options.case)
    return runner.make_jobs(cases, backends, device)


def _prepare(folder: Path | None) -> list[Row]:
    """Earlier rows of the output folder; it must be writable before anything is measured."""
    if folder is None:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    old = report.read_rows(folder / report.RESULTS)
    report.write_rows(folder / report.RESULTS, old)
    return old


def _measure(bench: Bench, jobs: Sequence[Job], options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    skipped = 0
    with _show.progress_bar() as progress:
        task = progress.add_task("", total=len(jobs))
        for job, row in bench.run(jobs, options.time_limit):
            progress.update(task, advance=1, description=f"{job.case.op} {job.case.name} {job.backend}")
            if row is None:
                skipped += 1
                continue
            rows.append(row)
            _stream(row, options)
    if skipped:
        print(f"hpcjit bench: time limit reached, {skipped} rows not measured", file=sys.stderr)
    return rows


def _stream(row: Row, options: argparse.Namespace) -> None:
    """Keep a row as soon as it is measured, so that an interrupted run loses nothing."""
    line = json.dumps(report.to_json(row), allow_nan=False)
    if options.json:
        print(line, flush=True)
    if options.out:
        with open(options.out / report.RESULTS, "a", encoding="utf-8") as file:
            file.write(line + "\n")


def _write(
    options: argparse.Namespace, rows: Sequence[Row], facts: environment.Environment, limits: environment.Ceilings
) -> None:
    report.write_rows(options.out / report.RESULTS, rows)
    (options.out / report.TABLES).write_text(report.markdown(rows, facts, limits), encoding="utf-8")
    if options.plots:
        from hpcjit.bench import plots

        plots.draw(rows, options.out)


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=200)
