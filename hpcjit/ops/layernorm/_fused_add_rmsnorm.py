"""Residual addition and RMSNorm in one pass, plain and with Gemma's unit offset."""

from __future__ import annotations

import torch

from hpcjit import checks
from hpcjit.fused_op import define
from hpcjit.jit_op import JitOp, Plan
from hpcjit.ops import _peers
from hpcjit.ops._tensors import accumulation_dtype, compiling
from hpcjit.ops.layernorm._norm_plan import check_norm, norm_plan


class FusedAddRmsNormOp(JitOp):
    op = "layernorm.fused_add_rmsnorm"
    schema = "(Tensor(a!) input, Tensor(b!) residual, Tensor weight, float eps) -> ()"
    peer = "fused_add_rmsnorm"  # its name in other packages
    unit_offset = False

    def check(self, input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        check_norm(self.op, input, weight, eps, input_written=True)
        checks.tensor(self.op, "residual", residual, dtypes=(input.dtype,), shape=input.shape, like=input)
        checks.rows(self.op, "residual", residual, written=True)
        checks.apart(self.op, "residual", residual, "input", input)
        checks.no_grad(self.op, residual=residual)

    def plan(self, input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Plan | str:
        return norm_plan(
            self.op, input, weight, input, output_name="input", residual=residual, unit_offset=self.unit_offset
        )

    def reference(self, input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        dtype = accumulation_dtype(input.dtype)
        x = input.to(dtype) + residual.to(dtype)
        w = weight.to(dtype) + (1 if self.unit_offset else 0)
        residual.copy_(x)
        input.copy_(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w)

    def forward_flashinfer(self, input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        self.check(input, residual, weight, eps)
        _peers.flashinfer("norm", self.peer)(input, residual, weight, eps)

    def forward_aot(self, input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        self.check(input, residual, weight, eps)
        _peers.sglang("layernorm.norm", self.peer)(input, residual, weight, eps)


class GemmaFusedAddRmsNormOp(FusedAddRmsNormOp):
    op = "layernorm.gemma_fused_add_rmsnorm"
    peer = "gemma_fused_add_rmsnorm"
    unit_offset = True


fused_add_rmsnorm_op = FusedAddRmsNormOp()
gemma_fused_add_rmsnorm_op = GemmaFusedAddRmsNormOp()
define(fused_add_rmsnorm_op)
define(gemma_fused_add_rmsnorm_op)


def fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    backend: str | None = None,
) -> None:
    """Add the residual, keep the sum, normalise it; both in place.

        residual = input + residual
        input    = residual * rsqrt(mean(residual^2) + eps) * weight      (from the sum before it is rounded)

    Args:
        input: `[..., hidden_size]`, bfloat16, float16 or float32; receives the normalised sum.
        residual: like `input`; receives the sum. The two must not overlap.
        weight: `[hidden_size]`, the dtype of `input` or float32.
        eps: added to the mean square; at least 0.
        backend: run this backend or fail.

    Raises:
        ArgumentError: a wrong dtype, shape, stride or device, or a tensor that requires grad.

    Layout rules, accuracy, determinism and CUDA-graph safety are those of `rmsnorm`.
    """
    if compiling("layernorm.fused_add_rmsnorm", backend):
        torch.ops.hpcjit.layernorm_fused_add_rmsnorm(input, residual, weight, eps)
    elif backend is None:
        fused_add_rmsnorm_op.fast(input, residual, weight, eps)
    else:
        fused_add_rmsnorm_op(input, residual, weight, eps, backend=backend)


def gemma_fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    backend: str | None = None,
) -> None:
    """`fused_add_rmsnorm` with `1 + weight` (formed in float32) in place of `weight`, as in the Gemma models."""
    if compiling("layernorm.gemma_fused_add_rmsnorm", backend):
        torch.ops.hpcjit.layernorm_gemma_fused_add_rmsnorm(input, residual, weight, eps)
    elif backend is None:
        gemma_fused_add_rmsnorm_op.fast(input, residual, weight, eps)
    else:
        gemma_fused_add_rmsnorm_op(input, residual, weight, eps, backend=backend)
