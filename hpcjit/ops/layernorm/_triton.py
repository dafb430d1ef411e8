"""Triton baselines of the layernorm group."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from hpcjit import checks
from hpcjit.ops._triton import head_shape, refuse, row_scale, row_shape, to_e4m3


@triton.jit
def _inverse_rms(square_sum, count, eps):
    return tl.rsqrt(tl.div_rn(square_sum, count * 1.0) + eps)


@triton.jit
def _rmsnorm_kernel(
    input, weight, out, columns, input_stride, out_stride, eps, UNIT_OFFSET: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < columns
    x = tl.load(input + row * input_stride + column, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    if UNIT_OFFSET:
        w += 1.0
    y = x * _inverse_rms(tl.sum(x * x, axis=0), columns, eps) * w
    tl.store(out + row * out_stride + column, y.to(out.dtype.element_ty), mask=mask)


def rmsnorm(
    op: str, input: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, *, unit_offset: bool
) -> None:
    num_tokens, input_stride = checks.rows(op, "input", input)
    _, out_stride = checks.rows(op, "out", out)
    block, num_warps = row_shape(op, input.shape[-1])
    with torch.cuda.device_of(input):
        _rmsnorm_kernel[(num_tokens,)](
            *(input, weight, out, input.shape[-1], input_stride, out_stride, float(eps)),
            UNIT_OFFSET=unit_offset,
            BLOCK=block,
            num_warps=num_warps,
        )


@triton.jit
def _rmsnorm_quant_kernel(
    input,
    residual,  # or None
    weight,
    out,
    scale,
    columns,
    input_stride,
    residual_stride,
    out_stride,
    eps,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < columns
    x = tl.load(input + row * input_stride + column, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        added = residual + row * residual_stride + column
        x += tl.load(added, mask=mask, other=0.0).to(tl.float32)
        tl.store(added, x.to(residual.dtype.element_ty), mask=mask)
    w = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    y = x * _inverse_rms(tl.sum(x * x, axis=0), columns, eps) * w
    s = row_scale(y)
    tl.store(out + row * out_stride + column, to_e4m3(y * (1.0 / s)), mask=mask)
    tl.store(scale + row, s)


def rmsnorm_quant_fp8(
    op: str,
    input: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    dynamic: bool,
    out: torch.Tensor,
    scale: torch.Tensor,
) -> None:
    if not dynamic:
        refuse(op, "it finds the scales itself and takes none")
    num_tokens, input_stride = checks.rows(op, "input", input)
    _, out_stride = checks.rows(op, "out", out)
    residual_stride = 0 if residual is None else checks.rows(op, "residual", residual)[1]
    block, num_warps = row_shape(op, input.shape[-1])
    with torch.cuda.device_of(input):
        _rmsnorm_quant_kernel[(num_tokens,)](
            *(input, residual, weight, out, scale, input.shape[-1], input_stride, residual_stride, out_stride),
            float(eps),
            BLOCK=block,
            num_warps=num_warps,
        )


@triton.jit
def _normalize_heads(
    x, weight, head, num_heads, head_dim, token_stride, head_stride, eps, HEADS: tl.constexpr, DIM: tl.constexpr
):
    """RMSNorm, in place, of up to `HEADS` heads of the program's token, from `head` on."""
    token = tl.program_id(0).to(tl.int64)
    head = head.to(tl.int64) + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, DIM)[None, :]
    mask = (head < num_heads) & (column < head_dim)
    place = x + token * token_stride + head * head_stride + column
    value = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=column < head_dim, other=0.0).to(tl.float32)
    r = _inverse_rms(tl.sum(value * value, axis=1, keep_dims=True), head_dim, eps)
    tl.store(place, (value * r * w).to(x.dtype.element_ty), mask=mask)


@triton.jit
def _qk_norm_kernel(
    q,
    k,
    q_weight,
    k_weight,
    num_q_heads,
    num_k_heads,
    head_dim,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    eps,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    part = tl.program_id(1)
    q_parts = tl.cdiv(num_q_heads, HEADS)
    if part < q_parts:
        _normalize_heads(
            q, q_weight, part * HEADS, num_q_heads, head_dim, q_token_stride, q_head_stride, eps, HEADS, DIM
        )
    else:
        head = (part - q_parts) * HEADS
        _normalize_heads(k, k_weight, head, num_k_heads, head_dim, k_token_stride, k_head_stride, eps, HEADS, DIM)


def qk_norm(
    op: str, q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float
) -> None:
    num_tokens, num_q_heads, head_dim = q.shape
    num_k_heads = k.shape[1]
    heads, dim, num_warps = head_shape(op, max(num_q_heads, num_k_heads), head_dim)
    parts = triton.cdiv(num_q_heads, heads) + triton.cdiv(num_k_heads, heads)
    with torch.cuda.device_of(q):
        _qk_norm_kernel[(num_tokens, parts)](
            *(q, k, q_weight, k_weight, num_q_heads, num_k_heads, head_dim, *q.stride()[:2], *k.stride()[:2]),
            float(eps),
            HEADS=heads,
            DIM=dim,
            num_warps=num_warps,
        )
