"""Batches for the tests of `attention.decode`: everything that no live token owns is NaN, or a page id that is not one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hpcjit import numerics
from hpcjit.cases import Args, Maker
from hpcjit.ops.attention._decode import decode_op
from hpcjit.ops.attention._decode_shape import DecodeArgs, paged

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


@dataclass(frozen=True)
class Batch:
    """A decode batch, described. Call it with a `Maker` to get the operator's arguments."""

    lengths: Sequence[int]
    q_lens: int | tuple[int, ...] = 1  # of every request, or of each one (cu_seqlens_q)
    kv_heads: int = 2
    group: int = 4
    head_dim: int = 128
    value_head_dim: int = 0  # 0: head_dim
    page: int = 64
    dtype: torch.dtype = BF16  # of q
    cache: torch.dtype | None = None  # None: that of q
    out: torch.dtype | None = None
    layout: str = "NHD"
    q_scale: str = ""  # "", "tensor" or "row"
    k_scale: str = ""  # "", "number", "tensor", "head" or "token"
    v_scale: str = ""
    scale: float = 0.0  # 0: head_dim ** -0.5
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    schedule: str = "dynamic"
    lse: bool = True
    views: str = ""  # "", "joint" caches, "fused" q, "spaced" outputs and table
    more_width: int = 0  # of the table than the longest request needs
    dead_id: int = -1

    def but(self, **changed: Any) -> Batch:
        return dataclasses.replace(self, **changed)

    @property
    def num_q_heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def rows_of(self) -> list[int]:
        """Query rows of each request."""
        return [self.q_lens] * len(self.lengths) if isinstance(self.q_lens, int) else list(self.q_lens)

    def __call__(self, m: Maker) -> Args:
        value_dim, cache = self.value_head_dim or self.head_dim, self.cache or self.dtype
        counts = [-(-length // self.page) for length in self.lengths]
        num_pages = sum(counts) + 2
        rows = sum(self.rows_of) + (0 if isinstance(self.q_lens, int) else 3)  # ragged: the last 3 belong to nobody
        table = self._table(m, counts, num_pages)
        caches = self._caches(m, num_pages, value_dim, cache)
        live = self._live(table) if m.device.type != "meta" else None
        if live is not None:
            for tensor in caches:
                paged(tensor, self.layout)[live] = m.normal(len(live[0]), *_tail(tensor, self.layout), dtype=cache)
        k_scale, k_factor = self._scale(m, self.k_scale, num_pages, live)
        v_scale, v_factor = self._scale(m, self.v_scale, num_pages, live)
        q_scale = m.normal(*((rows, self.num_q_heads) if self.q_scale == "row" else (1,)), dtype=FP32).abs() + 0.5
        sinks = m.normal(self.num_q_heads, dtype=FP32) if self.sinks else None
        out, lse = self._outputs(m, rows, value_dim)
        scale = self.scale or self.head_dim**-0.5
        return (
            *(self._queries(m, rows), *caches, table, self._int32(m, self.lengths), self._starts(m)),
            *(q_scale if self.q_scale else None, k_scale, v_scale, sinks, scale, k_factor, v_factor),
            *(self.softcap or 1.0, bool(self.softcap), self.window, max(self.rows_of, default=1)),
            *(self.layout, self.schedule, out, lse),
        )

    def named(self, m: Maker) -> DecodeArgs:
        return DecodeArgs(*self(m))

    def _int32(self, m: Maker, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=m.device)

    def _starts(self, m: Maker) -> torch.Tensor | None:
        if isinstance(self.q_lens, int):
            return None
        return self._int32(m, [sum(self.q_lens[:i]) for i in range(len(self.q_lens) + 1)])

    def first_page(self, request: int) -> int:
        """The first page that a row of this request sees."""
        if not self.window:
            return 0
        return max(self.lengths[request] - self.rows_of[request] + 1 - self.window, 0) // self.page

    def _table(self, m: Maker, counts: list[int], num_pages: int) -> torch.Tensor:
        width = max([*counts, 1]) + self.more_width
        spaced = 7 if self.views == "spaced" else 0
        storage = torch.full((len(counts), width + spaced), self.dead_id, dtype=torch.int32, device=m.device)
        table, pages = storage[:, :width], m.permutation(num_pages, dtype=torch.int32)
        begin = 0
        for request, count in enumerate(counts):
            first = self.first_page(request)
            table[request, first:count] = pages[begin + first : begin + count]
            begin += count
        return table

    def _live(self, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Page and slot of every token from the first page that is seen."""
        pages, slots = [], []
        for request, length in enumerate(self.lengths):
            tokens = torch.arange(self.first_page(request) * self.page, length, device=table.device)
            pages.append(table[request][tokens // self.page].long())
            slots.append(tokens % self.page)
        empty = [torch.zeros(0, dtype=torch.int64, device=table.device)]
        return torch.cat(pages + empty), torch.cat(slots + empty)

    def _axes(self, *inner: int) -> tuple[int, ...]:
        axes = (self.page, self.kv_heads) if self.layout == "NHD" else (self.kv_heads, self.page)
        return (*axes, *inner)

    def _caches(self, m: Maker, num_pages: int, value_dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
        if self.views == "joint":
            both = m.poison(num_pages, 2, *self._axes(self.head_dim), dtype=dtype)
            return [both[:, 0], both[:, 1]]
        return [m.poison(num_pages, *self._axes(dim), dtype=dtype) for dim in (self.head_dim, value_dim)]

    def _queries(self, m: Maker, rows: int) -> torch.Tensor:
        if self.views == "fused":
            heads = self.num_q_heads + 2 * self.kv_heads
            return m.normal(rows, heads, self.head_dim, dtype=self.dtype)[:, self.kv_heads : -self.kv_heads]
        return m.normal(rows, self.num_q_heads, self.head_dim, dtype=self.dtype)

    def _scale(self, m: Maker, kind: str, num_pages: int, live: Any) -> tuple[torch.Tensor | None, float]:
        if kind in ("", "number"):
            return None, 0.375 if kind else 1.0
        if kind != "token":
            return m.normal(self.kv_heads if kind == "head" else 1, dtype=FP32).abs() + 0.25, 1.0
        scale = m.poison(num_pages, *self._axes(), dtype=FP32)
        if live is not None:
            paged(scale, self.layout)[live] = m.normal(len(live[0]), self.kv_heads, dtype=FP32).abs() + 0.25
        return scale, 1.0

    def _outputs(self, m: Maker, rows: int, value_dim: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        dtype = self.out or (BF16 if self.dtype == FP8 else self.dtype)
        spaced = self.views == "spaced"
        out = m.poison(rows, self.num_q_heads + spaced, value_dim + 3 * spaced, dtype=dtype)
        out = out[:, : self.num_q_heads, :value_dim]
        if not self.lse:
            return out, None
        return out, m.poison(self.num_q_heads, rows, dtype=FP32).t() if spaced else m.poison(
            rows, self.num_q_heads, dtype=FP32
        )


def _tail(cache: torch.Tensor, layout: str) -> tuple[int, ...]:
    return tuple(paged(cache, layout).shape[2:])


# --- running and judging --------------------------------------------------------------------------------------------


def forward(device: torch.device | str) -> Callable[..., None]:
    """Our kernel on a GPU, the reference elsewhere."""
    return decode_op.forward_jit if torch.device(device).type == "cuda" else decode_op.forward_native


def run(args: Sequence[Any]) -> DecodeArgs:
    """Poison the outputs, run, and return the arguments by name."""
    a = DecodeArgs(*args)
    for output in (a.out, a.lse):
        if output is not None:
            output.fill_(torch.nan)
    forward(a.q.device)(*a)
    return a


def judge(args: Sequence[Any]) -> None:
    """The rule of numerics, against the reference."""
    for deviation in numerics.check(decode_op, tuple(args), forward(args[0].device)):
        assert deviation.ok, str(deviation)


def outputs(batch: Batch, m: Maker) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of `out` and `lse` of a run."""
    a = run(batch(m))
    assert a.lse is not None
    return a.out.clone(), a.lse.clone()


def alone(args: Sequence[Any], request: int) -> DecodeArgs:
    """One request of a uniform batch as a call of its own, on the same pool."""
    a = DecodeArgs(*args)
    rows = slice(request * a.max_q_len, (request + 1) * a.max_q_len)
    changed = {"q": a.q[rows], "out": torch.empty_like(a.out[rows])}
    changed |= {"block_table": a.block_table[request : request + 1], "seq_lens": a.seq_lens[request : request + 1]}
    if a.q_scale is not None and a.q_scale.ndim > 1:
        changed["q_scale"] = a.q_scale[rows]
    if a.lse is not None:
        changed["lse"] = torch.empty_like(a.lse[rows])
    return a._replace(**changed)


# --- the definition, spelled out ------------------------------------------------------------------------------------


def spelled_out(a: DecodeArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """`out` and `lse` in float64, token by token, as the docstring defines them; NaN in rows that nobody owns."""
    out = torch.full(a.out.shape, torch.nan, dtype=torch.float64)
    lse = torch.full(a.out.shape[:2], torch.nan, dtype=torch.float64)
    batch = a.seq_lens.shape[0]
    starts = [i * a.max_q_len for i in range(batch + 1)] if a.cu_seqlens_q is None else a.cu_seqlens_q.tolist()
    for request in range(batch):
        q_len, seq_len = starts[request + 1] - starts[request], int(a.seq_lens[request])
        for j in range(q_len):
            position = seq_len - q_len + j
            seen = [t for t in range(seq_len) if t <= position and (not a.window or t > position - a.window)]
            for head in range(a.q.shape[1]):
                _one_row(a, request, starts[request] + j, head, seen, out, lse)
    return out, lse


def _one_row(a: DecodeArgs, request: int, row: int, head: int, seen: list[int], out, lse) -> None:
    kv_head = head // (a.q.shape[1] // paged(a.k_cache, a.layout).shape[2])
    q = a.q[row, head].double()
    if a.q_scale is not None:
        q = q * (a.q_scale[0] if a.q_scale.ndim == 1 else a.q_scale[row, head]).double()
    logits = [] if a.sinks is None else [a.sinks[head].double()]
    values = [] if a.sinks is None else [torch.zeros(a.out.shape[2], dtype=torch.float64)]
    for token in seen:
        k = _at(a, a.k_cache, a.k_scale, a.k_factor, request, token, kv_head)
        logit = a.scale * (q * k).sum()
        logits.append(a.softcap * torch.tanh(logit / a.softcap) if a.capped else logit)
        values.append(_at(a, a.v_cache, a.v_scale, a.v_factor, request, token, kv_head))
    if not logits:
        out[row, head], lse[row, head] = 0.0, -torch.inf
        return
    total = torch.stack(logits)
    out[row, head] = total.softmax(0) @ torch.stack(values)
    lse[row, head] = total.logsumexp(0)


def _at(a: DecodeArgs, cache: torch.Tensor, scale, factor: float, request: int, token: int, head: int) -> torch.Tensor:
    page_size = paged(cache, a.layout).shape[1]
    page, slot = int(a.block_table[request, token // page_size]), token % page_size
    vector = (cache[page, slot, head] if a.layout == "NHD" else cache[page, head, slot]).double() * factor
    if scale is None:
        return vector
    if scale.ndim == 1:
        return vector * scale[head if scale.numel() > 1 else 0].double()
    return vector * (scale[page, slot, head] if a.layout == "NHD" else scale[page, head, slot]).double()
