"""By how many blocks pairs of tokens and experts are sorted, and how these learn of each other (csrc/moe/pair_sort.cuh)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hpcjit import tune

# Most pairs, blocks of the cluster, their threads: the fastest on an H200 (docs/perf/moe_gates.md). Blocks are small because
# latency decides: adding up the counts of many warps takes longer than a cluster of more blocks.
_CLUSTERS = ((1024, 4, 256), (4096, 8, 256), (16384, 16, 256), (32768, 16, 512))
_ONE_BLOCK = 256, 512  # pairs that one block sorts as fast, its threads
_FILLED_BY_ONE = 12288  # entries of the result
_PORTABLE = 8  # blocks of the largest cluster that every Hopper GPU can place
_ROUNDS = 4  # of a pair per thread, in a block that keeps them in registers
_FULL_GRID = 64  # blocks, each of which reads the counts of all
_MAX_BLOCKS = 128  # where fewer would have more rounds than they keep
_PER_THREAD = 2  # experts


class Sorters(NamedTuple):
    """Blocks that sort, and their threads. `clustered`: one cluster; `counted`: a kernel before them counts the pairs."""

    blocks: int
    threads: int
    clustered: bool
    counted: bool
    match: bool

    def count_bytes(self, num_experts: int) -> int:
        """Of workspace."""
        return 4 * self.blocks * 64 * -(-num_experts // 64) if self.counted else 0


def sorters(num_pairs: int, num_experts: int, device: torch.device, filled: int = 0) -> Sorters:
    """For so many pairs, where `filled` entries of the result are written beside them."""
    hopper = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)
    match = not hopper  # masks of lanes would leave no room for the counts in the shared memory of SM 8.6
    few_experts = num_experts <= 256 * _PER_THREAD
    wide = 1024 if few_experts else 512  # 1024 threads and more experts would not fit in shared memory
    most, threads = _ONE_BLOCK
    if num_pairs <= most and filled <= _FILLED_BY_ONE:
        return Sorters(1, threads, False, False, match)
    if not hopper and num_pairs <= _ROUNDS * wide:
        return Sorters(1, wide, False, False, match)
    if hopper:
        blocks, threads = _cluster(max(num_pairs, filled // 8), few_experts, tune.sm_count(device) == tune.HOPPER_SMS)
        if num_pairs <= _ROUNDS * blocks * threads:
            return Sorters(blocks, threads, True, False, False)
    blocks = min(-(-num_pairs // wide), max(_FULL_GRID, min(-(-num_pairs // (_ROUNDS * wide)), _MAX_BLOCKS)))
    return Sorters(blocks, wide, False, True, match)


def _cluster(size: int, few_experts: bool, measured: bool) -> tuple[int, int]:
    """Blocks and threads for so many pairs, or fewer where the pairs are too many for any cluster."""
    blocks, threads = next((way[1:] for way in _CLUSTERS if size <= way[0]), _CLUSTERS[-1][1:])
    if blocks > _PORTABLE and not (few_experts and measured):
        blocks, threads = _PORTABLE, 512
    return blocks, threads if few_experts else 512
