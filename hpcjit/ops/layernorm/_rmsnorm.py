"""RMSNorm, plain and with Gemma's unit offset."""

from __future__ import annotations

import torch

from hpcjit import checks
from hpcjit.fused_op import define
from hpcjit.jit_op import JitOp, Plan
from hpcjit.ops import _peers
from hpcjit.ops._tensors import accumulation_dtype, compiling, require
from hpcjit.ops.layernorm._norm_plan import check_norm, norm_plan


class RmsNormOp(JitOp):
    op = "layernorm.rmsnorm"
    schema = "(Tensor input, Tensor weight, float eps, Tensor(a!) out) -> ()"
    peer = "rmsnorm"  # its name in other packages
    unit_offset = False

    def check(self, input: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        check_norm(self.op, input, weight, eps)
        checks.tensor(self.op, "out", out, dtypes=(input.dtype,), shape=input.shape, like=input)
        checks.rows(self.op, "out", out, written=True)
        checks.no_grad(self.op, out=out)

    def plan(self, input: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> Plan | str:
        return norm_plan(self.op, input, weight, out, output_name="out", unit_offset=self.unit_offset)

    def reference(self, input: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        x = input.to(accumulation_dtype(input.dtype))
        w = weight.to(x.dtype) + (1 if self.unit_offset else 0)
        out.copy_(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w)

    def forward_flashinfer(self, input: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        self.check(input, weight, eps, out)
        _peers.flashinfer("norm", self.peer)(input, weight, eps, out)

    def forward_aot(self, input: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        self.check(input, weight, eps, out)
        _peers.sglang("layernorm.norm", self.peer)(input, weight, out, eps)

    def forward_triton(self, input: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        self.check(input, weight, eps, out)
        from hpcjit.ops.layernorm import _triton

        _triton.rmsnorm(self.op, input, weight, eps, out, unit_offset=self.unit_offset)


class GemmaRmsNormOp(RmsNormOp):
    op = "layernorm.gemma_rmsnorm"
    peer = "gemma_rmsnorm"
    unit_offset = True


rmsnorm_op = RmsNormOp()
gemma_rmsnorm_op = GemmaRmsNormOp()
define(rmsnorm_op)
define(gemma_rmsnorm_op)


def rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Root-mean-square normalisation of every row: `out = input * rsqrt(mean(input^2) + eps) * weight`.

    Args:
        input: `[..., hidden_size]`, bfloat16, float16 or float32; the last axis contiguous, the leading axes foldable into
            one. Multiples of 8 columns (16-byte aligned rows) are fast; any other size works.
        weight: `[hidden_size]`, the dtype of `input` or float32.
        eps: added to the mean square; at least 0.
        out: where the result goes, like `input`; may be `input` itself. A new tensor by default.
        backend: run this backend or fail; see `hpcjit ops show layernorm.rmsnorm`.

    Returns:
        `out`. Computed in float32 and rounded once; bits repeat, and a row's do not depend on what other rows hold.

    Raises:
        ArgumentError: a wrong dtype, shape, stride or device, or a tensor that requires grad.

    Safe under CUDA graphs once the signature has run or been prewarmed. Method: Zhang and Sennrich, 2019.
    """
    require(rmsnorm_op.op, "input", input)
    if out is None:
        out = torch.empty_like(input)
    if compiling("layernorm.rmsnorm", backend):
        torch.ops.hpcjit.layernorm_rmsnorm(input, weight, eps, out)
    elif backend is None:
        rmsnorm_op.fast(input, weight, eps, out)
    else:
        rmsnorm_op(input, weight, eps, out, backend=backend)
    return out


def gemma_rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """RMSNorm with weights stored around zero: `out = input * rsqrt(mean(input^2) + eps) * (1 + weight)`.

    Arguments, ranges, result and errors are those of `rmsnorm`; `1 + weight` is formed in float32. As in the Gemma models.
    """
    require(gemma_rmsnorm_op.op, "input", input)
    if out is None:
        out = torch.empty_like(input)
    if compiling("layernorm.gemma_rmsnorm", backend):
        torch.ops.hpcjit.layernorm_gemma_rmsnorm(input, weight, eps, out)
    elif backend is None:
        gemma_rmsnorm_op.fast(input, weight, eps, out)
    else:
        gemma_rmsnorm_op(input, weight, eps, out, backend=backend)
    return out
