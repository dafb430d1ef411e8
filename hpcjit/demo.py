"""The demonstration: every operator once, on whatever this machine has.

With a GPU each operator is compiled at its first call and runs there. Without one its kernel is cross-compiled and its
reference runs on the CPU; without nvcc only the references run. Each result is compared with the reference in float64.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from hpcjit import build, cache, cases, numerics, prewarm, toolchain
from hpcjit.cases import Case
from hpcjit.errors import HpcjitError, ToolchainError
from hpcjit.replay import operator
from hpcjit.spec import KernelBackend


@dataclass(frozen=True)
class Machine:
    """What the demonstration can do here."""

    device: torch.device
    arch: str
    compiler: str  # "nvcc 13.0.88", empty without one
    missing: str = ""  # why there is no compiler, and how to get one

    @property
    def gpu(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""


@dataclass(frozen=True)
class Result:
    """What became of one operator. `build_s`: its first call on a GPU, else its compile; None if not compiled."""

    case: Case
    ran_on: str
    build_s: float | None = None
    cached: bool = False
    deviation: numerics.Deviation | None = None
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error and (self.deviation is None or self.deviation.ok)


def machine() -> Machine:
    """Look at this machine."""
    gpu = toolchain.has_gpu()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    arch = toolchain.arch_of_device()
    try:
        tools = toolchain.find()
        toolchain.find_ninja()
    except ToolchainError as problem:
        return Machine(device, arch, "", str(problem))
    return Machine(device, arch, f"nvcc {tools.nvcc.version}, {tools.host.version}")


def chosen_cases(ops: Sequence[str] = ()) -> list[Case]:
    """One small case per operator."""
    first = {case.op: case for case in reversed(list(cases.all_cases("demo")))}
    return [case for op, case in sorted(first.items()) if not ops or op in ops]


@contextlib.contextmanager
def empty_cache() -> Iterator[None]:
    """A cache folder of its own for the length of the block, so that everything is compiled."""
    before = os.environ.get("HPCJIT_CACHE_DIR")
    with tempfile.TemporaryDirectory(prefix="hpcjit-demo-") as folder:
        os.environ["HPCJIT_CACHE_DIR"] = folder
        build.forget()
        try:
            yield
        finally:
            os.environ.pop("HPCJIT_CACHE_DIR")
            if before is not None:
                os.environ["HPCJIT_CACHE_DIR"] = before
            build.forget()


def run(here: Machine, chosen: Sequence[Case], jobs: int | None = None) -> Iterator[Result]:
    """Run the cases; results come as they finish."""
    if here.gpu:
        yield from (_on_gpu(case, here.device) for case in chosen)
        return
    references = {case.op: _reference(case) for case in chosen}
    if not here.compiler:
        yield from references.values()
        return
    yield from _cross_compiled(references, here.arch, jobs)


def _on_gpu(case: Case, device: torch.device) -> Result:
    op = operator(case.op)
    if op.why_not(KernelBackend.JIT):
        return _reference(case, device)
    args = case.args(device)
    torch.cuda.synchronize(device)
    before = set(cache.entry_folders())
    started = time.perf_counter()
    try:
        op(*args, backend=KernelBackend.JIT)
        torch.cuda.synchronize(device)
        first = time.perf_counter() - started
        found = numerics.check(op, case.args(device), lambda *a: op(*a, backend=KernelBackend.JIT))
    except HpcjitError as error:
        return Result(case, "jit", error=str(error))
    return Result(case, "jit", first, before == set(cache.entry_folders()), numerics.worst(found))


def _reference(case: Case, device: torch.device | str = "cpu") -> Result:
    op = operator(case.op)
    try:
        found = numerics.check(op, case.args(device), op.forward_native)
    except HpcjitError as error:
        return Result(case, "torch", error=str(error))
    return Result(case, "torch", deviation=numerics.worst(found))


def _cross_compiled(references: dict[str, Result], arch: str, jobs: int | None) -> Iterator[Result]:
    """The references' results, each when the kernel of its case has been compiled."""
    wanted: list[prewarm.Item] = []
    for result in references.values():
        wanted += [
            replace(item, op=result.case.op) for item in prewarm.items(prewarm.calls_of_cases([result.case]), [arch])
        ]
    for outcome in prewarm.run(wanted, jobs, keep=False):
        result = references[outcome.item.op]
        if outcome.error:
            yield replace(result, error=str(outcome.error))
        else:
            yield replace(result, build_s=outcome.seconds, cached=not outcome.compiled)
