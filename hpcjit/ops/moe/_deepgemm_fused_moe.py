"""The fused mixture of experts with DeepGEMM's grouped products and this package's operators around them.

DeepGEMM's contiguous layout wants the rows of each expert in whole blocks, so activations are gathered into such rows first
(`moe_align_block_size`). As nothing may be read by the host there are as many rows as any routing can need; blocks that hold
none are marked -1, which its kernels pass over, and the operators in between do not.
"""

from __future__ import annotations

import torch

from hpcjit.ops import _peers
from hpcjit.ops.activation import silu_and_mul, silu_and_mul_quant_fp8
from hpcjit.ops.moe._fused_moe_args import BLOCK, FusedMoeArgs
from hpcjit.ops.moe._moe_align_block_size import moe_align_block_size
from hpcjit.ops.moe._moe_reduce import moe_reduce
from hpcjit.ops.quantization import per_token_group_quant_fp8
from hpcjit.spec import KernelBackend

Scaled = tuple[torch.Tensor, torch.Tensor | None]


def run(op: str, a: FusedMoeArgs) -> None:
    if reason := _absent(a):
        _peers.refuse(op, KernelBackend.DEEPGEMM, reason)
    if not a.x.shape[0]:
        return
    backend = "jit" if a.x.is_cuda else "torch"  # named: one that is forced for the process does not reach these
    align = _peers.deep_gemm("get_mk_alignment_for_contiguous_layout")()
    local_ids = a.topk_ids - a.expert_offset if a.expert_offset else a.topk_ids
    pairs, expert_of_block, _ = moe_align_block_size(local_ids, a.num_experts, align, backend=backend)
    experts = expert_of_block.repeat_interleave(align)  # of each row, -1 for none

    x: Scaled = (a.x, a.x_scale)
    if a.quantises:
        x = per_token_group_quant_fp8(a.x, BLOCK, backend=backend)
    both = _product(_gathered(x, pairs, a.topk_ids), (a.w13, a.w13_scale), experts)
    if a.quant == "bf16":
        hidden: Scaled = (silu_and_mul(both, backend=backend), None)
    else:
        hidden = silu_and_mul_quant_fp8(both, group_size=BLOCK, backend=backend)
    rows = _product(hidden, (a.w2, a.w2_scale), experts)
    weights, shared = a.topk_weights, a.shared_output
    moe_reduce(rows, _positions(pairs, a.topk_ids), weights, shared_output=shared, out=a.out, backend=backend)


def _absent(a: FusedMoeArgs) -> str:
    """What it does not cover of a call, if anything."""
    if a.quant not in ("bf16", "fp8_block"):
        return "it has blockwise scales or none"
    if a.activation != "silu" or a.apply_weights_on_input:
        return "it has SiLU, and weights on the output"
    if a.quant == "fp8_block" and (a.intermediate_size % BLOCK or a.x.shape[1] % BLOCK):
        return f"its scales are of whole blocks of {BLOCK}"
    return ""


def _gathered(x: Scaled, pairs: torch.Tensor, topk_ids: torch.Tensor) -> Scaled:
    """The row of each pair's token; entries of padding get any."""
    tokens = pairs.clamp(max=topk_ids.numel() - 1) // topk_ids.shape[1]
    values, scale = x
    rows = values.view(torch.uint8)[tokens].view(values.dtype)  # not every torch indexes float8
    return rows, None if scale is None else scale[tokens]


def _product(x: Scaled, weight: Scaled, experts: torch.Tensor) -> torch.Tensor:
    out = x[0].new_empty((x[0].shape[0], weight[0].shape[1]), dtype=torch.bfloat16)
    if x[1] is None:
        _peers.deep_gemm("m_grouped_bf16_gemm_nt_contiguous")(x[0], weight[0], out, experts)
    else:
        _peers.deep_gemm("m_grouped_fp8_gemm_nt_contiguous")(x, weight, out, experts)
    return out


def _positions(pairs: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
    """The row of each pair, -1 for those of no expert here; all padding goes to one entry past the result."""
    rows = torch.arange(len(pairs), dtype=torch.int32, device=pairs.device)
    positions = rows.new_full((topk_ids.numel() + 1,), -1).scatter_(0, pairs.long(), rows)
    return positions[:-1].view(topk_ids.shape)
