"""How the row kernels split a row among threads: vector width, threads, vectors per thread."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

TYPE_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "e4m3",
    torch.int32: "int32",
    torch.int64: "int64",
}


def vector_width(size: int, itemsize: int, placed: Iterable[tuple[torch.Tensor, int]]) -> int:
    """Largest power of two of elements that one access may move, at most 16 bytes of the main tensor.

    `size` is the length of a row; `placed` holds each tensor with its row stride in elements (0 for one row only). Address
    and stride of each must be multiples of the access, or of 16 bytes if the access is made of several.
    """
    vec = 16 // itemsize
    placed = list(placed)
    while vec > 1 and not (size % vec == 0 and all(_aligned(tensor, stride, vec) for tensor, stride in placed)):
        vec //= 2
    return vec


def _aligned(tensor: torch.Tensor, stride: int, vec: int) -> bool:
    width = min(16, vec * tensor.element_size())
    return tensor.data_ptr() % width == 0 and stride * tensor.element_size() % width == 0


@dataclass(frozen=True)
class RowShape:
    """Threads of a block, threads of a row, vectors per thread (0: re-read instead of held), whether they fit exactly."""

    threads: int
    row_threads: int
    vecs_per_thread: int
    exact: bool


def row_shape(num_vecs: int, num_rows: int, *, max_vecs: int = 8, full_block_rows: int = 264) -> RowShape:
    """The split for rows of `num_vecs` vectors.

    Short rows get one warp each, four to a block. Longer ones a block with 2 to 4 vectors per thread, enough loads in flight
    at full occupancy; a few long rows get as many threads as fit, since then one row's latency is all there is.
    """
    if num_vecs <= 128:
        vecs = -(-num_vecs // 32)
        return RowShape(128, 32, vecs, vecs * 32 == num_vecs)
    if num_vecs > 1024 * max_vecs:
        return RowShape(1024, 1024, 0, False)
    few = num_rows <= full_block_rows
    for vecs in (1, 2, 4, 8):
        threads = -(-num_vecs // (vecs * 32)) * 32
        if threads <= (1024 if few and num_vecs > 1024 else 512) and (vecs > 1 or num_vecs <= 256):
            return RowShape(threads, threads, vecs, threads * vecs == num_vecs)
    return RowShape(1024, 1024, max_vecs, 1024 * max_vecs == num_vecs)
