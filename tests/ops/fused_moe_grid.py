"""Calls of `fused_moe` that are easy to get wrong, each with the reason it is here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from hpcjit.cases import Args, Maker
from hpcjit.cases.moe import reduce_args
from hpcjit.cases.moe_experts import FP8, Experts, grouped_args, plan_args
from hpcjit.ops.moe._fused_moe_args import FusedMoeArgs

BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32
NAN = float("nan")

Change = Callable[[Maker, FusedMoeArgs], dict[str, torch.Tensor | None]]


def gaps(x: torch.Tensor, columns: int) -> torch.Tensor:
    """The same values, with a gap of NaN after each row."""
    wide = torch.full((x.shape[0], x.shape[1] + columns), NAN, dtype=FP32, device=x.device).to(x.dtype)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def _dead(m: Maker, a: FusedMoeArgs) -> dict[str, torch.Tensor | None]:
    """The second token and every third pair belong to nobody; that token holds NaN."""
    if a.x.is_meta:
        return {}
    ids, x = a.topk_ids, a.x
    ids.view(-1)[::3] = -1
    ids[1] = 2**31 - 1
    x.view(torch.uint8)[1] = 0x7F if x.dtype == FP8 else 0xFF
    return {}


def _all_to_one(m: Maker, a: FusedMoeArgs) -> dict[str, torch.Tensor | None]:
    """The first choice of every token is expert 1: the others have few."""
    if not a.x.is_meta:
        a.topk_ids.fill_(-1)[:, 0] = 1
    return {}


def _twice(m: Maker, a: FusedMoeArgs) -> dict[str, torch.Tensor | None]:
    """The first choice again as the third; every fifth pair belongs to nobody."""
    if not a.topk_ids.is_meta:
        a.topk_ids[:, 2] = a.topk_ids[:, 0]
        a.topk_ids.view(-1)[::5] = -(2**31)
    return {}


def _borders(m: Maker, a: FusedMoeArgs) -> dict[str, torch.Tensor | None]:
    """Experts of so many rows each, in no order; the last tokens belong to nobody."""
    if not a.topk_ids.is_meta:
        counts = (130, 161, 191, 192, 193, 400)
        chosen = [e for e, count in enumerate(counts) for _ in range(count)]
        chosen += [-1] * (a.topk_ids.numel() - len(chosen))
        a.topk_ids.view(-1)[:] = torch.tensor([chosen[i * 37 % len(chosen)] for i in range(len(chosen))])
    return {}


def _nan_row(m: Maker, a: FusedMoeArgs) -> dict[str, torch.Tensor | None]:
    """NaN in one token, infinity in another: each spoils itself alone."""
    a.x[2, 5] = NAN
    a.x[0, 7] = float("inf")
    return {}


def _views(m: Maker, a: FusedMoeArgs) -> dict[str, torch.Tensor | None]:
    """Rows with gaps, scales with the tokens of a group next to each other."""
    wide = m.poison(a.topk_ids.shape[0], a.topk_ids.shape[1] + 3, dtype=INT32)
    ids = wide[:, : a.topk_ids.shape[1]]
    ids.copy_(a.topk_ids)
    scale = None if a.x_scale is None else a.x_scale.t().contiguous().t()
    weights = gaps(a.topk_weights, 2)
    rows = {"x": gaps(a.x, 16), "out": gaps(a.out, 8), "topk_ids": ids, "topk_weights": weights, "x_scale": scale}
    if a.shared_output is not None:
        rows["shared_output"] = gaps(a.shared_output, 8)
    return rows


def _given_scale(m: Maker, a: FusedMoeArgs) -> dict[str, torch.Tensor | None]:
    """Some activations are beyond what it can express."""
    return {"x_scale": m.normal(1, dtype=FP32).fill_(2.0 / 448)}


def _same(m: Maker, a: FusedMoeArgs) -> dict[str, torch.Tensor | None]:
    return {}


@dataclass(frozen=True)
class Mixed:
    experts: Experts
    why: str
    change: Change = field(default=_same)

    def args(self, m: Maker) -> Args:
        a = FusedMoeArgs(*self.experts.make(m))
        return tuple(a._replace(**self.change(m, a)))

    @property
    def label(self) -> str:
        e = self.experts
        words = [f"{e.tokens}x{e.experts}x{e.hidden}x{e.inner} of {e.top_k}", e.quant, e.activation]
        flags = {"codes": e.quant != "bf16" and e.codes, "shared": e.shared, "on input": e.on_input}
        flags |= {f"from {e.offset}": e.offset > 0, self.change.__name__.strip("_"): self.change is not _same}
        return " ".join(words + [name for name, on in flags.items() if on])


def _bf16(*sizes: int, **options) -> Experts:
    return Experts(*sizes, quant="bf16", codes=False, **options)


GRID = [
    Mixed(_bf16(1, 4, 128, 64, 2), "one token"),
    Mixed(_bf16(9, 3, 200, 72, 2, on_input=True), "sizes that fill no box, weights on the input"),
    Mixed(_bf16(6, 4, 256, 128, 2, shared=True), "NaN and infinity spread no further", _nan_row),
    Mixed(_bf16(140, 3, 128, 64, 2), "tiles of 128 rows, the second one with few", _all_to_one),
    Mixed(_bf16(140, 2, 128, 64, 2), "tiles of up to 192 rows"),
    Mixed(_bf16(1300, 7, 200, 72, 1), "rows of an expert around 128, 160 and 192", _borders),
    Mixed(_bf16(0, 8, 256, 128, 2), "no tokens"),
    Mixed(Experts(3, 4, 144, 48, 1, on_input=True), "the least sizes of FP8, one expert per token"),
    Mixed(Experts(33, 8, 256, 192, 2), "one expert takes all, in three tiles", _all_to_one),
    Mixed(Experts(7, 16, 256, 64, 6), "ids of nobody, a dead token of NaN", _dead),
    Mixed(Experts(5, 4, 256, 128, 2, codes=False), "a scale that is given; some values saturate", _given_scale),
    Mixed(Experts(6, 8, 256, 128, 4, codes=False, shared=True), "a scale for each token", _nan_row),
    Mixed(Experts(2, 512, 128, 64, 8, global_experts=512), "most experts, nearly all without tokens"),
    Mixed(Experts(5, 64, 128, 64, 32), "most experts of a token"),
    Mixed(Experts(9, 4, 272, 80, 3, "fp8_channel", False, "gelu"), "last boxes are partial; gelu"),
    Mixed(Experts(40, 4, 384, 192, 2, "fp8_channel", offset=8, global_experts=16), "experts 8 to 11 of 16 are here"),
    Mixed(Experts(7, 4, 384, 192, 2, "fp8_block", shared=True), "I = 192, views, scales of groups first", _views),
    Mixed(Experts(7, 4, 208, 320, 2, "fp8_block", False), "last groups of 128 are short in both sizes"),
    Mixed(Experts(5, 8, 256, 192, 4, "fp8_block", False), "ids of nobody, a dead token of NaN", _dead),
    Mixed(Experts(45, 6, 256, 192, 2, "fp8_block"), "tiles of 32 rows"),
    Mixed(Experts(100, 4, 256, 256, 1, "fp8_block", False), "tiles of 64 rows"),
    Mixed(Experts(190, 4, 256, 192, 2, "fp8_block"), "tiles of 128 rows: two warpgroups", _all_to_one),
    Mixed(Experts(190, 3, 256, 192, 2, "fp8_block"), "tiles of up to 192 rows"),
    Mixed(Experts(390, 3, 640, 192, 2, shared=True), "one expert takes all, in three tiles", _all_to_one),
    Mixed(Experts(1300, 7, 640, 80, 1), "rows of an expert around 128, 160 and 192", _borders),
    Mixed(Experts(1300, 7, 272, 192, 1, "fp8_channel", False), "likewise, last boxes are partial", _borders),
    Mixed(Experts(1300, 7, 208, 320, 1, "fp8_block"), "likewise, last groups are short", _borders),
    Mixed(Experts(128, 512, 128, 64, 8), "most tokens, pairs and experts whose plan a block finds by itself"),
    Mixed(Experts(64, 8, 256, 192, 8), "512 pairs, tiles of 128 rows of a plan of the block's own"),
    Mixed(Experts(57, 200, 128, 64, 9), "513 pairs; experts of no whole warp"),
    Mixed(
        Experts(128, 40, 256, 64, 8, "fp8_block"),
        "an expert twice in a token, ids of nobody, in every word of tokens",
        _twice,
    ),
    Mixed(Experts(128, 40, 256, 64, 9, "bf16", False), "more pairs than blocks find by themselves"),
    Mixed(Experts(700, 16, 1536, 64, 8, shared=True), "pairs are sorted by several blocks"),
]


# (tokens, experts, top_k, rows of a tile, first expert, ids are drawn among, why)
_PLANS = [
    (1, 1, 1, 1, 0, 0, "one pair"),
    (7, 60, 6, 16, 0, 0, "less than a warp in some, most experts empty"),
    (33, 512, 8, 64, 0, 0, "most experts, one tile each"),
    (129, 8, 8, 5, 0, 0, "the first size of many threads; tiles of odd size"),
    (513, 200, 8, 128, 0, 0, "the first size that two blocks sort"),
    (700, 8, 2, 192, 0, 0, "tiles of 192 rows"),
    (900, 16, 8, 3, 8, 40, "experts 8 to 23 of 40 are here; more tiles than threads"),
    (0, 8, 2, 16, 0, 0, "no tokens"),
]


# (rows, experts, features, hidden, rows of a tile, quant, why)
_GROUPED = [
    (1, 1, 8, 16, 16, "fp8_tensor", "one row, the least sizes"),
    (21, 3, 200, 72, 16, "bf16", "sizes that fill no box"),
    (90, 5, 136, 400, 32, "fp8_channel", "tiles of 32 rows, last groups of K are short"),
    (150, 3, 328, 208, 64, "fp8_block", "tiles of 64 rows, blocks of weights that are short in both sizes"),
    (300, 2, 256, 384, 128, "fp8_block", "tiles of 128 rows, the last one with few"),
    (523, 4, 200, 272, 192, "fp8_tensor", "tiles of 192 rows: experts of 0, 130, 260 and 133"),
    (645, 4, 136, 400, 192, "fp8_channel", "of 0, 161, 322 and 162"),
    (766, 4, 328, 208, 192, "fp8_block", "of 0, 191, 382 and 193"),
    (769, 4, 200, 72, 192, "bf16", "of 0, 192, 384 and 193"),
    (0, 2, 64, 128, 16, "bf16", "no rows"),
]


# (tokens, top_k, hidden, dtype, view, shared, why)
_REDUCE = [
    (1, 8, 4096, BF16, "plain", False, "one token"),
    (33, 6, 7168, BF16, "dead", True, "pairs of nobody, and rows of NaN whose weight is 0"),
    (7, 1, 64, torch.float16, "plain", True, "one pair; idle lanes"),
    (7, 9, 1000, FP32, "plain", False, "one pair more than are loaded at once; no multiple of a block"),
    (5, 32, 257, BF16, "plain", True, "odd columns: element accesses; many pairs"),
    (5, 4, 512, BF16, "views", True, "rows with gaps everywhere"),
    (1100, 8, 2048, BF16, "dead", False, "large enough to bypass the caches"),
    (0, 8, 4096, BF16, "plain", True, "no tokens"),
]


def _reduce(m: Maker, call: tuple[Any, ...]) -> Args:
    tokens, top_k, hidden, dtype, how, shared = call
    rows, positions, weights, added, out = reduce_args(m, tokens, top_k, hidden, shared, dtype)
    if how == "dead" and not rows.is_meta:
        positions[0], positions[1::2, 3], weights[:, 1] = -1, -1, 0.0
        rows[positions[1:, 1].clamp_min(0).long()] = NAN
        weights[3, 2] = 0.0
    if how == "views":
        wide = m.poison(tokens, top_k + 3, dtype=INT32)
        wide[:, :top_k] = positions
        positions, rows, weights, out = wide[:, :top_k], gaps(rows, 8), gaps(weights, 2), gaps(out, 16)
        added = None if added is None else gaps(added, 24)
    return rows, positions, weights, added, out


def _plan(m: Maker, call: tuple[int, ...]) -> Args:
    tokens, experts, top_k, rows, offset, spread = call
    args = plan_args(m, tokens, experts, top_k, rows, offset, spread)
    if not args[0].is_meta:
        args[0][tokens // 2 :: 3] = -1
    return args


def calls() -> Iterator[tuple[str, str, Callable[[Maker], Args], str]]:
    """Operator, label, maker of the arguments, reason."""
    for mixed in GRID:
        yield "moe.fused_moe", mixed.label, mixed.args, mixed.why
    for *call, why in _PLANS:
        label = f"{call[0]}x{call[2]} of {call[1]} by {call[3]} from {call[4]}"
        yield "moe.moe_plan", label, lambda m, call=call: _plan(m, call), why
    for *call, why in _REDUCE:
        label = f"{'x'.join(map(str, call[:3]))} {str(call[3])[6:]} {call[4]}{' shared' * call[5]}"
        yield "moe.moe_reduce", label, lambda m, call=call: _reduce(m, call), why
    for *call, why in _GROUPED:
        label = f"{call[0]}x{call[2]}x{call[3]} of {call[1]} {call[5]}"
        yield "moe.grouped_gemm", label, lambda m, call=call: grouped_args(m, *call), why
