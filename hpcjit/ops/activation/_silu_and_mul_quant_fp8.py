"""SwiGLU with FP8 output: a scale per row, per group, or one given."""

from __future__ import annotations

import torch

from hpcjit import checks
from hpcjit.fused_op import define
from hpcjit.jit_op import JitOp, Plan
from hpcjit.ops._fp8 import dynamic_scale, group_quantize, quantize
from hpcjit.ops._tensors import compiling, require
from hpcjit.ops.activation._gated import SILU, check_gated_input, gate
from hpcjit.ops.quantization import _fp8_plans as plans


class SiluAndMulQuantFp8Op(JitOp):
    """`group_size` 0 is a scale per row; not `dynamic`, one given for all."""

    op = "activation.silu_and_mul_quant_fp8"
    schema = "(Tensor input, bool dynamic, int group_size, bool scale_ue8m0, Tensor(a!) out, Tensor(b!) scale) -> ()"

    def check(
        self,
        input: torch.Tensor,
        dynamic: bool,
        group_size: int,
        scale_ue8m0: bool,
        out: torch.Tensor,
        scale: torch.Tensor,
    ) -> None:
        check_gated_input(self.op, input)
        shape = (*input.shape[:-1], input.shape[-1] // 2)
        plans.check_out(self.op, out, shape, input)
        checks.choice(self.op, "dynamic", dynamic, (False, True))
        checks.choice(self.op, "scale_ue8m0", scale_ue8m0, (False, True) if group_size else (False,))
        if group_size:
            checks.choice(self.op, "dynamic", dynamic, (True,))
            plans.check_group_size(self.op, group_size, input, halves=2)
            plans.check_group_scale(self.op, scale, group_size, out)
        else:
            plans.check_dense_scale(self.op, scale, (*shape[:-1], 1) if dynamic else (1,), input)

    def plan(
        self,
        input: torch.Tensor,
        dynamic: bool,
        group_size: int,
        scale_ue8m0: bool,
        out: torch.Tensor,
        scale: torch.Tensor,
    ) -> Plan | str:
        if group_size:
            return plans.group_quant_plan(self.op, input, group_size, scale_ue8m0, out, scale, activation=SILU)
        if dynamic:
            return plans.row_quant_plan(self.op, input, out, activation=SILU)
        return plans.tensor_quant_plan(self.op, input, False, out, activation=SILU)

    def reference(
        self,
        input: torch.Tensor,
        dynamic: bool,
        group_size: int,
        scale_ue8m0: bool,
        out: torch.Tensor,
        scale: torch.Tensor,
    ) -> None:
        y = gate(input, SILU)
        if group_size:
            group_quantize(y, group_size, scale_ue8m0, out, scale)
            return
        if dynamic:
            scale.copy_(dynamic_scale(y))
        out.copy_(quantize(y, scale.to(y.dtype)))

    def forward_triton(
        self,
        input: torch.Tensor,
        dynamic: bool,
        group_size: int,
        scale_ue8m0: bool,
        out: torch.Tensor,
        scale: torch.Tensor,
    ) -> None:
        """A scale per row only."""
        self.check(input, dynamic, group_size, scale_ue8m0, out, scale)
        from hpcjit.ops.activation import _triton

        _triton.silu_and_mul_quant_fp8(self.op, input, dynamic, group_size, out, scale)


silu_and_mul_quant_fp8_op = SiluAndMulQuantFp8Op()
define(silu_and_mul_quant_fp8_op)


def silu_and_mul_quant_fp8(
    input: torch.Tensor,
    *,
    group_size: int | None = None,
    scale: torch.Tensor | None = None,
    column_major_scales: bool = False,
    scale_ue8m0: bool = False,
    out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """SwiGLU of every row `[x | up]`, quantised to FP8 e4m3 without leaving the chip.

        y     = x / (1 + exp(-x)) * up              (float32, not rounded in between)
        scale = max(max|y|, 1e-10) / 448            (per row, or per group of columns, unless given)
        out   = e4m3(y / scale)                     (nearest, saturating)

    Args:
        input: `[..., 2 * hidden_size]`, bfloat16, float16 or float32; the last axis contiguous, the leading axes foldable
            into one. 16-byte aligned halves of rows are fast; any others work.
        group_size: None for a scale per row; 16, 32, 64, 128 or 256 for one per group of that many columns of `out`.
        scale: None to find the scales, or a float32 tensor `[1]`, positive, for all (then `group_size` must be None).
        column_major_scales, scale_ue8m0: as in `quantization.per_token_group_quant_fp8`; only with `group_size`.
        out: float8_e4m3fn `[..., hidden_size]`. A new tensor by default.
        out_scale: float32 `[..., 1]` or `[..., hidden_size / group_size]`, receives the scales. A new one by default.
        backend: run this backend or fail.

    Returns:
        `(out, scale)`. NaN and inf are treated as in `quantization.per_token_quant_fp8`. Bits repeat.

    Raises:
        ArgumentError: options that exclude each other, a wrong dtype, shape, stride or device, or a tensor that requires
            grad.

    Safe under CUDA graphs once the signature has run or been prewarmed.
    """
    name = SiluAndMulQuantFp8Op.op
    if scale is not None and (group_size is not None or out_scale is not None):
        raise checks.ArgumentError(name, "scale", "None with group_size or out_scale", "a tensor")
    if group_size is None and (column_major_scales or scale_ue8m0):
        raise checks.ArgumentError(name, "group_size", "given with column_major_scales or scale_ue8m0", "None")
    require(name, "input", input)
    if out is None:
        shape = (*input.shape[:-1], input.shape[-1] // 2)
        out = torch.empty(shape, dtype=torch.float8_e4m3fn, device=input.device)
    if group_size is not None:
        plans.check_group_size(name, group_size, input, halves=2)
    dynamic = scale is None
    if scale is None:
        scale = out_scale
    if scale is None:
        if group_size is None:
            scale = torch.empty((*out.shape[:-1], 1), dtype=torch.float32, device=input.device)
        else:
            scale = plans.empty_group_scale(name, out, group_size, column_major_scales)
    args = (input, dynamic, group_size or 0, scale_ue8m0, out, scale)
    if compiling("activation.silu_and_mul_quant_fp8", backend):
        torch.ops.hpcjit.activation_silu_and_mul_quant_fp8(*args)
    elif backend is None:
        silu_and_mul_quant_fp8_op.fast(*args)
    else:
        silu_and_mul_quant_fp8_op(*args, backend=backend)
    return out, scale
