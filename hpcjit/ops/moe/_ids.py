"""What debug mode asks of numbers of experts and of rows, which only the device knows."""

from __future__ import annotations

import torch

from hpcjit.errors import ArgumentError

MAX_GLOBAL = 1024  # experts of a layer, where nobody says how many


def limit(first: int, num_experts: int, num_global_experts: int | None = None) -> int:
    """What global numbers of experts are below, for a rank that has `num_experts` from `first` on."""
    return max(MAX_GLOBAL, first + num_experts) if num_global_experts is None else num_global_experts


def check(op: str, name: str, ids: torch.Tensor, limit: int) -> None:
    """Raise for the first of `[num_tokens, top_k]` numbers that is neither -1, which is nobody's, nor in `[0, limit)`.

    Reads from the device.

    Raises:
        ArgumentError: names the argument, the place, the value and how many such there are.
    """
    if ids.is_meta or not ids.numel():
        return
    wrong = ((ids < -1) | (ids >= limit)).flatten().nonzero().flatten()
    if wrong.numel():
        token, k = divmod(int(wrong[0]), ids.shape[1])
        got = f"{int(ids[token, k])} at position [{token}, {k}] ({wrong.numel()} such entries)"
        raise ArgumentError(op, name, f"-1 or in [0, {limit})", got)


def check_tiles(
    op: str, tiles: torch.Tensor, num_tiles: torch.Tensor, tile_rows: int, num_experts: int, num_rows: int
) -> None:
    """Raise for the first tile that counts and has an expert or rows that do not exist. Reads from the device.

    Raises:
        ArgumentError: names the argument, the tile and what it says.
    """
    if tiles.is_meta:
        return
    count = int(num_tiles)
    if not 0 <= count <= tiles.shape[0]:
        raise ArgumentError(op, "num_tiles", f"in [0, {tiles.shape[0]}] (rows of tiles)", count)
    expert, first, rows = tiles[:count, :3].long().unbind(1)
    end = first + rows.clamp(max=tile_rows)
    wrong = (expert < 0) | (expert >= num_experts) | (first < 0) | (rows < 0) | (end > num_rows)
    if bool(wrong.any()):
        index = int(wrong.nonzero()[0])
        expected = f"of experts in [0, {num_experts}) and rows in [0, {num_rows}]"
        raise ArgumentError(op, "tiles", expected, f"{tiles[index].tolist()} at {index}")
