"""Decode attention over a mixed batch: is it right, who does what, how long does it take?

    python examples/decode_attention.py --mix 1x64K+15x4K --dtype fp8 --heads 1x8

Builds a paged KV cache with one long request among short ones, attends to it, compares the result with torch, and draws the
work of every CTA: the dynamic schedule, which follows the live lengths, above the static one, which cuts every request into
the same number of parts. With a CUDA device it also times both, and every other backend that is installed. Without one the
reference runs, on lengths cut down to what a CPU does in a moment; the picture shows the full ones. The picture needs
matplotlib: pip install 'hpcjit[bench]'.
"""

from __future__ import annotations

import argparse
import heapq
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hpcjit import numerics
from hpcjit.bench import timer
from hpcjit.cases import Maker
from hpcjit.cases.attention import Batch, lengths_of
from hpcjit.errors import HpcjitError
from hpcjit.ops.attention import decode
from hpcjit.ops.attention._decode import decode_op
from hpcjit.ops.attention._decode_schedule import Piece, Rules, dynamic, static, tiles_of
from hpcjit.ops.attention._decode_shape import DecodeArgs
from hpcjit.spec import KernelBackend

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
CPU_LENGTH = 512
GOLDEN = 0.618034  # neighbours get colours that are far apart


def attend(a: DecodeArgs, schedule: str = "dynamic", backend: KernelBackend | None = None) -> None:
    """The public call: one new token per request over its pages, written to `a.out`."""
    scales: dict[str, Any] = {"q_scale": a.q_scale, "k_scale": a.k_factor} if a.q.dtype == DTYPES["fp8"] else {}
    options = {"layout": a.layout, "schedule": schedule, "out": a.out, "backend": backend}
    decode(a.q, a.k_cache, a.v_cache, a.block_table, a.seq_lens, **scales, **options)


# --- the schedule ---------------------------------------------------------------------------------------------------


def pieces_of(batch: Batch, rules: Rules, schedule: str) -> list[Piece]:
    """What each CTA does, by the numbers that the launch gets."""
    counts = [tiles_of(length, batch.q_len, 0, rules.tile)[1] for length in batch.lengths]
    return (static if schedule == "static" else dynamic)(counts, rules)


def place(pieces: Sequence[Piece], ctas: int, sms: int) -> list[int]:
    """The SM of each CTA: one is resident per SM; the last worker starts first, the next where one ends first."""
    if ctas <= sms:
        return list(range(ctas))
    tiles = [0] * ctas
    for piece in pieces:
        tiles[piece.worker] += piece.tiles
    free, placed = [(0, sm) for sm in range(sms)], []
    for work in reversed(tiles):
        until, sm = free[0]
        placed.append(sm)
        heapq.heapreplace(free, (until + work, sm))
    return placed[::-1]


def draw(batch: Batch, rules_of: dict[str, Rules], title: str, path: Path) -> dict[str, float]:
    """Both schedules as stacks of tiles on the SMs; returns largest over mean of each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, figsize=(12, 7), sharex=True, sharey=True, layout="constrained")
    sms, imbalance = rules_of["dynamic"].workers, {}
    for axis, (schedule, rules) in zip(axes, rules_of.items(), strict=True):
        pieces = pieces_of(batch, rules, schedule)
        loads = stack(axis, pieces, place(pieces, rules.workers, sms), sms)
        mean = sum(loads) / sms
        imbalance[schedule] = max(loads) / mean if mean else 1.0
        title_of = f"{schedule}: {rules.workers} CTAs, max/mean {imbalance[schedule]:.2f}"
        if schedule == "dynamic":
            title_of += f"; each request and KV head counts {2 * rules.margin} tiles more"
        axis.axhline(mean, color="black", linestyle=":", linewidth=1)
        axis.set_title(title_of, loc="left", fontsize=10)
        axis.set_ylabel(f"tiles of {rules.tile} tokens")
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("SM, its CTAs one above the other; a colour per request, the dotted line is the mean")
    axes[-1].set_xlim(-1, sms)
    figure.suptitle(title, fontweight="bold")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return imbalance


def stack(axis: Any, pieces: Sequence[Piece], placed: Sequence[int], sms: int) -> list[int]:
    """Draw a bar per piece, and return the tiles of each SM."""
    from matplotlib import colormaps

    loads, bars = [0] * sms, []
    for piece in pieces:
        sm = placed[piece.worker]
        if piece.tiles:
            bars.append((sm, piece.tiles, loads[sm], colormaps["turbo"](piece.request * GOLDEN % 1)))
        loads[sm] += piece.tiles
    if bars:
        x, heights, bottoms, colours = zip(*bars, strict=True)
        axis.bar(x, heights, bottom=bottoms, color=colours, width=1, edgecolor="white", linewidth=0.3)
    return loads


# --- times ----------------------------------------------------------------------------------------------------------


def attend_on(schedule: str, backend: KernelBackend, *args: Any) -> None:
    attend(DecodeArgs(*args), schedule, backend)


def print_times(batch: Batch, args: tuple[Any, ...]) -> None:
    """Our two schedules and every peer: one CUDA graph each, inputs in memory and not in L2."""
    references = (KernelBackend.TORCH, KernelBackend.TORCH_COMPILE)
    backends = [backend for backend in decode_op.available_backends() if backend not in references]
    runs = [(backend, "dynamic") for backend in backends]
    if KernelBackend.JIT in backends:
        runs.insert(backends.index(KernelBackend.JIT) + 1, (KernelBackend.JIT, "static"))
    for backend, schedule in runs:
        name = f"hpcjit, {schedule}" if backend is KernelBackend.JIT else str(backend)
        try:
            us = timer.cold(partial(attend_on, schedule, backend), args, args[0].device).us
        except Exception as error:  # a peer may fail in any way
            print(f"{name:18} {error}")
        else:
            print(f"{name:18} {us:8.2f} us {batch.bytes / us / 1e6:6.2f} TB/s")


# --- the command ----------------------------------------------------------------------------------------------------


def run(batch: Batch, title: str, path: Path) -> bool:
    """Check, draw, time; whether the result is right."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    here = batch if gpu else Batch(**{**vars(batch), "lengths": tuple(min(n, CPU_LENGTH) for n in batch.lengths)})
    args = here(Maker(device))
    found = numerics.worst(numerics.check(decode_op, args, lambda *own: attend(DecodeArgs(*own))))
    print(f"{title} on {torch.cuda.get_device_name(device) if gpu else 'the CPU (reference)'}")
    print(f"{found}: {'ok' if found.ok else 'WRONG'}")

    planned = DecodeArgs(*(args if gpu else batch(Maker("meta"))))
    rules_of = {name: Rules.of(decode_op.plan(*planned._replace(schedule=name))) for name in ("dynamic", "static")}
    try:
        imbalance = draw(batch, rules_of, title, path)
        print(f"{path}: max/mean {', '.join(f'{name} {ratio:.2f}' for name, ratio in imbalance.items())}")
    except ImportError:
        print("no picture: it needs matplotlib, pip install 'hpcjit[bench]'")
    if gpu:
        print_times(batch, args)
    return found.ok


def batch_of(options: argparse.Namespace) -> Batch:
    """The batch that the command line describes."""
    heads = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", options.heads)
    lengths = tuple(lengths_of(options.mix))
    if heads is None:
        raise ValueError(f"heads are KV heads x query heads, such as 8x64: got {options.heads!r}")
    if not any(lengths) or options.page_size < 1:
        raise ValueError("there must be a live token, and a page must have a slot")
    sizes = (options.head_dim, options.head_dim, options.page_size)
    return Batch(int(heads[1]), int(heads[2]), DTYPES[options.dtype], lengths, 1, *sizes)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mix", default="1x64K+15x4K", help="requests x live length, joined by +, K for 1024")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the cache and the queries")
    parser.add_argument("--heads", default="1x8", help="KV heads x query heads")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("decode_schedule.png"), help="the picture")
    options = parser.parse_args(argv)
    try:
        ok = run(batch_of(options), f"{options.heads} {options.dtype} {options.mix}", options.out)
    except (ValueError, HpcjitError) as error:
        parser.error(str(error))
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
