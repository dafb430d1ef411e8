"""Cases of the activation group: intermediate sizes of 8B models and DeepSeek-V3; tokens from decode to prefill.

A name is tokens x columns of the input, which holds both halves.
"""

from __future__ import annotations

import torch

from hpcjit.cases import Args, Case, Make, Maker

_SHAPES = [(tokens, columns) for columns in (8192, 14336) for tokens in (1, 32, 2048, 8192)]
_DEMO = frozenset({"demo", "bench"})
_BENCH = frozenset({"bench"})


def _gated(tokens: int, columns: int) -> Make:
    def make(m: Maker) -> Args:
        return m.normal(tokens, columns), m.poison(tokens, columns // 2)

    return make


def _quant_fp8(tokens: int, columns: int, group_size: int) -> Make:
    scales = columns // 2 // group_size if group_size else 1

    def make(m: Maker) -> Args:
        out = m.poison(tokens, columns // 2, dtype=torch.float8_e4m3fn)
        scale = m.poison(tokens, scales, dtype=torch.float32)
        return m.normal(tokens, columns), True, group_size, False, out, scale

    return make


def _cases() -> list[Case]:
    cases = []
    for tokens, columns in _SHAPES:
        name, tags = f"{tokens}x{columns}", _DEMO if (tokens, columns) == (32, 8192) else _BENCH
        for op in ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"):
            cases.append(Case(f"activation.{op}", name, _gated(tokens, columns), 3 * tokens * columns, tags=tags))
        for group_size in (0, 128):
            title = f"{name} g{group_size}" if group_size else name
            scales = columns // 2 // group_size if group_size else 1
            moved = 2 * tokens * columns + tokens * columns // 2 + 4 * tokens * scales
            make = _quant_fp8(tokens, columns, group_size)
            cases.append(Case("activation.silu_and_mul_quant_fp8", title, make, moved, tags=tags))
    return cases


CASES = _cases()
