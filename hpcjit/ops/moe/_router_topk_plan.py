"""How router logits are computed and gated by one call: by which kernels, and with which constants.

Three ways give the same bits (`WAYS`). "fused": one kernel, whose blocks gate the tokens. "launches": the product, then the
gate, which waits for its end. "polled": likewise two kernels, but the gate takes each row of logits as soon as it is whole.
"""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from hpcjit import folders, tune
from hpcjit.build import Config, Template
from hpcjit.jit_op import Plan
from hpcjit.ops.gemm import _router_plan, _router_tile
from hpcjit.ops.gemm._router_stream import ROUTER_STREAM, RouterStreamConfig
from hpcjit.ops.gemm._router_tile import RouterTileConfig
from hpcjit.ops.moe._gate import GateConfig

TABLE = "router_topk"  # tuned/router_topk.json, shapes as `_router_plan.shape_name` spells them
FUSED, LAUNCHES, POLLED = "fused", "launches", "polled"
WAYS = (FUSED, LAUNCHES, POLLED)
# Where no shape was measured (docs/perf/router_topk.md): up to so many tokens the gate polls; then, up to twice as many, one
# launch wins, whose warps gate a token or two; with more, it is enough that the gate has a kernel of its own.
_POLLED_TOKENS, _FUSED_TOKENS = 1536, 3072
_LINE = 128  # bytes


@dataclass(frozen=True)
class RouterGateConfig(Config):
    """The gate's part of a config; see `GateConfig`."""

    per_lane: int = 8
    vec: int = 4
    top_k: int = 8
    num_groups: int = 1
    topk_groups: int = 1
    shared_experts: int = 0
    exact_gate: bool = False
    sigmoid: bool = False
    renormalize: bool = True
    scaled: bool = False
    has_bias: bool = False
    has_valid: bool = False
    ranked: bool = True
    has_logits: bool = False


@dataclass(frozen=True)
class RouterTopkStreamConfig(RouterGateConfig, RouterStreamConfig):
    pass


@dataclass(frozen=True)
class RouterTopkTileConfig(RouterGateConfig, RouterTileConfig):
    pass


@dataclass(frozen=True)
class RouterPairConfig(RouterGateConfig):
    """The gate has a kernel of its own; its constants, as `GateConfig` has them."""

    polled: bool = False
    gate_threads: int = 256
    gate_blocks: int = 1
    gate_trigger: int = 0
    gate_prefetch: bool = False
    gate_wide: bool = False


@dataclass(frozen=True)
class RouterTopkStreamPairConfig(RouterPairConfig, RouterStreamConfig):
    pass


@dataclass(frozen=True)
class RouterTopkTilePairConfig(RouterPairConfig, RouterTileConfig):
    pass


_GATE_PARAMS = (
    *("bias", "num_valid_tokens", "weights", "ids", "counters", "workspace", "rows_offset"),
    *("weights_stride", "ids_stride", "scaling_factor"),
)

ROUTER_TOPK_STREAM = Template(
    op="moe.router_topk_stream",
    header="moe/router_topk_stream.cuh",
    entry="hpcjit::moe::RouterTopkStream",
    config=RouterTopkStreamConfig,
    params=(*ROUTER_STREAM.params, *_GATE_PARAMS),
)

ROUTER_TOPK_TILE = Template(
    op="moe.router_topk_tile",
    header="moe/router_topk_tile.cuh",
    entry="hpcjit::moe::RouterTopkTile",
    config=RouterTopkTileConfig,
    params=(*_router_tile.ROUTER_TILE.params, *_GATE_PARAMS),
)


ROUTER_TOPK_STREAM_PAIR = Template(
    op="moe.router_topk_stream_pair",
    header="moe/router_topk_stream_pair.cuh",
    entry="hpcjit::moe::RouterTopkStreamPair",
    config=RouterTopkStreamPairConfig,
    params=ROUTER_TOPK_STREAM.params,
)

ROUTER_TOPK_TILE_PAIR = Template(
    op="moe.router_topk_tile_pair",
    header="moe/router_topk_tile_pair.cuh",
    entry="hpcjit::moe::RouterTopkTilePair",
    config=RouterTopkTilePairConfig,
    params=ROUTER_TOPK_TILE.params,
)


def way_of(x: torch.Tensor, num_experts: int, mode: str) -> str:
    """The fastest of `WAYS`: as measured for the shape, or by a rule."""
    shape = _router_plan.shape_of(x, num_experts)
    name = _router_plan.shape_name(shape, mode, x.dtype)
    values = tune.lookup(TABLE, x.device, name, shape.num_tokens)
    if values is not None and values.get("way") in WAYS:
        return str(values["way"])
    if values is not None:
        text = f"measured choice for {name} is not used: {dict(values)}"
        warnings.warn(text, folders.CacheWarning, stacklevel=2)
    if shape.num_tokens <= _POLLED_TOKENS:
        return POLLED
    return FUSED if shape.num_tokens <= _FUSED_TOKENS else LAUNCHES


def plan(product: Plan, gate: Plan, logits: torch.Tensor | None, way: str) -> Plan:
    """The launch that does what `product`, to `logits` if they are wanted, and then `gate` would do.

    The gate was planned for rows like those of `logits`, or contiguous ones. With "launches" it reads `logits` themselves if
    they are wanted, else rows of its own.
    """
    num_tokens, num_experts = (int(product.values[name]) for name in ("num_tokens", "num_experts"))
    template, config = (
        _fused(product, gate, logits is not None) if way == FUSED else _paired(product, gate, logits, way)
    )
    values: dict[str, int | float | str] = dict(product.values)
    values["out"] = 0 if logits is None else "logits"
    values |= {name: gate.values[name] for name in _GATE_PARAMS if name in gate.values}
    if way == LAUNCHES:
        rows = 4 * num_tokens * num_experts if logits is None else 0
        return Plan(template, config, values | {"rows_offset": 0}, workspace_bytes=rows)
    tickets = ticket_bytes(config, num_tokens)
    rows = 4 * num_tokens * (-(-num_experts // 4) * 4)
    return Plan(template, config, values | {"rows_offset": tickets}, counter_bytes=tickets + rows)


def _fused(product: Plan, gate: Plan, has_logits: bool) -> tuple[Template, Config]:
    fields = _gate_fields(gate.config) | {"has_logits": has_logits} | _fields(product.config)
    if isinstance(product.config, RouterTileConfig):
        return ROUTER_TOPK_TILE, RouterTopkTileConfig(**fields)
    return ROUTER_TOPK_STREAM, RouterTopkStreamConfig(**fields)


def _paired(product: Plan, gate: Plan, logits: torch.Tensor | None, way: str) -> tuple[Template, Config]:
    own = gate.config
    assert isinstance(own, GateConfig)
    polled = way == POLLED
    fields = _gate_fields(own) | {"has_logits": polled and logits is not None} | _fields(product.config)
    fields |= {
        "polled": polled,
        "gate_threads": own.threads,
        "gate_blocks": own.min_blocks,
        "gate_trigger": own.trigger,
        "gate_prefetch": own.prefetch and not polled,
        "gate_wide": own.wide,
    }
    if isinstance(product.config, RouterTileConfig):
        return ROUTER_TOPK_TILE_PAIR, RouterTopkTilePairConfig(**fields)
    return ROUTER_TOPK_STREAM_PAIR, RouterTopkStreamPairConfig(**fields)


def _gate_fields(gate: Config) -> dict[str, Any]:
    assert isinstance(gate, GateConfig)
    ours = {field.name for field in dataclasses.fields(RouterGateConfig)}
    return {name: value for name, value in _fields(gate).items() if name in ours} | {"exact_gate": gate.exact}


def _fields(config: Config) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def ticket_bytes(config: Config, num_tokens: int) -> int:
    """Of what the fused kernels count with, in whole lines; the others do not count."""
    if isinstance(config, RouterTopkStreamConfig):
        tickets = 4 * config.splits * -(-num_tokens // (8 * config.token_tiles))
    elif isinstance(config, RouterTopkTileConfig):
        tickets = 8 * config.share * -(-num_tokens // (config.tokens * config.share))
    else:
        tickets = 0
    return -(-tickets // _LINE) * _LINE
