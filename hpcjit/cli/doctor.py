"""`hpcjit doctor`: what is here, what is missing, and what to do about it."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass

from rich.markup import escape
from rich.table import Table

import hpcjit
from hpcjit import cache, folders, settings, toolchain
from hpcjit.cli import _show
from hpcjit.errors import BackendError, CacheError, ToolchainError
from hpcjit.spec import KernelBackend

OK, WARN, FAIL = "ok", "warn", "fail"
_COLOURS = {OK: "green", WARN: "yellow", FAIL: "red"}
MIN_TORCH = (2, 8)


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    topic: str
    verdict: str
    text: str
    remedy: str = ""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Exit code 1: something that hpcjit needs is missing. No GPU is a warning, not an error."
    _show.add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    findings = examine()
    if options.json:
        _show.print_json([asdict(finding) for finding in findings])
    else:
        _print(findings)
    return 1 if any(finding.verdict == FAIL for finding in findings) else 0


def examine() -> list[Finding]:
    """Every finding, in the order of the report."""
    found = [Finding("hpcjit", OK, f"{hpcjit.__version__}, Python {platform.python_version()}, {platform.machine()}")]
    found.append(_torch())
    if found[-1].verdict != FAIL:
        found += _gpus()
    found += [_guarded(topic, look) for topic, look in _TOOLS]
    found += [_cache_folder(), *_layers(), *_variables()]
    return found


# --- torch and GPUs -------------------------------------------------------------------------------------------------


def _torch() -> Finding:
    try:
        import torch
    except ImportError as error:
        return Finding("torch", FAIL, f"cannot be imported: {error}", "pip install torch")
    text = f"{torch.__version__}, CUDA {torch.version.cuda or 'none (a CPU build)'}"
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < MIN_TORCH:
        return Finding("torch", FAIL, text, f"pip install 'torch>={MIN_TORCH[0]}.{MIN_TORCH[1]}'")
    if torch.version.cuda is None:
        return Finding("torch", WARN, text, "kernels compile but cannot run here; install a CUDA build of torch")
    return Finding("torch", OK, text)


def _gpus() -> list[Finding]:
    import torch

    from hpcjit.bench import environment

    if not torch.cuda.is_available():
        remedy = f"kernels are cross-compiled for {settings.read().arch or toolchain.DEFAULT_ARCH}; references run"
        return [Finding("GPU", WARN, "none that torch can use", remedy)]
    found = []
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        memory = torch.cuda.get_device_properties(index).total_memory
        name = f"{index}: {torch.cuda.get_device_name(index)}, SM {major}.{minor}, {_show.size(memory)}"
        old = (major, minor) < (8, 0)
        found.append(Finding("GPU", WARN if old else OK, name, "hpcjit's kernels need SM 8.0" if old else ""))
    driver = environment.smi("driver_version", torch.device("cuda", 0))
    found.append(Finding("driver", OK if driver else WARN, driver or "nvidia-smi gave no answer"))
    return found


# --- tools ----------------------------------------------------------------------------------------------------------


def _nvcc() -> str:
    nvcc = toolchain.find_nvcc()
    return f"{nvcc.version}, {nvcc.path}, toolkit {nvcc.home}"


def _host() -> str:
    compiler = toolchain.nvcc_host_compiler()
    return f"{compiler.version}, {compiler.path}"


_TOOLS: tuple[tuple[str, Callable[[], str]], ...] = (
    ("nvcc", _nvcc),
    ("host compiler", _host),
    ("ninja", toolchain.find_ninja),
    ("CuTe headers", lambda: str(toolchain.find_cutlass_include())),
)


def _guarded(topic: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(topic, OK, look())
    except ToolchainError as problem:
        text = str(problem)
        what, _, remedy = text.partition("\nRemedy: ")
        return Finding(topic, FAIL, what, remedy or text.rpartition(": ")[2])


# --- cache and variables --------------------------------------------------------------------------------------------


def _cache_folder() -> Finding:
    root = folders.configured_root()
    if problem := folders.root_problem():
        where = f"{root}: every process compiles for itself" if root else "none"
        return Finding("cache", WARN, where, problem)
    return Finding("cache", OK, f"{root}, {_content(cache.entries(root=root))}, only you can write it")


def _content(entries: list[cache.Entry]) -> str:
    return f"{len(entries)} kernels, {_show.size(sum(entry.size for entry in entries))}"


def _layers() -> list[Finding]:
    found = []
    for layer in folders.layers():
        if not layer.is_dir():
            found.append(Finding("cache layer", WARN, f"{layer} is no folder", "correct HPCJIT_CACHE_PATH"))
            continue
        try:
            folders.check_trust(layer)
        except CacheError as problem:
            found.append(Finding("cache layer", WARN, str(problem), "its kernels are not used until that is changed"))
        else:
            found.append(Finding("cache layer", OK, f"{layer}, {_content(cache.entries(root=layer))}"))
    return found


def _variables() -> list[Finding]:
    found = []
    for name, meaning in settings.VARIABLES.items():
        value = os.environ.get(name)
        problem = _problem(name, value) if value else ""
        text = "not set" if value is None else f"'{value}'"
        found.append(Finding(name, WARN if problem else OK, f"{text} ({meaning})", problem))
    return found


def _problem(name: str, value: str) -> str:
    """What is wrong with the value of a variable, empty if nothing is."""
    try:
        if name == "HPCJIT_ARCH":
            toolchain.check_arch(value.strip())
        elif name == "HPCJIT_BACKEND":
            KernelBackend.of(value.strip())
    except (ToolchainError, BackendError) as error:
        return str(error)
    if name == "HPCJIT_VERBOSE" and value.strip() not in ("0", "1", "2"):
        return "must be 0, 1 or 2; taken as 1"
    return ""


def _print(findings: list[Finding]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        mark = f"[{_COLOURS[finding.verdict]}]{finding.verdict}[/]"
        text = escape(finding.text) + (f"\n[italic]{escape(finding.remedy)}[/]" if finding.remedy else "")
        table.add_row(mark, finding.topic, text)
    out = _show.console()
    out.print(table)
    counts = {verdict: sum(finding.verdict == verdict for finding in findings) for verdict in (WARN, FAIL)}
    out.print(f"\n{counts[FAIL]} failures, {counts[WARN]} warnings")
