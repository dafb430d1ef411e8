"""Cases of the layernorm group: hidden sizes of 8B models, DeepSeek-V3 and 405B models; tokens from decode to prefill."""

from __future__ import annotations

import torch

from hpcjit.cases import Args, Case, Make, Maker

_SHAPES = [(tokens, hidden) for hidden in (4096, 7168, 16384) for tokens in (1, 32, 2048, 8192)]
_DEMO = frozenset({"demo", "bench"})
_BENCH = frozenset({"bench"})


def _rmsnorm(tokens: int, hidden: int) -> tuple[int, Make]:
    def make(m: Maker) -> Args:
        return m.normal(tokens, hidden), m.normal(hidden), 1e-6, m.poison(tokens, hidden)

    return 2 * 2 * tokens * hidden, make


def _fused_add_rmsnorm(tokens: int, hidden: int) -> tuple[int, Make]:
    def make(m: Maker) -> Args:
        return m.normal(tokens, hidden), m.normal(tokens, hidden), m.normal(hidden), 1e-6

    return 4 * 2 * tokens * hidden, make


def _layernorm(tokens: int, hidden: int) -> tuple[int, Make]:
    def make(m: Maker) -> Args:
        return m.normal(tokens, hidden), m.normal(hidden), m.normal(hidden), 1e-5, m.poison(tokens, hidden)

    return 2 * 2 * tokens * hidden, make


def _rmsnorm_quant_fp8(tokens: int, hidden: int) -> tuple[int, Make]:
    def make(m: Maker) -> Args:
        out = m.poison(tokens, hidden, dtype=torch.float8_e4m3fn)
        scale = m.poison(tokens, 1, dtype=torch.float32)
        return m.normal(tokens, hidden), None, m.normal(hidden), 1e-6, True, out, scale

    return 3 * tokens * hidden, make


def _qk_norm(tokens: int, q_heads: int, k_heads: int, head_dim: int) -> tuple[int, Make]:
    """Queries and keys are views of one fused projection, as models make them."""

    def make(m: Maker) -> Args:
        qkv = m.normal(tokens, q_heads + 2 * k_heads, head_dim)
        return qkv[:, :q_heads], qkv[:, q_heads : q_heads + k_heads], m.normal(head_dim), m.normal(head_dim), 1e-6

    return 2 * 2 * tokens * (q_heads + k_heads) * head_dim, make


_MAKERS = {
    "layernorm.rmsnorm": _rmsnorm,
    "layernorm.gemma_rmsnorm": _rmsnorm,
    "layernorm.fused_add_rmsnorm": _fused_add_rmsnorm,
    "layernorm.gemma_fused_add_rmsnorm": _fused_add_rmsnorm,
    "layernorm.layernorm": _layernorm,
    "layernorm.rmsnorm_quant_fp8": _rmsnorm_quant_fp8,
}

CASES = [
    Case(op, f"{tokens}x{hidden}", make, moved, tags=_DEMO if (tokens, hidden) == (32, 4096) else _BENCH)
    for op, maker in _MAKERS.items()
    for tokens, hidden in _SHAPES
    for moved, make in [maker(tokens, hidden)]
]

CASES += [
    Case("layernorm.qk_norm", f"{tokens}x{q}x{k}x{dim}", make, moved, tags=_DEMO if tokens == 32 else _BENCH)
    for q, k, dim in ((32, 8, 128),)
    for tokens in (1, 32, 2048, 8192)
    for moved, make in [_qk_norm(tokens, q, k, dim)]
]
