"""`hpcjit prewarm`."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hpcjit import cases, models, prewarm, registry, replay, toolchain, usages
from hpcjit.cli import _show
from hpcjit.errors import ArgumentError, UnknownOpError
from hpcjit.jit_op import JitOp
from hpcjit.prewarm import Item, Outcome
from hpcjit.spec import did_you_mean

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MAX_TOKENS = 1 << 24

Calls = list[tuple[JitOp, tuple[Any, ...]]]


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "With nothing but operators, or nothing at all, the kernels of the operators' own cases are compiled. "
        "A kernel that the cache holds is not compiled again. Exit code 1: a compile failed."
    )
    parser.add_argument("op", nargs="*", metavar="OP", help="operators (or kernel templates) to keep; default: all")
    parser.add_argument("--cases", action="store_true", help="the operators' own cases (the default)")
    parser.add_argument(
        "--shapes", nargs="+", default=[], metavar="TxN", help="tokens x sizes, such as 2048x4096; needs OP"
    )
    parser.add_argument("--model", type=Path, metavar="CONFIG", help="config.json of a model in Hugging Face's format")
    parser.add_argument(
        "--shards", type=int, default=1, metavar="N", help="GPUs that share the model's heads and widths"
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="the calls of a recorded trace")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype for --shapes and --model (default: bf16, the model's)")
    parser.add_argument(
        "--arch", nargs="+", default=[], metavar="SM", help="such as sm_90a sm_80 (default: this GPU's)"
    )
    parser.add_argument("--jobs", type=int, metavar="N", help="compiles at a time (default: the number of cores)")
    parser.add_argument("--list", action="store_true", help="list the kernels and compile nothing")
    _show.add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    wanted = _wanted(options)
    if options.list:
        return _list(wanted, options.json)
    started = time.monotonic()
    outcomes = _compile(wanted, options.jobs)
    if options.json:
        _show.print_json(_as_json(outcomes, time.monotonic() - started))
    else:
        print(_summary(outcomes, time.monotonic() - started))
    for text in dict.fromkeys(str(outcome.error) for outcome in outcomes if outcome.error):
        _show.say(f"hpcjit prewarm: {text}")
    return 1 if any(outcome.error for outcome in outcomes) else 0


# --- what to compile ------------------------------------------------------------------------------------------------


def _wanted(options: argparse.Namespace) -> list[Item]:
    """The kernels that the options ask for; all errors in the input are found here."""
    if options.jobs is not None and options.jobs < 1:
        raise ArgumentError("prewarm", "--jobs", "at least 1", options.jobs)
    if options.shards < 1:
        raise ArgumentError("prewarm", "--shards", "at least 1", options.shards)
    archs = [toolchain.check_arch(arch) for arch in options.arch] or [toolchain.arch_of_device()]
    archs = list(dict.fromkeys(archs))
    ops, templates = _names(options.op)
    calls: Calls = []
    if options.shapes:
        calls += _calls_of_shapes(options, ops)
    if options.model:
        calls += models.calls_of_model(
            models.load(options.model), ops, shards=options.shards, dtype=DTYPES.get(options.dtype)
        )
    if options.trace:
        calls += _calls_of_trace(options.trace, ops)
    if options.cases or not (options.shapes or options.model or options.trace):
        calls += prewarm.calls_of_cases(case for case in cases.all_cases() if case.op in ops)
    found = prewarm.items(calls, archs, named=bool(options.op))
    return [item for item in found if item.template.op in templates] if templates else found


def _names(names: Sequence[str]) -> tuple[list[str], set[str]]:
    """Operators to look at, and templates to keep (none: all). Messages of hpcjit name templates, so both are taken."""
    known = [op for op in registry.ops() if any(spec.backend.value == "jit" for spec in registry.registry.specs(op))]
    if not names:
        return known, set()
    ops, templates = [], set()
    for name in names:
        matches = [op for op in known if name in (op, op.partition(".")[2])]
        if len(matches) == 1:
            ops += matches
        elif name in _templates(known):
            templates.add(name)
        else:
            hint = did_you_mean(name, [*known, *(op.partition(".")[2] for op in known)])
            raise UnknownOpError(f"unknown operator '{name}'{hint}")
    return (ops, set()) if ops and not templates else (known, templates | _templates(ops))


def _templates(ops: Sequence[str]) -> set[str]:
    calls = prewarm.calls_of_cases(case for op in ops for case in cases.cases_of(op))
    return {item.template.op for item in prewarm.items(calls, [toolchain.DEFAULT_ARCH])}


def _calls_of_shapes(options: argparse.Namespace, ops: Sequence[str]) -> Calls:
    if not options.op:
        raise ArgumentError("prewarm", "--shapes", "used with an operator", "none")
    calls: Calls = []
    for op in ops:
        for text in options.shapes:
            tokens, *sizes = _numbers(text)
            calls += usages.calls_of(op, tuple(sizes), [tokens], DTYPES[options.dtype or "bf16"])
    return calls


def _numbers(text: str) -> list[int]:
    if not re.fullmatch(r"\d{1,9}(x\d{1,9})*", text):
        raise ArgumentError("prewarm", "--shapes", "sizes joined by x, such as 2048x4096", f"'{text}'")
    numbers = [int(part) for part in text.split("x")]
    if not all(1 <= number <= MAX_TOKENS for number in numbers):
        raise ArgumentError("prewarm", "--shapes", f"sizes in [1, {MAX_TOKENS}]", f"'{text}'")
    return numbers


def _calls_of_trace(path: Path, ops: Sequence[str]) -> Calls:
    return [
        (op, replay.checked(where, op, replay.arguments(where, op, record, replay.on_meta(where))))
        for where, op, record in replay.calls(path)
        if op.op in ops
    ]


# --- running --------------------------------------------------------------------------------------------------------


def _compile(wanted: Sequence[Item], jobs: int | None) -> list[Outcome]:
    outcomes = []
    shown = sys.stderr.isatty()
    with _show.progress_bar() as bar:
        task = bar.add_task("compiling", total=len(wanted))
        for outcome in prewarm.run(wanted, jobs):
            outcomes.append(outcome)
            bar.update(task, advance=1, description=outcome.item.op)
            if outcome.compiled and not shown:
                _show.say(f"compiled {outcome.item.title} in {outcome.seconds:.1f} s ({len(outcomes)}/{len(wanted)})")
    return outcomes


def _list(wanted: Sequence[Item], as_json: bool) -> int:
    if as_json:
        _show.print_json([_item(item) for item in wanted])
    else:
        for item in wanted:
            print(item.title)
    return 0


def _item(item: Item) -> dict[str, str]:
    return {"op": item.op, "template": item.template.op, "config": str(item.config), "arch": item.arch}


def _summary(outcomes: Sequence[Outcome], seconds: float) -> str:
    compiled = sum(outcome.compiled for outcome in outcomes)
    failed = sum(outcome.error is not None for outcome in outcomes)
    text = f"{len(outcomes)} kernels: {compiled} compiled, {len(outcomes) - compiled - failed} in the cache already"
    return f"{text}{f', {failed} failed' if failed else ''}, {seconds:.1f} s"


def _as_json(outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    rows = [
        {
            **_item(outcome.item),
            "status": "failed" if outcome.error else "compiled" if outcome.compiled else "cached",
            "seconds": outcome.seconds,
            "error": str(outcome.error or ""),
        }
        for outcome in outcomes
    ]
    return {"kernels": rows, "seconds": round(seconds, 3)}
