"""Template, constants and workspace of the fused mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass

from hpcjit import checks, tune
from hpcjit.build import Config, Template
from hpcjit.jit_op import Plan
from hpcjit.ops.moe import _fused_moe_mono
from hpcjit.ops.moe._fused_moe_args import ACTIVATIONS, BLOCK, HIDDEN_GROUP, QUANT, FusedMoeArgs, ceil_div
from hpcjit.ops.moe._fused_moe_space import Workspace, call_values, down_per_sm, max_tiles, quantise_mode
from hpcjit.ops.moe._pair_sort import Sorters, sorters

_DOWN_FEATURES = 128  # of an item

# The most rows of an expert, were all even, for which tiles have room for so many rows: most experts then have one.
_MEAN_ROWS = {16: 8, 32: 20, 64: 48, 128: 100}
_MOST_ROWS = 192
# Means of which two tiles of 128 rows were faster than one of 192 and a second one, where sums share a scale along K.
_TWICE_128 = (220, 300)

# Of calls whose blocks of gate-up find the plan by themselves. Tokens are bits of a mask for each expert.
_OWN_EXPERTS, _OWN_PAIRS, _OWN_TOKENS = (32, 128, 256, 512), (512, 1024), 128
_NO_SORTERS = Sorters(1, 256, False, False, False)


@dataclass(frozen=True)
class FusedMoeConfig(Config):
    weight_t: str = "e4m3"
    partial_t: str = "bf16"  # rows between down and their sums; float32 takes 2 to 3 us more at 64 tokens
    quant: int = 1
    quantise: int = 0
    tokens: int = 16
    per_sm: int = 1  # blocks of down
    activation: int = 1
    plan_threads: int = 1024
    plan_clustered: bool = False
    plan_counted: bool = False
    plan_match: bool = False
    ids_strided: bool = False
    own_experts: int = 0  # blocks of gate-up find the plan by themselves, for up to so many experts
    own_pairs: int = 0
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
        *("plan_blocks", "most_tiles", "gate_up_blocks", "down_blocks"),
        *("at_counts", "at_sorted", "at_position", "at_tiles"),
        *("at_x", "at_x_scale", "at_hidden", "at_hidden_scale", "at_rows"),
    ),
    threads=4,
)


def tile_rows(num_pairs: int, num_experts: int, quant: str) -> int:
    """The most rows of a tile; how many of them are multiplied follows from each tile's own count, on the device.

    Experts with more rows have several tiles, whose weights then come from L2. Room for more rows costs stages of the ring.
    """
    mean = num_pairs / num_experts
    if quant in ("fp8_tensor", "fp8_channel") and _TWICE_128[0] < mean <= _TWICE_128[1]:
        return 128
    return next((rows for rows, most in _MEAN_ROWS.items() if mean <= most), _MOST_ROWS)


def _own_plan(a: FusedMoeArgs) -> tuple[int, int]:
    """For how many experts and pairs blocks of gate-up have room to find the plan by themselves; 0, 0: a launch finds it.

    The sum of the weights of a token that names an expert twice does not pass through an activation, so not with weights on
    the input.
    """
    num_pairs = a.topk_ids.numel()
    if num_pairs > _OWN_PAIRS[-1] or a.topk_ids.shape[0] > _OWN_TOKENS or a.apply_weights_on_input:
        return 0, 0
    experts = next((most for most in _OWN_EXPERTS if a.num_experts <= most), 0)
    return experts, next(most for most in _OWN_PAIRS if num_pairs <= most) if experts else 0


def _config(op: str, a: FusedMoeArgs, by: Sorters) -> FusedMoeConfig:
    num_pairs = a.topk_ids.numel()
    rows = tile_rows(num_pairs, a.num_experts, a.quant)
    own_experts, own_pairs = _own_plan(a)
    if own_experts:
        by, rows = _NO_SORTERS, min(rows, _OWN_TOKENS)  # an expert has a row of a token at most once
    return FusedMoeConfig(
        weight_t="bf16" if a.quant == "bf16" else "e4m3",
        quant=QUANT.index(a.quant),
        quantise=quantise_mode(a),
        tokens=rows,
        per_sm=down_per_sm(rows),
        activation=1 + ACTIVATIONS.index(a.activation),
        plan_threads=by.threads,
        plan_clustered=by.clustered,
        plan_counted=by.counted,
        plan_match=by.match,
        ids_strided=not own_experts and checks.rows(op, "topk_ids", a.topk_ids)[1] != a.topk_ids.shape[1],
        own_experts=own_experts,
        own_pairs=own_pairs,
        weights_on_input=a.apply_weights_on_input,
        has_shared=a.shared_output is not None,
    )


def _workspace(a: FusedMoeArgs, config: FusedMoeConfig, by: Sorters) -> Workspace:
    num_pairs, (tokens, hidden), inner = a.topk_ids.numel(), a.x.shape, a.intermediate_size
    fp8 = a.quant != "bf16"
    space = Workspace()
    space.add("counts", by.count_bytes(a.num_experts))
    space.add("sorted", 4 * num_pairs)
    space.add("position", 4 * num_pairs)
    space.add("tiles", 16 * (1 + max_tiles(num_pairs, a.num_experts, config.tokens)))
    space.add("x", tokens * hidden if a.quantises else 0)
    space.add("x_scale", 4 * tokens * ceil_div(hidden, BLOCK) if a.quantises else 0)
    space.add("hidden", num_pairs * inner * (1 if fp8 else 2))
    space.add("hidden_scale", 4 * num_pairs * ceil_div(inner, HIDDEN_GROUP) if fp8 else 0)
    space.add("rows", 2 * num_pairs * hidden)
    return space


def plan(op: str, a: FusedMoeArgs) -> Plan:
    """One launch for few tokens, a chain of launches for more."""
    few = _fused_moe_mono.plan(op, a) if _fused_moe_mono.pays(a) else None
    return few or chain_plan(op, a)


def chain_plan(op: str, a: FusedMoeArgs) -> Plan:
    num_pairs = a.topk_ids.numel()
    by = sorters(num_pairs, a.num_experts, a.x.device)
    config = _config(op, a, by)
    space = _workspace(a, config, by)
    resident = tune.sm_count(a.x.device)
    tiles = max_tiles(num_pairs, a.num_experts, config.tokens)
    gate_up_items = tiles * ceil_div(a.intermediate_size, HIDDEN_GROUP)
    down_items = tiles * ceil_div(a.x.shape[1], _DOWN_FEATURES)
    values = call_values(op, a, config.quantise) | {
        "plan_blocks": by.blocks,
        "most_tiles": tiles,
        "gate_up_blocks": min(resident, gate_up_items),
        "down_blocks": min(resident * config.per_sm, down_items),
        **space.offsets,
    }
    return Plan(FUSED_MOE, config, values, workspace_bytes=space.size)
