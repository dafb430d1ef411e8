"""The mixture of experts in plain torch: a loop over experts on the dequantised values."""

from __future__ import annotations

import torch
from torch.nn import functional

from hpcjit.ops._fp8 import dynamic_scale, quantize
from hpcjit.ops.gemm._router_gemm import tf32
from hpcjit.ops.moe._fused_moe_args import BLOCK, HIDDEN_GROUP, FusedMoeArgs


def run(a: FusedMoeArgs) -> None:
    """In float32, the hidden activation rounded as the operator rounds it; in float64 throughout if that is what `a` has."""
    if a.x.device.type == "meta":
        return
    dtype = torch.promote_types(a.topk_weights.dtype, torch.float32)
    x = activations(a, dtype)
    top_k = a.topk_ids.shape[1]
    local = a.topk_ids.long().reshape(-1) - a.expert_offset
    rows = torch.zeros(local.numel(), a.x.shape[1], dtype=dtype, device=a.x.device)
    with tf32(False, x.device):
        for expert in local[(local >= 0) & (local < a.num_experts)].unique().tolist():
            pairs = (local == expert).nonzero().squeeze(1)
            gate, up = (x[pairs // top_k] @ gate_up_weights(a, expert, dtype).t()).chunk(2, -1)
            if a.apply_weights_on_input:
                weight = a.topk_weights.reshape(-1)[pairs, None].to(dtype)
                gate, up = gate * weight, up * weight
            act = functional.silu(gate) if a.activation == "silu" else functional.gelu(gate)
            rows[pairs] = rounded_hidden(a, act * up) @ down_weights(a, expert, dtype).t()
    mine = ((local >= 0) & (local < a.num_experts)).view_as(a.topk_ids)
    total = torch.zeros_like(x)
    for k, row in enumerate(rows.view(a.x.shape[0], top_k, a.x.shape[1]).unbind(1)):
        weighted = row if a.apply_weights_on_input else a.topk_weights[:, k, None].to(dtype) * row
        total += torch.where(mine[:, k, None], weighted, 0.0)
    if a.shared_output is not None:
        total += a.shared_output.to(dtype)
    a.out.copy_(total)


def activations(a: FusedMoeArgs, dtype: torch.dtype) -> torch.Tensor:
    """The values of the activations that are multiplied."""
    if not a.quantises:
        return scaled_rows(a.x, a.x_scale, dtype)
    x = a.x.to(dtype)
    if a.x_scale is not None:
        scale = a.x_scale.to(dtype)
        return quantize(x, scale).to(dtype) * scale
    return _rounded(x, BLOCK if a.quant == "fp8_block" else x.shape[1])


def scaled_rows(x: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """With no scale, one, one for each row, or one for 128 columns of a row."""
    if scale is None:
        return x.to(dtype)
    scale = scale[:, None] if scale.ndim == 1 else scale
    return x.to(dtype) * _along(scale.to(dtype), x.shape[1])


def _along(scale: torch.Tensor, columns: int) -> torch.Tensor:
    """One scale, or one for each group of 128 columns, repeated for every column."""
    return scale if scale.shape[-1] == 1 else scale.repeat_interleave(BLOCK, -1)[..., :columns]


def _rounded(x: torch.Tensor, group: int) -> torch.Tensor:
    """`x` quantised to FP8 with a scale per row and group of columns, and back; the last group may be short."""
    parts = x.split(group, -1)
    scales = [dynamic_scale(part) for part in parts]
    return torch.cat([quantize(p, s).to(x.dtype) * s for p, s in zip(parts, scales, strict=True)], -1)


def rounded_hidden(a: FusedMoeArgs, hidden: torch.Tensor) -> torch.Tensor:
    if hidden.dtype == torch.float64:
        return hidden
    return hidden.bfloat16().to(hidden.dtype) if a.quant == "bf16" else _rounded(hidden, HIDDEN_GROUP)


def gate_up_weights(a: FusedMoeArgs, expert: int, dtype: torch.dtype) -> torch.Tensor:
    if a.w13_scale is None or a.quant != "fp8_block":
        scale = None if a.w13_scale is None else a.w13_scale[expert]
        return scaled_weight(a.w13[expert], scale, a.quant, dtype)
    halves = zip(a.w13[expert].chunk(2), a.w13_scale[expert].chunk(2), strict=True)
    return torch.cat([scaled_weight(half, scale, a.quant, dtype) for half, scale in halves])


def down_weights(a: FusedMoeArgs, expert: int, dtype: torch.dtype) -> torch.Tensor:
    return scaled_weight(a.w2[expert], None if a.w2_scale is None else a.w2_scale[expert], a.quant, dtype)


def scaled_weight(weight: torch.Tensor, scale: torch.Tensor | None, quant: str, dtype: torch.dtype) -> torch.Tensor:
    """A matrix with no scale, one, one for each row, or one for each block of 128 x 128 ("fp8_block")."""
    if scale is None:
        return weight.to(dtype)
    scale = scale.to(dtype)
    if quant != "fp8_block":
        return weight.to(dtype) * scale.reshape(-1, 1)
    rows, columns = weight.shape
    return weight.to(dtype) * scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
