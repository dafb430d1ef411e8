"""What a measurement was made on: device, driver, clocks, versions, commit; and the device's measured ceilings."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import hpcjit
from hpcjit.bench import timer

_COPY_BYTES = 1 << 30


@dataclass(frozen=True)
class Environment:
    """Every field goes into every result row or the footer."""

    gpu: str
    torch: str
    cuda: str
    driver: str
    commit: str
    hpcjit: str
    clocks: str
    python: str

    def as_row(self) -> dict[str, str]:
        """The fields that every JSONL row carries."""
        facts = asdict(self)
        return {name: facts[name] for name in ("gpu", "torch", "cuda", "driver", "commit", "hpcjit")}


@dataclass(frozen=True)
class Ceilings:
    """What the device reaches at best: copying memory in bytes/s, matrix products in FLOP/s (0 when not known)."""

    copy: float = 0.0
    bf16: float = 0.0
    fp8: float = 0.0
    source: str = ""

    def floor_us(self, moved: int, flops: int, fp8: bool) -> float:
        """Least time for so much traffic and arithmetic; 0 when the ceiling is not known."""
        peak = self.fp8 if fp8 else self.bf16
        by_memory = moved / self.copy if self.copy else 0.0
        by_arithmetic = flops / peak if peak else 0.0
        return 1e6 * max(by_memory, by_arithmetic)


# Measured with large copies and large matrix products; other devices have their copy rate measured at each run.
KNOWN = {"NVIDIA H200": Ceilings(4.3e12, 781e12, 1437e12, "measured on an H200 before")}


def describe(device: torch.device, commit: str | None = None) -> Environment:
    """The environment of a run on `device`."""
    return Environment(
        gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU",
        torch=torch.__version__,
        cuda=torch.version.cuda or "",
        driver=smi("driver_version", device),
        commit=commit or git_commit(),
        hpcjit=hpcjit.__version__,
        clocks=smi("clocks.sm,clocks.mem", device),
        python=platform.python_version(),
    )


def ceilings(device: torch.device) -> Ceilings:
    """Known or measured now."""
    if device.type != "cuda":
        return Ceilings()
    known = KNOWN.get(torch.cuda.get_device_name(device))
    return known or Ceilings(copy=measured_copy_rate(device), source="copy rate measured in this run")


def measured_copy_rate(device: torch.device) -> float:
    """Bytes read and written per second by a large device-to-device copy."""
    size = min(_COPY_BYTES, torch.cuda.mem_get_info(device)[0] // 4)
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    graph = timer.capture(lambda: target.copy_(source), device, lambda: target.copy_(source))
    return 2 * size / (1e-6 * min(timer.span_us(graph.replay, device) for _ in range(10)))


def smi(query: str, device: torch.device) -> str:
    """One answer of nvidia-smi, empty when there is none."""
    if device.type != "cuda":
        return ""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", f"--id={device.index or 0}"]
    return _output(command)


def git_commit() -> str:
    """Short commit of the checkout that this package is run from, with a + when it has changes; else its version."""
    here = Path(hpcjit.__file__).parent
    tracked = _output(["git", "-C", str(here), "ls-files", "--error-unmatch", "__init__.py"])
    commit = _output(["git", "-C", str(here), "rev-parse", "--short=12", "HEAD"]) if tracked else ""
    if not commit:
        return f"v{hpcjit.__version__}"
    return commit + ("+" if _output(["git", "-C", str(here), "status", "--porcelain", "--", "."]) else "")


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
