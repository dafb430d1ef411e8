"""`hpcjit demo`."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hpcjit import __version__, demo, folders
from hpcjit.cli import _show
from hpcjit.demo import Machine, Result
from hpcjit.errors import ArgumentError
from hpcjit.naming import resolve_op


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "With a GPU every operator is compiled at its first call and runs; without one it is cross-compiled and its "
        "reference runs; without nvcc only the references run. Exit code 1: a result or a compile was wrong."
    )
    parser.add_argument("op", nargs="*", metavar="OP", help="operators (default: all)")
    parser.add_argument(
        "--fresh", action="store_true", help="compile everything, into a cache folder that is removed after"
    )
    parser.add_argument("--jobs", type=int, metavar="N", help="compiles at a time without a GPU")
    _show.add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.jobs is not None and options.jobs < 1:
        raise ArgumentError("demo", "--jobs", "at least 1", options.jobs)
    chosen = demo.chosen_cases([resolve_op(name) for name in options.op])
    with demo.empty_cache() if options.fresh else contextlib.nullcontext():
        here = demo.machine()
        out = _show.console()
        if not options.json:
            _introduce(out, here)
        started = time.monotonic()
        results = []
        with _show.progress_bar() as bar:
            task = bar.add_task("starting", total=len(chosen))
            for result in demo.run(here, chosen, options.jobs):
                results.append(result)
                bar.update(task, advance=1, description=result.case.op)
        results.sort(key=lambda result: result.case.op)
        seconds = time.monotonic() - started
    if options.json:
        _show.print_json(_as_json(here, results, seconds))
    else:
        out.print(_table(here, results))
        _conclude(out, here, results, seconds)
    return 0 if all(result.ok for result in results) else 1


def _introduce(out: Console, here: Machine) -> None:
    out.print(f"[bold]hpcjit {__version__}[/]  CUDA kernels compiled at first call", highlight=False)
    instead = f"kernels are cross-compiled for {here.arch}, " if here.compiler else ""
    gpu = here.gpu or f"none: {instead}references run on the CPU"
    compiler = here.compiler or "none: only the references run"
    for name, text in (
        ("GPU", gpu),
        ("compiler", compiler),
        ("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"),
        ("cache", str(folders.configured_root())),
    ):
        out.print(f"  {name:<9} {escape(text)}", soft_wrap=True)
    out.print()


def _table(here: Machine, results: Sequence[Result]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("operator", no_wrap=True)
    table.add_column("case")
    table.add_column("ran on")
    table.add_column("first call" if here.gpu else "compile", justify="right")
    table.add_column("error", justify="right")
    table.add_column("bound", justify="right")
    table.add_column("")
    for result in results:
        deviation = result.deviation
        table.add_row(
            result.case.op,
            escape(result.case.name),
            f"{result.ran_on} on {here.device.type}",
            _build(result),
            f"{deviation.err:.1e}" if deviation else "",
            f"{deviation.bound:.1e}" if deviation else "",
            "[green]ok[/]" if result.ok else "[red]failed[/]" if result.error else "[red]wrong[/]",
        )
    return table


def _build(result: Result) -> str:
    if result.build_s is None:
        return "-"
    if not result.cached:
        return f"{result.build_s:.1f} s"
    return f"cached, {result.build_s * 1e3:.0f} ms" if result.build_s else "cached"


def _conclude(out: Console, here: Machine, results: Sequence[Result], seconds: float) -> None:
    for result in results:
        if not result.ok:
            out.print(f"[red]{result.case.op}[/]: {escape(result.error or str(result.deviation))}", soft_wrap=True)
    good = sum(result.ok for result in results)
    out.print()
    what = ("built, run" if here.gpu else "cross-compiled" if here.compiler else "run as references") + " and checked"
    out.print(f"{good} of {len(results)} operators {what} in {seconds:.0f} s", highlight=False)
    if here.missing:
        out.print(f"\nNo compiler: {escape(here.missing)}", soft_wrap=True)
    elif not here.gpu:
        out.print("hpcjit prewarm compiles more; hpcjit doctor says what this machine lacks")


def _as_json(here: Machine, results: Sequence[Result], seconds: float) -> dict[str, Any]:
    rows = [
        {
            "op": result.case.op,
            "case": result.case.name,
            "ran_on": result.ran_on,
            "build_s": result.build_s,
            "cached": result.cached,
            "err": result.deviation.err if result.deviation else None,
            "bound": result.deviation.bound if result.deviation else None,
            "ok": result.ok,
            "error": result.error,
        }
        for result in results
    ]
    facts = {"gpu": here.gpu, "arch": here.arch, "compiler": here.compiler, "missing": here.missing}
    return {**facts, "seconds": round(seconds, 2), "operators": rows}
