"""What both plans of the fused mixture of experts share: values that describe the call, and the workspace."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hpcjit import checks
from hpcjit.ops.moe._fused_moe_args import BLOCK, FusedMoeArgs, ceil_div

SCALE_GIVEN, SCALE_OF_ROW, SCALE_OF_GROUP = 1, 2, 3  # csrc/moe/fused_moe_rows.cuh

_ALIGNMENT = 256


@dataclass
class Workspace:
    """Offsets of what lies behind each other, each at a multiple of 256 bytes."""

    size: int = 0
    offsets: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, num_bytes: int) -> None:
        self.offsets[f"at_{name}"] = self.size
        self.size += ceil_div(num_bytes, _ALIGNMENT) * _ALIGNMENT


def max_tiles(num_pairs: int, num_experts: int, rows: int) -> int:
    """The most tiles that so many pairs can make, however they are spread."""
    return (num_pairs + min(num_pairs, num_experts) * (rows - 1)) // rows


def quantise_mode(a: FusedMoeArgs) -> int:
    """How the activations become FP8; 0: they are not quantised."""
    if not a.quantises:
        return 0
    if a.given_scale:
        return SCALE_GIVEN
    return SCALE_OF_GROUP if a.quant == "fp8_block" else SCALE_OF_ROW


def x_scale_strides(a: FusedMoeArgs, quantise: int) -> tuple[int, int]:
    """Of tokens and of groups along a token."""
    if quantise == SCALE_OF_ROW:
        return 1, 0
    if quantise == SCALE_OF_GROUP:
        return ceil_div(a.x.shape[1], BLOCK), 1
    if a.x_scale is None or a.x_scale.numel() == 1 or quantise == SCALE_GIVEN:
        return 0, 0
    return a.x_scale.stride(0), a.x_scale.stride(1) if a.quant == "fp8_block" else 0


def row_stride(x: torch.Tensor) -> int:
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]


def call_values(op: str, a: FusedMoeArgs, quantise: int) -> dict[str, int | float | str]:
    """Sizes and strides of the call, and null where it leaves out a tensor."""
    token_stride, group_stride = x_scale_strides(a, quantise)
    values: dict[str, int | float | str] = {
        "num_tokens": a.x.shape[0],
        "top_k": a.topk_ids.shape[1],
        "num_experts": a.num_experts,
        "expert_offset": a.expert_offset,
        "hidden_size": a.x.shape[1],
        "intermediate_size": a.intermediate_size,
        "x_stride": row_stride(a.x),
        "x_scale_token_stride": token_stride,
        "x_scale_group_stride": group_stride,
        "ids_stride": checks.rows(op, "topk_ids", a.topk_ids)[1],
        "weights_stride": checks.rows(op, "topk_weights", a.topk_weights)[1],
        "shared_stride": 0 if a.shared_output is None else row_stride(a.shared_output),
        "out_stride": row_stride(a.out),
    }
    absent = (name for name in ("x_scale", "w13_scale", "w2_scale", "shared_output") if getattr(a, name) is None)
    return values | dict.fromkeys(absent, 0)


def down_per_sm(tile_rows: int) -> int:
    """Blocks an SM of a product whose rows lie behind each other: one adds up and stores while another multiplies."""
    return 2 if tile_rows <= 64 else 1
