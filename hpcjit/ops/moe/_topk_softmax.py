"""Softmax over experts and its top-k: the routing of a mixture of experts."""

from __future__ import annotations

from typing import Any

import torch

from hpcjit.fused_op import define
from hpcjit.ops import _peers
from hpcjit.ops._tensors import compiling
from hpcjit.ops.moe._gate import GateOp, outputs
from hpcjit.spec import KernelBackend


class TopkSoftmaxOp(GateOp):
    op = "moe.topk_softmax"
    schema = (
        "(Tensor logits, int top_k, bool renormalize, float softcap, float scaling_factor, int num_shared_experts,"
        " Tensor? bias, Tensor? num_valid_tokens, Tensor(a!) weights, Tensor(b!) ids) -> ()"
    )

    def forward_aot(self, *args: Any) -> None:
        """No shared experts, padding or scaling; no bias, which theirs adds to the logits before the softmax."""
        self.check(*args)
        a = self.gate(*args)
        self._refuse(KernelBackend.AOT, a, "num_shared_experts", "num_valid_tokens", "scaling_factor", "bias")
        run = _peers.sglang("moe.moe_topk_softmax", "topk_softmax")
        run(a.weights, a.ids, a.logits, a.renormalize, a.softcap, a.bias)


topk_softmax_op = TopkSoftmaxOp()
define(topk_softmax_op)


def topk_softmax(
    logits: torch.Tensor,
    top_k: int,
    *,
    renormalize: bool = False,
    softcap: float = 0.0,
    scaling_factor: float = 1.0,
    num_shared_experts: int = 0,
    bias: torch.Tensor | None = None,
    num_valid_tokens: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route every token: softmax over its experts' logits, and the `top_k` largest.

        x       = logits, or softcap * tanh(logits / softcap) if softcap > 0
        p       = softmax(x)                                     (float32)
        ids     = indices of the top_k largest logits, or p + bias with a bias, largest first
        weights = scaling_factor * p[ids], or scaling_factor * p[ids] / sum(p[ids]) with renormalize

    Args:
        logits: `[num_tokens, num_experts]`, bfloat16, float16 or float32, 1 to 1024 experts, experts contiguous.
        top_k: 1 to 32, and at most num_experts.
        renormalize: make the weights of a token add up to 1, before they are scaled; a sum of 0 leaves them 0.
        softcap: 0, which is none, or 2^-126 and more.
        scaling_factor: of the weights.
        num_shared_experts: 0 to 32; so many more columns with the ids num_experts, num_experts + 1, ... and weight 1,
            whatever the scaling_factor.
        bias: None, or float32 `[num_experts]`, which decides the choice but does not enter the weights.
        num_valid_tokens: None, or int32 `[1]` on the device. Rows from there on are padding: id -1 and weight 0 in every
            column, and their logits may be anything.
        weights: float32 `[num_tokens, top_k + num_shared_experts]`, receives the weights. A new tensor by default.
        ids: int32 likewise, receives the experts. A new tensor by default.
        backend: run this backend or fail.

    Returns:
        `(weights, ids)`. Equal scores go to the lowest id. NaN logits weigh 0; they, and experts with a NaN bias, are chosen
        last; the ids of a token are always different and in range. If no logit is above -inf all weights are 0. Bits repeat.

    Raises:
        ArgumentError: a wrong dtype, shape, stride or device, top_k or softcap out of range, a tensor that requires grad.

    Safe under CUDA graphs once the signature has run or been prewarmed.
    """
    weights, ids = outputs(TopkSoftmaxOp.op, logits, top_k, num_shared_experts, weights, ids)
    args = (logits, top_k, renormalize, softcap, scaling_factor, num_shared_experts)
    tensors = (bias, num_valid_tokens, weights, ids)
    if compiling("moe.topk_softmax", backend):
        torch.ops.hpcjit.moe_topk_softmax(*args, *tensors)
    elif backend is None:
        topk_softmax_op.fast(*args, *tensors)
    else:
        topk_softmax_op(*args, *tensors, backend=backend)
    return weights, ids
