"""FP8 quantisation with a scale per group of neighbours in a row."""

from __future__ import annotations

import torch

from hpcjit import checks
from hpcjit.fused_op import define
from hpcjit.jit_op import JitOp, Plan
from hpcjit.ops import _peers
from hpcjit.ops._fp8 import group_quantize
from hpcjit.ops._tensors import accumulation_dtype, compiling, require
from hpcjit.ops.quantization._fp8_plans import (
    check_group_scale,
    check_group_size,
    check_input,
    check_out,
    empty_group_scale,
    group_quant_plan,
)


class PerTokenGroupQuantFp8Op(JitOp):
    op = "quantization.per_token_group_quant_fp8"
    schema = "(Tensor input, int group_size, bool scale_ue8m0, Tensor(a!) out, Tensor(b!) scale) -> ()"

    def check(
        self, input: torch.Tensor, group_size: int, scale_ue8m0: bool, out: torch.Tensor, scale: torch.Tensor
    ) -> None:
        check_input(self.op, input)
        check_group_size(self.op, group_size, input)
        checks.choice(self.op, "scale_ue8m0", scale_ue8m0, (False, True))
        check_out(self.op, out, input.shape, input)
        check_group_scale(self.op, scale, group_size, out)

    def plan(
        self, input: torch.Tensor, group_size: int, scale_ue8m0: bool, out: torch.Tensor, scale: torch.Tensor
    ) -> Plan | str:
        return group_quant_plan(self.op, input, group_size, scale_ue8m0, out, scale)

    def reference(
        self, input: torch.Tensor, group_size: int, scale_ue8m0: bool, out: torch.Tensor, scale: torch.Tensor
    ) -> None:
        group_quantize(input.to(accumulation_dtype(input.dtype)), group_size, scale_ue8m0, out, scale)

    def forward_aot(
        self, input: torch.Tensor, group_size: int, scale_ue8m0: bool, out: torch.Tensor, scale: torch.Tensor
    ) -> None:
        """SGLang packs power-of-two scales into integers, so it takes plain scales only."""
        self.check(input, group_size, scale_ue8m0, out, scale)
        checks.choice(self.op, "scale_ue8m0", scale_ue8m0, (False,))
        _peers.sglang("quantization.per_token_group_quant", "per_token_group_quant")(input, out, scale, group_size)


per_token_group_quant_fp8_op = PerTokenGroupQuantFp8Op()
define(per_token_group_quant_fp8_op)


def per_token_group_quant_fp8(
    input: torch.Tensor,
    group_size: int = 128,
    *,
    column_major_scales: bool = False,
    scale_ue8m0: bool = False,
    out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to FP8 e4m3 with a scale for every `group_size` neighbours of a row.

        scale = max(max|group|, 1e-10) / 448        (rounded up to a power of two with scale_ue8m0)
        out   = e4m3(input / scale)                 (nearest, saturating)

    Args:
        input: `[..., hidden_size]`, bfloat16, float16 or float32, `hidden_size` a multiple of `group_size`; the last axis
            contiguous, the leading axes foldable into one. 16-byte aligned rows are fast; any others work.
        group_size: 16, 32, 64, 128 or 256.
        column_major_scales: let the scales of one group lie next to each other (strides `(1, tokens padded to 4)`), as
            block-scaled GEMMs on Hopper read them. Only says how a new `out_scale` is laid out.
        scale_ue8m0: scales are powers of two; still stored as float32.
        out: float8_e4m3fn, shaped like `input`. A new tensor by default.
        out_scale: float32 `[..., hidden_size / group_size]` of any strides, receives the scales. A new one by default.
        backend: run this backend or fail.

    Returns:
        `(out, out_scale)`. NaN stays NaN and does not count in the maximum; a group with inf gets the scale inf, NaN for
        its inf elements and 0 for the others. Bits repeat.

    Raises:
        ArgumentError: another group size, a wrong dtype, shape, stride or device, or a tensor that requires grad.

    Safe under CUDA graphs once the signature has run or been prewarmed.
    """
    require(PerTokenGroupQuantFp8Op.op, "input", input)
    if out is None:
        out = torch.empty(input.shape, dtype=torch.float8_e4m3fn, device=input.device)
    if out_scale is None:
        check_group_size(PerTokenGroupQuantFp8Op.op, group_size, input)
        out_scale = empty_group_scale(PerTokenGroupQuantFp8Op.op, out, group_size, column_major_scales)
    if compiling("quantization.per_token_group_quant_fp8", backend):
        torch.ops.hpcjit.quantization_per_token_group_quant_fp8(input, group_size, scale_ue8m0, out, out_scale)
    elif backend is None:
        per_token_group_quant_fp8_op.fast(input, group_size, scale_ue8m0, out, out_scale)
    else:
        per_token_group_quant_fp8_op(input, group_size, scale_ue8m0, out, out_scale, backend=backend)
    return out, out_scale
