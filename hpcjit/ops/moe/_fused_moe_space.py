"""What the plans of the fused mixture of experts share: scales and strides of the activations, and the workspace."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

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
