"""Latency over size: one PNG per operator, a panel per width, a line per backend, the floor below them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcjit.bench.runner import Row
from hpcjit.errors import ToolchainError
from hpcjit.spec import KernelBackend

# Colours that people with colour-blindness tell apart (Okabe and Ito); ours first and heavier.
STYLES: dict[str, tuple[str, str]] = {
    KernelBackend.JIT.value: ("#0072B2", "o"),
    KernelBackend.FLASHINFER.value: ("#E69F00", "s"),
    KernelBackend.FLASHINFER_XQA.value: ("#D55E00", "h"),
    KernelBackend.AOT.value: ("#009E73", "^"),
    KernelBackend.TRITON.value: ("#56B4E9", "v"),
    KernelBackend.FLASH_ATTN.value: ("#F0E442", "D"),
    KernelBackend.DEEPGEMM.value: ("#CC79A7", "P"),
    KernelBackend.TORCH_COMPILE.value: ("#CC79A7", "X"),
    KernelBackend.TORCH.value: ("#999999", "d"),
}
LABELS = {
    KernelBackend.JIT.value: "hpcjit",
    KernelBackend.AOT.value: "sglang",
    KernelBackend.TORCH.value: "torch eager",
}
COLUMNS = 3

Panel = dict[str, list[tuple[int, Row]]]


def panels(rows: Sequence[Row]) -> dict[str, Panel]:
    """Rows of one operator by what their case names have beyond the leading token count, then by backend.

    A case `"2048x4096"` is 2048 tokens in the panel `"4096"`; cases whose name starts with no number are left out.
    """
    found: dict[str, Panel] = {}
    for row in rows:
        match = re.match(r"(\d+)x?(.*)", row.case)
        if match and row.us:
            found.setdefault(match[2].strip(), {}).setdefault(row.backend, []).append((int(match[1]), row))
    for panel in found.values():
        for points in panel.values():
            points.sort(key=lambda point: point[0])
    return {name: panel for name, panel in found.items() if max(len(points) for points in panel.values()) > 1}


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write `<folder>/<op>.png` for every operator with more than one size, and return the files.

    Raises:
        ToolchainError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ToolchainError("plots need matplotlib: pip install 'hpcjit[bench]'") from None
    matplotlib.use("Agg")
    written = []
    for op in dict.fromkeys(row.op for row in rows):
        shown = panels([row for row in rows if row.op == op])
        if shown:
            written.append(folder / f"{op}.png")
            _figure(op, shown, next(row for row in rows if row.op == op)).savefig(written[-1], dpi=150)
    matplotlib.pyplot.close("all")
    return written


def _figure(op: str, shown: dict[str, Panel], sample: Row) -> Any:
    from matplotlib import pyplot

    columns = min(COLUMNS, len(shown))
    lines = math.ceil(len(shown) / columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(4.6 * columns, 3.9 * lines + 0.9), squeeze=False, layout="constrained"
    )
    for axis, (name, panel) in zip(axes.flat, shown.items(), strict=False):
        _panel(axis, name, panel)
    for axis in list(axes.flat)[len(shown) :]:
        axis.set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("us per call, cold L2")
    pairs = [pair for axis in axes.flat for pair in zip(*axis.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in pairs}
    facts = sample.environment
    note = f"{facts.get('gpu', '')}, torch {facts.get('torch', '')}, hpcjit commit {facts.get('commit', '')}"
    figure.suptitle(f"{op}\n", fontweight="bold", fontsize=13)
    figure.text(0.5, 1 - 0.36 / figure.get_figheight(), note, ha="center", va="top", fontsize=8.5, color="#555555")
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), frameon=False)
    return figure


def _panel(axis: Any, name: str, panel: Panel) -> None:
    for backend in (backend for backend in STYLES if backend in panel):
        points = panel[backend]
        colour, marker = STYLES[backend]
        ours = backend == KernelBackend.JIT.value
        axis.plot(
            [tokens for tokens, _ in points],
            [row.us for _, row in points],
            color=colour,
            marker=marker,
            markersize=5,
            linewidth=2.4 if ours else 1.3,
            zorder=3 if ours else 2,
            label=LABELS.get(backend, backend),
        )
    floor = {tokens: row.floor_us for points in panel.values() for tokens, row in points if row.floor_us}
    if floor:
        axis.plot(list(floor), list(floor.values()), color="black", linestyle=":", linewidth=1.2, label="floor")
    times = [row.us for points in panel.values() for _, row in points if row.us]
    axis.set_ylim(0.5 * min(times), 1.5 * max(times))
    _dress(axis, name, sorted({tokens for points in panel.values() for tokens, _ in points}))


def _dress(axis: Any, name: str, sizes: list[int]) -> None:
    """Logarithmic axes with plain numbers, and light lines."""
    from matplotlib import ticker

    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axis.yaxis.set_minor_formatter(ticker.NullFormatter())
    axis.margins(x=0.06)
    axis.set_title(f"size {name}" if name else "", fontsize=10)
    axis.set_xlabel("number of tokens")
    axis.grid(True, which="major", color="#dddddd", linewidth=0.7)
    axis.spines[["top", "right"]].set_visible(False)
