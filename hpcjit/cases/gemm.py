"""Cases of the gemm group: routers of LongCat-Flash (768 and 384 experts), DeepSeek-V3 (256), Qwen3 and others.

M is the number of tokens. Names that end in fast take the weights in two terms, the others in three.
"""

from __future__ import annotations

import torch

from hpcjit.cases import Args, Case, Make, Maker

SHAPES = ((192, 4096), (768, 6144), (384, 3072), (256, 7168), (128, 4096))  # N, K
TOKENS = (1, 2, 4, 8, 16, 48, 64, 96, 128, 208, 256, 512, 1024, 2048, 4096, 8192)
_DEMO = frozenset({"demo"})
_BENCH = frozenset({"bench"})
_STD = 0.02  # of router weights


def _router(m_size: int, n_size: int, k_size: int, mode: str) -> Make:
    def make(m: Maker) -> Args:
        weight = m.normal(n_size, k_size, dtype=torch.float32, std=_STD)
        return m.normal(m_size, k_size), weight, mode, m.poison(m_size, n_size, dtype=torch.float32)

    return make


def _bf16x2(m_size: int, n_size: int, k_size: int) -> Make:
    def make(m: Maker) -> Args:
        high, low = (m.normal(n_size, k_size, std=std) for std in (_STD, _STD / 2))
        return m.normal(m_size, k_size), high, low, 1 / 256, m.poison(m_size, n_size, dtype=torch.float32)

    return make


def _case(op: str, name: str, sizes: tuple[int, int, int], make: Make, tags: frozenset[str] = _BENCH) -> Case:
    m_size, n_size, k_size = sizes
    moved = 4 * n_size * k_size + 2 * m_size * k_size + 4 * m_size * n_size
    passes = 2 if make.__qualname__.startswith("_bf16x2") or name.endswith("fast") else 3
    return Case(op, name, make, moved, 2 * passes * m_size * n_size * k_size, tags)


def _cases() -> list[Case]:
    small = (5, 96, 512)
    found = [
        _case("gemm.router_gemm", "N=96 K=512 M=5", small, _router(*small, "accurate"), _DEMO),
        _case("gemm.router_gemm", "N=96 K=512 M=5 fast", small, _router(*small, "fast"), _DEMO),
        _case("gemm.gemm_bf16x2", "N=96 K=512 M=5", small, _bf16x2(*small), _DEMO),
    ]
    for n_size, k_size in SHAPES:
        for m_size in TOKENS:
            name, sizes = f"N={n_size} K={k_size} M={m_size}", (m_size, n_size, k_size)
            found.append(_case("gemm.router_gemm", name, sizes, _router(*sizes, "accurate")))
            found.append(_case("gemm.router_gemm", f"{name} fast", sizes, _router(*sizes, "fast")))
    for m_size in (1, 16, 64, 512):
        sizes = (m_size, 192, 4096)
        found.append(_case("gemm.gemm_bf16x2", f"N=192 K=4096 M={m_size}", sizes, _bf16x2(*sizes)))
    return found


CASES = _cases()
