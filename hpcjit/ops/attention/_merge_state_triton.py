"""Triton baseline of `attention.merge_state`: a program per token joins some of its heads."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from hpcjit.ops._triton import head_shape

_INF = tl.constexpr(float("inf"))


@triton.jit
def _share(x, largest):
    """exp(x - largest) where nothing is taken from infinity."""
    e = tl.where(x == largest, 1.0, tl.exp(x - largest))
    return tl.where(x == -_INF, 0.0, e)


@triton.jit
def _part(weight, x):
    return tl.where(weight == 0.0, 0.0, weight * x)


@triton.jit
def _merge_state_kernel(
    out_a,
    lse_a,
    out_b,
    lse_b,
    out,
    lse,
    num_heads,
    head_dim,
    out_a_token_stride,
    out_a_head_stride,
    lse_a_token_stride,
    lse_a_head_stride,
    out_b_token_stride,
    out_b_head_stride,
    lse_b_token_stride,
    lse_b_head_stride,
    out_token_stride,
    out_head_stride,
    lse_token_stride,
    lse_head_stride,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    column = tl.arange(0, BLOCK_DIM)
    inside = head < num_heads
    mask = inside[:, None] & (column < head_dim)[None, :]
    a = tl.load(lse_a + token * lse_a_token_stride + head * lse_a_head_stride, mask=inside, other=0.0)
    b = tl.load(lse_b + token * lse_b_token_stride + head * lse_b_head_stride, mask=inside, other=0.0)
    place_a = token * out_a_token_stride + head[:, None] * out_a_head_stride + column[None, :]
    place_b = token * out_b_token_stride + head[:, None] * out_b_head_stride + column[None, :]
    x = tl.load(out_a + place_a, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(out_b + place_b, mask=mask, other=0.0).to(tl.float32)

    largest = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    share_a, share_b = _share(a, largest), _share(b, largest)
    total = share_a + share_b
    divisor = tl.where(total == 0.0, 1.0, total)
    weight_a, weight_b = tl.div_rn(share_a, divisor), tl.div_rn(share_b, divisor)
    z = _part(weight_a[:, None], x) + _part(weight_b[:, None], y)
    place = token * out_token_stride + head[:, None] * out_head_stride + column[None, :]
    tl.debug_barrier()  # lse may be lse_a or lse_b, which all threads have read
    tl.store(out + place, z.to(out.dtype.element_ty), mask=mask)
    tl.store(lse + token * lse_token_stride + head * lse_head_stride, largest + tl.log(total), mask=inside)


def merge_state(
    op: str,
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    num_tokens, num_heads, head_dim = out.shape
    block_heads, block_dim, num_warps = head_shape(op, num_heads, head_dim)
    placed = (out_a, lse_a, out_b, lse_b, out, lse)
    strides = [stride for x in placed for stride in x.stride()[:2]]
    with torch.cuda.device_of(out):
        _merge_state_kernel[(num_tokens, triton.cdiv(num_heads, block_heads))](
            *(*placed, num_heads, head_dim, *strides),
            BLOCK_HEADS=block_heads,
            BLOCK_DIM=block_dim,
            num_warps=num_warps,
        )
