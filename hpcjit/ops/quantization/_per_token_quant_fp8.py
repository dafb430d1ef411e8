"""FP8 quantisation with a scale per row."""

from __future__ import annotations

import torch

from hpcjit.fused_op import define
from hpcjit.jit_op import JitOp, Plan
from hpcjit.ops import _peers
from hpcjit.ops._fp8 import dynamic_scale, quantize
from hpcjit.ops._tensors import accumulation_dtype, compiling, require
from hpcjit.ops.quantization._fp8_plans import check_dense_scale, check_input, check_out, row_quant_plan


class PerTokenQuantFp8Op(JitOp):
    op = "quantization.per_token_quant_fp8"
    schema = "(Tensor input, Tensor(a!) out, Tensor(b!) scale) -> ()"

    def check(self, input: torch.Tensor, out: torch.Tensor, scale: torch.Tensor) -> None:
        check_input(self.op, input)
        check_out(self.op, out, input.shape, input)
        check_dense_scale(self.op, scale, (*input.shape[:-1], 1), input)

    def plan(self, input: torch.Tensor, out: torch.Tensor, scale: torch.Tensor) -> Plan | str:
        return row_quant_plan(self.op, input, out)

    def reference(self, input: torch.Tensor, out: torch.Tensor, scale: torch.Tensor) -> None:
        x = input.to(accumulation_dtype(input.dtype))
        scale.copy_(dynamic_scale(x))
        out.copy_(quantize(x, scale.to(x.dtype)))

    def forward_aot(self, input: torch.Tensor, out: torch.Tensor, scale: torch.Tensor) -> None:
        self.check(input, out, scale)
        _peers.sglang("quantization.per_token_quant_fp8", "per_token_quant_fp8")(input, out, scale)

    def forward_triton(self, input: torch.Tensor, out: torch.Tensor, scale: torch.Tensor) -> None:
        self.check(input, out, scale)
        from hpcjit.ops.quantization import _triton

        _triton.per_token_quant_fp8(self.op, input, out, scale)


per_token_quant_fp8_op = PerTokenQuantFp8Op()
define(per_token_quant_fp8_op)


def per_token_quant_fp8(
    input: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise every row to FP8 e4m3 with a scale of its own.

        scale = max(max|row|, 1e-10) / 448
        out   = e4m3(input / scale)            (nearest, saturating)

    Args:
        input: `[..., hidden_size]`, bfloat16, float16 or float32; the last axis contiguous, the leading axes foldable into
            one. Multiples of 8 columns (16-byte aligned rows) are fast; any other size works.
        out: float8_e4m3fn, shaped like `input`. A new tensor by default.
        out_scale: float32 `[..., 1]`, contiguous, receives the scales. A new tensor by default.
        backend: run this backend or fail.

    Returns:
        `(out, out_scale)`; `out * out_scale` restores the input. NaN stays NaN and does not count in the maximum; a row
        with inf gets the scale inf, NaN for its inf elements and 0 for the others. Bits repeat.

    Raises:
        ArgumentError: a wrong dtype, shape, stride or device, or a tensor that requires grad.

    Safe under CUDA graphs once the signature has run or been prewarmed.
    """
    require(PerTokenQuantFp8Op.op, "input", input)
    if out is None:
        out = torch.empty(input.shape, dtype=torch.float8_e4m3fn, device=input.device)
    if out_scale is None:
        out_scale = torch.empty((*input.shape[:-1], 1), dtype=torch.float32, device=input.device)
    if compiling("quantization.per_token_quant_fp8", backend):
        torch.ops.hpcjit.quantization_per_token_quant_fp8(input, out, out_scale)
    elif backend is None:
        per_token_quant_fp8_op.fast(input, out, out_scale)
    else:
        per_token_quant_fp8_op(input, out, out_scale, backend=backend)
    return out, out_scale
