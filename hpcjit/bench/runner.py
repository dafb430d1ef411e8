"""Runs benchmark rows: one operator, case and backend at a time; checked first, then timed."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hpcjit import numerics
from hpcjit.bench import timer
from hpcjit.bench.environment import Ceilings, Environment
from hpcjit.bench.targets import Targets
from hpcjit.cases import Args, Case, cases_of
from hpcjit.errors import ArgumentError, HpcjitError
from hpcjit.fused_op import use_backend
from hpcjit.jit_op import JitOp
from hpcjit.naming import resolve_op
from hpcjit.registry import ops, registry
from hpcjit.replay import operator
from hpcjit.spec import DeviceType, KernelBackend, PlatformInfo, did_you_mean

L2_MODES = ("cold", "hot", "both")

# Rows are measured backend by backend in this order, so that a time limit cuts off what matters least.
ORDER = (
    KernelBackend.JIT,
    KernelBackend.JIT_STEPS,
    KernelBackend.AOT,
    KernelBackend.FLASHINFER,
    KernelBackend.FLASHINFER_XQA,
    KernelBackend.FLASH_ATTN,
    KernelBackend.DEEPGEMM,
    KernelBackend.TRITON,
    KernelBackend.CUBLAS_TF32,
    KernelBackend.TORCH,
    KernelBackend.TORCH_COMPILE,
)
REFERENCES = (KernelBackend.TORCH, KernelBackend.TORCH_COMPILE)


@dataclass(frozen=True)
class Job:
    """One row to measure."""

    op: JitOp
    case: Case
    backend: KernelBackend
    device: str = "cuda"

    @property
    def key(self) -> tuple[str, str, str]:
        return self.case.op, self.case.name, self.backend.value

    @property
    def command(self) -> str:
        """The command that repeats this row."""
        where = "" if self.device == "cuda" else f" --device {self.device}"
        return f"hpcjit bench {self.case.op} --case {shlex.quote(self.case.name)} --backend {self.backend}{where}"


@dataclass(frozen=True)
class Row:
    """One measured row. Times are microseconds; None is not measured. `load` is the used share of the error bound."""

    op: str
    case: str
    backend: str
    cold_us: float | None = None
    cold_p20: float | None = None
    cold_p80: float | None = None
    hot_us: float | None = None
    host_us: float | None = None
    err: float | None = None
    load: float | None = None
    ok: bool = True
    gbps: float | None = None
    tflops: float | None = None
    floor_us: float | None = None
    pct_of_ceiling: float | None = None
    copies: int = 0
    timer: str = ""
    bytes: int = 0
    target_us: float | None = None
    error: str = ""
    command: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    speedup: dict[str, float] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, str]:
        return self.op, self.case, self.backend

    @property
    def us(self) -> float | None:
        """The time that rows are compared by: cold where it was measured."""
        return self.cold_us if self.cold_us is not None else self.hot_us

    @property
    def failed(self) -> bool:
        """Whether hpcjit's own kernel gave a wrong result or none."""
        return self.backend == KernelBackend.JIT.value and not self.ok


# --- what to measure ------------------------------------------------------------------------------------------------


def choose_cases(names: Sequence[str], patterns: Sequence[str]) -> list[Case]:
    """The benchmark cases of the named operators (of all, when none is named); `patterns` name cases or parts of names.

    Raises:
        UnknownOpError: no such operator.
        ArgumentError: no case matches.
    """
    chosen: list[Case] = []
    for op in [resolve_op(name) for name in names] or ops():
        chosen += cases_of(op, "bench")
    if patterns:
        matching = [case for case in chosen if case.name in patterns]
        matching = matching or [case for case in chosen if any(pattern in case.name for pattern in patterns)]
        if not matching:
            known = dict.fromkeys(case.name for case in chosen)
            hint = did_you_mean(patterns[0], known) or f"; there are {', '.join(list(known)[:8])}"
            raise ArgumentError("bench", "--case", "the name of a case", f"'{patterns[0]}'{hint}")
        chosen = matching
    return chosen


def make_jobs(cases: Iterable[Case], backends: Sequence[str], device: torch.device) -> list[Job]:
    """Every case on every backend that can run here, or on the named ones, ordered by backend.

    Raises:
        BackendError: an unknown backend.
    """
    wanted = [KernelBackend.of(name) for name in backends]
    jobs = []
    for case in cases:
        op = operator(case.op)
        declared = [spec.backend for spec in registry.specs(case.op)]
        for backend in [b for b in declared if b in wanted] if wanted else declared:
            if wanted or usable(op, backend, device):
                jobs.append(Job(op, case, backend, device.type))
    return sorted(jobs, key=lambda job: ORDER.index(job.backend))


def usable(op: JitOp, backend: KernelBackend, device: torch.device) -> bool:
    """Whether the operator has the backend and its requirements hold on the device; a GPU that is not there is a Hopper."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return backend in op.available_backends(PlatformInfo(DeviceType.CUDA, 9, 0))
    index = (device.index or 0) if device.type == "cuda" else -1
    return backend in op.available_backends(PlatformInfo.detect(index))


# --- measuring ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bench:
    """The settings of a run."""

    device: torch.device
    environment: Environment
    ceilings: Ceilings
    l2: str = "both"
    host: bool = True
    targets: Targets | None = None

    def run(self, jobs: Sequence[Job], time_limit_s: float | None = None) -> Iterator[tuple[Job, Row | None]]:
        """Measure each job in turn. After the time limit the rest come back without a row."""
        stop = time.monotonic() + time_limit_s if time_limit_s else None
        for job in jobs:
            if stop is not None and time.monotonic() > stop:
                yield job, None
            else:
                yield job, self.measure(job)

    def measure(self, job: Job) -> Row:
        """One row. A backend that fails gives a row with `error`; it does not end the run."""
        row = Row(*job.key, bytes=job.case.bytes, command=job.command, environment=self.environment.as_row())
        target = self.targets.of(job.case.op, job.case.name) if self.targets else None
        row = replace(row, target_us=target.target_us if target else None)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            with _fresh_compile(job):
                return self._timed(job, self._checked(job, row))
        except Exception as error:  # peers fail in their own ways: what they raise is the result of the row
            text = str(error).strip().splitlines()
            known = isinstance(error, HpcjitError)
            message = f"{'' if known else type(error).__name__ + ': '}{text[0] if text else ''}"
            return replace(row, ok=False, error=message[:300])

    def _checked(self, job: Job, row: Row) -> Row:
        args = job.case.args(self.device)
        found = numerics.check(job.op, args, lambda *a: job.op(*a, backend=job.backend))
        deviation = numerics.worst(found)
        return replace(row, err=deviation.err, load=deviation.load, ok=all(d.ok for d in found))

    def _timed(self, job: Job, row: Row) -> Row:
        args = job.case.args(self.device)
        call = getattr(job.op, job.backend.method)
        with torch.no_grad(), unchecked(job):
            eager = job.backend in REFERENCES  # a reference may read from the device, which no graph can hold
            if self.l2 != "hot":
                sample = timer.cold(call, args, self.device, or_eager=eager, case=job.case)
                row = replace(row, cold_us=sample.us, cold_p20=sample.p20, cold_p80=sample.p80)
                row = replace(row, copies=sample.copies, timer=sample.timer)
            if self.l2 != "cold":
                sample = timer.hot(call, args, self.device, or_eager=eager)
                row = replace(row, hot_us=sample.us, timer=sample.timer)
            if self.host:
                with use_backend(job.backend):
                    row = replace(row, host_us=timer.host_us(host_call(job, args), self.device))
        return self._rated(job, row, args)

    def _rated(self, job: Job, row: Row, args: Args) -> Row:
        fp8 = any(isinstance(a, torch.Tensor) and a.dtype in numerics.FP8 for a in args)
        floor = self.ceilings.floor_us(job.case.bytes, job.case.flops, fp8)
        if row.us is None:
            return row
        return replace(
            row,
            gbps=job.case.bytes / row.us / 1e3 if job.case.bytes else None,
            tflops=job.case.flops / row.us / 1e6 if job.case.flops else None,
            floor_us=floor or None,
            pct_of_ceiling=100 * floor / row.us if floor else None,
        )


@contextlib.contextmanager
def _fresh_compile(job: Job) -> Iterator[None]:
    """torch.compile starts anew for each case, so that it may specialise on the shape instead of generalising."""
    if job.backend is KernelBackend.TORCH_COMPILE:
        torch._dynamo.reset()
        job.op._compiled = None
    yield


@contextlib.contextmanager
def unchecked(job: Job) -> Iterator[None]:
    """Peers are timed without hpcjit's argument checks, which are not theirs."""
    if job.backend is KernelBackend.JIT:
        yield
        return
    job.op.check = lambda *args: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        del job.op.check  # type: ignore[misc]


def host_call(job: Job, args: Args) -> Callable[[], Any]:
    """The eager call that a user makes: the public function for the JIT backend, the adapter itself for the others."""
    own = numerics.copy_args(args)
    if job.backend is KernelBackend.JIT:
        return _public_call(job, own) or functools.partial(job.op.fast, *own)
    return functools.partial(getattr(job.op, job.backend.method), *own)


def _public_call(job: Job, args: Args) -> Callable[[], Any] | None:
    """`public(*positional, **options)`, if the public function takes everything that the schema has."""
    group, _, name = job.case.op.partition(".")
    public = getattr(importlib.import_module(f"hpcjit.ops.{group}"), name)
    parameters = inspect.signature(public).parameters
    named = {
        f"out_{argument}" if f"out_{argument}" in parameters else argument: value
        for argument, value in zip(job.op.arguments, args, strict=True)
    }
    if not set(named) <= set(parameters):
        return None
    positional, options = [], {}
    for parameter in parameters.values():
        if parameter.name in named:
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
                positional.append(named[parameter.name])
            else:
                options[parameter.name] = named[parameter.name]
    return functools.partial(public, *positional, **options)


def with_speedups(rows: Sequence[Row]) -> list[Row]:
    """The rows, those of the JIT backend with the time of every other backend over their own."""
    times = {row.key: row.us for row in rows if row.us}
    done = []
    for row in rows:
        if row.backend == KernelBackend.JIT.value and row.us:
            others = {key[2]: us / row.us for key, us in times.items() if key[:2] == row.key[:2] and key != row.key}
            row = replace(row, speedup=others)
        done.append(row)
    return done
