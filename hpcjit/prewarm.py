"""Compiles kernels ahead of time: from cases, sizes, a model's configuration or a trace to entries of the cache.

Everything that can be wrong with the input is found before the first compile. No GPU is needed: plans are made from tensors
without memory. What the cache holds is not compiled again, so an interrupted run continues where it stopped.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from hpcjit import build, folders, progress
from hpcjit.cases import Case
from hpcjit.errors import BackendError, CacheError, HpcjitError
from hpcjit.jit_op import JitOp, Plan
from hpcjit.registry import registry
from hpcjit.replay import operator
from hpcjit.spec import DeviceType, KernelBackend, PlatformInfo

MAX_JOBS = 16


@dataclass(frozen=True)
class Item:
    """One kernel to have: a template, its config, an architecture, and an operator that needs it."""

    op: str
    template: build.Template
    config: build.Config
    arch: str

    @property
    def title(self) -> str:
        return self.template.title(self.config, self.arch)


@dataclass(frozen=True)
class Outcome:
    """What became of an item. `seconds` is the compile's own time, 0 when the kernel was there."""

    item: Item
    compiled: bool = False
    seconds: float = 0.0
    error: HpcjitError | None = None


def default_jobs() -> int:
    """As many compiles at a time as this process has cores."""
    return min(len(os.sched_getaffinity(0)), MAX_JOBS)


def plan_of(op: JitOp, args: tuple[Any, ...]) -> Plan | None:
    """The plan for a call after its check; None when there is nothing to launch."""
    op.check(*args)
    plan = op.plan(*args)
    return plan if isinstance(plan, Plan) else None


def items(calls: Iterable[tuple[JitOp, tuple[Any, ...]]], archs: Sequence[str], *, named: bool = True) -> list[Item]:
    """The different kernels that the calls need, for each architecture.

    Raises:
        BackendError: an operator does not run on one of the architectures. One that nobody `named` is left out there, unless
            none is left.
    """
    found: dict[tuple[int, build.Config, str], Item] = {}
    refused: dict[str, str] = {}
    for op, args in calls:
        plan = plan_of(op, args)
        for arch in archs:
            if reason := registry.get(op.op, KernelBackend.JIT).why_not(platform_of(arch)):
                refused[arch] = f"{op.op} cannot be built for {arch}: {reason}"
            elif plan is not None:
                found.setdefault((id(plan.template), plan.config, arch), Item(op.op, plan.template, plan.config, arch))
    for arch, text in refused.items():
        if named or all(item.arch != arch for item in found.values()):
            raise BackendError(text)
    return list(found.values())


def platform_of(arch: str) -> PlatformInfo:
    """The device that an architecture such as `sm_90a` names."""
    digits = re.sub(r"\D", "", arch)
    return PlatformInfo(DeviceType.CUDA, int(digits[:-1]), int(digits[-1]))


def calls_of_cases(cases: Iterable[Case]) -> Iterator[tuple[JitOp, tuple[Any, ...]]]:
    """The calls of some cases, with tensors without memory."""
    for case in cases:
        yield operator(case.op), case.args("meta")


def run(wanted: Sequence[Item], jobs: int | None = None, *, keep: bool = True) -> Iterator[Outcome]:
    """Compile what the cache lacks, several at a time; outcomes come as they finish.

    Raises:
        CacheError: the cache folder cannot be written, so that nothing would be kept (not asked with `keep=False`).
    """
    if keep and (problem := folders.root_problem()):
        raise CacheError(f"nothing can be prewarmed: {problem}")
    with progress.silenced(), ThreadPoolExecutor(max(jobs or default_jobs(), 1)) as pool:
        futures = [pool.submit(_have, item) for item in wanted]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            for future in futures:
                future.cancel()


def _have(item: Item) -> Outcome:
    started = time.time()
    try:
        entry = build.compile_only(item.template, item.config, item.arch)
    except HpcjitError as error:
        return Outcome(item, error=error)
    if float(entry.manifest.get("created", 0)) < started:
        return Outcome(item)
    return Outcome(item, compiled=True, seconds=float(entry.manifest.get("compile_seconds", 0)))
