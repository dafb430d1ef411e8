"""Triton baselines of the moe group."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from hpcjit import checks
from hpcjit.ops._triton import refuse
from hpcjit.ops.moe._gate import GateArgs
from hpcjit.ops.moe._moe_reduce import ReduceArgs

_INF = tl.constexpr(float("inf"))
_NEVER = tl.constexpr(-(2**31))  # key of padding and of what has been chosen
_LAST = tl.constexpr(-(2**31) + 1)  # key of NaN, below that of -inf


@triton.jit
def _gate_kernel(
    logits,
    bias,  # or None
    weights,
    ids,
    num_experts,
    logits_stride,
    weights_stride,
    ids_stride,
    scaling_factor,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    mask = expert < num_experts
    score = tl.load(logits + token * logits_stride + expert, mask=mask, other=-_INF).to(tl.float32)

    # NaN weighs nothing; in a softmax several +inf share, and of a row without anything above -inf all is zero.
    x = tl.where(score == score, score, -_INF)
    if SIGMOID:
        e = tl.div_rn(1.0, 1.0 + tl.exp(-x))
        total = 1.0
    else:
        largest = tl.max(x, axis=0)
        e = tl.where(x == largest, 1.0, tl.exp(x - largest))
        e = tl.where(x > -_INF, e, 0.0)
        total = tl.maximum(tl.sum(e, axis=0), 1.0)
    if bias is not None:
        biased = e / total + tl.load(bias + expert, mask=mask, other=0.0)
        score = tl.where(score == score, biased, score)

    # Integers in the order of the scores, in which nothing is as low as what has been chosen.
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(score == score, key, _LAST)
    key = tl.where(mask, key, _NEVER)
    place = tl.arange(0, BLOCK_K)
    chosen_id = tl.zeros([BLOCK_K], tl.int32)
    chosen = tl.zeros([BLOCK_K], tl.float32)
    for i in range(TOP_K):
        winner = tl.argmax(key, axis=0)  # of equals the lowest
        chosen_id = tl.where(place == i, winner, chosen_id)
        chosen = tl.where(place == i, tl.sum(tl.where(expert == winner, e, 0.0), axis=0), chosen)
        key = tl.where(expert == winner, _NEVER, key)
    if RENORMALIZE:
        total = tl.sum(chosen, axis=0)
        total = tl.where(total > 0.0, total, 1.0)
    weight = tl.div_rn(chosen, total) * scaling_factor
    tl.store(weights + token * weights_stride + place, weight, mask=place < TOP_K)
    tl.store(ids + token * ids_stride + place, chosen_id, mask=place < TOP_K)


def gate(op: str, a: GateArgs) -> None:
    if a.softcap > 0:
        refuse(op, "it has no softcap")
    if a.grouped:
        refuse(op, "it has no groups")
    if a.num_shared_experts:
        refuse(op, "it has no shared experts")
    if a.num_valid_tokens is not None:
        refuse(op, "it has no padding")
    num_tokens, logits_stride = checks.rows(op, "logits", a.logits)
    if not num_tokens:
        return
    block = triton.next_power_of_2(a.logits.shape[1])
    with torch.cuda.device_of(a.logits):
        _gate_kernel[(num_tokens,)](
            *(a.logits, a.bias, a.weights, a.ids, a.logits.shape[1], logits_stride),
            checks.rows(op, "weights", a.weights)[1],
            checks.rows(op, "ids", a.ids)[1],
            float(a.scaling_factor),
            SIGMOID=a.scoring == "sigmoid",
            RENORMALIZE=a.renormalize,
            TOP_K=a.top_k,
            BLOCK=block,
            BLOCK_K=triton.next_power_of_2(a.top_k),
            num_warps=1 if block <= 512 else 2,
        )


@triton.jit
def _sum_reduce_kernel(
    x,
    weights,  # or None
    out,
    hidden_size,
    token_stride,
    pair_stride,
    weights_stride,
    out_stride,
    scaling_factor,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < hidden_size
    total = tl.zeros([BLOCK], tl.float32)
    for k in range(TOP_K):
        row = x + token * token_stride + k * pair_stride
        if weights is not None:
            weight = tl.load(weights + token * weights_stride + k)
            live = column < tl.where(weight == 0.0, 0, hidden_size)  # a pair of weight 0 is not read
            total += tl.load(row + column, mask=live, other=0.0).to(tl.float32) * weight
        else:
            total += tl.load(row + column, mask=mask, other=0.0).to(tl.float32)
    result = (total * scaling_factor).to(out.dtype.element_ty)
    tl.store(out + token * out_stride + column, result, mask=mask)


def sum_reduce(
    op: str, x: torch.Tensor, scaling_factor: float, weights: torch.Tensor | None, out: torch.Tensor
) -> None:
    num_tokens, top_k, hidden_size = x.shape
    if not out.numel():
        return
    block = min(triton.next_power_of_2(hidden_size), 1024)
    with torch.cuda.device_of(x):
        _sum_reduce_kernel[(num_tokens, triton.cdiv(hidden_size, block))](
            *(x, weights, out, hidden_size, x.stride(0), x.stride(1)),
            0 if weights is None else checks.rows(op, "weights", weights)[1],
            checks.rows(op, "out", out)[1],
            float(scaling_factor),
            TOP_K=top_k,
            BLOCK=block,
            num_warps=4,
        )


@triton.jit
def _reduce_kernel(
    rows,
    positions,
    weights,
    shared,  # or None
    out,
    hidden_size,
    row_stride,
    positions_stride,
    weights_stride,
    shared_stride,
    out_stride,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < hidden_size
    total = tl.zeros([BLOCK], tl.float32)
    for k in range(TOP_K):
        position = tl.load(positions + token * positions_stride + k).to(tl.int64)
        weight = tl.load(weights + token * weights_stride + k)
        live = column < tl.where((weight == 0.0) | (position < 0), 0, hidden_size)  # others are not read
        total += tl.load(rows + position * row_stride + column, mask=live, other=0.0).to(tl.float32) * weight
    if shared is not None:
        total += tl.load(shared + token * shared_stride + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * out_stride + column, total.to(out.dtype.element_ty), mask=mask)


def reduce(op: str, a: ReduceArgs) -> None:
    hidden_size = a.rows.shape[1]
    if not a.out.numel():
        return
    block = min(triton.next_power_of_2(hidden_size), 1024)
    tensors = (a.rows, a.positions, a.topk_weights, a.shared_output, a.out)
    strides = [0 if x is None else checks.rows(op, name, x)[1] for name, x in zip(a._fields, tensors, strict=True)]
    with torch.cuda.device_of(a.rows):
        _reduce_kernel[(a.out.shape[0], triton.cdiv(hidden_size, block))](
            *(*tensors, hidden_size, *strides), TOP_K=a.positions.shape[1], BLOCK=block, num_warps=4
        )
