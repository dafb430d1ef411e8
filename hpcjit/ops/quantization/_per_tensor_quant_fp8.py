"""FP8 quantisation with one scale for the whole tensor, found or given."""

from __future__ import annotations

import torch

from hpcjit import checks
from hpcjit.fused_op import define
from hpcjit.jit_op import JitOp, Plan
from hpcjit.ops import _peers
from hpcjit.ops._fp8 import dynamic_scale, quantize
from hpcjit.ops._tensors import accumulation_dtype, compiling, require
from hpcjit.ops.quantization._fp8_plans import check_dense_scale, check_input, check_out, tensor_quant_plan


class PerTensorQuantFp8Op(JitOp):
    op = "quantization.per_tensor_quant_fp8"
    schema = "(Tensor input, bool dynamic, Tensor(a!) out, Tensor(b!) scale) -> ()"

    def check(self, input: torch.Tensor, dynamic: bool, out: torch.Tensor, scale: torch.Tensor) -> None:
        check_input(self.op, input)
        checks.choice(self.op, "dynamic", dynamic, (False, True))
        check_out(self.op, out, input.shape, input)
        check_dense_scale(self.op, scale, (1,), input)

    def plan(self, input: torch.Tensor, dynamic: bool, out: torch.Tensor, scale: torch.Tensor) -> Plan | str:
        return tensor_quant_plan(self.op, input, dynamic, out)

    def reference(self, input: torch.Tensor, dynamic: bool, out: torch.Tensor, scale: torch.Tensor) -> None:
        x = input.to(accumulation_dtype(input.dtype))
        if dynamic:
            flat = torch.cat([x.flatten(), x.new_zeros(1)])  # an empty tensor has a scale too
            scale.copy_(dynamic_scale(flat))
        out.copy_(quantize(x, scale.to(x.dtype)))

    def forward_aot(self, input: torch.Tensor, dynamic: bool, out: torch.Tensor, scale: torch.Tensor) -> None:
        self.check(input, dynamic, out, scale)
        if dynamic:
            scale.zero_()  # the kernel takes the maximum with what is there
        _peers.sglang("quantization.per_tensor_quant_fp8", "per_tensor_quant_fp8")(input, out, scale, not dynamic)


per_tensor_quant_fp8_op = PerTensorQuantFp8Op()
define(per_tensor_quant_fp8_op)


def per_tensor_quant_fp8(
    input: torch.Tensor,
    scale: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a tensor to FP8 e4m3 with one scale.

        scale = max(max|input|, 1e-10) / 448        (unless given)
        out   = e4m3(input / scale)                 (nearest, saturating)

    Args:
        input: `[..., hidden_size]`, bfloat16, float16 or float32; the last axis contiguous, the leading axes foldable into
            one. Multiples of 8 columns (16-byte aligned rows) are fast; any other size works.
        scale: None to find the scale, or a float32 tensor `[1]` on the device, positive (static quantisation).
        out: float8_e4m3fn, shaped like `input`. A new tensor by default.
        out_scale: float32 `[1]`, receives the scale when it is found. A new tensor by default.
        backend: run this backend or fail.

    Returns:
        `(out, scale)`; `out * scale` restores the input. NaN stays NaN and does not count in the maximum; inf makes the
        found scale inf, itself NaN and all else 0. The maximum takes no atomics: bits repeat.

    Raises:
        ArgumentError: both scales given, a wrong dtype, shape, stride or device, or a tensor that requires grad.

    Safe under CUDA graphs once the signature has run or been prewarmed; finding the scale takes two kernels.
    """
    if scale is not None and out_scale is not None:
        raise checks.ArgumentError(PerTensorQuantFp8Op.op, "out_scale", "None when scale is given", "a tensor")
    require(PerTensorQuantFp8Op.op, "input", input)
    if out is None:
        out = torch.empty(input.shape, dtype=torch.float8_e4m3fn, device=input.device)
    dynamic = scale is None
    if scale is None:
        scale = torch.empty(1, dtype=torch.float32, device=input.device) if out_scale is None else out_scale
    if compiling("quantization.per_tensor_quant_fp8", backend):
        torch.ops.hpcjit.quantization_per_tensor_quant_fp8(input, dynamic, out, scale)
    elif backend is None:
        per_tensor_quant_fp8_op.fast(input, dynamic, out, scale)
    else:
        per_tensor_quant_fp8_op(input, dynamic, out, scale, backend=backend)
    return out, scale
