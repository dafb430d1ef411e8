"""`attention.decode` in plain torch, request by request: float32, or float64 for outputs in float64."""

from __future__ import annotations

import torch

from hpcjit import settings
from hpcjit.jit_op import raise_fault
from hpcjit.ops._tensors import accumulation_dtype
from hpcjit.ops.attention._decode_shape import FAULT_TEXT, DecodeArgs, Shape, paged


def attend(op: str, a: DecodeArgs) -> None:
    """Write `out` and `lse`. Only live tokens are gathered, so nothing else of pool or table can matter."""
    shape = Shape.of(a)
    lengths = a.seq_lens.tolist()
    if settings.read().debug:
        _raise_first_fault(op, a, shape, lengths)
    starts = (a.cu_seqlens_q.clamp(0, shape.total_q) if a.cu_seqlens_q is not None else _uniform(shape)).tolist()
    for request, length in enumerate(lengths):
        first = starts[request]
        q_len = min(starts[request + 1] - first, shape.max_q_len)
        if q_len > 0:
            _attend_one(a, shape, request, min(max(length, 0), shape.capacity), slice(first, first + q_len))


def _uniform(shape: Shape) -> torch.Tensor:
    return torch.arange(shape.batch + 1) * shape.max_q_len


def _attend_one(a: DecodeArgs, shape: Shape, request: int, length: int, rows: slice) -> None:
    dtype = accumulation_dtype(a.out.dtype)
    q = _queries(a, rows, dtype)
    q_len = q.shape[0]
    begin = max(length - q_len + 1 - a.window, 0) if a.window else 0
    pages, slots = _live_slots(a.block_table[request], begin, length, shape)
    k = _gathered(a.k_cache, a.k_scale, a.k_factor, a.layout, pages, slots, dtype)
    v = _gathered(a.v_cache, a.v_scale, a.v_factor, a.layout, pages, slots, dtype)

    grouped = q.unflatten(1, (shape.num_kv_heads, shape.group)).permute(1, 2, 0, 3).flatten(1, 2)
    logits = (grouped @ k.transpose(1, 2) * a.scale).view(shape.num_kv_heads, shape.group, q_len, -1)
    if a.capped:
        logits = a.softcap * torch.tanh(logits / a.softcap)
    logits = logits.masked_fill(~_visible(q_len, begin, length, a.window, q.device), -torch.inf)

    sinks = torch.full((shape.num_q_heads,), -torch.inf, dtype=dtype, device=q.device)
    if a.sinks is not None:
        sinks = a.sinks.to(dtype)
    sinks = sinks.view(shape.num_kv_heads, shape.group, 1, 1)
    top = torch.cat((logits, sinks.expand(-1, -1, q_len, -1)), dim=-1).amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0.0)  # a row that sees nothing
    weights = torch.exp(logits - top)
    total = weights.sum(-1, keepdim=True) + torch.exp(sinks - top)
    out = (weights.flatten(1, 2) @ v).view(*weights.shape[:3], -1) / total.masked_fill(total == 0, 1.0)
    a.out[rows] = out.permute(2, 0, 1, 3).flatten(1, 2).to(a.out.dtype)
    if a.lse is not None:
        lse = (top + torch.log(total)).squeeze(-1)
        a.lse[rows] = lse.permute(2, 0, 1).flatten(1, 2).to(a.lse.dtype)


def _queries(a: DecodeArgs, rows: slice, dtype: torch.dtype) -> torch.Tensor:
    q = a.q[rows].to(dtype)
    if a.q_scale is None:
        return q
    return q * (a.q_scale if a.q_scale.ndim == 1 else a.q_scale[rows].unsqueeze(-1)).to(dtype)


def _live_slots(table: torch.Tensor, begin: int, end: int, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """Page and slot of each token in [begin, end); a page id that is out of range is clamped, so that nothing crashes."""
    positions = torch.arange(begin, end, device=table.device)
    pages = table[positions // shape.page_size].long().clamp(0, shape.num_pages - 1)
    return pages, positions % shape.page_size


def _gathered(
    cache: torch.Tensor,
    scale: torch.Tensor | None,
    factor: float,
    layout: str,
    pages: torch.Tensor,
    slots: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`[num_kv_heads, tokens, dim]` of these slots, with the scale applied."""
    bytes_only = cache.dtype == torch.float8_e4m3fn  # which torch 2.8 cannot index on a CPU
    values = paged(cache.view(torch.uint8) if bytes_only else cache, layout)[pages, slots]
    values = values.view(cache.dtype).to(dtype).transpose(0, 1)
    if scale is None:
        return values * factor
    if scale.ndim == 3:
        return values * (factor * paged(scale, layout)[pages, slots].to(dtype).t().unsqueeze(-1))
    return values * (factor * scale.to(dtype)).view(-1, 1, 1)


def _visible(q_len: int, begin: int, end: int, window: int, device: torch.device) -> torch.Tensor:
    """`[q_len, tokens]`: row j sees the tokens before `end - q_len + j + 1`, with a window only the last ones of them."""
    positions = torch.arange(begin, end, device=device)
    limits = torch.arange(end - q_len + 1, end + 1, device=device).unsqueeze(-1)
    visible = positions < limits
    return visible & (positions >= limits - window) if window else visible


# --- debug mode -----------------------------------------------------------------------------------------------------


def _raise_first_fault(op: str, a: DecodeArgs, shape: Shape, lengths: list[int]) -> None:
    """Raise what device code reports in debug mode: the first bad length or, if there is none, the first bad page id."""
    bad = [request for request, length in enumerate(lengths) if not 0 <= length <= shape.capacity]
    if bad:
        raise_fault(op, FAULT_TEXT, [len(bad), -1 - bad[0], lengths[bad[0]], shape.capacity], shape.table_width)
    columns = torch.arange(shape.table_width, device=a.block_table.device)
    end = (a.seq_lens.long() + shape.page_size - 1) // shape.page_size
    live = columns < end.unsqueeze(-1)
    if a.window:
        live &= columns >= (_first_tokens(a, shape) // shape.page_size).unsqueeze(-1)
    wrong = (live & ((a.block_table < 0) | (a.block_table >= shape.num_pages))).flatten().nonzero().flatten()
    if wrong.numel():
        position = int(wrong[0])
        value = int(a.block_table[position // shape.table_width, position % shape.table_width])
        raise_fault(op, FAULT_TEXT, [wrong.numel(), position, value, shape.num_pages], shape.table_width)


def _first_tokens(a: DecodeArgs, shape: Shape) -> torch.Tensor:
    """The first token that a row of each request sees."""
    q_lens = shape.max_q_len if a.cu_seqlens_q is None else a.cu_seqlens_q.diff().clamp(0, shape.max_q_len).long()
    return (a.seq_lens.long() - q_lens + 1 - a.window).clamp_min(0)
