"""Cases of the attention group: decode batches from uniform to one request that outweighs all others.

A name is KV heads x query heads, dtype of the cache, requests x length; pages of 64 slots, heads of 128 and layout HND unless
it says otherwise: q4 four new tokens per request, d64 heads of 64, p16 pages of 16 slots, nhd, static and invariant schedules.
With an FP8 cache the queries are FP8 too, with the scales that every peer can express: one for the queries, one for K, none
for V; rowscale has those of queries per token and head, tokenscale those of K and V. The pool holds the live pages in random
order and nothing else.

Of `merge_state`, a name is tokens x heads x head_dim.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hpcjit.cases import Args, Case, Make, Maker

MIXES = (
    *("64x512", "64x4K", "32x128+32x4K", "1x16K+15x64", "1x64K+7x4K", "1x64K+15x4K", "1x64K+31x4K", "1x128K+31x4K"),
    *("2x32K+30x4K", "1x2K", "1x32K", "4x8K", "128x1K", "256x2K"),
)
_FP8 = torch.float8_e4m3fn
_DEMO = frozenset({"demo"})
_BENCH = frozenset({"bench"})
_BOTH = _DEMO | _BENCH


def lengths_of(mix: str) -> list[int]:
    """The live length of each request of a mix such as `1x64K+7x4K`."""
    found: list[int] = []
    for part in mix.split("+"):
        match = re.fullmatch(r"(\d+)x(\d+)(K?)", part)
        if match is None:
            raise ValueError(f"a mix is requests x length, joined by +, with K for 1024: got {mix!r}")
        count, length, kilo = match.groups()
        found += [int(length) * (1024 if kilo else 1)] * int(count)
    return found


@dataclass(frozen=True)
class Batch:
    """A decode batch; its arguments are those of the operator."""

    num_kv_heads: int
    num_q_heads: int
    dtype: torch.dtype  # of the cache, and of the queries
    lengths: tuple[int, ...]
    q_len: int = 1
    head_dim: int = 128
    value_head_dim: int = 128
    page_size: int = 64
    layout: str = "HND"
    schedule: str = "dynamic"
    row_scales: bool = False
    token_scales: bool = False
    with_lse: bool = False

    @property
    def num_rows(self) -> int:
        return len(self.lengths) * self.q_len

    @property
    def bytes(self) -> int:
        """Live keys and values, queries and results, and scales of each."""
        per_token = (self.head_dim + self.value_head_dim) * self.dtype.itemsize + 8 * self.token_scales
        per_row = self.head_dim * self.dtype.itemsize + self.value_head_dim * 2 + 4 * self.row_scales
        return sum(self.lengths) * self.num_kv_heads * per_token + self.num_rows * self.num_q_heads * per_row

    @property
    def flops(self) -> int:
        return 2 * sum(self.lengths) * self.q_len * self.num_q_heads * (self.head_dim + self.value_head_dim)

    def __call__(self, m: Maker) -> Args:
        counts = [-(-length // self.page_size) for length in self.lengths]
        axes = (self.page_size, self.num_kv_heads) if self.layout == "NHD" else (self.num_kv_heads, self.page_size)
        caches = [m.normal(sum(counts), *axes, dim, dtype=self.dtype) for dim in (self.head_dim, self.value_head_dim)]
        q = m.normal(self.num_rows, self.num_q_heads, self.head_dim, dtype=self.dtype)
        table, lengths = table_of(m, counts), torch.tensor(self.lengths, dtype=torch.int32, device=m.device)
        quantised = self.dtype == _FP8
        q_scale = _scale(m, *(self.num_rows, self.num_q_heads) if self.row_scales else (1,)) if quantised else None
        kv_scales = [_scale(m, *cache.shape[:3]) if self.token_scales else None for cache in caches]
        k_factor = 1.25 if quantised and not self.token_scales else 1.0
        dtype = torch.bfloat16 if quantised else self.dtype
        out = m.poison(self.num_rows, self.num_q_heads, self.value_head_dim, dtype=dtype)
        lse = m.poison(self.num_rows, self.num_q_heads, dtype=torch.float32) if self.with_lse else None
        scales = (None, q_scale, *kv_scales, None, self.head_dim**-0.5, k_factor, 1.0)
        options = (1.0, False, 0, self.q_len, self.layout, self.schedule)
        return q, *caches, table, lengths, *scales, *options, out, lse


def _scale(m: Maker, *shape: int) -> torch.Tensor:
    return m.normal(*shape, dtype=torch.float32).abs() + 0.5


def table_of(m: Maker, counts: list[int]) -> torch.Tensor:
    """A block table with so many pages for each request, drawn from a pool without gaps; unused entries are 0."""
    pages = m.permutation(sum(counts), dtype=torch.int32)
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=m.device)
    begin = 0
    for row, count in zip(table, counts, strict=True):
        row[:count] = pages[begin : begin + count]
        begin += count
    return table


_DTYPES = {"fp8": _FP8, "bf16": torch.bfloat16}
_VARIANTS: dict[str, dict[str, int | str]] = {
    "q2": {"q_len": 2},
    "q4": {"q_len": 4},
    "d64": {"head_dim": 64, "value_head_dim": 64},
    "d256": {"head_dim": 256, "value_head_dim": 256},
    "d192+128": {"head_dim": 192, "value_head_dim": 128},
    "p16": {"page_size": 16},
    "p1": {"page_size": 1},
    "nhd": {"layout": "NHD"},
    "static": {"schedule": "static"},
    "invariant": {"schedule": "invariant"},
    "rowscale": {"row_scales": True},
    "tokenscale": {"token_scales": True},
}


def _named(heads: str, dtype: str, mix: str, variant: str = "") -> Case:
    num_kv_heads, num_q_heads = map(int, heads.split("x"))
    options = _VARIANTS[variant] if variant else {}
    batch = Batch(num_kv_heads, num_q_heads, _DTYPES[dtype], tuple(lengths_of(mix)), **options)  # type: ignore[arg-type]
    name = " ".join(word for word in (heads, dtype, mix, variant) if word)
    return Case("attention.decode", name, batch, batch.bytes, batch.flops)


def _decode_cases() -> Iterator[Case]:
    demo = Batch(2, 8, torch.bfloat16, (700, 64, 1, 333), with_lse=True)
    yield Case("attention.decode", "2x8 bf16 small", demo, demo.bytes, demo.flops, tags=_DEMO)
    for heads in ("1x8", "8x64"):
        for dtype in _DTYPES:
            for mix in MIXES:
                yield _named(heads, dtype, mix)
    for dtype in _DTYPES:
        yield _named("1x12", dtype, "64x4K")
        yield _named("1x8", dtype, "64x4K", "q2")
        yield _named("1x8", dtype, "64x4K", "q4")
        for variant in ("d64", "d256", "d192+128", "p16", "p1", "nhd"):
            yield _named("8x64", dtype, "32x128+32x4K", variant)
    for mix in ("64x512", "64x4K", "32x128+32x4K", "2x32K+30x4K", "1x64K+15x4K", "1x128K+31x4K"):
        yield _named("1x8", "fp8", mix, "static")
    for mix in ("64x4K", "1x64K+15x4K"):
        yield _named("1x8", "fp8", mix, "invariant")
    yield _named("1x8", "fp8", "64x4K", "rowscale")
    yield _named("1x8", "fp8", "64x4K", "tokenscale")


def _merge_state(tokens: int, heads: int, head_dim: int) -> tuple[int, Make]:
    def make(m: Maker) -> Args:
        sides = [
            x
            for _ in range(2)
            for x in (m.normal(tokens, heads, head_dim), m.normal(tokens, heads, dtype=torch.float32, std=2.0))
        ]
        return *sides, m.poison(tokens, heads, head_dim), m.poison(tokens, heads, dtype=torch.float32)

    return 3 * tokens * heads * (2 * head_dim + 4), make


_MERGES = [
    Case(
        "attention.merge_state",
        f"{tokens}x{heads}x128",
        make,
        moved,
        tags=_BOTH if (tokens, heads) == (32, 8) else _BENCH,
    )
    for heads in (8, 64)
    for tokens in (1, 32, 256, 2048, 8192)
    for moved, make in [_merge_state(tokens, heads, 128)]
]

CASES = [*_decode_cases(), *_MERGES]
