"""Other configs of one operator's template, on its cases: which shape of a kernel is fastest where.

    python -m hpcjit.bench.sweep rmsnorm --case 8192x16384 --set threads=512,1024 --set trigger=0,1,2 --tie row_threads=threads

Each `--set` lists values of a config field, and every combination is tried; `--tie a=b` gives field a the value of field b.
All are compiled first, in parallel. With a GPU each is then checked by the numerics rule and timed cold, fastest first, the
operator's own config marked with `*`; a combination that does not fit the case shows as wrong. Without a GPU the table holds
registers and spills.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from hpcjit import build, numerics, toolchain
from hpcjit.bench import timer
from hpcjit.cases import Case, cases_of
from hpcjit.errors import ArgumentError, CompileError, HpcjitError
from hpcjit.jit_op import JitOp, Plan
from hpcjit.naming import resolve_op
from hpcjit.replay import operator


@dataclasses.dataclass
class Result:
    """One config on one case. Times in microseconds; `registers` and `spills` are those of the binary."""

    case: str
    config: str
    own: bool
    us: float | None = None
    ok: bool | None = None
    registers: int | None = None
    spills: int | None = None
    error: str = ""


def variants(config: build.Config, choices: Mapping[str, Sequence[Any]], ties: Mapping[str, str]) -> list[build.Config]:
    """`config` and every combination of `choices` in its place, without repeats.

    Raises:
        ArgumentError: a field that the config does not have.
    """
    fields = [field.name for field in dataclasses.fields(config)]
    for name in (*choices, *ties, *ties.values()):
        if name not in fields:
            raise ArgumentError("sweep", "--set", f"a field of {type(config).__name__}: {', '.join(fields)}", name)
    found = {config: None}
    for values in itertools.product(*choices.values()):
        changed = dataclasses.replace(config, **dict(zip(choices, values, strict=True)))
        changed = dataclasses.replace(changed, **{name: getattr(changed, source) for name, source in ties.items()})
        found[changed] = None
    return list(found)


def parse_choice(text: str) -> tuple[str, list[Any]]:
    """`"threads=128,256"` -> `("threads", [128, 256])`; values are integers, true, false, or element types."""
    name, _, values = text.partition("=")
    if not name or not values:
        raise ArgumentError("sweep", "--set", "FIELD=VALUE,VALUE", text)
    return name, [_value(value.strip()) for value in values.split(",")]


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return int(text)
    except ValueError:
        return text


def compiled(plan: Plan, configs: Sequence[build.Config], arch: str) -> dict[build.Config, Any]:
    """The manifest of each config, or the error that its compile ended with."""

    def one(config: build.Config) -> Any:
        try:
            return build.compile_only(plan.template, config, arch).manifest
        except (CompileError, TypeError) as error:
            return error

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(configs, pool.map(one, configs), strict=True))


def run(op: JitOp, case: Case, choices: Mapping[str, Sequence[Any]], ties: Mapping[str, str]) -> Iterator[Result]:
    """Results of every config on one case, in the order of `variants`."""
    plan = op.plan(*case.args("meta"))
    if not isinstance(plan, Plan):
        return
    configs = variants(plan.config, choices, ties)
    gpu = torch.cuda.is_available()
    built = compiled(plan, configs, toolchain.arch_of_device(0 if gpu else None))
    for config in configs:
        result = Result(case.name, str(config), config == plan.config)
        manifest = built[config]
        if isinstance(manifest, Exception):
            result.error = str(manifest).splitlines()[0]
        else:
            result.registers, result.spills = manifest.get("registers"), manifest.get("spill_bytes")
            if gpu:
                _measure(op, case, dataclasses.replace(plan, config=config), result)
        yield result


def _measure(op: JitOp, case: Case, plan: Plan, result: Result) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    launch = op._runner(plan, device.index, anywhere=True)
    args = case.args(device)
    result.ok = all(deviation.ok for deviation in numerics.check(op, args, launch))
    result.us = timer.cold(launch, args, device).us


def table(results: Sequence[Result]) -> str:
    """Fastest first; wrong and failed ones last."""
    lines = []
    for result in sorted(results, key=lambda r: (bool(r.error), r.ok is False, r.us or 0.0)):
        figures = f"{result.us:9.2f} us  " if result.us is not None else ""
        state = result.error or ("" if result.ok is not False else "WRONG")
        size = "" if result.registers is None else f"{result.registers:3d} registers, {result.spills} spilled  "
        lines.append(f"{'*' if result.own else ' '} {figures}{size}{result.config}  {state}".rstrip())
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hpcjit.bench.sweep", description=__doc__.splitlines()[0])
    parser.add_argument("op", help="operator, with or without its group")
    parser.add_argument("--case", action="append", required=True, help="a case's name; may be repeated")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=V,V", help="values of a config field")
    parser.add_argument("--tie", action="append", default=[], metavar="FIELD=FIELD", help="the left follows the right")
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    options = parser.parse_args(argv)
    try:
        return _sweep(options)
    except HpcjitError as error:
        print(f"sweep: {error}", file=sys.stderr)
        return 2


def _sweep(options: argparse.Namespace) -> int:
    op = operator(resolve_op(options.op))
    known = {case.name: case for case in cases_of(op.op)}
    choices = dict(map(parse_choice, options.set))
    ties = {name: str(values[0]) for name, values in map(parse_choice, options.tie)}
    for name in options.case:
        if name not in known:
            raise ArgumentError("sweep", "--case", f"a case of {op.op}: {', '.join(known)}", name)
    for name in options.case:
        results = list(run(op, known[name], choices, ties))
        if options.json:
            print("\n".join(json.dumps(dataclasses.asdict(result)) for result in results))
        else:
            print(f"{op.op} {name}\n{table(results)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
