"""Other configs of one operator's template, on its cases: which shape of a kernel is fastest where.

    python -m hpcjit.bench.sweep rmsnorm --case 8192x16384 --set threads/row_threads/vecs_per_thread=512/512/4,1024/1024/2
        --set trigger=0,1,2 --set late_weight=true,false --finals 4 --backend aot

Each `--set` lists values of a config field, or of several that change together, and every combination is tried; `--tie a=b`
gives field a the value of field b. `--plan FILE` holds several such command lines, one each line. All configs are compiled
first, in parallel. With a GPU each is then checked by the numerics rule and timed cold, fastest first, the operator's own
config marked with `*`. A combination that does not fit the case may read or write outside of its tensors, which ends the
run: name fields that belong together in one `--set`. With `--finals N` the N fastest, the operator's own config and the
backends are timed again in turns, which differences of one per cent need. Without a GPU the table holds registers and spills.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

import torch

from hpcjit import build, numerics, toolchain
from hpcjit.bench import timer
from hpcjit.cases import Case, cases_of
from hpcjit.errors import ArgumentError, CompileError, HpcjitError
from hpcjit.jit_op import JitOp, Plan
from hpcjit.naming import resolve_op
from hpcjit.replay import operator

FIRST_REPLAYS = 9  # of every config when finals follow
FINAL_TURNS, FINAL_REPLAYS = 3, 15

Choices = Mapping[str, Sequence[Any]]


@dataclasses.dataclass
class Result:
    """One config on one case. Times in microseconds; `registers` and `spills` are those of the binary."""

    op: str
    case: str
    config: str
    own: bool
    us: float | None = None
    final_us: float | None = None
    ok: bool | None = None
    registers: int | None = None
    spills: int | None = None
    error: str = ""

    @property
    def order(self) -> tuple[bool, bool, bool, float]:
        """Fastest first, those of the finals before the others; wrong and failed ones last."""
        final = self.final_us is not None
        return bool(self.error), self.ok is False, not final, (self.final_us if final else self.us) or 0.0


@dataclasses.dataclass(frozen=True)
class Sweep:
    """One operator's case and the configs to try on it."""

    op: JitOp
    case: Case
    plan: Plan
    configs: list[build.Config]
    finals: int
    backends: list[str]


@dataclasses.dataclass(eq=False)
class Entry:
    """What is timed for one result: `open` makes the launch, and may fail with `failures`.

    Any other exception of a config comes from a kernel that broke the device, and ends the run.
    """

    result: Result
    open: Callable[[], Callable[..., Any]]
    failures: tuple[type[Exception], ...]
    launch: Callable[..., Any] | None = None

    @property
    def right(self) -> bool:
        return bool(self.result.ok) and self.result.registers is not None


# --- which configs --------------------------------------------------------------------------------------------------


def variants(config: build.Config, choices: Choices, ties: Mapping[str, str]) -> list[build.Config]:
    """`config` and every combination of `choices` in its place, without repeats.

    Raises:
        ArgumentError: a field that the config does not have.
    """
    fields = [field.name for field in dataclasses.fields(config)]
    for name in (*(part for key in choices for part in key.split("/")), *ties, *ties.values()):
        if name not in fields:
            raise ArgumentError("sweep", "--set", f"a field of {type(config).__name__}: {', '.join(fields)}", name)
    found = {config: None}
    for values in itertools.product(*choices.values()):
        changed = dataclasses.replace(config, **_fields(choices, values))
        changed = dataclasses.replace(changed, **{name: getattr(changed, source) for name, source in ties.items()})
        found[changed] = None
    return list(found)


def _fields(names: Choices, values: Sequence[Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in zip(names, values, strict=True):
        parts = name.split("/")
        fields |= dict(zip(parts, value if len(parts) > 1 else (value,), strict=True))
    return fields


def parse_choice(text: str) -> tuple[str, list[Any]]:
    """`"threads=128,256"` -> `("threads", [128, 256])`, `"a/b=1/2,3/4"` -> `("a/b", [(1, 2), (3, 4)])`.

    Values are integers, true, false, or element types.
    """
    name, _, values = text.partition("=")
    if not name or not values:
        raise ArgumentError("sweep", "--set", "FIELD=VALUE,VALUE", text)
    fields = name.count("/") + 1
    found: list[Any] = []
    for value in values.split(","):
        parts = tuple(_value(part.strip()) for part in value.split("/"))
        if len(parts) != fields:
            raise ArgumentError("sweep", "--set", f"{fields} values between commas, as {name} names", value)
        found.append(parts if fields > 1 else parts[0])
    return name, found


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return int(text)
    except ValueError:
        return text


# --- compile, check, time -------------------------------------------------------------------------------------------


def compile_all(sweeps: Sequence[Sweep], arch: str) -> dict[tuple[build.Template, build.Config], Any]:
    """The manifest of each config of the sweeps, or the error that its compile ended with."""

    def one(template: build.Template, config: build.Config) -> Any:
        try:
            return build.compile_only(template, config, arch).manifest
        except (CompileError, TypeError) as error:
            return error

    futures: dict[tuple[build.Template, build.Config], Future[Any]] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for sweep in sweeps:
            for config in sweep.configs:
                key = sweep.plan.template, config
                if key not in futures:
                    futures[key] = pool.submit(one, *key)
    return {key: future.result() for key, future in futures.items()}


def run(sweep: Sweep, built: Mapping[tuple[build.Template, build.Config], Any], stop: float) -> list[Result]:
    """Results of one sweep, in the order of its configs, then its backends. Nothing is timed after `stop`."""
    entries = [_entry(sweep, config, built[sweep.plan.template, config]) for config in sweep.configs]
    if torch.cuda.is_available():
        entries += [_backend_entry(sweep, backend) for backend in sweep.backends]
        args = sweep.case.args(torch.device("cuda", torch.cuda.current_device()))
        for entry in entries:
            if not entry.result.error:
                _measure(sweep, args, entry, stop)
        _finals(sweep, args, entries, stop)
    return [entry.result for entry in entries]


def _entry(sweep: Sweep, config: build.Config, manifest: Any) -> Entry:
    result = Result(sweep.op.op, sweep.case.name, str(config), config == sweep.plan.config)
    if isinstance(manifest, Exception):
        result.error = str(manifest).splitlines()[0]
    else:
        result.registers, result.spills = manifest.get("registers"), manifest.get("spill_bytes")
    plan = dataclasses.replace(sweep.plan, config=config)
    return Entry(result, lambda: sweep.op._runner(plan, torch.cuda.current_device(), anywhere=True), (HpcjitError,))


def _backend_entry(sweep: Sweep, backend: str) -> Entry:
    result = Result(sweep.op.op, sweep.case.name, f"backend {backend}", False)
    return Entry(result, lambda: functools.partial(sweep.op, backend=backend), (Exception,))


def _measure(sweep: Sweep, args: timer.Args, entry: Entry, stop: float) -> None:
    if time.monotonic() > stop:
        entry.result.error = "not timed: the time limit"
        return
    try:
        entry.launch = entry.open()
        entry.result.ok = all(deviation.ok for deviation in numerics.check(sweep.op, args, entry.launch))
        entry.result.us = _cold(entry, sweep.case, args, FIRST_REPLAYS if sweep.finals else timer.REPLAYS)
    except entry.failures as error:
        entry.result.error = (str(error).splitlines() or [type(error).__name__])[0]


def _cold(entry: Entry, case: Case, args: timer.Args, replays: int) -> float:
    assert entry.launch is not None
    device = torch.device("cuda", torch.cuda.current_device())
    return timer.cold(entry.launch, args, device, replays=replays, case=case).us


def _finals(sweep: Sweep, args: timer.Args, entries: Sequence[Entry], stop: float) -> None:
    """Times the fastest right configs, the operator's own and the backends again, in turns."""
    timed = [entry for entry in entries if entry.result.us is not None]
    right = sorted((entry for entry in timed if entry.right), key=lambda entry: entry.result.us or 0.0)
    chosen = right[: sweep.finals]
    kept = [e for e in timed if sweep.finals and (e in chosen or e.result.own or e.result.registers is None)]
    times: list[list[float]] = [[] for _ in kept]
    for _ in range(FINAL_TURNS):
        for entry, own in zip(kept, times, strict=True):
            if time.monotonic() < stop:
                own.append(_cold(entry, sweep.case, args, FINAL_REPLAYS))
    for entry, own in zip(kept, times, strict=True):
        entry.result.final_us = statistics.median(own) if own else None


def table(results: Sequence[Result]) -> str:
    """Fastest first; wrong and failed ones last."""
    lines = []
    for result in sorted(results, key=lambda r: r.order):
        figures = "" if result.final_us is None else f"{result.final_us:9.2f} us  first "
        figures += "" if result.us is None else f"{result.us:9.2f} us  "
        state = result.error or ("" if result.ok is not False else "WRONG")
        size = "" if result.registers is None else f"{result.registers:3d} registers, {result.spills} spilled  "
        lines.append(f"{'*' if result.own else ' '} {figures}{size}{result.config}  {state}".rstrip())
    return "\n".join(lines)


# --- command line ---------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hpcjit.bench.sweep", description=__doc__.splitlines()[0])
    parser.add_argument("op", nargs="?", help="operator, with or without its group")
    parser.add_argument("--case", action="append", default=[], help="a case's name; may be repeated")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=V,V", help="values of a config field")
    parser.add_argument("--tie", action="append", default=[], metavar="FIELD=FIELD", help="the left follows the right")
    parser.add_argument("--finals", type=int, default=0, metavar="N", help="time the N fastest again, in turns")
    parser.add_argument("--backend", action="append", default=[], help="time this backend too; may be repeated")
    parser.add_argument("--plan", type=Path, metavar="FILE", help="a command line in each line; # starts a comment")
    parser.add_argument(
        "--time-limit", type=float, default=float("inf"), metavar="S", help="time nothing after S seconds"
    )
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write JSON lines there, besides what is printed")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    if options.plan is None and (options.op is None or not options.case):
        parser.error("an operator and --case, or --plan")
    try:
        return _run_all(options)
    except (HpcjitError, OSError) as error:
        print(f"sweep: {error}", file=sys.stderr)
        return 2


def _lines(options: argparse.Namespace) -> Iterator[argparse.Namespace]:
    if options.op is not None:
        yield options
    if options.plan is not None:
        for line in options.plan.read_text().splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield _parser().parse_args(words)


def _sweeps(options: argparse.Namespace) -> Iterator[Sweep]:
    op = operator(resolve_op(options.op))
    known = {case.name: case for case in cases_of(op.op)}
    choices = dict(map(parse_choice, options.set))
    ties = {name: str(values[0]) for name, values in map(parse_choice, options.tie)}
    for name in options.case:
        if name not in known:
            raise ArgumentError("sweep", "--case", f"a case of {op.op}: {', '.join(known)}", name)
        plan = op.plan(*known[name].args("meta"))
        if isinstance(plan, Plan):
            configs = variants(plan.config, choices, ties)
            yield Sweep(op, known[name], plan, configs, options.finals, options.backend)


def _run_all(options: argparse.Namespace) -> int:
    stop = time.monotonic() + options.time_limit
    sweeps = [sweep for line in _lines(options) for sweep in _sweeps(line)]
    built = compile_all(sweeps, toolchain.arch_of_device(0 if torch.cuda.is_available() else None))
    out = options.out.open("a") if options.out else None
    try:
        for sweep in sweeps:
            _report(run(sweep, built, stop), options.json, out)
    finally:
        if out:
            out.close()
    return 0


def _report(results: Sequence[Result], as_json: bool, out: TextIO | None) -> None:
    lines = "".join(json.dumps(dataclasses.asdict(result)) + "\n" for result in results)
    if out:
        out.write(lines)
        out.flush()
    print(lines.rstrip("\n") if as_json else f"{results[0].op} {results[0].case}\n{table(results)}\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
