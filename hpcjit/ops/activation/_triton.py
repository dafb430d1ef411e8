"""Triton baselines of the activation group."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from hpcjit import checks
from hpcjit.ops._triton import refuse, row_scale, row_shape, to_e4m3


@triton.jit
def _silu_and_mul_quant_kernel(input, out, scale, columns, input_stride, out_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < columns
    gate = input + row * input_stride + column
    x = tl.load(gate, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate + columns, mask=mask, other=0.0).to(tl.float32)
    y = x / (1.0 + tl.exp(-x)) * up
    s = row_scale(y)
    tl.store(out + row * out_stride + column, to_e4m3(y * (1.0 / s)), mask=mask)
    tl.store(scale + row, s)


def silu_and_mul_quant_fp8(
    op: str, input: torch.Tensor, dynamic: bool, group_size: int, out: torch.Tensor, scale: torch.Tensor
) -> None:
    if group_size or not dynamic:
        refuse(op, "it finds one scale for every row and takes neither a scale nor a group size")
    num_tokens, input_stride = checks.rows(op, "input", input)
    _, out_stride = checks.rows(op, "out", out)
    block, num_warps = row_shape(op, out.shape[-1])
    with torch.cuda.device_of(input):
        _silu_and_mul_quant_kernel[(num_tokens,)](
            *(input, out, scale, out.shape[-1], input_stride, out_stride), BLOCK=block, num_warps=num_warps
        )
