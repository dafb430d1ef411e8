"""Which kernel computes router logits and gates them in the same launch, and with which constants."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from hpcjit.build import Config, Template
from hpcjit.jit_op import Plan
from hpcjit.ops.gemm import _router_plan, _router_tile
from hpcjit.ops.gemm._router_plan import RouterStreamConfig
from hpcjit.ops.gemm._router_tile import RouterTileConfig
from hpcjit.ops.moe._gate import GateConfig

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


_GATE_PARAMS = (
    *("bias", "num_valid_tokens", "weights", "ids", "counters", "rows_offset"),
    *("weights_stride", "ids_stride", "scaling_factor"),
)

ROUTER_TOPK_STREAM = Template(
    op="moe.router_topk_stream",
    header="moe/router_topk_stream.cuh",
    entry="hpcjit::moe::RouterTopkStream",
    config=RouterTopkStreamConfig,
    params=(*_router_plan.ROUTER_STREAM.params, *_GATE_PARAMS),
)

ROUTER_TOPK_TILE = Template(
    op="moe.router_topk_tile",
    header="moe/router_topk_tile.cuh",
    entry="hpcjit::moe::RouterTopkTile",
    config=RouterTopkTileConfig,
    params=(*_router_tile.ROUTER_TILE.params, *_GATE_PARAMS),
)


def plan(product: Plan, gate: Plan, logits: torch.Tensor | None) -> Plan:
    """The launch that does what `product`, to `logits` if they are wanted, and then `gate` would do."""
    values: dict[str, Any] = dict(product.values)
    num_tokens, num_experts = values["num_tokens"], values["num_experts"]
    config = fused(product.config, gate.config, logits is not None)
    tickets, rows = counters(config, num_tokens, num_experts)
    values["out"] = 0 if logits is None else "logits"
    values |= {name: gate.values[name] for name in _GATE_PARAMS if name in gate.values}
    values["rows_offset"] = tickets
    template = ROUTER_TOPK_STREAM if isinstance(config, RouterTopkStreamConfig) else ROUTER_TOPK_TILE
    return Plan(template, config, values, counter_bytes=tickets + rows)


def fused(product: Config, gate: Config, has_logits: bool) -> RouterTopkStreamConfig | RouterTopkTileConfig:
    """Both configs in one."""
    assert isinstance(gate, GateConfig)
    ours = {field.name for field in dataclasses.fields(RouterGateConfig)}
    fields = {name: value for name, value in _fields(gate).items() if name in ours}
    fields |= {"exact_gate": gate.exact, "has_logits": has_logits}
    if isinstance(product, RouterTileConfig):
        return RouterTopkTileConfig(**_fields(product) | fields)
    return RouterTopkStreamConfig(**_fields(product) | fields)


def _fields(config: Config) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def counters(
    config: RouterTopkStreamConfig | RouterTopkTileConfig, num_tokens: int, num_experts: int
) -> tuple[int, int]:
    """Bytes of what the kernel counts with, and of the rows in which it passes logits on."""
    rows = 4 * num_tokens * (-(-num_experts // 4) * 4)
    if isinstance(config, RouterTopkStreamConfig):
        tickets = 4 * config.splits * -(-num_tokens // (8 * config.token_tiles))
    else:
        tickets = 8 * config.share * -(-num_tokens // (config.tokens * config.share))
    return -(-tickets // _LINE) * _LINE, rows
