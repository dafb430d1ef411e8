"""Cases of the kvcache group: 8 and 1 KV heads of 128 (a GQA model on one and on eight GPUs), pages of 64 slots.

A name is tokens x heads x head_dim, layout, dtype of the cache. The cache is about twice what is written.
"""

from __future__ import annotations

import torch

from hpcjit.cases import Args, Case, Make, Maker

_PAGE_SIZE = 64
_HEAD_DIM = 128
_CACHES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
_DEMO = frozenset({"demo", "bench"})
_BENCH = frozenset({"bench"})


def _reshape_and_cache(tokens: int, heads: int, layout: str, dtype: torch.dtype) -> Make:
    num_pages = 2 * tokens // _PAGE_SIZE + 1
    axes = (_PAGE_SIZE, heads) if layout == "NHD" else (heads, _PAGE_SIZE)

    def make(m: Maker) -> Args:
        key, value = m.normal(tokens, heads, _HEAD_DIM), m.normal(tokens, heads, _HEAD_DIM)
        caches = [m.poison(num_pages, *axes, _HEAD_DIM, dtype=dtype) for _ in range(2)]
        slots = m.permutation(num_pages * _PAGE_SIZE)[:tokens].contiguous()
        factor = 1.0 if dtype == torch.bfloat16 else 0.02
        return key, value, *caches, slots, None, None, factor, factor, layout

    return make


CASES = [
    Case(
        "kvcache.reshape_and_cache",
        f"{tokens}x{heads}x{_HEAD_DIM} {layout.lower()} {name}",
        _reshape_and_cache(tokens, heads, layout, dtype),
        2 * tokens * heads * _HEAD_DIM * (2 + dtype.itemsize) + 8 * tokens,
        tags=_DEMO if (tokens, heads, layout) == (32, 8, "NHD") else _BENCH,
    )
    for heads, layout in ((8, "NHD"), (8, "HND"), (1, "NHD"))
    for name, dtype in _CACHES.items()
    for tokens in (1, 32, 256, 2048, 8192)
]
