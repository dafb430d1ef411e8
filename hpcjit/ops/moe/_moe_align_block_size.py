"""Pairs of tokens and experts sorted by expert, in whole blocks: what a grouped matrix product walks along."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hpcjit import checks
from hpcjit.build import Config, Template
from hpcjit.errors import ArgumentError
from hpcjit.fused_op import define
from hpcjit.jit_op import JitOp, Plan
from hpcjit.ops import _peers
from hpcjit.ops._tensors import compiling, overwrites_none, require
from hpcjit.ops.moe import _ids
from hpcjit.ops.moe._pair_sort import sorters
from hpcjit.spec import KernelBackend

MAX_EXPERTS = 1024
MAX_BLOCK_SIZE = 1024
MAX_SORTED = 2**30  # entries of the result: the kernel adds to positions in 32 bits


@dataclass(frozen=True)
class AlignConfig(Config):
    threads: int = 1024
    clustered: bool = False
    counted: bool = False
    match: bool = False
    filled: bool = True
    has_map: bool = False
    strided: bool = False
    pdl: bool = True


ALIGN = Template(
    op="moe.align",
    header="moe/align.cuh",
    entry="hpcjit::moe::Align",
    config=AlignConfig,
    params=(
        "topk_ids",
        "expert_map",
        "sorted_token_ids",
        "expert_ids",
        "num_tokens_post_padded",
        "workspace",
        "numel",
        "top_k",
        "ids_stride",
        "num_ids",
        "num_experts",
        "block_size",
        "sorted_size",
        "expert_ids_size",
        "blocks",
        "first_id",
    ),
)


class AlignArgs(NamedTuple):
    topk_ids: torch.Tensor
    num_experts: int
    block_size: int
    expert_map: torch.Tensor | None
    sorted_token_ids: torch.Tensor
    expert_ids: torch.Tensor
    num_tokens_post_padded: torch.Tensor


def sorted_size(numel: int, num_experts: int, block_size: int) -> int:
    """The most entries that `numel` pairs can take: all but one of the entries of each expert's last block are padding."""
    return (numel + min(numel, num_experts) * (block_size - 1)) // block_size * block_size


def checked_size(topk_ids: torch.Tensor, num_experts: int, block_size: int) -> int:
    """`sorted_size`, or an ArgumentError where that is too much."""
    size = sorted_size(topk_ids.numel(), num_experts, block_size)
    if size > MAX_SORTED:
        expected = f"few enough for {MAX_SORTED} entries of sorted_token_ids"
        got = f"{size} for {checks.describe(topk_ids)}"
        raise ArgumentError(MoeAlignBlockSizeOp.op, "topk_ids", expected, got)
    return size


class MoeAlignBlockSizeOp(JitOp):
    op = "moe.moe_align_block_size"
    schema = (
        "(Tensor topk_ids, int num_experts, int block_size, Tensor? expert_map, Tensor(a!) sorted_token_ids,"
        " Tensor(b!) expert_ids, Tensor(c!) num_tokens_post_padded) -> ()"
    )
    trace_values = ("topk_ids:histogram",)

    def check(self, *args: Any) -> None:
        a = AlignArgs(*args)
        int32 = (torch.int32,)
        checks.tensor(self.op, "topk_ids", a.topk_ids, dtypes=int32, min_ndim=2)
        if a.topk_ids.ndim != 2:
            raise ArgumentError(self.op, "topk_ids", "[num_tokens, top_k]", checks.describe(a.topk_ids))
        checks.integer(self.op, "num_experts", a.num_experts, low=1, high=MAX_EXPERTS)
        checks.integer(self.op, "block_size", a.block_size, low=1, high=MAX_BLOCK_SIZE)
        if a.expert_map is not None:
            checks.tensor(self.op, "expert_map", a.expert_map, dtypes=int32, min_ndim=1, like=a.topk_ids)
            if a.expert_map.ndim != 1:
                raise ArgumentError(self.op, "expert_map", "of rank 1", checks.describe(a.expert_map))
        size = checked_size(a.topk_ids, a.num_experts, a.block_size)
        self._check_result("sorted_token_ids", a.sorted_token_ids, size, a)
        self._check_result("expert_ids", a.expert_ids, size // a.block_size, a)
        name, post = "num_tokens_post_padded", a.num_tokens_post_padded
        checks.tensor(self.op, name, post, dtypes=int32, shape=(1,), like=a.topk_ids)
        results = {"sorted_token_ids": a.sorted_token_ids, "expert_ids": a.expert_ids, name: post}
        for (one, first), (other, second) in itertools.combinations(results.items(), 2):
            checks.apart(self.op, other, second, one, first)
        for one, first in results.items():
            overwrites_none(self.op, one, first, {"topk_ids": a.topk_ids, "expert_map": a.expert_map})

    def _check_result(self, name: str, value: torch.Tensor, size: int, a: AlignArgs) -> None:
        checks.tensor(self.op, name, value, dtypes=(torch.int32,), min_ndim=1, like=a.topk_ids)
        if value.ndim != 1 or not size <= value.shape[0] <= MAX_SORTED:
            expected = f"of rank 1 and length {size} to {MAX_SORTED}"
            raise ArgumentError(self.op, name, expected, checks.describe(value))

    def check_values(self, *args: Any) -> None:
        a = AlignArgs(*args)
        _ids.check(self.op, "topk_ids", a.topk_ids, a.num_experts if a.expert_map is None else a.expert_map.shape[0])

    def plan(self, *args: Any) -> Plan | str:
        a = AlignArgs(*args)
        numel, top_k = a.topk_ids.numel(), a.topk_ids.shape[1]
        _, ids_stride = checks.rows(self.op, "topk_ids", a.topk_ids)
        by = sorters(numel, a.num_experts, a.topk_ids.device, a.sorted_token_ids.shape[0])
        config = AlignConfig(
            threads=by.threads,
            clustered=by.clustered,
            counted=by.counted,
            match=by.match,
            has_map=a.expert_map is not None,
            strided=ids_stride != top_k,
        )
        values: dict[str, int | float | str] = {
            "numel": numel,
            "top_k": top_k,
            "ids_stride": ids_stride,
            "num_ids": a.num_experts if a.expert_map is None else a.expert_map.shape[0],
            "num_experts": a.num_experts,
            "block_size": a.block_size,
            "sorted_size": a.sorted_token_ids.shape[0],
            "expert_ids_size": a.expert_ids.shape[0],
            "blocks": by.blocks,
            "first_id": 0,
        }
        if a.expert_map is None:
            values["expert_map"] = 0
        return Plan(ALIGN, config, values, workspace_bytes=by.count_bytes(a.num_experts))

    def reference(self, *args: Any) -> None:
        a = AlignArgs(*args)
        expert = _experts(a)
        counts = expert.new_zeros(a.num_experts + 1).scatter_add(0, expert, torch.ones_like(expert))
        padded = -(-counts[:-1] // a.block_size) * a.block_size
        ends = padded.cumsum(0)
        # Pairs of no expert are in the last bucket, which goes to one entry past the result.
        size = a.sorted_token_ids.shape[0]
        shift = torch.cat([ends - padded, ends.new_full((1,), size)]) - (counts.cumsum(0) - counts)
        order = expert.sort(stable=True).indices
        position = torch.arange(len(order), device=order.device) + shift[expert[order]]
        entries = order.new_full((size + 1,), len(order)).scatter(0, position.clamp(max=size), order)
        block = torch.arange(a.expert_ids.shape[0], device=order.device) * a.block_size
        owner = torch.searchsorted(ends, block, right=True)
        a.sorted_token_ids.copy_(entries[:-1])
        a.expert_ids.copy_(torch.where(block < ends[-1], owner, -1))
        a.num_tokens_post_padded.copy_(ends[-1:])

    def forward_aot(self, *args: Any) -> None:
        """No expert_map; in any order within an expert; ids of no expert get blocks of their own, marked -1, in front."""
        self.check(*args)
        a = AlignArgs(*args)
        if a.expert_map is not None:
            _peers.refuse(self.op, KernelBackend.AOT, "it has no expert_map")
        if not a.topk_ids.is_contiguous():
            _peers.refuse(self.op, KernelBackend.AOT, "it takes contiguous ids")
        run = _peers.sglang("moe.moe_align", "moe_align_block_size")
        sums = a.topk_ids.new_empty(a.num_experts + 2)
        outputs = (a.sorted_token_ids, a.expert_ids, a.num_tokens_post_padded, sums)
        run(a.topk_ids, a.num_experts + 1, a.block_size, *outputs, True, pad_expert_ids=True)


def _experts(a: AlignArgs) -> torch.Tensor:
    """The expert of every pair, num_experts for none."""
    ids = a.topk_ids.reshape(-1).long()
    count = a.num_experts if a.expert_map is None else a.expert_map.shape[0]
    known = (ids >= 0) & (ids < count)
    if a.expert_map is not None:
        ids = a.expert_map.long()[torch.where(known, ids, 0)] if count else ids
        known = known & (ids >= 0) & (ids < a.num_experts)
    return torch.where(known, ids, a.num_experts)


moe_align_block_size_op = MoeAlignBlockSizeOp()
define(moe_align_block_size_op)


def moe_align_block_size(
    topk_ids: torch.Tensor,
    num_experts: int,
    block_size: int,
    *,
    expert_map: torch.Tensor | None = None,
    sorted_token_ids: torch.Tensor | None = None,
    expert_ids: torch.Tensor | None = None,
    num_tokens_post_padded: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort pairs of tokens and experts by expert, each expert's padded to whole blocks of a grouped matrix product.

    Pair `i = token * top_k + k` belongs to expert `topk_ids[token, k]`. The result lists the pairs of expert 0 in increasing
    order, then `numel = num_tokens * top_k` as padding up to the next multiple of block_size, then those of expert 1, and so
    on. An expert without pairs takes no block. Ids outside of `[0, num_experts)`, such as -1 for padding tokens, belong to no
    expert and are not listed.

    Args:
        topk_ids: int32 `[num_tokens, top_k]`, any number of tokens, rows at any stride.
        num_experts: 1 to 1024; with an expert_map, of the experts here.
        block_size: 1 to 1024, entries of a block.
        expert_map: None, or int32 `[num_global_experts]`: topk_ids are global, and belong to expert `expert_map[id]` of
            those here, or to none if that is not in `[0, num_experts)`.
        sorted_token_ids: int32, 1-D of at least
            `(numel + min(numel, num_experts) * (block_size - 1)) // block_size * block_size` entries, which is the default,
            and at most 2^30.
        expert_ids: int32, 1-D, at least one entry per block of that.
        num_tokens_post_padded: int32 `[1]`.
        backend: run this backend or fail.

    Returns:
        `(sorted_token_ids, expert_ids, num_tokens_post_padded)`: the list; the expert of each of its blocks; how many entries
        of the list count. Entries past those are numel, blocks -1. The order is stable and bits repeat. Nothing is read by
        the host. The same layout as in vLLM and SGLang (whose order within an expert varies).

    Raises:
        ArgumentError: a wrong dtype, rank, device or size, more than 2^30 entries; in debug mode an id that is neither -1 nor
            in range.

    Safe under CUDA graphs, with ids that change between replays, once the signature has run or been prewarmed.
    """
    op = MoeAlignBlockSizeOp.op
    require(op, "topk_ids", topk_ids, 2)
    if sorted_token_ids is None or expert_ids is None:
        checks.integer(op, "num_experts", num_experts, low=1, high=MAX_EXPERTS)
        checks.integer(op, "block_size", block_size, low=1, high=MAX_BLOCK_SIZE)
        size = checked_size(topk_ids, num_experts, block_size)
    if sorted_token_ids is None:
        sorted_token_ids = topk_ids.new_empty(size, dtype=torch.int32)
    if expert_ids is None:
        expert_ids = topk_ids.new_empty(size // block_size, dtype=torch.int32)
    if num_tokens_post_padded is None:
        num_tokens_post_padded = topk_ids.new_empty(1, dtype=torch.int32)
    outputs = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    if compiling("moe.moe_align_block_size", backend):
        torch.ops.hpcjit.moe_moe_align_block_size(topk_ids, num_experts, block_size, expert_map, *outputs)
    elif backend is None:
        moe_align_block_size_op.fast(topk_ids, num_experts, block_size, expert_map, *outputs)
    else:
        moe_align_block_size_op(topk_ids, num_experts, block_size, expert_map, *outputs, backend=backend)
    return outputs
