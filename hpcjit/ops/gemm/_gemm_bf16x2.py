"""A product with weights that were split into two bfloat16 parts beforehand."""

from __future__ import annotations

import torch

from hpcjit import checks
from hpcjit.fused_op import define
from hpcjit.jit_op import NOTHING, JitOp, Plan
from hpcjit.ops._tensors import accumulation_dtype, compiling, require
from hpcjit.ops.gemm import _router_plan
from hpcjit.ops.gemm._router_gemm import RESULTS, check_product, tf32

LOW_SCALE = 256.0  # what `prepare_router_weight` multiplies the low part with, so that it stays in range


class GemmBf16x2Op(JitOp):
    op = "gemm.gemm_bf16x2"
    schema = "(Tensor x, Tensor w_high, Tensor w_low, float scale, Tensor(a!) out) -> ()"
    tensor_core_sums = ("out",)

    def check(
        self, x: torch.Tensor, w_high: torch.Tensor, w_low: torch.Tensor, scale: float, out: torch.Tensor
    ) -> None:
        check_product(self.op, x, {"w_high": w_high, "w_low": w_low}, torch.bfloat16, out)
        checks.number(self.op, "scale", scale)

    def plan(
        self, x: torch.Tensor, w_high: torch.Tensor, w_low: torch.Tensor, scale: float, out: torch.Tensor
    ) -> Plan | str:
        if not out.numel():
            return NOTHING
        shape = _router_plan.shape_of(x, w_high.shape[0])
        weights = w_high, w_low
        return _router_plan.tile_plan(x, weights, "fast", out, shape) or _router_plan.stream_plan(
            x, weights, "fast", out, shape
        )

    def reference(
        self, x: torch.Tensor, w_high: torch.Tensor, w_low: torch.Tensor, scale: float, out: torch.Tensor
    ) -> None:
        x, w_high, w_low = (value.to(accumulation_dtype(value.dtype)) for value in (x, w_high, w_low))
        with tf32(False, x.device):
            out.copy_((x @ w_high.t()).add_(x @ w_low.t(), alpha=scale))


gemm_bf16x2_op = GemmBf16x2Op()
define(gemm_bf16x2_op)


def prepare_router_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split fp32 weights once, for `gemm_bf16x2`.

        w_high = bf16(weight)        w_low = bf16((weight - w_high) * 256)

    Both are rounded to nearest; `w_high + w_low / 256` is off by at most 2^-17 of the weight, or 2^-142 where that is more. A
    weight that changes must be split anew; `router_gemm` splits at each call instead.

    Args:
        weight: float32, any shape. From about 3.396e38 on the high part is infinite, and the low one NaN or
            infinite too: such weights give NaN.

    Returns:
        `(w_high, w_low)`, bfloat16.

    Raises:
        ArgumentError: another dtype.
    """
    checks.tensor("gemm.prepare_router_weight", "weight", weight, dtypes=(torch.float32,), dense_last=False)
    weight = weight.detach()
    high = weight.bfloat16()
    return high, ((weight - high.float()) * LOW_SCALE).bfloat16()


def gemm_bf16x2(
    x: torch.Tensor,
    w_high: torch.Tensor,
    w_low: torch.Tensor,
    *,
    scale: float = 1 / LOW_SCALE,
    out_dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """`x @ w_high.T + scale * (x @ w_low.T)`: a product with weights of about 16 bits, in two bfloat16 parts.

    Args:
        x: bfloat16 `[num_tokens, hidden_size]`; any row stride, last axis contiguous.
        w_high: bfloat16 `[num_experts, hidden_size]`, likewise.
        w_low: like `w_high`; `prepare_router_weight` makes both.
        scale: what the low part counts.
        out_dtype: float32 or bfloat16, of a new result.
        out: receives the result, `[num_tokens, num_experts]`, float32 or bfloat16; any row stride. A new tensor by default.
        backend: run this backend or fail.

    Returns:
        `out`. Sums are float32, in a fixed order: bits repeat, and a row's do not depend on what other rows hold.

    Raises:
        ArgumentError: a wrong rank, dtype, shape, stride or device, a scale that is no finite number, an `out` that begins
            where an input does, or a tensor that requires grad. Other overlaps are not looked for.

    Safe under CUDA graphs once the signature has run or been prewarmed. The form is that of HPC-Ops' `gemm_bf16xfp32`.
    """
    require(GemmBf16x2Op.op, "x", x, 2)
    require(GemmBf16x2Op.op, "w_high", w_high, 2)
    if out is None:
        checks.choice(GemmBf16x2Op.op, "out_dtype", out_dtype, RESULTS)
        out = x.new_empty((x.shape[0], w_high.shape[0]), dtype=out_dtype)
    if compiling("gemm.gemm_bf16x2", backend):
        torch.ops.hpcjit.gemm_gemm_bf16x2(x, w_high, w_low, scale, out)
    elif backend is None:
        gemm_bf16x2_op.fast(x, w_high, w_low, scale, out)
    else:
        gemm_bf16x2_op(x, w_high, w_low, scale, out, backend=backend)
    return out
