"""By how many blocks pairs of tokens and experts are sorted, and how these learn of each other (csrc/moe/pair_sort.cuh)."""

from __future__ import annotations

from typing import NamedTuple

import torch

_ROUNDS = 4  # of a pair per thread, in a block that keeps them in registers
_CLUSTER = 8  # blocks of the largest cluster that every Hopper GPU can place
_ONE_BLOCK = 1024  # pairs that one block sorts as fast as several
_COUNTED_PAIRS = 4096  # of a block, until there are as many blocks as may be
_MAX_BLOCKS = 128  # each reads the counts of all
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
    wide = 512 if num_experts > 1024 // _PER_THREAD else 1024
    if (num_pairs <= _ONE_BLOCK and filled <= 8 * _ONE_BLOCK) or (not hopper and num_pairs <= _ROUNDS * wide):
        threads = 256 if num_pairs <= 256 and wide == 1024 else 512 if num_pairs <= 512 else wide
        return Sorters(1, threads, False, False, match)
    if hopper and num_pairs <= _ROUNDS * wide * _CLUSTER:
        blocks = next(n for n in (2, 4, _CLUSTER) if n == _CLUSTER or max(num_pairs, filled // 8) <= n * 512)
        return Sorters(blocks, 512 if num_pairs <= blocks * 512 else wide, True, False, False)
    blocks = min(-(-num_pairs // _COUNTED_PAIRS), _MAX_BLOCKS)
    return Sorters(blocks, wide, False, True, match)
