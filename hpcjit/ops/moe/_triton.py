"""Triton baselines of the moe group."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from hpcjit import checks
from hpcjit.ops._triton import refuse

_INF = tl.constexpr(float("inf"))
_NEVER = tl.constexpr(-(2**31))  # key of padding and of what has been chosen
_LAST = tl.constexpr(-(2**31) + 1)  # key of NaN, below that of -inf


@triton.jit
def _topk_softmax_kernel(
    logits,
    bias,  # or None
    weights,
    ids,
    num_experts,
    logits_stride,
    weights_stride,
    ids_stride,
    RENORMALIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    mask = expert < num_experts
    score = tl.load(logits + token * logits_stride + expert, mask=mask, other=-_INF).to(tl.float32)

    # exp(x - largest): NaN weighs nothing, several +inf share, and of a row without anything above -inf all is zero.
    x = tl.where(score == score, score, -_INF)
    largest = tl.max(x, axis=0)
    e = tl.where(x == largest, 1.0, tl.exp(x - largest))
    e = tl.where(x > -_INF, e, 0.0)
    total = tl.maximum(tl.sum(e, axis=0), 1.0)
    if bias is not None:
        score = e / total + tl.load(bias + expert, mask=mask, other=0.0)

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
    tl.store(weights + token * weights_stride + place, tl.div_rn(chosen, total), mask=place < TOP_K)
    tl.store(ids + token * ids_stride + place, chosen_id, mask=place < TOP_K)


def topk_softmax(
    op: str,
    logits: torch.Tensor,
    top_k: int,
    renormalize: bool,
    softcap: float,
    bias: torch.Tensor | None,
    weights: torch.Tensor,
    ids: torch.Tensor,
) -> None:
    if softcap > 0:
        refuse(op, "it has no softcap")
    num_tokens, logits_stride = checks.rows(op, "logits", logits)
    block = triton.next_power_of_2(logits.shape[1])
    with torch.cuda.device_of(logits):
        _topk_softmax_kernel[(num_tokens,)](
            *(logits, bias, weights, ids, logits.shape[1], logits_stride),
            checks.rows(op, "weights", weights)[1],
            checks.rows(op, "ids", ids)[1],
            RENORMALIZE=renormalize,
            TOP_K=top_k,
            BLOCK=block,
            BLOCK_K=triton.next_power_of_2(top_k),
            num_warps=1 if block <= 512 else 2,
        )
