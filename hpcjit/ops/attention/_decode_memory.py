"""How much device memory `attention.decode` takes besides its arguments."""

from __future__ import annotations

import torch

from hpcjit import checks
from hpcjit.errors import ArgumentError
from hpcjit.ops.attention._decode_plan import ASSUMED_SMS, Work, memory, ring_of, rows_of
from hpcjit.ops.attention._decode_shape import HEAD_DIMS, MAX_GROUP, MAX_LENGTH, MAX_Q_LEN, SCHEDULES, Sizes

_OP = "attention.decode"
_CACHES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)


def decode_workspace_bytes(
    *,
    batch: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    table_width: int,
    value_head_dim: int | None = None,
    max_q_len: int = 1,
    kv_dtype: torch.dtype = torch.bfloat16,
    schedule: str = "dynamic",
    num_sms: int = ASSUMED_SMS,
) -> tuple[int, int]:
    """Bytes of scratch and of counters that a call of `decode` takes, for planning a device's memory without one.

    Scratch is 0. The counters are slots, by which blocks that share a pair of request and KV head pass results on. Each of the
    `num_q_heads / num_kv_heads * max_q_len` query rows of a pair, rounded up to 8 times a power of two, takes
    `4 * (value_head_dim + 4)` bytes in each of so many slots:

        dynamic    2 * num_sms, whatever the batch and the lengths: 1.1 MB for 8 rows and heads of 128, 18 MB for 128 rows
        static     pairs * splits, less than 4 * num_sms; none where the pairs alone are 2 * num_sms
        invariant  pairs * (capacity / 2048 + 1), where capacity = table_width * page_size: this alone grows with the
                   tokens that a request can have. 64 requests of 128K take 18 MB for each KV head of 8 rows.

    A call takes memory of its stream, once for all calls there: what matters is the largest of them, and every stream and
    every captured graph has its own. Slots are zero between launches, and a call leaves them so; a captured graph zeroes its
    own once per replay, which with the invariant schedule and long tables takes time.

    Args:
        batch: requests, those of padding too.
        page_size: tokens of a page.
        table_width: pages in a row of the block table.
        value_head_dim: None is `head_dim`.
        max_q_len: the most query rows of a request.
        kv_dtype: of the caches.
        schedule: "dynamic", "static" or "invariant".
        num_sms: multiprocessors of the device.

    Returns:
        `(scratch, counters)`, in bytes.

    Raises:
        ArgumentError: a size, dtype or schedule that `decode` does not take.
    """
    _check_sizes(batch=batch, num_kv_heads=num_kv_heads, page_size=page_size, table_width=table_width, num_sms=num_sms)
    checks.integer(_OP, "max_q_len", max_q_len, low=1, high=MAX_Q_LEN)
    checks.choice(_OP, "schedule", schedule, SCHEDULES)
    checks.choice(_OP, "kv_dtype", kv_dtype, _CACHES)
    value_head_dim = head_dim if value_head_dim is None else value_head_dim
    for name, value in (("head_dim", head_dim), ("value_head_dim", value_head_dim)):
        checks.integer(_OP, name, value, low=1, high=MAX_LENGTH)
    if (head_dim, value_head_dim) not in HEAD_DIMS:
        supported = ", ".join(f"{dim}/{value}" for dim, value in HEAD_DIMS)
        raise ArgumentError(
            _OP, "head_dim", f"of a supported head_dim/value_head_dim: {supported}", f"{head_dim}/{value_head_dim}"
        )
    checks.integer(_OP, "num_q_heads", num_q_heads, low=num_kv_heads, high=MAX_GROUP * num_kv_heads)
    if num_q_heads % num_kv_heads:
        raise ArgumentError(_OP, "num_q_heads", f"a multiple of {num_kv_heads} (num_kv_heads)", num_q_heads)
    sizes = Sizes(
        batch=batch,
        max_q_len=max_q_len,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_head_dim=value_head_dim,
        page_size=page_size,
        table_width=table_width,
    )
    if not batch:
        return 0, 0
    _, tile, _ = ring_of(sizes, kv_dtype.itemsize, *rows_of(sizes))
    return 0, memory(sizes, Work.of(sizes, schedule, tile, num_sms))


def _check_sizes(batch: int, **positive: int) -> None:
    checks.integer(_OP, "batch", batch, low=0, high=MAX_LENGTH)
    for name, value in positive.items():
        checks.integer(_OP, name, value, low=1, high=MAX_LENGTH)
