"""Which kernel computes router logits, and with which constants."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hpcjit import folders, tune
from hpcjit.build import Config, Template
from hpcjit.jit_op import Plan
from hpcjit.ops._rows import TYPE_NAMES
from hpcjit.ops.gemm import _router_tile
from hpcjit.ops.gemm._router_tile import RouterTileConfig

TABLE = "router_gemm"  # tuned/router_gemm.json, shapes as `shape_name` spells them
STEP_K = 32  # of hidden_size, in one step of a warp
TERMS = {"accurate": 3, "fast": 2}
FEW_TOKENS = 64  # up to which one pass over few weights beats the kernel for many tokens; over MANY_WEIGHTS up to half
MANY_WEIGHTS = 1 << 20


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


@dataclass(frozen=True)
class Shape:
    """What the choice depends on."""

    num_tokens: int
    num_experts: int
    hidden_size: int
    num_sms: int = tune.HOPPER_SMS


def shape_of(x: torch.Tensor, num_experts: int) -> Shape:
    return Shape(x.shape[0], num_experts, x.shape[1], tune.sm_count(x.device))


def shape_name(shape: Shape, mode: str, dtype: torch.dtype) -> str:
    """How a table calls a shape; of the activations only another dtype than bfloat16 is named."""
    other = "" if dtype == torch.bfloat16 else f" {TYPE_NAMES[dtype]}"
    return f"N={shape.num_experts} K={shape.hidden_size} {mode}{other}"


def tuned_values(x: torch.Tensor, mode: str, shape: Shape) -> tune.Values | None:
    """What a table says of the call, if this kernel can be what it says."""
    values = tune.lookup(TABLE, x.device, shape_name(shape, mode, x.dtype), shape.num_tokens)
    if values is None or _makes_sense(values):
        return values
    name = shape_name(shape, mode, x.dtype)
    warnings.warn(f"measured configuration of {name} is not used: {dict(values)}", folders.CacheWarning, stacklevel=2)
    return None


_KNOWN: Mapping[str, Mapping[str, Container[Any]]] = {
    "tile": {
        "tokens": (16, 32, 64, 96, 128, 160, 192, 256),
        "groups": (1, 2, 3),
        "slots": (1, 2, 3),
        "splits": tuple(_router_tile.CLUSTERS),
        "share": (1, 2),
        "blocks_per_sm": (1, 2),
    },
    "stream": {
        "row_tiles": (1, 2, 4),
        "token_tiles": (1, 2, 4, 8),
        "warps": range(1, 33),
        "splits": (1, 2, 4, 8, 16),
        "depth": range(1, 9),
    },
}
_OPTIONAL: Mapping[str, Container[Any]] = {"blocks_per_sm": (1, 2, 3, 4), "prefetch": (False, True)}


def _makes_sense(values: tune.Values) -> bool:
    kind = values.get("kernel")
    known = _KNOWN.get(str(kind))
    if known is None or (kind == "tile" and not known.keys() <= values.keys()):  # a stream keeps its rule's others
        return False
    allowed = {**_OPTIONAL, **known}
    return all(
        name in allowed and type(value) is (bool if name == "prefetch" else int) and value in allowed[name]
        for name, value in values.items()
        if name != "kernel"
    )


def plan(x: torch.Tensor, weight: torch.Tensor, mode: str, out: torch.Tensor) -> Plan:
    shape = shape_of(x, weight.shape[0])
    tuned = tuned_values(x, mode, shape)
    return tile_plan(x, (weight,), mode, out, shape, tuned) or stream_plan(x, (weight,), mode, out, shape, tuned)


def tile_plan(
    x: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    mode: str,
    out: torch.Tensor,
    shape: Shape,
    tuned: tune.Values | None = None,
) -> Plan | None:
    """The plan of the kernel for many tokens, or None where it does not apply or should be slower."""
    if not (_tile_applies(shape, tuned) and all(map(_copied_in_boxes, (x, *weights)))):
        return None
    presplit, half = len(weights) == 2, x.dtype == torch.float16
    base = RouterTileConfig(
        x_t=TYPE_NAMES[x.dtype],
        out_t=TYPE_NAMES[out.dtype],
        terms=2 if presplit else terms_of(x, mode),
        separate_low=presplit or half,
        presplit=presplit,
        vector_out=shape.num_experts % 4 == 0 and _in_fours(out),
    )
    accurate = mode == "accurate"
    config = None
    if tuned and tuned["kernel"] == "tile":
        found: dict[str, Any] = {name: tuned[name] for name in _router_tile.TUNED}
        config = _router_tile.complete(dataclasses.replace(base, **found), shape.hidden_size, accurate)
    if config is None:
        tokens = _router_tile.rounded(shape.num_tokens)
        config = _router_tile.best(base, tokens, *dataclasses.astuple(shape)[1:], accurate)
    return Plan(_router_tile.ROUTER_TILE, config, _launch_values(x, weights, out, shape))


def _tile_applies(shape: Shape, tuned: tune.Values | None) -> bool:
    if tuned:
        return tuned["kernel"] == "tile"
    return shape.num_tokens > (FEW_TOKENS if shape.num_experts * shape.hidden_size < MANY_WEIGHTS else FEW_TOKENS // 2)


def _copied_in_boxes(x: torch.Tensor) -> bool:
    """Whether the copy engine can take boxes of it: rows on 16-byte boundaries that do not overlap."""
    stride = _row_stride(x)
    return _address(x) % 16 == 0 and stride * x.element_size() % 16 == 0 and stride >= x.shape[1] and x.shape[1] >= 64


def terms_of(x: torch.Tensor, mode: str) -> int:
    """Terms of a weight. Two of float16 have as many bits as three of bfloat16 need for theirs."""
    return 2 if x.dtype == torch.float16 else TERMS[mode]


def _launch_values(
    x: torch.Tensor, weights: tuple[torch.Tensor, ...], out: torch.Tensor, shape: Shape
) -> dict[str, int | float | str]:
    """Launch parameters that both kernels have; `weights` are the fp32 weights, or their high and low parts in bf16."""
    presplit = len(weights) == 2
    values: dict[str, int | float | str] = {
        "num_tokens": shape.num_tokens,
        "num_experts": shape.num_experts,
        "hidden_size": shape.hidden_size,
        "x_stride": _row_stride(x),
        "weight_stride": _row_stride(weights[0]),
        "low_stride": _row_stride(weights[1]) if presplit else 0,
        "out_stride": _row_stride(out),
    }
    return values | ({"weight": "w_high", "weight_low": "w_low"} if presplit else {"weight_low": 0, "scale": 1.0})


def stream_plan(
    x: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    mode: str,
    out: torch.Tensor,
    shape: Shape,
    tuned: tune.Values | None = None,
) -> Plan:
    """The plan of the kernel for few tokens. `weights` are the fp32 weights, or their high and low parts in bf16."""
    presplit = len(weights) == 2
    ruled = stream_rule(shape)
    config = dataclasses.replace(
        ruled,
        # Addresses of two matrices leave fewer registers.
        row_tiles=1 if presplit else ruled.row_tiles,
        blocks_per_sm=1 if presplit else ruled.blocks_per_sm,
        x_t=TYPE_NAMES[x.dtype],
        out_t=TYPE_NAMES[out.dtype],
        terms=2 if presplit else terms_of(x, mode),
        presplit=presplit,
        aligned=shape.hidden_size % 4 == 0 and all(map(_in_fours, (x, *weights))),
    )
    if tuned and tuned.get("kernel", "stream") == "stream":
        found: dict[str, Any] = {name: tuned[name] for name in TUNED if name in tuned}
        config = dataclasses.replace(config, **found)
    steps = -(-shape.hidden_size // STEP_K)
    config = dataclasses.replace(
        config,
        exact=config.aligned and shape.hidden_size % STEP_K == 0,
        once=steps == config.splits * config.warps * config.depth,
    )
    return Plan(ROUTER_STREAM, config, _launch_values(x, weights, out, shape))


def stream_rule(shape: Shape) -> RouterStreamConfig:
    """Constants for a shape that was not measured: all weights of a block under way at once, over all multiprocessors."""
    token_tiles = 1 if shape.num_tokens <= 8 else 2 if shape.num_tokens <= 16 else 4 if shape.num_tokens <= 32 else 8
    blocks_of_tokens = -(-shape.num_tokens // (8 * token_tiles))
    # Two tiles of experts share the loads of tokens, where enough blocks are left.
    row_tiles = 2 if token_tiles == 8 and 8 * -(-shape.num_experts // 32) * blocks_of_tokens > shape.num_sms // 2 else 1
    tiles = -(-shape.num_experts // (16 * row_tiles)) * blocks_of_tokens
    steps = -(-shape.hidden_size // STEP_K)
    splits = 8
    while splits > 1 and (tiles * splits > 3 * shape.num_sms or steps < 4 * splits):
        splits //= 2
    shared = tiles * splits > shape.num_sms  # several blocks on a multiprocessor
    depth = 1 if token_tiles == 8 else 3 if shared and token_tiles == 1 else 2
    most = 8 if shared or token_tiles > 2 else 16
    warps = max(1, min(most, -(-steps // (splits * depth))))
    together = -(-tiles * splits // shape.num_sms) if token_tiles <= 2 else 1
    return RouterStreamConfig(
        row_tiles=row_tiles,
        token_tiles=token_tiles,
        warps=warps,
        splits=splits,
        depth=depth,
        blocks_per_sm=min(together, 3),
    )


# --- what to measure -------------------------------------------------------------------------------------------------

MOST_STREAMED = 128  # tokens
TILES_TRIED = 12  # by the cost model the cheapest


def alternatives(
    x: torch.Tensor, weight: torch.Tensor, mode: str, out: torch.Tensor
) -> Iterator[tuple[tune.Values, Plan]]:
    """Configurations that may be the fastest for a call, as values of a table and as plans."""
    if not out.numel():
        return
    shape = shape_of(x, weight.shape[0])
    if shape.num_tokens <= MOST_STREAMED:
        for values in _streams(shape):
            yield values, stream_plan(x, (weight,), mode, out, shape, values)
    base = RouterTileConfig(terms=terms_of(x, mode), separate_low=x.dtype == torch.float16)
    sizes = dataclasses.astuple(shape)
    found = _router_tile.candidates(base, shape.hidden_size, mode == "accurate")
    for tile in sorted(found, key=lambda config: _router_tile.cost(config, *sizes))[:TILES_TRIED]:
        tuned = {"kernel": "tile"} | {name: getattr(tile, name) for name in _router_tile.TUNED}
        plan = tile_plan(x, (weight,), mode, out, shape, tuned)
        if plan is not None:
            yield tuned, plan


def _streams(shape: Shape) -> Iterator[dict[str, Any]]:
    """Around the rule: all splits of K, in few steps of many warps or the other way round."""
    ruled = stream_rule(shape)
    steps = -(-shape.hidden_size // STEP_K)
    for splits, depth in itertools.product((4, 8, 16), (1, 2, 3, 4)):
        warps = -(-steps // (splits * depth))
        held = 16 * ruled.row_tiles * depth + 4 * ruled.token_tiles * (depth + ruled.row_tiles)  # registers
        if 2 <= warps <= 16 and held <= 160 and 32 * warps * (held + 32) <= _router_tile.REGISTERS:
            yield {
                "kernel": "stream",
                "row_tiles": ruled.row_tiles,
                "token_tiles": ruled.token_tiles,
                "warps": warps,
                "splits": splits,
                "depth": depth,
            }


def _row_stride(x: torch.Tensor) -> int:
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]


def _address(x: torch.Tensor) -> int:
    return 0 if x.device.type == "meta" else x.data_ptr()


def _in_fours(x: torch.Tensor) -> bool:
    """Whether four neighbours, from every fourth element of every row on, lie on a boundary of their size."""
    size = 4 * x.element_size()
    return _address(x) % size == 0 and _row_stride(x) % 4 == 0
