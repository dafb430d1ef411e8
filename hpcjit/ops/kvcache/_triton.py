"""Triton baselines of the kvcache group."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from hpcjit.ops._triton import head_shape, to_e4m3


@triton.jit
def _write_heads(
    source,
    cache,
    scale,  # or None
    factor,
    page,
    slot,
    head,
    num_heads,
    dim,
    token_stride,
    head_stride,
    cache_page_stride,
    cache_slot_stride,
    cache_head_stride,
    scale_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Write up to `HEADS` heads of the program's token, from `head` on, into a slot of a page."""
    token = tl.program_id(0).to(tl.int64)
    head = head.to(tl.int64) + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, DIM)[None, :]
    mask = (head < num_heads) & (column < dim)
    x = tl.load(source + token * token_stride + head * head_stride + column, mask=mask)
    place = cache + page * cache_page_stride + slot * cache_slot_stride + head * cache_head_stride + column
    if cache.dtype.element_ty == tl.float8e4nv:
        s = factor
        if scale is not None:
            s = factor * tl.load(scale + head * scale_stride, mask=head < num_heads, other=1.0)
        tl.store(place, to_e4m3(x.to(tl.float32) / s), mask=mask)
    else:
        tl.store(place, x, mask=mask)


@triton.jit
def _reshape_and_cache_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    k_scale,
    v_scale,
    k_factor,
    v_factor,
    num_heads,
    page_size,
    num_slots,
    key_dim,
    key_token_stride,
    key_head_stride,
    key_cache_page_stride,
    key_cache_slot_stride,
    key_cache_head_stride,
    k_scale_stride,
    value_dim,
    value_token_stride,
    value_head_stride,
    value_cache_page_stride,
    value_cache_slot_stride,
    value_cache_head_stride,
    v_scale_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    slot = tl.load(slot_mapping + tl.program_id(0).to(tl.int64)).to(tl.int64)
    if (slot >= 0) & (slot < num_slots):
        page = slot // page_size
        slot = slot % page_size
        part = tl.program_id(1)
        key_parts = tl.cdiv(num_heads, HEADS)
        if part < key_parts:
            _write_heads(
                *(key, key_cache, k_scale, k_factor, page, slot, part * HEADS, num_heads, key_dim),
                *(key_token_stride, key_head_stride, key_cache_page_stride, key_cache_slot_stride),
                *(key_cache_head_stride, k_scale_stride, HEADS, DIM),
            )
        else:
            _write_heads(
                *(value, value_cache, v_scale, v_factor, page, slot, (part - key_parts) * HEADS, num_heads, value_dim),
                *(value_token_stride, value_head_stride, value_cache_page_stride, value_cache_slot_stride),
                *(value_cache_head_stride, v_scale_stride, HEADS, DIM),
            )


def reshape_and_cache(
    op: str,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    k_factor: float,
    v_factor: float,
) -> None:
    """The caches as `[num_pages, page_size, num_kv_heads, head_dim]`, whatever their layout in memory."""
    num_tokens, num_heads = key.shape[:2]
    num_pages, page_size = key_cache.shape[:2]
    heads, dim, num_warps = head_shape(op, num_heads, max(key.shape[2], value.shape[2]))
    sides = [
        (source.shape[2], *source.stride()[:2], *cache.stride()[:3], _scale_stride(scale))
        for source, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale))
    ]
    with torch.cuda.device_of(key):
        _reshape_and_cache_kernel[(num_tokens, 2 * triton.cdiv(num_heads, heads))](
            *(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, float(k_factor), float(v_factor)),
            *(num_heads, page_size, num_pages * page_size, *sides[0], *sides[1]),
            HEADS=heads,
            DIM=dim,
            num_warps=num_warps,
        )


def _scale_stride(scale: torch.Tensor | None) -> int:
    return 0 if scale is None or scale.shape[0] == 1 else scale.stride(0)
