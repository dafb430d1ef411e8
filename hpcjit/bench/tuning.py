"""Measuring the alternatives of an operator on the device that is there, for its table of measured configurations."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from hpcjit import build, numerics, tune
from hpcjit.bench import timer
from hpcjit.cases import Case
from hpcjit.errors import CompileError, HpcjitError
from hpcjit.jit_op import JitOp, Plan
from hpcjit.trace_file import write_whole

SAME = 1.01  # as fast as the best: then what the size before took, so that neighbours share a kernel
KEPT_WARM = 9  # replays of a first look
FINALS, FINAL_REPLAYS = 3, 25


@dataclass
class Choice:
    """One alternative for one case. `us`: cold, in a CUDA graph."""

    values: Mapping[str, Any]
    plan: Plan
    us: float | None = None
    error: str = ""


@dataclass(frozen=True)
class Finding:
    """What was found for one case; `choices` the fastest first, failed ones last."""

    case: str
    shape: str
    size: int
    choices: list[Choice] = field(default_factory=list)

    @property
    def best(self) -> Choice | None:
        return next((choice for choice in self.choices if choice.us is not None), None)


def alternatives(op: JitOp, case: Case) -> Finding:
    """What is to be measured, found on tensors without memory."""
    args = case.args("meta")
    shape, size = op.tuned_shape(*args)
    return Finding(case.name, shape, size, [Choice(dict(values), plan) for values, plan in op.alternatives(*args)])


def compile_all(findings: Sequence[Finding], arch: str) -> None:
    """Compiles every alternative, in parallel; those that fail are marked."""
    choices = [choice for finding in findings for choice in finding.choices]
    wanted = {(choice.plan.template, choice.plan.config) for choice in choices}

    def one(template: build.Template, config: build.Config) -> str:
        try:
            build.compile_only(template, config, arch)
        except (CompileError, TypeError) as error:
            return str(error).splitlines()[0]
        return ""

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        errors = dict(zip(wanted, pool.map(lambda key: one(*key), wanted), strict=True))
    for choice in choices:
        choice.error = errors[choice.plan.template, choice.plan.config]


def measure(op: JitOp, case: Case, finding: Finding, device: torch.device, stop: float) -> None:
    """Checks and times the choices of a case on `device`, and puts the fastest first. Nothing starts after `stop`."""
    args = case.args(device)
    launches: dict[int, Any] = {}
    for choice in finding.choices:
        if choice.error:
            continue
        if time.monotonic() > stop:
            choice.error = "not timed: the time limit"
            continue
        try:
            launch = op._runner(choice.plan, device.index or 0, anywhere=True)
            wrong = [str(found) for found in numerics.check(op, args, launch) if not found.ok]
            if wrong:
                choice.error = f"wrong: {wrong[0]}"
                continue
            choice.us = timer.cold(launch, args, device, replays=KEPT_WARM, case=case).us
            launches[id(choice)] = launch
        except HpcjitError as error:
            choice.error = str(error).splitlines()[0]
    finding.choices.sort(key=_order)
    for choice in finding.choices[:FINALS]:
        if id(choice) in launches and time.monotonic() < stop:
            choice.us = timer.cold(launches[id(choice)], args, device, replays=FINAL_REPLAYS, case=case).us
    finding.choices.sort(key=_order)


def _order(choice: Choice) -> float:
    return float("inf") if choice.us is None else choice.us


def entries(findings: Sequence[Finding]) -> dict[str, tune.Entries]:
    """The shapes of a table. A size whose best is no better than what the size before took gets that; of cases of one
    shape and size the first one counts."""
    shapes: dict[str, tune.Entries] = {}
    for finding in sorted(findings, key=lambda found: found.size):
        best, own = finding.best, shapes.get(finding.shape, [])
        if best is None or best.us is None or (own and own[-1][0] == finding.size):
            continue
        before = own[-1][1] if own else None
        kept = [c for c in finding.choices if c.us is not None and c.us <= SAME * best.us and c.values == before]
        values = dict((kept[0] if kept else best).values)
        shapes.setdefault(finding.shape, []).append((finding.size, values))
    return shapes


def prepare(path: Path) -> None:
    """Find out before anything is measured whether `path` can take the result.

    Raises:
        FormatError: it holds something else.
        OSError: it cannot be written.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    tune.read(path)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))


def write(path: Path, found: Mapping[str, tune.Entries], device: torch.device) -> None:
    """Adds `found` to the table in `path`, all of it or nothing."""
    properties = torch.cuda.get_device_properties(device)
    new = {properties.name: {"sm_count": properties.multi_processor_count, "shapes": dict(found)}}
    target = path.resolve()
    with FileLock(target.with_name(f".{target.name}.lock"), mode=0o600):
        write_whole(target, "".join(_lines(tune.merged(tune.read(target), new))))
    tune.forget()


def _lines(table: Mapping[str, Any]) -> Iterator[str]:
    """A line for each entry, which differences between versions need."""
    devices = []
    for device, found in table.items():
        shapes = []
        for shape, sizes in found["shapes"].items():
            rows = ",\n".join(f"    {json.dumps([size, values])}" for size, values in sizes)
            shapes.append(f"  {json.dumps(shape)}: [\n{rows}\n  ]")
        inner = ",\n".join(shapes)
        devices.append(f'{json.dumps(device)}: {{"sm_count": {found["sm_count"]}, "shapes": {{\n{inner}\n}}}}')
    yield "{" + ",\n".join(devices) + "}\n"
