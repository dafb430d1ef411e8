"""Calls of the gemm group that are easy to get wrong, each with the reason it is here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch

from hpcjit.cases import Args, Maker

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PLAIN, PADDED, FOURS, MISALIGNED, REPEATED = "plain", "padded", "fours", "misaligned", "repeated"


def _placed(fill: Callable[..., torch.Tensor], rows: int, columns: int, dtype: torch.dtype, how: str) -> torch.Tensor:
    """Contiguous; with a gap of 5 or 4 elements after each row; one element off alignment; or one row for all."""
    if how in (PADDED, FOURS):
        return fill(rows, columns + (5 if how == PADDED else 4), dtype=dtype)[:, :columns]
    if how == MISALIGNED:
        return fill(math.prod((rows, columns)) + 1, dtype=dtype)[1:].view(rows, columns)
    if how == REPEATED:
        return fill(1, columns, dtype=dtype).expand(rows, columns)
    return fill(rows, columns, dtype=dtype)


def _out(m: Maker, rows: int, columns: int, dtype: torch.dtype, how: str) -> torch.Tensor:
    return _placed(m.poison, rows, columns, dtype, PLAIN if how == REPEATED else how)


def router(m: Maker, tokens: int, experts: int, hidden: int, mode: str, dtype=BF16, out=FP32, how=PLAIN) -> Args:
    x = _placed(m.normal, tokens, hidden, dtype, how)
    weight = _placed(partial(m.normal, std=0.02), experts, hidden, FP32, PLAIN if how == REPEATED else how)
    return x, weight, mode, _out(m, tokens, experts, out, how)


def bf16x2(m: Maker, tokens: int, experts: int, hidden: int, out=FP32, how=PLAIN) -> Args:
    x = _placed(m.normal, tokens, hidden, BF16, how)
    high, low = (_placed(partial(m.normal, std=std), experts, hidden, BF16, how) for std in (0.02, 0.01))
    return x, high, low, 1 / 256, _out(m, tokens, experts, out, how)


_ROUTER = [
    ((1, 1, 1, "accurate"), "the least call"),
    ((1, 192, 4096, "accurate"), "one token: 7 columns of the product are nobody's"),
    ((8, 128, 4096, "fast"), "whole tiles, every warp has as many steps as it holds"),
    ((3, 7, 100, "accurate"), "fewer experts than a tile; hidden size of fours but not of steps"),
    ((5, 37, 1001, "accurate"), "odd everything: element loads"),
    ((9, 65, 24, "fast"), "less than one step"),
    ((11, 130, 72, "accurate"), "fewer steps than warps, a token past a tile"),
    ((16, 48, 1088, "accurate"), "two tiles of tokens; steps that do not divide"),
    ((31, 50, 512, "fast", FP16, BF16), "fp16 in two terms, bf16 out"),
    ((17, 100, 1024, "accurate", FP16), "fp16 in three terms"),
    ((33, 96, 2048, "accurate", BF16, BF16), "bf16 out; one token more than four tiles"),
    ((20, 40, 516, "fast", BF16, FP32, FOURS), "rows with gaps that keep fours aligned"),
    ((20, 40, 512, "accurate", BF16, FP32, PADDED), "rows with gaps of 5: none but the first is aligned"),
    ((6, 33, 512, "accurate", BF16, BF16, MISALIGNED), "storage offset 1"),
    ((6, 33, 512, "fast", FP16, FP32, MISALIGNED), "storage offset 1, fp16"),
    ((12, 32, 256, "accurate", BF16, FP32, REPEATED), "every token is the same row: stride 0"),
    ((70, 48, 640, "accurate"), "two blocks of tokens, the second nearly empty"),
    ((300, 200, 768, "fast"), "several blocks of tokens and of experts"),
    ((1100, 24, 512, "accurate"), "many tokens, few experts"),
    ((0, 64, 128, "accurate"), "no tokens"),
]

_BF16X2 = [
    ((1, 1, 1), "the least call"),
    ((9, 192, 2048), "a token past a tile"),
    ((20, 65, 1003), "odd: element loads"),
    ((70, 40, 520, BF16), "bf16 out, a hidden size of fours, two blocks of tokens"),
    ((7, 33, 96, FP32, PADDED), "rows with gaps of 5"),
    ((7, 33, 96, FP32, MISALIGNED), "storage offset 1"),
    ((0, 8, 16), "no tokens"),
]


def calls() -> Iterator[tuple[str, str, Callable[[Maker], Args], str]]:
    """Operator, label, maker of arguments, reason."""
    for op, make, entries in (("router_gemm", router, _ROUTER), ("gemm_bf16x2", bf16x2, _BF16X2)):
        for call, why in entries:
            words = [str(value).removeprefix("torch.") for value in call[3:]]
            label = " ".join(["x".join(map(str, call[:3])), *words])
            yield f"gemm.{op}", label, lambda m, make=make, call=call: make(m, *call), why
