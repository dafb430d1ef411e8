"""Calls of the moe group that are easy to get wrong, each with the reason it is here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hpcjit.cases import Args, Maker
from hpcjit.cases.moe import separated

BF16, FP16, FP32, INT32 = torch.bfloat16, torch.float16, torch.float32, torch.int32

Placed = Callable[..., torch.Tensor]
Call = tuple[str, str, Callable[[Maker], Args], str]


@dataclass(frozen=True)
class Gate:
    """A call of one of the gates. `bias` is the spread of one; `valid` how many tokens are no padding (their logits NaN)."""

    tokens: int
    experts: int
    top_k: int
    dtype: torch.dtype = FP32
    how: str = "plain"
    renormalize: bool = False
    softcap: float = 0.0
    scale: float = 1.0
    shared: int = 0
    bias: float = 0.0
    valid: int | None = None
    groups: tuple[int, int] = (1, 1)
    scoring: str = "sigmoid"

    def args(self, op: str, m: Maker, placed: Placed) -> Args:
        logits = placed(m, m.normal, (self.tokens, self.experts), self.dtype, self.how)
        bias = m.normal(self.experts, dtype=FP32, std=self.bias) if self.bias else None
        separated(logits, bias, "softmax" if op == "moe.topk_softmax" else self.scoring, self.groups[0])
        valid = None
        if self.valid is not None:
            valid = m.poison(1, dtype=INT32).fill_(self.valid)
            logits[self.valid :] = float("nan")
        shape = (self.tokens, self.top_k + self.shared)
        outputs = (placed(m, m.poison, shape, dtype, self.how) for dtype in (FP32, INT32))
        options: dict[str, tuple[Any, ...]] = {
            "moe.topk_softmax": (self.renormalize, self.softcap),
            "moe.topk_sigmoid": (self.renormalize,),
            "moe.grouped_topk": (*self.groups, self.scoring, self.renormalize),
        }
        return logits, self.top_k, *options[op], self.scale, self.shared, bias, valid, *outputs

    @property
    def label(self) -> str:
        flags = {"renorm": self.renormalize, "bias": self.bias, "padding": self.valid is not None, "fused": self.shared}
        text = f"{self.tokens}x{self.experts}x{self.top_k} {str(self.dtype)[6:]} {self.how} {self.softcap:g}"
        groups = f"{self.groups[1]}of{self.groups[0]} {self.scoring}" if self.groups != (1, 1) else ""
        return " ".join([text, *(name for name, on in flags.items() if on), groups]).strip()


_SOFTMAX = [
    (Gate(1, 1, 1), "one expert"),
    (Gate(5, 8, 8, renormalize=True), "all experts chosen; lanes without one"),
    (Gate(33, 7, 3, softcap=30.0), "softcap must not weigh the padding"),
    (Gate(257, 128, 8, renormalize=True), "tokens do not fill the last block"),
    (Gate(64, 160, 6, bias=0.1), "experts per lane are no power of two; bias steers the choice"),
    (Gate(64, 257, 32, renormalize=True, softcap=5.0, bias=0.1), "odd experts, most winners, every option"),
    (Gate(64, 1000, 8), "lanes partly filled"),
    (Gate(16, 1024, 32), "most experts"),
    (Gate(9, 96, 4, how="padded"), "rows with gaps, also of the outputs"),
    (Gate(9, 256, 8, how="misaligned"), "storage offset 1"),
    (Gate(1101, 128, 8, renormalize=True), "eight tokens a block, the last one not full"),
    (Gate(4101, 520, 4, softcap=20.0, bias=0.1), "likewise, more than half a wave, every option"),
    (Gate(70, 64, 6, renormalize=True, scale=2.5, shared=2, valid=31), "shared experts, padding, scaling"),
    (Gate(0, 128, 8), "no tokens"),
]

_SIGMOID = [
    (Gate(1, 1, 1, renormalize=True), "one expert"),
    (Gate(33, 255, 8), "odd experts; no bias: by the logits"),
    (Gate(40, 256, 8, renormalize=True, bias=0.1, scale=2.5), "DeepSeek-V3 without groups"),
    (Gate(40, 384, 8, renormalize=True, bias=0.1, scale=2.8, shared=1, valid=40), "Kimi-K2; nothing is padding"),
    (Gate(19, 512, 16, BF16, bias=0.1, valid=0), "everything is padding; most winners by rank"),
    (Gate(19, 1024, 32, FP16), "ties are certain; by rounds"),
    (Gate(40, 64, 6, BF16, bias=0.1, renormalize=True), "16-bit logits with a bias"),
    (Gate(9, 96, 4, how="padded", bias=0.1), "rows with gaps, also of the outputs"),
    (Gate(9, 256, 8, how="misaligned"), "storage offset 1"),
    (Gate(33000, 32, 2, renormalize=True), "more tokens than 16 bits count"),
    (Gate(0, 128, 8), "no tokens"),
]

_GROUPED = [
    (Gate(40, 256, 8, renormalize=True, bias=0.1, scale=2.5, groups=(8, 4)), "DeepSeek-V3"),
    (Gate(40, 160, 6, scale=16.0, groups=(8, 3), scoring="softmax"), "DeepSeek-V2: groups of 20 in four lanes each"),
    (Gate(40, 256, 8, BF16, renormalize=True, bias=0.1, groups=(8, 4), shared=1, valid=17), "16-bit, shared, padding"),
    (Gate(19, 24, 4, bias=0.1, groups=(3, 2)), "groups are no power of two: lanes of none"),
    (Gate(19, 32, 8, bias=0.1, groups=(32, 8)), "groups of one: the second best is not added"),
    (Gate(19, 1024, 8, renormalize=True, groups=(32, 2)), "one lane a group; fewer lanes than winners"),
    (Gate(19, 250, 16, bias=0.1, groups=(2, 1), scoring="softmax"), "odd groups, every winner from one"),
    (Gate(19, 36, 5, groups=(4, 4), bias=0.1), "every group kept: no groups"),
    (Gate(19, 128, 8, groups=(1, 1)), "one group"),
    (Gate(9, 64, 4, how="padded", bias=0.1, groups=(4, 2)), "rows with gaps, also of the outputs"),
    (Gate(9, 64, 4, how="misaligned", groups=(4, 2), scoring="softmax", renormalize=True), "storage offset 1"),
    (Gate(1101, 64, 4, renormalize=True, groups=(8, 4)), "eight tokens a block, the last one not full"),
    (Gate(0, 256, 8, groups=(8, 4)), "no tokens"),
]


@dataclass(frozen=True)
class Align:
    """A call of `moe_align_block_size`: ids from `low` to `high`, or those of a map from so many global experts."""

    tokens: int
    top_k: int
    experts: int
    block: int
    low: int = 0
    high: int | None = None
    how: str = "plain"
    mapped: int = 0
    longer: int = 0

    def args(self, m: Maker, placed: Placed) -> Args:
        high = self.high if self.high is not None else self.mapped or self.experts

        def ids(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return m.integers(self.low, high, *shape, dtype=dtype)

        expert_map = m.permutation(self.mapped, dtype=INT32) if self.mapped else None
        numel = self.tokens * self.top_k
        size = (numel + min(numel, self.experts) * (self.block - 1)) // self.block
        outputs = (m.poison(n, dtype=INT32) for n in (size * self.block + self.longer, size + self.longer, 1))
        topk_ids = placed(m, ids, (self.tokens, self.top_k), INT32, self.how)
        return topk_ids, self.experts, self.block, expert_map, *outputs

    @property
    def label(self) -> str:
        mapped = f" of {self.mapped}" * bool(self.mapped)
        ids = f"{self.low}..{'' if self.high is None else self.high}"
        return f"{self.tokens}x{self.top_k} {self.experts}{mapped} by {self.block} ids {ids} {self.how}"


_ALIGN = [
    (Align(1, 8, 256, 64), "one token"),
    (Align(32, 8, 128, 64), "fewer pairs than a block of threads"),
    (Align(130, 8, 257, 16), "odd experts; more than 1024 pairs: the large block"),
    (Align(7, 1, 1, 128), "one expert, one of top 1"),
    (Align(33, 3, 64, 64, 5, 6), "all tokens to one expert"),
    (Align(33, 3, 64, 64, -1, 0), "no expert at all: nothing counts"),
    (Align(40, 9, 60, 8, -3, 64), "ids outside of the experts on both sides, duplicates in a row"),
    (Align(40, 6, 255, 1), "blocks of one: no padding"),
    (Align(40, 6, 384, 32, how="padded"), "rows with gaps"),
    (Align(40, 6, 512, 32, how="misaligned"), "storage offset 1"),
    (Align(40, 6, 32, 32, -1, 120, mapped=100), "experts of one rank, and ids past the map"),
    (Align(300, 8, 1024, 128, longer=77), "most experts; longer results than needed"),
    (Align(513, 8, 256, 64), "one pair past one block of threads: two kernels"),
    (Align(1001, 7, 1024, 64), "likewise, odd, most experts"),
    (Align(3000, 8, 33, 16, how="padded", mapped=70), "likewise, rows with gaps, experts of one rank"),
    (Align(40000, 8, 384, 64), "more tokens than 16 bits count"),
    (Align(90000, 8, 3, 1024), "chunks of more than 4096 pairs"),
    (Align(0, 8, 256, 64), "no tokens: still a number"),
]

# (tokens, top_k, hidden size, dtype, view, weights, scale, why)
_SUMS = [
    (1, 8, 4096, BF16, "plain", False, 1.0, "one token"),
    (33, 8, 7168, BF16, "plain", True, 2.5, "weights and scaling"),
    (7, 1, 64, FP16, "plain", True, 1.0, "one pair; idle lanes"),
    (
        7,
        9,
        1000,
        FP32,
        "plain",
        False,
        0.5,
        "one pair more than are loaded at once; hidden size no multiple of a block",
    ),
    (5, 33, 257, BF16, "plain", True, 1.0, "odd columns: element accesses; many pairs"),
    (5, 6, 2880, BF16, "misaligned", False, 1.0, "storage offset 1"),
    (5, 6, 2880, BF16, "padded", True, 1.0, "rows with gaps"),
    (5, 4, 256, FP16, "experts first", False, 1.0, "the axis of pairs is the outer one"),
    (5, 4, 256, BF16, "dead pairs", True, 1.0, "pairs of weight 0 hold NaN and do not count"),
    (1100, 8, 2048, BF16, "plain", True, 1.0, "large enough to bypass the caches"),
    (0, 8, 4096, BF16, "plain", False, 1.0, "no tokens"),
]


def _sum_args(m: Maker, placed: Placed, call: tuple[Any, ...]) -> Args:
    tokens, top_k, hidden, dtype, how, weighted, scale = call
    view = how if how in ("padded", "misaligned") else "plain"
    x = placed(m, m.normal, (tokens, top_k, hidden), dtype, view)
    if how == "experts first":
        x = m.normal(top_k, tokens, hidden, dtype=dtype).transpose(0, 1)
    weights = placed(m, m.normal, (tokens, top_k), FP32, view) if weighted else None
    if how == "dead pairs":
        weights[1], weights[:, 2] = 0.0, 0.0
        x[1], x[:, 2] = float("nan"), float("inf")
    return x, scale, weights, placed(m, m.poison, (tokens, hidden), dtype, view)


def calls(placed: Placed) -> Iterator[Call]:
    """Operator, label, maker of the arguments, reason."""
    for op, gates in (("moe.topk_softmax", _SOFTMAX), ("moe.topk_sigmoid", _SIGMOID), ("moe.grouped_topk", _GROUPED)):
        for gate, why in gates:
            yield op, gate.label, lambda m, op=op, gate=gate: gate.args(op, m, placed), why
    for align, why in _ALIGN:
        yield "moe.moe_align_block_size", align.label, lambda m, align=align: align.args(m, placed), why
    for *call, why in _SUMS:
        label = f"{'x'.join(map(str, call[:3]))} {str(call[3])[6:]} {call[4]} {'weights' * call[5]}".strip()
        yield "moe.moe_sum_reduce", label, lambda m, call=call: _sum_args(m, placed, call), why
