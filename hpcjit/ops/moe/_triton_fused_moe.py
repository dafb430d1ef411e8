"""Triton baseline of the fused mixture of experts: the chain of kernels that serving engines run.

Pairs are sorted by expert in whole blocks (`moe_align_block_size`); then quantisation of the activations where they come in
bfloat16, a grouped product that gathers them, the activation function with quantisation, a second grouped product that
weights its rows, and the sum over the experts of a token. Results between kernels are bfloat16. FP8 hidden activations have a
scale for each pair, or for 128 features of one in "fp8_block". Tile sizes follow the mean number of rows; nothing is tuned.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hpcjit import checks
from hpcjit.ops._triton import row_shape, to_e4m3
from hpcjit.ops.moe._fused_moe_args import BLOCK as SCALE_BLOCK
from hpcjit.ops.moe._fused_moe_args import FusedMoeArgs, ceil_div
from hpcjit.ops.moe._moe_align_block_size import moe_align_block_size

_NONE, _SILU, _GELU = 0, 1, 2
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_E4M3_MAX = tl.constexpr(448.0)
_SCALE_FLOOR = tl.constexpr(1e-10)
_SCALES = tl.constexpr(SCALE_BLOCK)


class Scaled(NamedTuple):
    """Rows of a product, and how their scales lie; no scales with bfloat16."""

    values: torch.Tensor
    scale: torch.Tensor | None = None
    row_stride: int = 0
    group_stride: int = 0


@triton.jit
def _activate_kernel(
    x,  # [rows, columns], or [rows, 2 * columns] with an activation
    out,
    scale,  # [rows, groups], or None for bfloat16 results
    given,  # a scale, or None
    columns,
    x_stride,
    groups,
    ACTIVATION: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = column < columns
    y = tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION == 1:
        y = y / (1.0 + tl.exp(-y))
    if ACTIVATION == 2:
        y = 0.5 * y * (1.0 + tl.erf(y * _SQRT_HALF))
    if ACTIVATION > 0:
        y = y * tl.load(x + row * x_stride + columns + column, mask=mask, other=0.0).to(tl.float32)
    if given is not None:
        y = to_e4m3(tl.div_rn(y, tl.load(given) + tl.zeros_like(y)))
    elif scale is not None:
        largest = tl.max(tl.where(y == y, tl.abs(y), 0.0), axis=1)
        s = tl.div_rn(tl.maximum(largest, _SCALE_FLOOR), _E4M3_MAX)
        y = to_e4m3(tl.div_rn(y, s[:, None] + tl.zeros_like(y)))
        tl.store(scale + row * groups + group, s, mask=group < groups)
    tl.store(out + row * columns + column, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _product_kernel(
    x,
    x_scale,  # or None
    weight,  # [experts, features, depth]
    weight_scale,  # or None
    pair_weights,  # or None
    out,  # [pairs, features]
    sorted_pairs,
    expert_of_block,
    num_sorted,
    num_pairs,
    features,
    depth,
    x_stride,
    x_scale_row_stride,
    x_scale_group_stride,
    weight_scale_expert_stride,
    weight_scale_row_stride,
    part,  # features that have blocks of scales of their own
    pair_weights_stride,
    TOP_K: tl.constexpr,
    GATHER: tl.constexpr,  # x has a row for each token, not for each pair
    BLOCKWISE: tl.constexpr,
    EVEN: tl.constexpr,  # the depth is a multiple of BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # Neighbours share the rows of x, and programs that run at once read an expert's weights together.
    column_blocks = tl.cdiv(features, BLOCK_N)
    block_m = tl.program_id(0) // column_blocks
    block_n = tl.program_id(0) % column_blocks
    if block_m * BLOCK_M >= tl.load(num_sorted):
        return
    expert = tl.load(expert_of_block + block_m).to(tl.int64)
    pair = tl.load(sorted_pairs + block_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    live = pair < num_pairs
    row = pair // TOP_K if GATHER else pair
    feature = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    known = feature < features
    k = tl.arange(0, BLOCK_K)
    x_at = x + row[:, None] * x_stride + k[None, :]
    weight_at = weight + (expert * features + feature[None, :].to(tl.int64)) * depth + k[:, None]
    if x_scale is not None:
        x_scale_at = x_scale + row * x_scale_row_stride
        scale_row = feature // part * tl.cdiv(part, _SCALES) + feature % part // _SCALES if BLOCKWISE else feature
        weight_scale_at = weight_scale + expert * weight_scale_expert_stride + scale_row * weight_scale_row_stride

    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(tl.cdiv(depth, BLOCK_K)):
        if EVEN:
            a = tl.load(x_at, mask=live[:, None], other=0.0)
            b = tl.load(weight_at, mask=known[None, :], other=0.0)
        else:
            a = tl.load(x_at, mask=live[:, None] & (k[None, :] < depth - step * BLOCK_K), other=0.0)
            b = tl.load(weight_at, mask=known[None, :] & (k[:, None] < depth - step * BLOCK_K), other=0.0)
        if BLOCKWISE:
            of_x = tl.load(x_scale_at + step * x_scale_group_stride, mask=live, other=0.0)
            of_weight = tl.load(weight_scale_at + step, mask=known, other=0.0)
            total += tl.dot(a, b) * of_x[:, None] * of_weight[None, :]
        else:
            total = tl.dot(a, b, total)
        x_at += BLOCK_K
        weight_at += BLOCK_K

    if x_scale is not None and not BLOCKWISE:
        of_x = tl.load(x_scale_at, mask=live, other=0.0)
        total = total * of_x[:, None] * tl.load(weight_scale_at, mask=known, other=0.0)[None, :]
    if pair_weights is not None:
        at = pair_weights + pair // TOP_K * pair_weights_stride + pair % TOP_K
        total = total * tl.load(at, mask=live, other=0.0)[:, None]
    result = total.to(out.dtype.element_ty)
    tl.store(out + pair[:, None] * features + feature[None, :], result, mask=live[:, None] & known[None, :])


@triton.jit
def _sum_kernel(
    rows,  # [tokens, TOP_K, hidden_size]
    ids,
    shared,  # or None
    out,
    hidden_size,
    num_experts,
    expert_offset,
    ids_stride,
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
        expert = tl.load(ids + token * ids_stride + k).to(tl.int64) - expert_offset
        live = column < tl.where((expert >= 0) & (expert < num_experts), hidden_size, 0)  # others were never written
        total += tl.load(rows + (token * TOP_K + k) * hidden_size + column, mask=live, other=0.0).to(tl.float32)
    if shared is not None:
        total += tl.load(shared + token * shared_stride + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * out_stride + column, total.to(out.dtype.element_ty), mask=mask)


def run(op: str, a: FusedMoeArgs) -> None:
    if not a.x.shape[0]:
        return
    pairs, hidden_size = a.topk_ids.numel(), a.x.shape[1]
    with torch.cuda.device_of(a.x):
        x = _activations(op, a)
        block_m = _rows_of_a_block(pairs, a.num_experts)
        local_ids = a.topk_ids - a.expert_offset if a.expert_offset else a.topk_ids
        # Named, so that a backend that is forced for the process, as in a benchmark, does not reach it.
        backend = "jit" if a.x.is_cuda else "torch"
        blocks = moe_align_block_size(local_ids, a.num_experts, block_m, backend=backend)
        both = a.x.new_empty((pairs, 2 * a.intermediate_size), dtype=torch.bfloat16)
        _product(op, a, x, a.w13, a.w13_scale, both, blocks, gather=True, weighted=a.apply_weights_on_input)
        hidden = _activated(op, both, a.quant, a.intermediate_size, _SILU if a.activation == "silu" else _GELU)
        rows = a.x.new_empty((pairs, hidden_size), dtype=torch.bfloat16)
        weighted = not a.apply_weights_on_input
        _product(op, a, hidden, a.w2, a.w2_scale, rows, blocks, gather=False, weighted=weighted)
        _sum(op, a, rows)


def _rows_of_a_block(pairs: int, experts: int) -> int:
    """At least the mean number of rows of an expert, from 16 to 128."""
    return min(max(triton.next_power_of_2(ceil_div(pairs, experts)), 16), 128)


def _activations(op: str, a: FusedMoeArgs) -> Scaled:
    if a.quantises:
        return _activated(op, a.x, a.quant, a.x.shape[1], _NONE, a.x_scale)
    if a.x_scale is None or a.x_scale.numel() == 1:
        return Scaled(a.x, a.x_scale)
    return Scaled(a.x, a.x_scale, a.x_scale.stride(0), a.x_scale.stride(1) if a.quant == "fp8_block" else 0)


def _activated(
    op: str, x: torch.Tensor, quant: str, columns: int, activation: int, given: torch.Tensor | None = None
) -> Scaled:
    """The activation function of rows, if any, and their quantisation, if any."""
    count = x.shape[0]
    block, num_warps = row_shape(op, columns)
    group = min(SCALE_BLOCK, block) if quant == "fp8_block" else block
    groups = ceil_div(columns, group)
    out = x.new_empty((count, columns), dtype=torch.bfloat16 if quant == "bf16" else torch.float8_e4m3fn)
    scale = None
    if quant != "bf16" and given is None:
        scale = x.new_empty((count, groups), dtype=torch.float32)
    _activate_kernel[(count,)](
        *(x, out, scale, given, columns, checks.rows(op, "x", x)[1], groups),
        ACTIVATION=activation,
        GROUPS=block // group,
        GROUP=group,
        num_warps=num_warps,
    )
    return Scaled(out, given) if scale is None else Scaled(out, scale, groups, 1)


def _product(
    op: str,
    a: FusedMoeArgs,
    x: Scaled,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    out: torch.Tensor,
    blocks: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    gather: bool,
    weighted: bool,
) -> None:
    sorted_pairs, expert_of_block, num_sorted = blocks
    block_m = sorted_pairs.numel() // max(expert_of_block.numel(), 1)
    block_n, block_k = 128, 64 if a.quant == "bf16" else SCALE_BLOCK
    _, features, depth = weight.shape
    expert_stride, row_stride = 0, 0
    if weight_scale is not None:
        expert_stride = weight_scale.stride(0)
        row_stride = 0 if a.quant == "fp8_tensor" else weight_scale.stride(1)
    _product_kernel[(expert_of_block.numel() * triton.cdiv(features, block_n),)](
        *(x.values, x.scale, weight, weight_scale, a.topk_weights if weighted else None, out),
        *(sorted_pairs, expert_of_block, num_sorted, a.topk_ids.numel(), features, depth),
        *(checks.rows(op, "x", x.values)[1], x.row_stride, x.group_stride, expert_stride, row_stride),
        *(a.intermediate_size if gather else features, checks.rows(op, "topk_weights", a.topk_weights)[1]),
        TOP_K=a.topk_ids.shape[1],
        GATHER=gather,
        BLOCKWISE=a.quant == "fp8_block",
        EVEN=depth % block_k == 0,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=8 if block_m == 128 else 4,
    )


def _sum(op: str, a: FusedMoeArgs, rows: torch.Tensor) -> None:
    (tokens, top_k), hidden_size = a.topk_ids.shape, a.x.shape[1]
    block = min(triton.next_power_of_2(hidden_size), 1024)
    strides = [
        0 if value is None else checks.rows(op, name, value)[1]
        for name, value in (("topk_ids", a.topk_ids), ("shared_output", a.shared_output), ("out", a.out))
    ]
    _sum_kernel[(tokens, triton.cdiv(hidden_size, block))](
        *(rows, a.topk_ids, a.shared_output, a.out, hidden_size, a.num_experts, a.expert_offset, *strides),
        TOP_K=top_k,
        BLOCK=block,
        num_warps=4,
    )
