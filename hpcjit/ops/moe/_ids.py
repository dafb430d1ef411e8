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
