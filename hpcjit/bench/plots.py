"""One PNG per operator. Latency over size: a panel per width, a line per backend, the floor below them. Or, where cases are
named mixes of lengths: a panel per heads and dtype, a row per mix, a dot per backend, a mark where the floor is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcjit.bench.runner import Row
from hpcjit.errors import ToolchainError
from hpcjit.spec import KernelBackend

# Colours that people with colour-blindness tell apart (Okabe and Ito); ours first and heavier.
STYLES: dict[str, tuple[str, str]] = {
    KernelBackend.JIT.value: ("#0072B2", "o"),
    KernelBackend.JIT_STEPS.value: ("#E69F00", "s"),
    KernelBackend.FLASHINFER.value: ("#E69F00", "s"),
    KernelBackend.FLASHINFER_XQA.value: ("#D55E00", "h"),
    KernelBackend.AOT.value: ("#009E73", "^"),
    KernelBackend.TRITON.value: ("#56B4E9", "v"),
    KernelBackend.FLASH_ATTN.value: ("#F0E442", "D"),
    KernelBackend.DEEPGEMM.value: ("#CC79A7", "P"),
    KernelBackend.CUBLAS_TF32.value: ("#D55E00", "h"),
    KernelBackend.TORCH_COMPILE.value: ("#CC79A7", "X"),
    KernelBackend.TORCH.value: ("#999999", "d"),
}
LABELS = {
    KernelBackend.JIT.value: "hpcjit",
    KernelBackend.JIT_STEPS.value: "hpcjit, steps",
    KernelBackend.AOT.value: "sglang",
    KernelBackend.TORCH.value: "torch eager",
}
COLUMNS = 3
UNIT = "us per call, cold L2"

Panel = dict[str, list[tuple[int, Row]]]
MixPanel = dict[str, list[Row]]  # rows by mix

_SIZES = (
    re.compile(r"(?P<before>)(?P<tokens>\d+)x?(?P<behind>.*)"),
    re.compile(r"(?P<before>.* )M=(?P<tokens>\d+)(?P<behind>.*)"),
    re.compile(r"(?P<before>[a-z]\S* \S+ )(?P<tokens>\d+)(?P<behind>.*)"),
)
_MIX = re.compile(r"(\d+x\d+ [a-z]\w*) (\S.*)")  # heads and dtype, then the mix


def panels(rows: Sequence[Row]) -> dict[str, Panel]:
    """Rows of one operator by what their case names have beyond the token count, then by backend.

    The count leads (`"2048x4096"` in the panel `"4096"`), is called M (`"N=256 K=7168 M=64 fast"`) or comes third (`"dsv3 tp8
    64 bf16"`). Cases whose name has none are left out, and so are panels of a single size.
    """
    found: dict[str, Panel] = {}
    for row in rows:
        match = next(filter(None, (size.match(row.case) for size in _SIZES)), None)
        if match and row.us:
            name = " ".join((match["before"] + match["behind"]).split())
            found.setdefault(name, {}).setdefault(row.backend, []).append((int(match["tokens"]), row))
    for panel in found.values():
        for points in panel.values():
            points.sort(key=lambda point: point[0])
    return {name: panel for name, panel in found.items() if max(len(points) for points in panel.values()) > 1}


def mix_panels(rows: Sequence[Row]) -> dict[str, MixPanel]:
    """Rows of one operator by heads and dtype, then by mix: `"1x8 fp8 64x4K q2"` is the mix `"64x4K q2"` in `"1x8 fp8"`.

    Cases with other names are left out, and so are panels of a single mix.
    """
    found: dict[str, MixPanel] = {}
    for row in rows:
        match = _MIX.fullmatch(row.case)
        if match and row.us:
            found.setdefault(match[1], {}).setdefault(match[2], []).append(row)
    return {name: panel for name, panel in found.items() if len(panel) > 1}


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write `<folder>/<op>.png` for every operator with more than one size or mix, and return the files.

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
        own = [row for row in rows if row.op == op]
        figure = _figure(own)
        if figure is not None:
            written.append(folder / f"{op}.png")
            figure.savefig(written[-1], dpi=150)
    matplotlib.pyplot.close("all")
    return written


def _figure(rows: Sequence[Row]) -> Any:
    """The figure of one operator, or None if there is nothing to compare."""
    mixes = mix_panels(rows)
    if mixes:
        height = 1.2 + 0.3 * max(len(panel) for panel in mixes.values())
        return _grid(rows[0], mixes, _mix_panel, min(2, len(mixes)), (6.6, height))
    sizes = panels(rows)
    if not sizes:
        return None
    figure = _grid(rows[0], sizes, _panel, min(COLUMNS, len(sizes)), (4.6, 3.9))
    for axis in figure.axes[:: min(COLUMNS, len(sizes))]:
        axis.set_ylabel(UNIT)
    return figure


def _grid(
    sample: Row, shown: Mapping[str, Any], paint: Callable[..., None], columns: int, size: tuple[float, float]
) -> Any:
    """A panel for each of `shown`, `size` inches each, under the operator's name and above one legend."""
    from matplotlib import pyplot

    lines = math.ceil(len(shown) / columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(size[0] * columns, size[1] * lines + 0.9), squeeze=False, layout="constrained"
    )
    for axis, (name, panel) in zip(axes.flat, shown.items(), strict=False):
        paint(axis, name, panel)
    for axis in list(axes.flat)[len(shown) :]:
        axis.set_visible(False)
    pairs = [pair for axis in axes.flat for pair in zip(*axis.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in pairs}
    facts = sample.environment
    note = f"{facts.get('gpu', '')}, torch {facts.get('torch', '')}, hpcjit commit {facts.get('commit', '')}"
    figure.suptitle(f"{sample.op}\n", fontweight="bold", fontsize=13)
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


def _mix_panel(axis: Any, name: str, panel: MixPanel) -> None:
    rows = [(place, row) for place, of_mix in enumerate(panel.values()) for row in of_mix]
    for place, of_mix in enumerate(panel.values()):
        times = [row.us for row in of_mix if row.us]
        axis.plot([min(times), max(times)], [place, place], color="#dddddd", linewidth=2.5, zorder=1)
    for backend in (backend for backend in STYLES if any(row.backend == backend for _, row in rows)):
        colour, marker = STYLES[backend]
        ours = backend == KernelBackend.JIT.value
        axis.scatter(
            [row.us for _, row in rows if row.backend == backend],
            [place for place, row in rows if row.backend == backend],
            color=colour,
            marker=marker,
            s=60 if ours else 34,
            edgecolors="white",
            linewidths=0.5,
            zorder=3 if ours else 2,
            label=LABELS.get(backend, backend),
        )
    floors = {place: row.floor_us for place, row in rows if row.floor_us}
    if floors:
        axis.scatter(list(floors.values()), list(floors), color="black", marker="|", s=90, zorder=4, label="floor")
    every = [row.us for _, row in rows if row.us]
    axis.set_xlim(0.5 * min(every), 1.3 * max(every))
    axis.set_yticks(range(len(panel)), list(panel))
    axis.invert_yaxis()
    axis.set_title(name, fontsize=10)
    axis.set_xlabel(UNIT)
    _log_scale(axis, axis.xaxis)


def _dress(axis: Any, name: str, sizes: list[int]) -> None:
    apart = sizes[:1]  # sizes far enough from each other for a label
    for size in sizes[1:]:
        if size >= 1.5 * apart[-1]:
            apart.append(size)
    axis.set_xscale("log", base=2)
    axis.set_xticks(apart, [str(size) for size in apart], rotation=45 if len(apart) > 8 else 0)
    axis.minorticks_off()
    axis.margins(x=0.06)
    axis.set_title(f"size {name}" if name[:1].isdigit() else name, fontsize=10)
    axis.set_xlabel("number of tokens")
    _log_scale(axis, axis.yaxis)


def _log_scale(axis: Any, times: Any) -> None:
    """A logarithmic axis of times with plain numbers, and light lines."""
    from matplotlib import ticker

    (axis.set_xscale if times is axis.xaxis else axis.set_yscale)("log")
    times.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    times.set_major_formatter(ticker.FormatStrFormatter("%g"))
    times.set_minor_formatter(ticker.NullFormatter())
    axis.grid(True, which="major", color="#dddddd", linewidth=0.7)
    axis.spines[["top", "right"]].set_visible(False)
