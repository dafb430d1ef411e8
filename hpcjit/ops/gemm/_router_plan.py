"""Which kernel computes router logits, and with which constants."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hpcjit import folders, tune
from hpcjit.jit_op import Plan
from hpcjit.ops._rows import TYPE_NAMES
from hpcjit.ops.gemm import _router_stream, _router_tile
from hpcjit.ops.gemm._clusters import CLUSTERS, MOST_BLOCKS
from hpcjit.ops.gemm._router_stream import ROUTER_STREAM, STEP_K, RouterStreamConfig
from hpcjit.ops.gemm._router_tile import RouterTileConfig

TABLE = "router_gemm"  # tuned/router_gemm.json, shapes as `shape_name` spells them
TERMS = {"accurate": 3, "fast": 2}
FEW_TOKENS = 64  # up to which one pass over few weights beats the kernel for many tokens; over MANY_WEIGHTS up to half
MANY_WEIGHTS = 1 << 20


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
        "splits": CLUSTERS,
        "share": (1, 2),
        "blocks_per_sm": (1, 2),
    },
    "stream": {
        "row_tiles": (1, 2, 4),
        "token_tiles": (1, 2, 4, 8),
        "warps": range(1, 33),
        "splits": CLUSTERS,
        "depth": range(1, 9),
    },
}
_OPTIONAL: Mapping[str, Container[Any]] = {"blocks_per_sm": range(1, MOST_BLOCKS + 1), "prefetch": (False, True)}


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
    terms = 2 if presplit else terms_of(x, mode)
    config = dataclasses.replace(
        stream_rule(shape, terms, presplit),
        x_t=TYPE_NAMES[x.dtype],
        out_t=TYPE_NAMES[out.dtype],
        aligned=shape.hidden_size % 4 == 0 and all(map(_in_fours, (x, *weights))),
    )
    if tuned and tuned.get("kernel", "stream") == "stream":
        found: dict[str, Any] = {name: tuned[name] for name in _router_stream.TUNED if name in tuned}
        config = dataclasses.replace(config, **found)
    steps = -(-shape.hidden_size // STEP_K)
    config = dataclasses.replace(
        config,
        exact=config.aligned and shape.hidden_size % STEP_K == 0,
        once=steps == config.splits * config.warps * config.depth,
    )
    return Plan(ROUTER_STREAM, config, _launch_values(x, weights, out, shape))


def stream_rule(shape: Shape, terms: int = 3, presplit: bool = False) -> RouterStreamConfig:
    """Constants for a shape that was not measured."""
    of_tile = 8 * _router_stream.token_tiles(shape.num_tokens)
    tokens = of_tile if shape.num_tokens <= of_tile else _router_tile.rounded(shape.num_tokens)
    return _router_stream.best(terms, tokens, *dataclasses.astuple(shape)[1:], presplit)


# --- what to measure -------------------------------------------------------------------------------------------------

MOST_STREAMED = 128  # tokens
STREAMS_TRIED = 16  # by its cost model the cheapest
TILES_TRIED = 12  # likewise


def alternatives(
    x: torch.Tensor, weight: torch.Tensor, mode: str, out: torch.Tensor
) -> Iterator[tuple[tune.Values, Plan]]:
    """Configurations that may be the fastest for a call, as values of a table and as plans."""
    if not out.numel():
        return
    shape = shape_of(x, weight.shape[0])
    if shape.num_tokens <= MOST_STREAMED:
        for values in _streams(shape, terms_of(x, mode)):
            yield values, stream_plan(x, (weight,), mode, out, shape, values)
    base = RouterTileConfig(terms=terms_of(x, mode), separate_low=x.dtype == torch.float16)
    sizes = dataclasses.astuple(shape)
    found = _router_tile.candidates(base, shape.hidden_size, mode == "accurate")
    for tile in sorted(found, key=lambda config: _router_tile.cost(config, *sizes))[:TILES_TRIED]:
        tuned = {"kernel": "tile"} | {name: getattr(tile, name) for name in _router_tile.TUNED}
        plan = tile_plan(x, (weight,), mode, out, shape, tuned)
        if plan is not None:
            yield tuned, plan


def _streams(shape: Shape, terms: int) -> Iterator[dict[str, Any]]:
    sizes = dataclasses.astuple(shape)
    found = _router_stream.candidates(terms, *sizes)
    for config in sorted(found, key=lambda config: (_router_stream.cost(config, *sizes), repr(config)))[:STREAMS_TRIED]:
        yield {"kernel": "stream"} | {name: getattr(config, name) for name in _router_stream.TUNED}


def _row_stride(x: torch.Tensor) -> int:
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]


def _address(x: torch.Tensor) -> int:
    return 0 if x.device.type == "meta" else x.data_ptr()


def _in_fours(x: torch.Tensor) -> bool:
    """Whether four neighbours, from every fourth element of every row on, lie on a boundary of their size."""
    size = 4 * x.element_size()
    return _address(x) % size == 0 and _row_stride(x) % 4 == 0
