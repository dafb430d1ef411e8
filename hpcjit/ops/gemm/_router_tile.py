"""Constants of the router GEMM's kernel for many tokens: what fits, what it should cost, and the best of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from hpcjit.build import Config, Template
from hpcjit.ops.gemm._clusters import CLUSTERS, REGISTERS, SHARED, room

ACCURATE_CHAIN = 64  # of hidden_size, after which sums leave the tensor cores
FAST_CHAIN = 512
LONGEST_CHAIN = 700  # that a fast product does without leaving them
COPYING = 24  # registers of a thread that copies


@dataclass(frozen=True)
class RouterTileConfig(Config):
    x_t: str = "bf16"
    out_t: str = "fp32"
    tokens: int = 128
    groups: int = 1  # of 64 experts
    slots: int = 2  # warpgroups that take turns at the stages
    stage_k: int = 64
    stages: int = 6
    terms: int = 3
    batch: int = 1  # steps of 16 of hidden_size whose weights are split together
    promote: int = ACCURATE_CHAIN
    splits: int = 1  # of hidden_size, over the blocks of a cluster
    share: int = 1  # blocks that share the weights they copy
    blocks_per_sm: int = 1
    separate_low: bool = False
    presplit: bool = False
    vector_out: bool = True
    pdl: bool = True


ROUTER_TILE = Template(
    op="gemm.router_tile",
    header="gemm/router_tile.cuh",
    entry="hpcjit::gemm::RouterTile",
    config=RouterTileConfig,
    params=(
        *("x", "weight", "weight_low", "out", "num_tokens", "num_experts", "hidden_size"),
        *("x_stride", "weight_stride", "low_stride", "out_stride", "scale"),
    ),
)

# What a table may say of the kernel; the rest follows from the call.
TUNED = ("tokens", "groups", "slots", "splits", "share", "blocks_per_sm")


def complete(config: RouterTileConfig, hidden_size: int, accurate: bool) -> RouterTileConfig | None:
    """`config` with the fields that follow from others, or None where it does not fit a multiprocessor."""
    chain = -(-hidden_size // (config.splits * config.slots))
    promote = ACCURATE_CHAIN if accurate else FAST_CHAIN if chain > LONGEST_CHAIN else 0
    config = replace(config, promote=promote)
    for stage_k in (64,) if config.presplit else (64, 32):
        stages = min(8, _ring_bytes(config) // _stage_bytes(config, stage_k))
        if stages > max(config.slots, 2) and config.tokens * stage_k * 2 % 1024 == 0:
            config = replace(config, stage_k=stage_k, stages=stages)
            return _batched(config) if _fits(config) else None
    return None


def _batched(config: RouterTileConfig) -> RouterTileConfig:
    """As many steps at a time as registers are left for; none are handed over for that."""
    for batch in (4, 2):
        batched = replace(config, batch=batch)
        launch, needed = _registers(batched)
        if 16 * batch <= config.stage_k and needed <= launch:
            return batched
    return config


def _stage_bytes(config: RouterTileConfig, stage_k: int) -> int:
    return stage_k * (2 * config.tokens + 256 * config.groups)


def _inbox_bytes(config: RouterTileConfig) -> int:
    return config.tokens * (64 * config.groups + 4) * 4 if config.splits > 1 else 0


def _ring_bytes(config: RouterTileConfig) -> int:
    return SHARED // config.blocks_per_sm - _inbox_bytes(config) - 3072


def _registers(config: RouterTileConfig) -> tuple[int, int]:
    """Of a thread at the launch, and what one that computes needs."""
    threads = 128 * (config.groups * config.slots + 1)
    sums = config.tokens // 2 * (1 + (config.promote > 0) + config.separate_low)
    return REGISTERS // (threads * config.blocks_per_sm) // 8 * 8, sums + 8 * config.terms * config.batch + 40


def _fits(config: RouterTileConfig) -> bool:
    warpgroups = config.groups * config.slots
    staged = config.slots * config.tokens * (64 * config.groups + 4) * 4
    if warpgroups > 3 or config.tokens % config.splits or staged > _ring_bytes(config):
        return False
    if config.splits * config.share not in CLUSTERS:
        return False
    launch, needed = _registers(config)
    if config.tokens // 2 + 30 > launch:  # one instruction must do with what the launch gives
        return False
    if needed <= launch:
        return True
    raised = (launch * 128 * (warpgroups + 1) - 128 * COPYING) // (128 * warpgroups) // 8 * 8
    return config.blocks_per_sm == 1 and needed <= min(raised, 240) + 12


def cost(config: RouterTileConfig, num_tokens: int, num_experts: int, hidden_size: int, num_sms: int) -> float:
    """Microseconds that a launch should take on an H200. docs/perf/router_gemm.md says where the constants are from."""
    cluster = config.splits * config.share
    tiles = -(-num_tokens // (config.tokens * config.share)) * -(-num_experts // (64 * config.groups))
    together = room(cluster, config.blocks_per_sm, num_sms)
    beside = config.blocks_per_sm if tiles * cluster > num_sms else 1
    steps = hidden_size / 16 / config.splits
    products = steps * config.terms * config.tokens / 2 * config.groups / 0.86 * beside
    fragments = steps / config.slots * (88 + 50 * config.terms)
    copies = hidden_size / config.splits * (2 * config.tokens + 256 * config.groups) / 51 * beside
    loop = (products**4 + fragments**4 + copies**4) ** 0.25
    end = config.tokens * config.groups * (14 if config.splits > 1 else 10) * (1 + 0.2 * (config.slots - 1))
    return -(-tiles // together) * (loop + end + 3850) / 1755 + 1.5


def candidates(base: RouterTileConfig, hidden_size: int, accurate: bool) -> Iterator[RouterTileConfig]:
    for tokens, groups, slots, splits, share, blocks in itertools.product(
        (16, 32, 64, 96, 128, 160, 192, 256), (1, 2, 3), (1, 2, 3), (1, 2, 3, 4, 6, 8, 16), (1, 2), (1, 2)
    ):
        if splits > 1 and hidden_size < 128 * splits:
            continue
        config = replace(
            base, tokens=tokens, groups=groups, slots=slots, splits=splits, share=share, blocks_per_sm=blocks
        )
        found = complete(config, hidden_size, accurate)
        if found is not None:
            yield found


def rounded(num_tokens: int) -> int:
    """Up to a number that shares its configuration with neighbours: a server sees every one, and each choice takes time."""
    step = max(32, 1 << max(num_tokens.bit_length() - 3, 0))
    return -(-num_tokens // step) * step


@cache
def best(
    base: RouterTileConfig, num_tokens: int, num_experts: int, hidden_size: int, num_sms: int, accurate: bool
) -> RouterTileConfig:
    """The cheapest configuration by `cost`, for shapes that no table has."""
    shape = num_tokens, num_experts, hidden_size, num_sms
    return min(candidates(base, hidden_size, accurate), key=lambda config: (cost(config, *shape), repr(config)))
