"""Mixture of experts: both products of every chosen expert, the activation between them and the weighted sum."""

from __future__ import annotations

from typing import Any

import torch

from hpcjit.fused_op import define
from hpcjit.jit_op import NOTHING, JitOp, Plan
from hpcjit.ops._tensors import compiling, require
from hpcjit.ops.moe import _fused_moe_args, _fused_moe_plan, _fused_moe_reference, _ids
from hpcjit.ops.moe._fused_moe_args import FusedMoeArgs


class FusedMoeOp(JitOp):
    op = "moe.fused_moe"
    schema = (
        "(Tensor x, Tensor w13, Tensor w2, Tensor topk_ids, Tensor topk_weights, Tensor? w13_scale, Tensor? w2_scale,"
        " Tensor? x_scale, str quant, str activation, Tensor? shared_output, int expert_offset,"
        " int? num_global_experts, bool apply_weights_on_input, Tensor(a!) out) -> ()"
    )
    trace_values = ("topk_ids:histogram",)

    def check(self, *args: Any) -> None:
        _fused_moe_args.check(self.op, FusedMoeArgs(*args))

    def check_values(self, *args: Any) -> None:
        a = FusedMoeArgs(*args)
        limit = _ids.limit(a.expert_offset, a.num_experts, a.num_global_experts)
        _ids.check(self.op, "topk_ids", a.topk_ids, limit)

    def plan(self, *args: Any) -> Plan | str:
        a = FusedMoeArgs(*args)
        return _fused_moe_plan.plan(self.op, a) if a.x.shape[0] else NOTHING

    def reference(self, *args: Any) -> None:
        _fused_moe_reference.run(FusedMoeArgs(*args))

    def forward_deepgemm(self, *args: Any) -> None:
        """Blockwise FP8 with whole blocks, or bfloat16; SiLU; weights on the output."""
        self.check(*args)
        from hpcjit.ops.moe import _deepgemm_fused_moe

        _deepgemm_fused_moe.run(self.op, FusedMoeArgs(*args))

    def forward_triton(self, *args: Any) -> None:
        self.check(*args)
        from hpcjit.ops.moe import _triton_fused_moe

        _triton_fused_moe.run(self.op, FusedMoeArgs(*args))


fused_moe_op = FusedMoeOp()
define(fused_moe_op)


def fused_moe(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    w13_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    quant: str = "bf16",
    activation: str = "silu",
    shared_output: torch.Tensor | None = None,
    expert_offset: int = 0,
    num_global_experts: int | None = None,
    apply_weights_on_input: bool = False,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """The experts of a layer: gate and up products, activation, down product and the weighted sum of each token's experts.

        h[t, k] = act(x[t] @ gate[e].T) * (x[t] @ up[e].T)                with e = topk_ids[t, k] - expert_offset
        out[t]  = sum over k of topk_weights[t, k] * (h[t, k] @ w2[e].T)  + shared_output[t]

    Pairs whose expert is not here (`e` outside of `[0, num_experts)`, such as an id of -1) contribute nothing; a token with no
    other pair gets zeros or its shared_output. Weights stay as checkpoints have them. For expert parallelism give the experts
    of this rank and expert_offset, for tensor parallelism a slice of intermediate_size, in "fp8_block" one that begins at a
    multiple of 128 or has scales of its own; then add up over the ranks.

    Args:
        x: `[num_tokens, hidden_size]`, any number of tokens: bfloat16, or float8_e4m3fn with x_scale. Rows at any stride of
            whole 16 bytes.
        w13: `[num_experts, 2 * intermediate_size, hidden_size]`, contiguous, the gate rows of an expert before its up rows;
            bfloat16 with quant "bf16", else float8_e4m3fn. Up to 512 experts. hidden_size and intermediate_size are multiples
            of 16 (bfloat16: of 8).
        w2: `[num_experts, hidden_size, intermediate_size]`, likewise.
        topk_ids: int32 `[num_tokens, top_k]`, global numbers of experts; top_k up to 32. Debug mode reports ids that are
            neither -1 nor below num_global_experts.
        topk_weights: float32 `[num_tokens, top_k]`.
        w13_scale, w2_scale: float32, contiguous; a weight is its code times its scale.

            - "fp8_tensor": `[num_experts]` both
            - "fp8_channel": `[num_experts, 2 * intermediate_size]` and `[num_experts, hidden_size]`
            - "fp8_block", blocks of 128 x 128, the last ones smaller: `[num_experts, 2 * ceil(intermediate_size / 128),
              ceil(hidden_size / 128)]`, gate and up each with their own rows of blocks, and `[num_experts,
              ceil(hidden_size / 128), ceil(intermediate_size / 128)]`
        x_scale: float32, of activations in float8: `[1]` or `[num_tokens, 1]` in "fp8_tensor", `[num_tokens, 1]` or
            `[num_tokens]` in "fp8_channel", `[num_tokens, ceil(hidden_size / 128)]` at any strides in "fp8_block".
            Activations in bfloat16 are quantised here: with an x_scale `[1]` ("fp8_tensor" only), or a scale found for each
            token, or for 128 columns of one in "fp8_block".
        quant: "bf16", "fp8_tensor", "fp8_channel" or "fp8_block".
        activation: "silu", or "gelu" (with erf).
        shared_output: None, or bfloat16 `[num_tokens, hidden_size]`, added to the result.
        expert_offset: the global number of the first expert here.
        num_global_experts: None, or how many experts all ranks have together: only a part of the pairs is then expected here,
            and the form for few tokens, which rounds otherwise (below), may be taken for more. By default debug mode takes all
            ids below 1024, or below those here where they end later.
        apply_weights_on_input: multiply a pair's gate and up products by its weight, in place of its result.
        out: bfloat16 `[num_tokens, hidden_size]`; may be x or shared_output. A new tensor by default.
        backend: run this backend or fail.

    Returns:
        `out`. Products are summed in float32. h is rounded to bfloat16, or with FP8 to e4m3 with a scale for every 64 features
        of a pair (16 with few tokens); a pair's result is rounded to bfloat16 before it is weighted (not with few tokens). Sums
        over experts are in a fixed order, so bits repeat: that of k, or with few tokens one that can depend on what the other
        tokens of the call have chosen.

    Raises:
        ArgumentError: shapes that do not agree, scales of another granularity than quant has, a wrong dtype, device,
            alignment or option, a tensor that requires grad; in debug mode an id out of range.

    Safe under CUDA graphs, with routing that changes between replays, once the signature has run or been prewarmed. Method:
    sorting by expert as in MegaBlocks (Gale et al., 2022); FP8 sums that leave the tensor cores as in DeepSeek-V3 (2024).
    """
    require(FusedMoeOp.op, "x", x, 2)
    require(FusedMoeOp.op, "w13", w13, 3)
    require(FusedMoeOp.op, "w2", w2, 3)
    require(FusedMoeOp.op, "topk_ids", topk_ids, 2)
    if out is None:
        out = x.new_empty(x.shape, dtype=torch.bfloat16)
    scales = (w13_scale, w2_scale, x_scale)
    options = (quant, activation, shared_output, expert_offset, num_global_experts, apply_weights_on_input)
    args = (x, w13, w2, topk_ids, topk_weights, *scales, *options, out)
    if compiling("moe.fused_moe", backend):
        torch.ops.hpcjit.moe_fused_moe(*args)
    elif backend is None:
        fused_moe_op.fast(*args)
    else:
        fused_moe_op(*args, backend=backend)
    return out
