"""LayerNorm over the last axis."""

from __future__ import annotations

import torch

from hpcjit import checks
from hpcjit.fused_op import define
from hpcjit.jit_op import JitOp, Plan
from hpcjit.ops import _peers
from hpcjit.ops._tensors import accumulation_dtype, compiling, require
from hpcjit.ops.layernorm._norm_plan import check_norm, norm_plan


class LayerNormOp(JitOp):
    op = "layernorm.layernorm"
    schema = "(Tensor input, Tensor weight, Tensor? bias, float eps, Tensor(a!) out) -> ()"

    def check(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, out: torch.Tensor
    ) -> None:
        check_norm(self.op, input, weight, eps, bias=bias)
        checks.tensor(self.op, "out", out, dtypes=(input.dtype,), shape=input.shape, like=input)
        checks.rows(self.op, "out", out, written=True)
        checks.no_grad(self.op, out=out)

    def plan(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, out: torch.Tensor
    ) -> Plan | str:
        return norm_plan(self.op, input, weight, out, output_name="out", bias=bias, layer_norm=True)

    def reference(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, out: torch.Tensor
    ) -> None:
        x = input.to(accumulation_dtype(input.dtype))
        x = x - x.mean(-1, keepdim=True)
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(x.dtype)
        out.copy_(y if bias is None else y + bias.to(x.dtype))

    def forward_flashinfer(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, out: torch.Tensor
    ) -> None:
        """FlashInfer's public function allocates its result, so this calls the kernel below it. bfloat16 input only."""
        self.check(input, weight, bias, eps, out)
        if input.dtype != torch.bfloat16 or weight.dtype != torch.float32 or bias is None:
            raise checks.ArgumentTypeError(self.op, "weight", "float32 like bias, with bfloat16 input", weight.dtype)
        _peers.flashinfer("norm", "get_norm_module")().layernorm(out, input, weight, bias, eps)


layernorm_op = LayerNormOp()
define(layernorm_op)


def layernorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Layer normalisation of every row: `out = (input - mean) * rsqrt(var + eps) * weight + bias`.

    Mean and (biased) variance are those of the row, the variance from the centred values, so a large common offset costs no
    accuracy.

    Args:
        input: `[..., hidden_size]`, bfloat16, float16 or float32.
        weight: `[hidden_size]`, the dtype of `input` or float32.
        bias: None, or like `weight`.
        eps: added to the variance; at least 0.
        out: where the result goes, like `input`; may be `input` itself. A new tensor by default.
        backend: run this backend or fail.

    Returns:
        `out`.

    Raises:
        ArgumentError: a wrong dtype, shape, stride or device, or a tensor that requires grad.

    Layout rules, determinism and CUDA-graph safety are those of `rmsnorm`. Method: Ba, Kiros and Hinton, 2016.
    """
    require(layernorm_op.op, "input", input)
    if out is None:
        out = torch.empty_like(input)
    if compiling("layernorm.layernorm", backend):
        torch.ops.hpcjit.layernorm_layernorm(input, weight, bias, eps, out)
    elif backend is None:
        layernorm_op.fast(input, weight, bias, eps, out)
    else:
        layernorm_op(input, weight, bias, eps, out, backend=backend)
    return out
