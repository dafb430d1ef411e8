"""How `attention.decode` is launched: its template, the config and the launch parameters of a call."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from hpcjit.build import Config, Template
from hpcjit.jit_op import Plan
from hpcjit.ops._rows import TYPE_NAMES
from hpcjit.ops.attention._decode_shape import FAULT_TEXT, SCHEDULES, DecodeArgs, Shape, Sizes, alignment

INVARIANT_TOKENS = 2048  # of a piece under the invariant schedule
_SMEM_BYTES = 225 * 1024  # for rings, sums and queries
_RING_BYTES = 128 * 1024  # all rings together; deeper ones gain nothing
_LEAST_BYTES = 64 * 1024  # of keys and values that a worker gets
_WHOLE_BYTES = 320 * 1024  # up to which a pair is not cut
_SLACK_TILES = 8  # more for some workers, if that spares cuts
_LESS_TILES = 10  # less for the first workers, where one request is in many parts
_MARGIN_TILES = 8  # half of what it costs to open and close a pair, in tiles of about 8 KiB
_STATIC_SPLITS = 16  # at most
ASSUMED_SMS = 132  # for meta tensors


@dataclass(frozen=True)
class DecodeConfig(Config):
    q_t: str = "bf16"
    kv_t: str = "bf16"
    out_t: str = "bf16"
    mma_t: str = "bf16"  # of the operands: bf16, or fp16 for fp16 and float8 caches
    head_dim: int = 128
    value_head_dim: int = 128
    tile: int = 16  # tokens
    stages: int = 3
    warps: int = 8
    row_groups: int = 1  # warps that share a tile, each with rows of its own
    row_tiles: int = 1  # of 8 query rows, per warp
    shared_q: bool = False  # queries in shared memory, not in registers
    axis_t: str = "int32"  # of costs: int64 where the tables of a batch address too much for 32 bits
    whole_tiles: bool = True  # a page holds whole tiles
    shifted_pages: bool = True  # their size is a power of two
    q_scale: bool = False
    k_scale: int = 0  # 0: none, 1: per head (or one for all), 2: per token and head
    v_scale: int = 0
    normalise_q: bool = False  # bf16 queries become fp16
    causal: bool = False  # several query rows per request
    ragged: bool = False
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    schedule: int = 0  # index in SCHEDULES
    out_vec: int = 4
    early: bool = True  # find the work and prefetch it into L2 before the predecessor is done
    trigger: int = 0
    blocks_per_sm: int = 1
    pdl: bool = True


DECODE = Template(
    op="attention.decode",
    header="attention/decode.cuh",
    entry="hpcjit::attention::Decode",
    config=DecodeConfig,
    params=(
        *("q", "k_cache", "v_cache", "block_table", "seq_lens", "cu_seqlens_q", "q_scale", "k_scale", "v_scale"),
        *("sinks", "out", "lse", "counters", "fault", "scale", "k_factor", "v_factor", "softcap"),
        *("batch", "total_q", "max_q_len", "num_kv_heads", "group", "num_pages", "page_size", "page_shift", "capacity"),
        *("table_width", "table_stride", "window", "workers", "splits", "least", "whole", "slack", "less", "margin"),
        "max_pieces",
        *("q_token_stride", "q_head_stride", "q_scale_token_stride", "q_scale_head_stride"),
        *("k_page_stride", "k_slot_stride", "k_head_stride", "v_page_stride", "v_slot_stride", "v_head_stride"),
        *("k_scale_page_stride", "k_scale_slot_stride", "k_scale_head_stride"),
        *("v_scale_page_stride", "v_scale_slot_stride", "v_scale_head_stride"),
        *("out_token_stride", "out_head_stride", "lse_token_stride", "lse_head_stride"),
    ),
)


def rows_of(shape: Sizes) -> tuple[int, int]:
    """Warps that share a tile, and tiles of 8 query rows per warp."""
    tiles = -(-shape.group * shape.max_q_len // 8)
    per_warp = 1 if tiles == 1 or (shape.value_head_dim > 128 and tiles <= 8) else 2
    groups = 1
    while groups * per_warp < tiles:
        groups *= 2
    return groups, per_warp


def queries_shared(shape: Sizes, groups: int, row_tiles: int) -> bool:
    """Whether queries are in shared memory: beside O, S of two row tiles and long heads or tiles, registers lack."""
    return row_tiles == 2 and (groups > 1 or shape.head_dim > 128)


def ring_of(shape: Sizes, itemsize: int, groups: int, row_tiles: int) -> tuple[int, int, int]:
    """Warps of a block, tokens of a tile, and stages of a team's ring: at least two, more where there are few teams."""
    token_bytes = (shape.head_dim + shape.value_head_dim) * itemsize
    tile = usual_tile(shape, itemsize)
    doubled = groups * row_tiles > 2 and shape.head_dim <= 128 and shape.page_size % (2 * tile) == 0
    if doubled:
        tile *= 2
    sums = groups * row_tiles * 8 * shape.value_head_dim * 4
    warps, stages = 8, 0
    while True:
        teams = warps // groups
        room = _SMEM_BYTES - (teams * sums if sums > tile * token_bytes else 0)
        if queries_shared(shape, groups, row_tiles):
            room -= warps * row_tiles * 8 * shape.head_dim * 2
        stages = room // (teams * tile * (token_bytes + 8))
        if stages >= 2:
            break
        warps //= 2
    most = 2 if doubled else max(2, _RING_BYTES // (teams * tile * token_bytes))
    return warps, tile, min(stages, most)


def usual_tile(shape: Sizes, itemsize: int) -> int:
    """Tokens of a tile for few query rows: 4 to 16 KiB of keys and values."""
    return 32 if (shape.head_dim + shape.value_head_dim) * itemsize <= 320 else 16


def config_of(a: DecodeArgs, shape: Shape) -> DecodeConfig:
    """The config of a call; nothing in it depends on the size of the batch."""
    groups, row_tiles = rows_of(shape)
    warps, tile, stages = ring_of(shape, a.k_cache.itemsize, groups, row_tiles)
    return DecodeConfig(
        q_t=TYPE_NAMES[a.q.dtype],
        kv_t=TYPE_NAMES[a.k_cache.dtype],
        out_t=TYPE_NAMES[a.out.dtype],
        mma_t="bf16" if a.k_cache.dtype == torch.bfloat16 else "fp16",
        head_dim=shape.head_dim,
        value_head_dim=shape.value_head_dim,
        tile=tile,
        stages=stages,
        warps=warps,
        row_groups=groups,
        row_tiles=row_tiles,
        shared_q=queries_shared(shape, groups, row_tiles),
        axis_t="int32" if _largest_total(shape, tile) < 2**30 else "int64",  # all intervals together pass it
        whole_tiles=shape.page_size % tile == 0,
        shifted_pages=_log2(shape.page_size) >= 0,
        q_scale=a.q_scale is not None,
        k_scale=_scale_kind(a.k_scale),
        v_scale=_scale_kind(a.v_scale),
        normalise_q=a.q.dtype == torch.bfloat16 != a.k_cache.dtype,
        causal=shape.max_q_len > 1,
        ragged=shape.ragged,
        window=a.window > 0,
        softcap=a.capped,
        sinks=a.sinks is not None,
        schedule=SCHEDULES.index(a.schedule),
        out_vec=4 if alignment(a.out) >= 8 else 1,
    )


def _largest_total(shape: Sizes, tile: int) -> int:
    """The cost of all pairs, in tiles, if every request filled its row of the table."""
    return shape.batch * shape.num_kv_heads * (shape.capacity // tile + 2 + 2 * _MARGIN_TILES)


def _scale_kind(scale: torch.Tensor | None) -> int:
    return 0 if scale is None else 2 if scale.ndim > 1 else 1


def _log2(size: int) -> int:
    return size.bit_length() - 1 if size & (size - 1) == 0 else -1


@dataclass(frozen=True)
class Work:
    """How many blocks work, how pairs of request and KV head are split, and how many slots for shares that takes."""

    workers: int
    splits: int
    max_pieces: int
    slots: int

    @classmethod
    def of(cls, shape: Sizes, schedule: str, tile: int, sms: int) -> Work:
        pairs = shape.batch * shape.num_kv_heads
        if schedule == "static":
            splits = 1
            while splits < _STATIC_SPLITS and pairs * splits < 2 * sms:
                splits *= 2
            if splits == 1:  # nothing is merged
                return cls(pairs, 1, 0, 0)
            return cls(pairs * splits, splits, 0, pairs * splits)
        if schedule == "invariant":
            pieces = -(-shape.capacity // INVARIANT_TOKENS) + 1  # a window may begin inside of a tile
            return cls(sms, INVARIANT_TOKENS // tile, pieces, pairs * pieces)
        return cls(sms, 0, 0, 2 * sms)


def memory(shape: Sizes, work: Work) -> int:
    """Bytes of the slots, which are zero between launches."""
    return work.slots * math.prod(rows_of(shape)) * 8 * (shape.value_head_dim + 4) * 4


def plan(op: Any, *args: Any) -> Plan:
    """The launch of a call that passed the checks."""
    a = DecodeArgs(*args)
    shape = Shape.of(a)
    config = config_of(a, shape)
    sms = ASSUMED_SMS
    if a.q.is_cuda:
        sms = torch.cuda.get_device_properties(a.q.device).multi_processor_count
    work = Work.of(shape, a.schedule, config.tile, sms)
    tile_bytes = config.tile * (shape.head_dim + shape.value_head_dim) * a.k_cache.itemsize
    larger = config.tile // usual_tile(shape, a.k_cache.itemsize)
    optional = ("cu_seqlens_q", "q_scale", "k_scale", "v_scale", "sinks", "lse")
    values: dict[str, int | float | str] = {name: 0 for name in optional if getattr(a, name) is None}
    sizes = (
        "batch",
        "total_q",
        "max_q_len",
        "num_kv_heads",
        "group",
        "num_pages",
        "page_size",
        "capacity",
        "table_width",
        "table_stride",
    )
    values |= {name: getattr(shape, name) for name in sizes}
    values |= {name: getattr(work, name) for name in ("workers", "splits", "max_pieces")}
    values |= {
        "page_shift": _log2(shape.page_size),
        "window": a.window,
        "least": _LEAST_BYTES // tile_bytes,
        "whole": _WHOLE_BYTES // tile_bytes,
        "slack": _SLACK_TILES // larger,
        "less": _LESS_TILES // larger,
        "margin": _MARGIN_TILES // larger,
    }
    for name in ("q", "q_scale", "out", "lse"):
        rows = getattr(shape, name)
        values |= {f"{name}_token_stride": rows.token, f"{name}_head_stride": rows.head}
    for name in ("k", "v", "k_scale", "v_scale"):
        pages = getattr(shape, name)
        values |= {f"{name}_page_stride": pages.page, f"{name}_slot_stride": pages.slot}
        values[f"{name}_head_stride"] = pages.head
    return Plan(DECODE, config, values, 0, memory(shape, work), FAULT_TEXT, shape.table_width)
