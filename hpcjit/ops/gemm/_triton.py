"""Triton baseline of `gemm.router_gemm`: the obvious loop, with a dot for each term of the weights."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from hpcjit import checks
from hpcjit.ops._triton import refuse


@triton.jit
def _router_kernel(
    x,
    weight,
    out,
    num_tokens,
    num_experts,
    hidden_size,
    x_stride,
    weight_stride,
    out_stride,
    THIRD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    expert = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, hidden_size, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        x_mask = (token < num_tokens)[:, None] & (k < hidden_size)[None, :]
        w_mask = (expert < num_experts)[None, :] & (k < hidden_size)[:, None]
        a = tl.load(x + token[:, None] * x_stride + k[None, :], mask=x_mask, other=0.0)
        w = tl.load(weight + expert[None, :] * weight_stride + k[:, None], mask=w_mask, other=0.0)
        high = w.to(tl.bfloat16)
        rest = w - high.to(tl.float32)
        low = rest.to(tl.bfloat16)
        part = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if THIRD:
            part = tl.dot(a, (rest - low.to(tl.float32)).to(tl.bfloat16), part)
        part = tl.dot(a, low, part)
        total += tl.dot(a, high, part)
    place = out + token[:, None] * out_stride + expert[None, :]
    mask = (token < num_tokens)[:, None] & (expert < num_experts)[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=mask)


def router_gemm(op: str, x: torch.Tensor, weight: torch.Tensor, terms: int, out: torch.Tensor) -> None:
    if x.dtype != torch.bfloat16:
        refuse(op, "it takes bfloat16 activations")
    if not out.numel():
        return
    num_tokens, x_stride = checks.rows(op, "x", x)
    num_experts, weight_stride = checks.rows(op, "weight", weight)
    block_m = 16 if num_tokens <= 16 else 64
    block_n = 16 if num_tokens <= 64 else 64
    with torch.cuda.device_of(x):
        _router_kernel[(triton.cdiv(num_tokens, block_m), triton.cdiv(num_experts, block_n))](
            *(x, weight, out, num_tokens, num_experts, x.shape[1], x_stride, weight_stride),
            checks.rows(op, "out", out)[1],
            THIRD=terms == 3,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=64,
            num_warps=4,
        )
