"""Sigmoid of every expert's logit and the top-k: routing without a softmax."""

from __future__ import annotations

from typing import Any

import torch

from hpcjit.fused_op import define
from hpcjit.ops import _peers
from hpcjit.ops._tensors import compiling
from hpcjit.ops.moe._gate import GateOp, outputs
from hpcjit.spec import KernelBackend


class TopkSigmoidOp(GateOp):
    op = "moe.topk_sigmoid"
    schema = (
        "(Tensor logits, int top_k, bool renormalize, float scaling_factor, int num_shared_experts, Tensor? bias,"
        " Tensor? num_valid_tokens, Tensor(a!) weights, Tensor(b!) ids) -> ()"
    )
    scoring = "sigmoid"

    def forward_aot(self, *args: Any) -> None:
        """No shared experts (theirs weigh otherwise) or padding; scaling with renormalize only."""
        self.check(*args)
        a = self.gate(*args)
        self._refuse(KernelBackend.AOT, a, "num_shared_experts", "num_valid_tokens")
        if a.scaling_factor != 1.0 and not a.renormalize:
            _peers.refuse(self.op, KernelBackend.AOT, "it scales renormalised weights only")
        run = _peers.sglang("moe.moe_topk_sigmoid", "topk_sigmoid")
        run(a.weights, a.ids, a.logits, a.renormalize, a.bias, a.scaling_factor, 0)


topk_sigmoid_op = TopkSigmoidOp()
define(topk_sigmoid_op)


def topk_sigmoid(
    logits: torch.Tensor,
    top_k: int,
    *,
    renormalize: bool = False,
    scaling_factor: float = 1.0,
    num_shared_experts: int = 0,
    bias: torch.Tensor | None = None,
    num_valid_tokens: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route every token: the sigmoid of each expert's logit, and the `top_k` largest.

        s       = sigmoid(logits)                                (float32)
        ids     = indices of the top_k largest logits, or s + bias with a bias, largest first
        weights = scaling_factor * s[ids], or scaling_factor * s[ids] / sum(s[ids]) with renormalize

    Without a bias the logits decide: their order is that of the sigmoids, which round large logits to one value.

    Args:
        logits: `[num_tokens, num_experts]`, bfloat16, float16 or float32, 1 to 1024 experts, experts contiguous.
        top_k: 1 to 32, and at most num_experts.
        renormalize: make the weights of a token add up to 1, before they are scaled; a sum of 0 leaves them 0.
        scaling_factor: of the weights.
        num_shared_experts: 0 to 32; so many more columns with the ids num_experts, num_experts + 1, ... and weight 1,
            whatever the scaling_factor.
        bias: None, or float32 `[num_experts]`, which decides the choice but does not enter the weights: they are computed
            from the logits, so that no digits are lost to a large bias.
        num_valid_tokens: None, or int32 `[1]` on the device. Rows from there on are padding: id -1 and weight 0 in every
            column, and their logits may be anything.
        weights: float32 `[num_tokens, top_k + num_shared_experts]`, receives the weights. A new tensor by default.
        ids: int32 likewise, receives the experts. A new tensor by default.
        backend: run this backend or fail.

    Returns:
        `(weights, ids)`. Equal scores go to the lowest id. NaN logits weigh 0, and NaN scores are chosen last; the ids of a
        token are always different and in range. Bits repeat.

    Raises:
        ArgumentError: a wrong dtype, shape, stride or device, top_k out of range, a tensor that requires grad.

    Safe under CUDA graphs once the signature has run or been prewarmed. `grouped_topk` restricts the choice to groups.
    """
    weights, ids = outputs(TopkSigmoidOp.op, logits, top_k, num_shared_experts, weights, ids)
    args = (logits, top_k, renormalize, scaling_factor, num_shared_experts, bias, num_valid_tokens, weights, ids)
    if compiling("moe.topk_sigmoid", backend):
        torch.ops.hpcjit.moe_topk_sigmoid(*args)
    elif backend is None:
        topk_sigmoid_op.fast(*args)
    else:
        topk_sigmoid_op(*args, backend=backend)
    return weights, ids
