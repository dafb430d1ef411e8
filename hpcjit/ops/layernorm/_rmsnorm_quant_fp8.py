"""RMSNorm with FP8 output, a scale per row or one given."""

from __future__ import annotations

import torch

from hpcjit import checks
from hpcjit.fused_op import define
from hpcjit.jit_op import JitOp, Plan
from hpcjit.ops._fp8 import dynamic_scale, quantize
from hpcjit.ops._tensors import accumulation_dtype, compiling, require
from hpcjit.ops.layernorm._norm_plan import check_norm, norm_plan

_DYNAMIC, _STATIC = 1, 2  # NormConfig.quant


class RmsNormQuantFp8Op(JitOp):
    op = "layernorm.rmsnorm_quant_fp8"
    schema = (
        "(Tensor input, Tensor(c!)? residual, Tensor weight, float eps, bool dynamic, Tensor(a!) out, Tensor(b!) scale)"
        " -> ()"
    )

    def check(
        self,
        input: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        dynamic: bool,
        out: torch.Tensor,
        scale: torch.Tensor,
    ) -> None:
        check_norm(self.op, input, weight, eps)
        if residual is not None:
            checks.tensor(self.op, "residual", residual, dtypes=(input.dtype,), shape=input.shape, like=input)
            checks.rows(self.op, "residual", residual, written=True)
            checks.apart(self.op, "residual", residual, "input", input)
        checks.tensor(self.op, "out", out, dtypes=(torch.float8_e4m3fn,), shape=input.shape, like=input)
        checks.rows(self.op, "out", out, written=True)
        shape = (*input.shape[:-1], 1) if dynamic else (1,)
        checks.tensor(self.op, "scale", scale, dtypes=(torch.float32,), shape=shape, like=input)
        if not scale.is_contiguous():
            raise checks.ArgumentError(self.op, "scale", "contiguous", f"strides {scale.stride()}")
        checks.no_grad(self.op, residual=residual, scale=scale)

    def plan(
        self,
        input: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        dynamic: bool,
        out: torch.Tensor,
        scale: torch.Tensor,
    ) -> Plan | str:
        quant = _DYNAMIC if dynamic else _STATIC
        return norm_plan(self.op, input, weight, out, output_name="out", residual=residual, quant=quant)

    def reference(
        self,
        input: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        dynamic: bool,
        out: torch.Tensor,
        scale: torch.Tensor,
    ) -> None:
        x = input.to(accumulation_dtype(input.dtype))
        if residual is not None:
            x = x + residual.to(x.dtype)
            residual.copy_(x)
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(x.dtype)
        if dynamic:
            scale.copy_(dynamic_scale(y))
        out.copy_(quantize(y, scale.to(y.dtype)))

    def forward_triton(
        self,
        input: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        dynamic: bool,
        out: torch.Tensor,
        scale: torch.Tensor,
    ) -> None:
        """Dynamic scales only."""
        self.check(input, residual, weight, eps, dynamic, out, scale)
        from hpcjit.ops.layernorm import _triton

        _triton.rmsnorm_quant_fp8(self.op, input, residual, weight, eps, dynamic, out, scale)


rmsnorm_quant_fp8_op = RmsNormQuantFp8Op()
define(rmsnorm_quant_fp8_op)


def rmsnorm_quant_fp8(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    residual: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm whose result is quantised to FP8 e4m3 without leaving the chip.

        s     = input + residual                        (if given; the rounded sum replaces residual)
        y     = s * rsqrt(mean(s^2) + eps) * weight     (float32, not rounded in between)
        scale = max(max|y|, 1e-10) / 448                (per row, unless given)
        out   = e4m3(y / scale)                         (saturating)

    Args:
        input: `[..., hidden_size]`, bfloat16, float16 or float32.
        weight: `[hidden_size]`, the dtype of `input` or float32.
        eps: added to the mean square; at least 0.
        residual: None, or like `input`; replaced by the sum.
        scale: None for a dynamic scale per row, or a float32 tensor `[1]` (positive) for all.
        out: float8_e4m3fn, shaped like `input`. A new tensor by default.
        out_scale: float32 `[..., 1]`, receives the dynamic scales (then `scale` must be None). A new tensor by default.
        backend: run this backend or fail.

    Returns:
        `(out, scale)`, with `scale` float32 `[..., 1]` when dynamic, else the one given. `out * scale` restores y.

    Raises:
        ArgumentError: a wrong dtype, shape, stride or device, or a tensor that requires grad.

    Layout rules, determinism and CUDA-graph safety are those of `rmsnorm`.
    """
    require(rmsnorm_quant_fp8_op.op, "input", input)
    if out is None:
        out = torch.empty(input.shape, dtype=torch.float8_e4m3fn, device=input.device)
    if scale is not None and out_scale is not None:
        raise checks.ArgumentError(rmsnorm_quant_fp8_op.op, "out_scale", "None with a given scale", "a tensor")
    dynamic = scale is None
    if scale is None:
        scale = out_scale
    if scale is None:
        scale = torch.empty((*input.shape[:-1], 1), dtype=torch.float32, device=input.device)
    if compiling("layernorm.rmsnorm_quant_fp8", backend):
        torch.ops.hpcjit.layernorm_rmsnorm_quant_fp8(input, residual, weight, eps, dynamic, out, scale)
    elif backend is None:
        rmsnorm_quant_fp8_op.fast(input, residual, weight, eps, dynamic, out, scale)
    else:
        rmsnorm_quant_fp8_op(input, residual, weight, eps, dynamic, out, scale, backend=backend)
    return out, scale
