"""The top-k experts of the best groups of experts: the routing of DeepSeek-V2 and V3."""

from __future__ import annotations

from typing import Any

import torch

from hpcjit.fused_op import define
from hpcjit.ops import _peers
from hpcjit.ops._tensors import compiling
from hpcjit.ops.moe._gate import GateOp, outputs
from hpcjit.spec import KernelBackend


class GroupedTopkOp(GateOp):
    op = "moe.grouped_topk"
    schema = (
        "(Tensor logits, int top_k, int num_groups, int topk_groups, str scoring, bool renormalize,"
        " float scaling_factor, int num_shared_experts, Tensor? bias, Tensor? num_valid_tokens, Tensor(a!) weights,"
        " Tensor(b!) ids) -> ()"
    )

    def forward_flashinfer(self, *args: Any) -> None:
        """DeepSeek-V3 only: sigmoid with a bias of the dtype of the logits, renormalised; contiguous tensors."""
        self.check(*args)
        a = self.gate(*args)
        self._refuse(KernelBackend.FLASHINFER, a, "num_shared_experts", "num_valid_tokens")
        if a.scoring != "sigmoid" or a.bias is None or not a.renormalize or a.logits.dtype != torch.float32:
            _peers.refuse(self.op, KernelBackend.FLASHINFER, "it takes float32, sigmoid, a bias, and renormalises")
        run = _peers.flashinfer("fused_moe", "fused_topk_deepseek")
        run(a.logits, a.bias, a.num_groups, a.topk_groups, a.top_k, a.scaling_factor, a.weights, a.ids)


grouped_topk_op = GroupedTopkOp()
define(grouped_topk_op)


def grouped_topk(
    logits: torch.Tensor,
    top_k: int,
    *,
    num_groups: int,
    topk_groups: int,
    scoring: str = "sigmoid",
    renormalize: bool = True,
    scaling_factor: float = 1.0,
    num_shared_experts: int = 0,
    bias: torch.Tensor | None = None,
    num_valid_tokens: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route every token to the `top_k` experts with the largest scores in its `topk_groups` best groups.

        s       = sigmoid(logits) or softmax(logits)             (float32)
        c       = logits, or s + bias with a bias
        group   = num_experts / num_groups neighbouring experts; its score is the largest c, or with a bias the sum of its two
                  largest (the largest alone in groups of one)
        ids     = indices of the top_k largest c in the topk_groups groups of the largest scores, largest first
        weights = scaling_factor * s[ids], or scaling_factor * s[ids] / sum(s[ids]) with renormalize

    With sigmoid and a bias this is DeepSeek-V3, with softmax and none DeepSeek-V2. Experts of other groups are never
    chosen, however low those of the kept groups score.

    Args:
        logits: `[num_tokens, num_experts]`, bfloat16, float16 or float32, 1 to 1024 experts, experts contiguous.
        top_k: 1 to 32, and at most the experts of topk_groups groups.
        num_groups: 1 to 32, a divisor of num_experts.
        topk_groups: 1 to num_groups.
        scoring: "sigmoid" or "softmax".
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
        `(weights, ids)`. Equal scores go to the lowest id, of experts as of groups. NaN logits weigh 0, NaN scores are chosen
        last and count as -inf in their group's score (which is -inf too where it would be inf - inf); the ids of a token are
        always different and in range. Bits repeat.

    Raises:
        ArgumentError: a wrong dtype, shape, stride or device, an option out of range, num_groups that does not divide the
            experts, fewer than top_k experts in the kept groups, a tensor that requires grad.

    Safe under CUDA graphs once the signature has run or been prewarmed.
    """
    weights, ids = outputs(GroupedTopkOp.op, logits, top_k, num_shared_experts, weights, ids)
    args = (logits, top_k, num_groups, topk_groups, scoring, renormalize, scaling_factor, num_shared_experts)
    tensors = (bias, num_valid_tokens, weights, ids)
    if compiling("moe.grouped_topk", backend):
        torch.ops.hpcjit.moe_grouped_topk(*args, *tensors)
    elif backend is None:
        grouped_topk_op.fast(*args, *tensors)
    else:
        grouped_topk_op(*args, *tensors, backend=backend)
    return weights, ids
