"""Template, constants and workspace of the fused mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hpcjit import checks, tune
from hpcjit.build import Config, Template
from hpcjit.jit_op import Plan
from hpcjit.ops.moe._fused_moe_args import ACTIVATIONS, BLOCK, HIDDEN_GROUP, QUANT, FusedMoeArgs, ceil_div

SCALE_GIVEN, SCALE_OF_ROW, SCALE_OF_GROUP = 1, 2, 3  # csrc/moe/fused_moe_rows.cuh

FEW_PAIRS = 1024  # up to which a small block sorts them
ONE_BLOCK = 4096  # up to which one block does
MAX_PLAN_BLOCKS = 128
_WIDE_ROWS = 32 << 20  # bytes of products in float32 that L2 holds; more of them are bfloat16
_DOWN_FEATURES = 128  # of an item
_ALIGNMENT = 256

# The most rows of an expert, were all even, for which tiles of so many rows are made: most experts then have one.
_MEAN_ROWS = {16: 8, 32: 20, 64: 48}


@dataclass(frozen=True)
class FusedMoeConfig(Config):
    weight_t: str = "e4m3"
    partial_t: str = "fp32"
    quant: int = 1
    quantise: int = 0
    tokens: int = 16
    blocks_per_sm: int = 2
    activation: int = 1
    plan_threads: int = 1024
    plan_per_thread: int = 1
    plan_counted: bool = False
    ids_strided: bool = False
    weights_on_input: bool = False
    has_shared: bool = False
    half_groups: bool = True  # scales of the hidden activation are of 64 features
    pdl: bool = True


FUSED_MOE = Template(
    op="moe.fused_moe",
    header="moe/fused_moe.cuh",
    entry="hpcjit::moe::FusedMoe",
    config=FusedMoeConfig,
    params=(
        *("x", "x_scale", "w13", "w13_scale", "w2", "w2_scale", "topk_ids", "topk_weights", "shared_output", "out"),
        "workspace",
        *("num_tokens", "top_k", "num_experts", "expert_offset", "hidden_size", "intermediate_size"),
        *("x_stride", "x_scale_token_stride", "x_scale_group_stride"),
        *("ids_stride", "weights_stride", "shared_stride", "out_stride"),
        *("plan_blocks", "gate_up_blocks", "down_blocks"),
        *("at_counts", "at_sorted", "at_position", "at_tiles"),
        *("at_x", "at_x_scale", "at_hidden", "at_hidden_scale", "at_rows"),
    ),
)


def tile_rows(num_pairs: int, num_experts: int) -> int:
    """Rows of a tile. Experts with more have several tiles, whose weights then come from L2."""
    mean = num_pairs / num_experts
    return next((rows for rows, most in _MEAN_ROWS.items() if mean <= most), 128)


def max_tiles(num_pairs: int, num_experts: int, rows: int) -> int:
    """The most tiles that so many pairs can make, however they are spread."""
    return (num_pairs + min(num_pairs, num_experts) * (rows - 1)) // rows


def blocks_of_sm(rows: int) -> int:
    """How many blocks with tiles of so many rows an SM has: two take turns at copying and multiplying, where they fit."""
    return 2 if rows <= 32 else 1


def plan_threads(num_pairs: int) -> int:
    """Of a block that sorts them."""
    return 256 if num_pairs <= FEW_PAIRS else 1024


@dataclass
class Workspace:
    """Offsets of what lies behind each other, each at a multiple of 256 bytes."""

    size: int = 0
    offsets: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, num_bytes: int) -> None:
        self.offsets[f"at_{name}"] = self.size
        self.size += ceil_div(num_bytes, _ALIGNMENT) * _ALIGNMENT


def _quantise(a: FusedMoeArgs) -> int:
    if not a.quantises:
        return 0
    if a.given_scale:
        return SCALE_GIVEN
    return SCALE_OF_GROUP if a.quant == "fp8_block" else SCALE_OF_ROW


def _config(op: str, a: FusedMoeArgs) -> FusedMoeConfig:
    num_pairs = a.topk_ids.numel()
    rows = tile_rows(num_pairs, a.num_experts)
    threads = plan_threads(num_pairs)
    return FusedMoeConfig(
        weight_t="bf16" if a.quant == "bf16" else "e4m3",
        partial_t="fp32" if num_pairs * a.x.shape[1] * 4 <= _WIDE_ROWS else "bf16",
        quant=QUANT.index(a.quant),
        quantise=_quantise(a),
        tokens=rows,
        blocks_per_sm=blocks_of_sm(rows),
        activation=1 + ACTIVATIONS.index(a.activation),
        plan_threads=threads,
        plan_per_thread=ceil_div(a.num_experts, threads),
        plan_counted=num_pairs > ONE_BLOCK,
        ids_strided=checks.rows(op, "topk_ids", a.topk_ids)[1] != a.topk_ids.shape[1],
        weights_on_input=a.apply_weights_on_input,
        has_shared=a.shared_output is not None,
    )


def _workspace(a: FusedMoeArgs, config: FusedMoeConfig, plan_blocks: int) -> Workspace:
    num_pairs, (tokens, hidden), inner = a.topk_ids.numel(), a.x.shape, a.intermediate_size
    fp8 = a.quant != "bf16"
    space = Workspace()
    space.add("counts", 4 * plan_blocks * a.num_experts if config.plan_counted else 0)
    space.add("sorted", 4 * num_pairs)
    space.add("position", 4 * num_pairs)
    space.add("tiles", 16 * (1 + max_tiles(num_pairs, a.num_experts, config.tokens)))
    space.add("x", tokens * hidden if a.quantises else 0)
    space.add("x_scale", 4 * tokens * ceil_div(hidden, BLOCK) if a.quantises else 0)
    space.add("hidden", num_pairs * inner * (1 if fp8 else 2))
    space.add("hidden_scale", 4 * num_pairs * ceil_div(inner, HIDDEN_GROUP) if fp8 else 0)
    space.add("rows", num_pairs * hidden * (4 if config.partial_t == "fp32" else 2))
    return space


def _x_scale_strides(a: FusedMoeArgs, quantise: int) -> tuple[int, int]:
    """Of tokens and of groups along a token."""
    if quantise == SCALE_OF_ROW:
        return 1, 0
    if quantise == SCALE_OF_GROUP:
        return ceil_div(a.x.shape[1], BLOCK), 1
    if a.x_scale is None or a.x_scale.numel() == 1 or quantise == SCALE_GIVEN:
        return 0, 0
    return a.x_scale.stride(0), a.x_scale.stride(1) if a.quant == "fp8_block" else 0


def plan(op: str, a: FusedMoeArgs) -> Plan:
    config = _config(op, a)
    num_pairs = a.topk_ids.numel()
    plan_blocks = min(ceil_div(num_pairs, ONE_BLOCK), MAX_PLAN_BLOCKS)
    space = _workspace(a, config, plan_blocks)
    resident = tune.sm_count(a.x.device) * config.blocks_per_sm
    tiles = max_tiles(num_pairs, a.num_experts, config.tokens)
    token_stride, group_stride = _x_scale_strides(a, config.quantise)
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
        "plan_blocks": plan_blocks,
        "gate_up_blocks": min(resident, tiles * ceil_div(a.intermediate_size, HIDDEN_GROUP)),
        "down_blocks": min(resident, tiles * ceil_div(a.x.shape[1], _DOWN_FEATURES)),
        **space.offsets,
    }
    for name in ("x_scale", "w13_scale", "w2_scale", "shared_output"):
        if getattr(a, name) is None:
            values[name] = 0
    return Plan(FUSED_MOE, config, values, workspace_bytes=space.size)


def row_stride(x: torch.Tensor) -> int:
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]
