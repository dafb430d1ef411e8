"""Constants of the router GEMM's kernel for few tokens: what fits, what it should cost, and the best of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from hpcjit.build import Config, Template
from hpcjit.ops.gemm._clusters import CLUSTERS, MOST_BLOCKS, REGISTERS, SHARED, room

STEP_K = 32  # of hidden_size, in one step of a warp
PREFETCHED = (
    10_000_000  # bytes of weights; more of them, asked for while the predecessor runs, cost more than they gain
)


@dataclass(frozen=True)
class RouterStreamConfig(Config):
    x_t: str = "bf16"
    out_t: str = "fp32"
    terms: int = 3
    row_tiles: int = 1  # 16 experts each
    token_tiles: int = 1  # 8 tokens each
    warps: int = 8
    splits: int = 8  # blocks of a cluster, which split hidden_size
    depth: int = 2  # steps of a warp under way
    blocks_per_sm: int = 1  # at least: bounds the registers
    presplit: bool = False
    aligned: bool = True  # four neighbours of x and of the weights can be read at once
    exact: bool = True  # hidden_size is whole steps
    once: bool = False  # every warp has exactly `depth` steps
    prefetch: bool = True
    pdl: bool = True


ROUTER_STREAM = Template(
    op="gemm.router_stream",
    header="gemm/router_stream.cuh",
    entry="hpcjit::gemm::RouterStream",
    config=RouterStreamConfig,
    params=(
        *("x", "weight", "weight_low", "out", "num_tokens", "num_experts", "hidden_size"),
        *("x_stride", "weight_stride", "low_stride", "out_stride", "scale"),
    ),
)

# What a table may say of the kernel; the rest of its config follows from the call.
TUNED = ("row_tiles", "token_tiles", "warps", "splits", "depth", "blocks_per_sm", "prefetch")

_WARPS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
_MOST_HELD = 170  # registers of data; the compiler wants some 36 more
_MOST_IDLE = 1.25  # steps that all warps together could do, over those that there are


def token_tiles(num_tokens: int) -> int:
    """Tiles of eight tokens in a block."""
    return next((tiles for tiles in (1, 2, 4) if num_tokens <= 8 * tiles), 8)


def tiles_of(config: RouterStreamConfig, num_tokens: int, num_experts: int) -> int:
    """Clusters of a launch."""
    return -(-num_experts // (16 * config.row_tiles)) * -(-num_tokens // (8 * config.token_tiles))


def _most_blocks(config: RouterStreamConfig) -> int:
    """Blocks that a multiprocessor should hold, by an estimate of the registers; 0: none."""
    held = 16 * config.row_tiles * config.depth + 4 * config.token_tiles * (config.depth + config.row_tiles)
    if held > _MOST_HELD:
        return 0
    tiles = config.row_tiles * config.token_tiles
    shared = 512 * tiles * (config.warps + (config.splits > 1)) + 2048
    threads = 32 * config.warps
    return min(REGISTERS // (threads * (held + 36)), 2048 // threads, SHARED // shared, MOST_BLOCKS)


def cost(config: RouterStreamConfig, num_tokens: int, num_experts: int, hidden_size: int, num_sms: int) -> float:
    """Microseconds that a launch should take on an H200. docs/perf/router_gemm.md says where the constants are from."""
    tiles = tiles_of(config, num_tokens, num_experts)
    steps = -(-hidden_size // STEP_K)
    of_warp = -(-steps // (config.splits * config.warps))
    side_by_side = -(-tiles * config.splits // num_sms)
    waves = -(-tiles // room(config.splits, config.blocks_per_sm, num_sms))
    latency = 2.04 + 0.1 * (-(-of_warp // config.depth) - 1) + 0.15 * of_warp
    megabytes = num_experts * hidden_size * 4e-6
    warp_steps = min(side_by_side, config.blocks_per_sm) * waves * config.warps * of_warp
    work = warp_steps * (0.0108 * config.row_tiles * config.terms + 0.0074 * config.token_tiles)
    end = 0.163 * config.row_tiles * config.token_tiles + 0.005 * config.splits
    crowded = 0.24 * max(0, config.blocks_per_sm - side_by_side)  # clusters that fit only so leave others empty
    return waves * (latency + end) + ((megabytes / 4.5) ** 3 + work**3) ** (1 / 3) + crowded


def candidates(
    terms: int, num_tokens: int, num_experts: int, hidden_size: int, num_sms: int, presplit: bool = False
) -> Iterator[RouterStreamConfig]:
    """Whatever gives every warp about as much to do. Addresses of two matrices leave fewer registers."""
    steps = -(-hidden_size // STEP_K)
    prefetch = num_experts * hidden_size * 4 <= PREFETCHED
    for rows, splits, depth, warps in itertools.product((1,) if presplit else (1, 2), CLUSTERS, (1, 2, 3, 4), _WARPS):
        units = splits * warps
        of_warp = -(-steps // units)
        if (splits > 1 and steps < 4 * splits) or depth > of_warp or of_warp * units > max(_MOST_IDLE * steps, warps):
            continue
        config = RouterStreamConfig(
            terms=terms,
            row_tiles=rows,
            token_tiles=token_tiles(num_tokens),
            warps=warps,
            splits=splits,
            depth=depth,
            prefetch=prefetch,
            presplit=presplit,
        )
        most = min(_most_blocks(config), 1 if presplit else MOST_BLOCKS)
        if not most:
            continue
        tiles = tiles_of(config, num_tokens, num_experts)
        blocks = next((blocks for blocks in range(1, most) if room(splits, blocks, num_sms) >= tiles), most)
        yield RouterStreamConfig(**{**vars(config), "blocks_per_sm": blocks})


@cache
def best(
    terms: int, num_tokens: int, num_experts: int, hidden_size: int, num_sms: int, presplit: bool = False
) -> RouterStreamConfig:
    """The cheapest configuration by `cost`, for shapes that no table has."""
    shape = num_tokens, num_experts, hidden_size, num_sms
    found = candidates(terms, *shape, presplit)
    return min(found, key=lambda config: (cost(config, *shape), repr(config)))
