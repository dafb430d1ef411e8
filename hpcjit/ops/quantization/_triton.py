"""Triton baselines of the quantization group."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from hpcjit import checks
from hpcjit.ops._triton import row_scale, row_shape, to_e4m3


@triton.jit
def _per_token_quant_kernel(input, out, scale, columns, input_stride, out_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < columns
    x = tl.load(input + row * input_stride + column, mask=mask, other=0.0).to(tl.float32)
    s = row_scale(x)
    tl.store(out + row * out_stride + column, to_e4m3(x * (1.0 / s)), mask=mask)
    tl.store(scale + row, s)


def per_token_quant_fp8(op: str, input: torch.Tensor, out: torch.Tensor, scale: torch.Tensor) -> None:
    num_tokens, input_stride = checks.rows(op, "input", input)
    _, out_stride = checks.rows(op, "out", out)
    block, num_warps = row_shape(op, input.shape[-1])
    with torch.cuda.device_of(input):
        _per_token_quant_kernel[(num_tokens,)](
            *(input, out, scale, input.shape[-1], input_stride, out_stride), BLOCK=block, num_warps=num_warps
        )
