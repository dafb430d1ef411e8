"""The plan of a grouped product: pairs of tokens and experts sorted by expert, and tiles of rows of one expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hpcjit import checks
from hpcjit.build import Config, Template
from hpcjit.errors import ArgumentError
from hpcjit.fused_op import define
from hpcjit.jit_op import NOTHING, JitOp, Plan
from hpcjit.ops._tensors import compiling, require
from hpcjit.ops.moe import _ids
from hpcjit.ops.moe._fused_moe_args import MAX_EXPERTS, MAX_PAIRS
from hpcjit.ops.moe._fused_moe_space import max_tiles
from hpcjit.ops.moe._pair_sort import sorters

MAX_TILE_ROWS = 1024


@dataclass(frozen=True)
class PlanConfig(Config):
    plan_threads: int = 1024
    plan_clustered: bool = False
    plan_counted: bool = False
    plan_match: bool = False
    ids_strided: bool = False
    pdl: bool = True


PLAN = Template(
    op="moe.plan",
    header="moe/plan.cuh",
    entry="hpcjit::moe::Plan",
    config=PlanConfig,
    params=(
        *("topk_ids", "sorted_pairs", "positions", "tiles", "num_tiles", "workspace"),
        *("numel", "top_k", "ids_stride", "num_experts", "expert_offset", "tile_rows", "plan_blocks"),
    ),
)


class PlanArgs(NamedTuple):
    topk_ids: torch.Tensor
    num_experts: int
    tile_rows: int
    expert_offset: int
    sorted_pairs: torch.Tensor
    positions: torch.Tensor
    tiles: torch.Tensor
    num_tiles: torch.Tensor


class MoePlanOp(JitOp):
    op = "moe.moe_plan"
    schema = (
        "(Tensor topk_ids, int num_experts, int tile_rows, int expert_offset, Tensor(a!) sorted_pairs,"
        " Tensor(b!) positions, Tensor(c!) tiles, Tensor(d!) num_tiles) -> ()"
    )
    trace_values = ("topk_ids:histogram",)

    def check(self, *args: Any) -> None:
        a = PlanArgs(*args)
        check_ids(self.op, a.topk_ids)
        check_sizes(self.op, a.num_experts, a.tile_rows)
        checks.integer(self.op, "expert_offset", a.expert_offset, low=0, high=2**30)
        numel = a.topk_ids.numel()
        shapes = {
            "sorted_pairs": (numel,),
            "positions": tuple(a.topk_ids.shape),
            "tiles": (max_tiles(numel, a.num_experts, a.tile_rows), 4),
            "num_tiles": (1,),
        }
        before: dict[str, torch.Tensor] = {"topk_ids": a.topk_ids}
        for name, shape in shapes.items():
            value = getattr(a, name)
            checks.tensor(self.op, name, value, dtypes=(torch.int32,), shape=shape, like=a.topk_ids)
            if not value.is_contiguous():
                raise ArgumentError(self.op, name, "contiguous", f"strides {value.stride()}")
            for other_name, other in before.items():
                checks.apart(self.op, name, value, other_name, other)
            before[name] = value

    def check_values(self, *args: Any) -> None:
        a = PlanArgs(*args)
        _ids.check(self.op, "topk_ids", a.topk_ids, _ids.limit(a.expert_offset, a.num_experts))

    def plan(self, *args: Any) -> Plan | str:
        a = PlanArgs(*args)
        numel, top_k = a.topk_ids.numel(), a.topk_ids.shape[1]
        if not numel:
            return NOTHING
        ids_stride = checks.rows(self.op, "topk_ids", a.topk_ids)[1]
        by = sorters(numel, a.num_experts, a.topk_ids.device)
        config = PlanConfig(by.threads, by.clustered, by.counted, by.match, ids_stride != top_k)
        values: dict[str, int | float | str] = {
            "numel": numel,
            "top_k": top_k,
            "ids_stride": ids_stride,
            "num_experts": a.num_experts,
            "expert_offset": a.expert_offset,
            "tile_rows": a.tile_rows,
            "plan_blocks": by.blocks,
        }
        return Plan(PLAN, config, values, workspace_bytes=by.count_bytes(a.num_experts))

    def reference(self, *args: Any) -> None:
        a = PlanArgs(*args)
        if a.topk_ids.device.type == "meta" or not a.topk_ids.numel():
            return
        local = a.topk_ids.reshape(-1).long() - a.expert_offset
        local = torch.where((local >= 0) & (local < a.num_experts), local, a.num_experts)
        counts = local.new_zeros(a.num_experts + 1).scatter_add(0, local, torch.ones_like(local))[:-1]
        order = local.sort(stable=True).indices
        live = int(counts.sum())
        a.sorted_pairs[:live] = order[:live].int()
        rows = torch.empty_like(order)
        rows[order] = torch.arange(len(order), device=order.device)
        a.positions.copy_(torch.where(local < a.num_experts, rows, -1).view_as(a.positions))
        starts = (counts.cumsum(0) - counts).tolist()
        tiles = [
            (expert, start + first, min(a.tile_rows, count - first), 0)
            for expert, (start, count) in enumerate(zip(starts, counts.tolist(), strict=True))
            for first in range(0, count, a.tile_rows)
        ]
        a.num_tiles.fill_(len(tiles))
        a.tiles[: len(tiles)] = a.tiles.new_tensor(tiles).view(-1, 4)


def check_ids(op: str, topk_ids: torch.Tensor) -> None:
    checks.tensor(op, "topk_ids", topk_ids, dtypes=(torch.int32,), min_ndim=2)
    if topk_ids.ndim != 2 or not topk_ids.shape[1] or topk_ids.numel() > MAX_PAIRS:
        raise ArgumentError(
            op, "topk_ids", f"[num_tokens, top_k] with at most {MAX_PAIRS} pairs", checks.describe(topk_ids)
        )


def check_sizes(op: str, num_experts: int, tile_rows: int) -> None:
    checks.integer(op, "num_experts", num_experts, low=1, high=MAX_EXPERTS)
    checks.integer(op, "tile_rows", tile_rows, low=1, high=MAX_TILE_ROWS)


moe_plan_op = MoePlanOp()
define(moe_plan_op)


def moe_plan(
    topk_ids: torch.Tensor,
    num_experts: int,
    tile_rows: int,
    *,
    expert_offset: int = 0,
    sorted_pairs: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    tiles: torch.Tensor | None = None,
    num_tiles: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort pairs of tokens and experts by expert, and cut each expert's rows into tiles: what `grouped_gemm` walks along.

    Row r of the sorted order is pair `sorted_pairs[r] = token * top_k + k`: those of expert `expert_offset` in increasing
    order, then those of the next one. Unlike in `moe_align_block_size` there is no padding between experts.

    Args:
        topk_ids: int32 `[num_tokens, top_k]`, any number of tokens, rows at any stride. Ids outside of
            `[expert_offset, expert_offset + num_experts)`, such as -1, are of no expert here.
        num_experts: 1 to 512, of the experts here.
        tile_rows: 1 to 1024, the most rows of a tile.
        expert_offset: the global number of the first expert here.
        sorted_pairs: int32 `[num_tokens * top_k]`. Those past the last row keep what they held.
        positions: int32 `[num_tokens, top_k]`, receives the row of each pair, or -1.
        tiles: int32 `[(pairs + min(pairs, num_experts) * (tile_rows - 1)) // tile_rows, 4]`, receives for each tile the
            expert (0 is the first here), the first row, the number of rows and 0, in the order of the rows. Those past the
            last one keep what they held.
        num_tiles: int32 `[1]`. Without tokens nothing is written, here and elsewhere.
        backend: run this backend or fail.

    Returns:
        `(sorted_pairs, positions, tiles, num_tiles)`, new tensors by default. Nothing is read by the host. Bits repeat.

    Raises:
        ArgumentError: a wrong dtype, shape, stride or size, results that share memory; in debug mode an id that is neither
            -1 nor below 1024, or below `expert_offset + num_experts` where that is more.

    Safe under CUDA graphs, with ids that change between replays, once the signature has run or been prewarmed. Method: as in
    MegaBlocks (Gale et al., 2022), rows of an expert next to each other and products of variable size over them.
    """
    op = MoePlanOp.op
    require(op, "topk_ids", topk_ids, 2)
    if tiles is None:
        check_sizes(op, num_experts, tile_rows)
        tiles = topk_ids.new_empty((max_tiles(topk_ids.numel(), num_experts, tile_rows), 4), dtype=torch.int32)
    if sorted_pairs is None:
        sorted_pairs = topk_ids.new_empty(topk_ids.numel(), dtype=torch.int32)
    if positions is None:
        positions = topk_ids.new_empty(topk_ids.shape, dtype=torch.int32)
    if num_tiles is None:
        num_tiles = topk_ids.new_zeros(1, dtype=torch.int32)
    outputs = (sorted_pairs, positions, tiles, num_tiles)
    if compiling("moe.moe_plan", backend):
        torch.ops.hpcjit.moe_moe_plan(topk_ids, num_experts, tile_rows, expert_offset, *outputs)
    elif backend is None:
        moe_plan_op.fast(topk_ids, num_experts, tile_rows, expert_offset, *outputs)
    else:
        moe_plan_op(topk_ids, num_experts, tile_rows, expert_offset, *outputs, backend=backend)
    return outputs
