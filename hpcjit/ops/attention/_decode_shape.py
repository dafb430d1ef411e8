"""What the parts of `attention.decode` share: its arguments by name, the sizes and strides of a call, its device faults."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

MAX_GROUP = 16
MAX_Q_LEN = 8
HEAD_DIMS = ((64, 64), (128, 128), (256, 256), (192, 128))  # (head_dim, value_head_dim)
LAYOUTS = ("NHD", "HND")
SCHEDULES = ("dynamic", "static", "invariant")
MAX_LENGTH = 2**31 - 1
MAX_TOKENS = 2**31 - 64  # that a request can have: the ends of their tiles are no more than MAX_LENGTH

# Positions that device code reports: request * table_width + column for a page id, -1 - request for a length.
FAULT_TEXT = (
    "block_table: page ids of live tokens in [0, {limit})\n"
    "seq_lens: lengths in [0, {limit}], the slots of table_width pages"
)


class DecodeArgs(NamedTuple):
    """The arguments of the schema, in its order."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor | None
    q_scale: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    sinks: torch.Tensor | None
    scale: float
    k_factor: float
    v_factor: float
    softcap: float
    capped: bool
    window: int
    max_q_len: int
    layout: str
    schedule: str
    out: torch.Tensor
    lse: torch.Tensor | None


class Paged(NamedTuple):
    """Strides, in elements, of something that lives in pages: of the two caches and their scales."""

    page: int
    slot: int
    head: int


class Rows(NamedTuple):
    """Strides, in elements, of something with a value or vector per query row and head."""

    token: int
    head: int


def paged(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """A cache, or its scales per token and head, as [num_pages, page_size, num_kv_heads, ...] whatever its layout."""
    return tensor if layout == "NHD" else tensor.transpose(1, 2)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is known of a call without its tensors."""

    batch: int
    max_q_len: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    page_size: int
    table_width: int

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def capacity(self) -> int:
        """Tokens that a request can have: lengths are clamped to [0, capacity]."""
        return min(self.table_width * self.page_size, MAX_TOKENS)


@dataclass(frozen=True, kw_only=True)
class Shape(Sizes):
    """Sizes and strides of a call that passed the checks. A stride of an axis of one element is a valid stand-in."""

    total_q: int
    ragged: bool
    num_pages: int
    table_stride: int  # from one request's row of the block table to the next
    q: Rows
    q_scale: Rows  # (0, 0) for one scale or none, likewise below
    k: Paged
    v: Paged
    k_scale: Paged
    v_scale: Paged
    out: Rows
    lse: Rows

    @classmethod
    def of(cls, a: DecodeArgs) -> Shape:
        num_pages, page_size, num_kv_heads, head_dim = paged(a.k_cache, a.layout).shape
        total_q, num_q_heads = a.q.shape[:2]
        batch, table_width = a.block_table.shape
        return cls(
            batch=batch,
            total_q=total_q,
            max_q_len=a.max_q_len,
            ragged=a.cu_seqlens_q is not None,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            value_head_dim=a.v_cache.shape[3],
            page_size=min(page_size, MAX_LENGTH),
            num_pages=min(num_pages, MAX_LENGTH + 1),
            table_width=table_width,
            table_stride=_steps(a.block_table, table_width)[0],
            q=_rows(a.q),
            q_scale=_rows(a.q_scale),
            k=_cache(a.k_cache, a.layout),
            v=_cache(a.v_cache, a.layout),
            k_scale=_scale(a.k_scale, a.layout),
            v_scale=_scale(a.v_scale, a.layout),
            out=_rows(a.out),
            lse=_rows(a.lse),
        )


def _steps(tensor: torch.Tensor, single: int) -> list[int]:
    """Strides, `single` in the place of those that nothing steps along."""
    return [single if size == 1 else step for step, size in zip(tensor.stride(), tensor.shape, strict=True)]


def _rows(tensor: torch.Tensor | None) -> Rows:
    if tensor is None or tensor.ndim == 1:
        return Rows(0, 0)
    return Rows(*_steps(tensor, tensor.shape[2] if tensor.ndim == 3 else 1)[:2])


def _cache(cache: torch.Tensor, layout: str) -> Paged:
    return Paged(*_steps(paged(cache, layout), cache.shape[3])[:3])


def _scale(scale: torch.Tensor | None, layout: str) -> Paged:
    if scale is None or scale.numel() == 1:
        return Paged(0, 0, 0)
    if scale.ndim == 1:
        return Paged(0, 0, scale.stride(0))
    return Paged(*_steps(paged(scale, layout), 0))


def alignment(tensor: torch.Tensor) -> int:
    """The largest power of two of bytes, at most 16, at whose multiples every row along the last axis begins."""
    steps = [step for step, size in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if size > 1]
    return math.gcd(16, tensor.data_ptr(), *(step * tensor.element_size() for step in steps))
