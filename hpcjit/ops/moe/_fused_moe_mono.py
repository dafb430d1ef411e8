"""The fused mixture of experts in one launch, for few tokens (`csrc/moe/mono.cuh`)."""

from __future__ import annotations

from dataclasses import dataclass

from hpcjit import tune
from hpcjit.build import Config, Template
from hpcjit.jit_op import Plan
from hpcjit.ops.moe._fused_moe_args import ACTIVATIONS, QUANT, FusedMoeArgs, ceil_div
from hpcjit.ops.moe._fused_moe_space import Workspace, call_values, quantise_mode

MAX_TOKENS = 128
MAX_PAIRS = 1024
FEATURES = 16  # of a gate-up item; those of a row's hidden activation that share a scale
_WARPS = 8  # that compute
_SMEM = 227 * 1024
_PREFETCH = 64 << 10  # bytes that a block fetches to L2 while it makes the plan,
_PREFETCHED = 32 << 20  # where all that is needed stays there until it is
# Up to which one launch wins (docs/perf/fused_moe_mono.md): rows of an expert, were all even; bytes of weights for all pairs.
_MOST_ROWS, _MOST_BYTES = 0.5, 60 << 20
_MIN_STAGES = {1: 3, 2: 4}  # of the ring, by groups
_PART = 256  # bytes of K of a down slot
_EXPERTS_STEP = 32  # a config serves so many numbers of experts

# The most rows of an expert, were all even, for which a tile has so many times 8 rows.
_MEAN_ROWS = {1: 4, 2: 12}


@dataclass(frozen=True)
class FusedMoeMonoConfig(Config):
    weight_t: str = "e4m3"
    quant: int = 1
    quantise: int = 0
    token_tiles: int = 1
    columns: int = 32
    groups: int = 2
    tokens: int = 8
    pairs: int = 64
    experts: int = 128
    activation: int = 1
    has_shared: bool = False
    pdl: bool = True


FUSED_MOE_MONO = Template(
    op="moe.fused_moe_mono",
    header="moe/mono.cuh",
    entry="hpcjit::moe::FusedMoeMono",
    config=FusedMoeMonoConfig,
    params=(
        *("x", "x_scale", "w13", "w13_scale", "w2", "w2_scale", "topk_ids", "topk_weights", "shared_output", "out"),
        *("workspace", "counters"),
        *("num_tokens", "top_k", "num_experts", "expert_offset", "hidden_size", "intermediate_size"),
        *("x_stride", "x_scale_token_stride", "x_scale_group_stride"),
        *("ids_stride", "weights_stride", "shared_stride", "out_stride"),
        *("blocks", "prefetch_bytes"),
        *("at_x", "at_x_scale", "at_hidden"),
    ),
)


def takes(a: FusedMoeArgs) -> bool:
    """Whether the kernel can run the call."""
    size = a.w13.element_size()
    return (
        0 < a.x.shape[0] <= MAX_TOKENS
        and a.topk_ids.numel() <= MAX_PAIRS
        and a.x.shape[1] * size % 128 == 0
        and a.intermediate_size * size % 64 == 0
        and a.intermediate_size % FEATURES == 0
        and not a.apply_weights_on_input
    )


def columns(hidden_size: int, num_sms: int) -> int:
    """Features of a down item: every SM has one item, where eight warps can share it out."""
    return min(FEATURES * ceil_div(ceil_div(hidden_size, FEATURES), num_sms), FEATURES * _WARPS)


def _hidden_row(fp8: bool) -> int:
    """Bytes of a part of a row of the hidden activation: 16 scales with FP8, and padding."""
    return _PART + (64 if fp8 else 0) + 16


def fits(tokens: int, token_tiles: int, columns: int, groups: int, pairs: int, experts: int, fp8: bool) -> bool:
    """Whether enough stages of the ring fit into shared memory (`csrc/moe/mono_shape.cuh`)."""
    rows, strips = 8 * token_tiles, columns // FEATURES
    slots = _WARPS // strips
    slot_rows = rows * _hidden_row(fp8)
    stage = max(32768, slots * columns * 256) + max(rows * 1040, slots * slot_rows) + 1040
    sums = groups * max(token_tiles * 16384, slots * tokens * (columns + 8) * 4)
    tables = 8 * (ceil_div(pairs, rows) + experts) + 12 * pairs + experts * (4 * ceil_div(tokens, 32) + 2)
    return sums + tables + _MIN_STAGES[groups] * stage + 4096 <= _SMEM


def _config(op: str, a: FusedMoeArgs) -> FusedMoeMonoConfig | None:
    tokens, top_k = a.topk_ids.shape
    cap = max(8, 1 << (tokens - 1).bit_length())
    pairs = cap * top_k
    experts = ceil_div(a.num_experts, _EXPERTS_STEP) * _EXPERTS_STEP
    strip = columns(a.x.shape[1], tune.sm_count(a.x.device))
    mean = tokens * top_k / a.num_experts
    wanted = next((n for n, most in _MEAN_ROWS.items() if mean <= most), 0)
    tiles = min(wanted, max(1, cap // 8))
    fp8 = a.quant != "bf16"
    if not tiles:
        return None
    most = 1 if a.quant in ("fp8_channel", "fp8_block") else 2  # registers do not suffice for two and many scales
    groups = next((n for n in range(most, 0, -1) if fits(cap, tiles, strip, n, pairs, experts, fp8)), 0)
    if not groups:
        return None
    return FusedMoeMonoConfig(
        weight_t="e4m3" if fp8 else "bf16",
        quant=QUANT.index(a.quant),
        quantise=quantise_mode(a),
        token_tiles=tiles,
        columns=strip,
        groups=groups,
        tokens=cap,
        pairs=pairs,
        experts=experts,
        activation=1 + ACTIVATIONS.index(a.activation),
        has_shared=a.shared_output is not None,
    )


def _workspace(a: FusedMoeArgs) -> Workspace:
    num_pairs, (tokens, hidden), inner = a.topk_ids.numel(), a.x.shape, a.intermediate_size
    fp8 = a.quant != "bf16"
    space = Workspace()
    space.add("x", tokens * hidden if a.quantises else 0)
    space.add("x_scale", 4 * tokens * ceil_div(hidden, 128) if a.quantises else 0)
    parts = ceil_div(inner * a.w2.element_size(), _PART)
    space.add("hidden", num_pairs * parts * _hidden_row(fp8))
    return space


def pays(a: FusedMoeArgs) -> bool:
    """Whether it was measured to be the faster way: it costs less to start, and reads weights more slowly."""
    rows = a.topk_ids.numel() / (a.num_global_experts or a.num_experts)
    row_bytes = 3 * a.intermediate_size * a.x.shape[1] * a.w13.element_size()
    return rows <= _MOST_ROWS and rows * a.num_experts * row_bytes <= _MOST_BYTES


def _chosen_bytes(a: FusedMoeArgs) -> int:
    """The most that the gate and up weights of the chosen experts can have."""
    experts = min(a.topk_ids.numel(), a.num_experts)
    return experts * 2 * a.intermediate_size * a.x.shape[1] * a.w13.element_size()


def plan(op: str, a: FusedMoeArgs) -> Plan | None:
    """The launch, whether or not it pays; None where the kernel cannot run the call."""
    config = _config(op, a) if takes(a) else None
    if config is None:
        return None
    space = _workspace(a)
    max_tiles = a.topk_ids.numel()
    values = call_values(op, a, config.quantise) | {
        "blocks": tune.sm_count(a.x.device),
        "prefetch_bytes": _PREFETCH if _chosen_bytes(a) <= _PREFETCHED else 0,
        **space.offsets,
    }
    return Plan(FUSED_MOE_MONO, config, values, space.size, counter_bytes=4 * (2 + max_tiles))
