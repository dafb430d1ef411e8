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


def streams(num_bytes: int) -> bool:
    """Whether a tensor is large: bandwidth decides then, and evict-first accesses would spare what the next operator needs."""
    return num_bytes >= 4 << 20


FEW_ROWS = 8
LONG_ROW = 1536  # vectors


def row_shape(num_vecs: int, num_rows: int, *, large: bool = False, max_vecs: int = 8, vecs: int = 4) -> RowShape:
    """The split for rows of `num_vecs` vectors, `vecs` of them per thread where a block then covers the row.

    Short rows get one warp each, four to a block. Longer ones a block with a few vectors per thread: measured on an H200,
    the loads in flight at full occupancy then suffice and blocks are small enough to keep memory busy while others reduce.
    Long rows of a small tensor get as many threads as fit, since one row's latency is all there is.
    """
    if num_vecs <= 128:
        vecs = -(-num_vecs // 32)
        return RowShape(128, 32, vecs, vecs * 32 == num_vecs)
    if num_vecs > 1024 * max_vecs:
        return RowShape(1024, 1024, 0, False)
    if num_vecs >= LONG_ROW and not large and num_rows > FEW_ROWS:
        vecs = 2
    vecs = max(vecs, -(-num_vecs // 1024))
    threads = -(-num_vecs // (vecs * 32)) * 32
    return RowShape(threads, threads, vecs, threads * vecs == num_vecs)


def holds_long_row(shape: RowShape) -> bool:
    """Whether a block has a row of its own and keeps it in registers."""
    return shape.vecs_per_thread > 0 and shape.row_threads == shape.threads


def resident_blocks(shape: RowShape, threads: int = 2048) -> int:
    """Blocks per SM that make up so many threads: 2048 leave each 32 registers, 1536 leave 40."""
    return max(1, threads // shape.threads)


# Config.trigger: where a kernel lets its dependents launch (include/hpcjit/ptx/pdl.cuh).
AT_START, AFTER_LOADS, AT_END = 0, 1, 2

# Config.prefetch: what a block pulls into L2 before it waits for its predecessor: nothing, the lines of its rows by all
# threads, or its row by one request, which must be a multiple of 16 bytes (include/hpcjit/ptx/prefetch.cuh).
NO_PREFETCH, LINES, WHOLE_ROW = 0, 1, 2
