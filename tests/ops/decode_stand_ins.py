"""Stand-ins for FlashAttention-3 and FlashInfer: they compute in float64 what the peers document, from their own arguments."""

from __future__ import annotations

import math
import types
from typing import Any

import torch

HALVES = (torch.bfloat16, torch.float16)


def attend(q, k, v, scale, left=-1, cap=0.0, sinks=None):
    """`out` and natural `lse` of one request whose last query belongs to its last token; `left` tokens before it are seen."""
    first = max(len(k) - len(q) - left, 0) if left >= 0 else 0  # nobody sees the tokens before
    q, k, v = (x.double() for x in (q, k[first:], v[first:]))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    logits = torch.einsum("qhd,thd->hqt", q, k) * scale
    logits = cap * torch.tanh(logits / cap) if cap else logits
    distance = (torch.arange(len(q)) + len(k) - len(q))[:, None] - torch.arange(len(k))
    seen = (distance >= 0) & (distance <= (left if left >= 0 else len(k)))
    logits = logits.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        logits = torch.cat((logits, sinks.double()[:, None, None].expand(-1, len(q), 1)), -1)
        v = torch.cat((v, torch.zeros_like(v[:1])))
    return torch.einsum("hqt,thd->qhd", logits.softmax(-1).nan_to_num(), v), logits.logsumexp(-1).t()


def tokens(cache, pages, length):
    """The first `length` tokens of these pages, in layout NHD."""
    bits = cache.view(torch.uint8) if cache.itemsize == 1 else cache  # torch 2.8 cannot index float8 on the CPU
    return bits[pages.long()].flatten(0, 1)[:length].view(cache.dtype)


class FlashAttn:
    """The module `flash_attn_interface`."""

    def __init__(self) -> None:
        self.plans: list[tuple[Any, ...]] = []
        self.flash_attn_3_gpu = types.SimpleNamespace(fwd=self._fwd)

    def get_scheduler_metadata(self, batch, max_q, max_k, q_heads, kv_heads, dim, lens, **options):
        assert max_k % options["page_size"] == 0
        assert options["headdim_v"] == dim
        call = (batch, max_q, q_heads, kv_heads, dim, options["qkv_dtype"], options["causal"], options["window_size"])
        self.plans.append((*call, lens.tolist()))
        return torch.tensor([len(self.plans) - 1], dtype=torch.int32)

    def _fwd(self, q, k, v, *, out, cu_seqlens_q, seqused_k, max_seqlen_q, page_table, **options):
        assert q.dtype == k.dtype == v.dtype
        assert out.dtype == (q.dtype if q.dtype in HALVES else torch.bfloat16)
        batch, kv_heads, uniform = len(seqused_k), k.shape[2], cu_seqlens_q is None
        assert (q.ndim, max_seqlen_q is None) == ((4, True) if uniform else (3, False))
        window = (options["window_size_left"], options["window_size_right"])
        call = (batch, max_seqlen_q or q.shape[1], q.shape[-2], kv_heads, q.shape[-1], q.dtype)
        plan = (*call, options["is_causal"], window, seqused_k.tolist())
        assert self.plans[int(options["scheduler_metadata"])] == plan
        starts = torch.arange(batch + 1) * q.shape[1] if uniform else cu_seqlens_q
        rows, result = (q.flatten(0, 1), out.view(-1, *out.shape[2:])) if uniform else (q, out)
        lse = torch.full((rows.shape[1], len(rows)), torch.nan)
        for b, length in enumerate(seqused_k.tolist()):
            mine = slice(int(starts[b]), int(starts[b + 1]))
            kv = [tokens(x, page_table[b][: -(-length // k.shape[1])], length) for x in (k, v)]
            scales = [self._scale(options[f"{name}_descale"], (batch, kv_heads))[b] for name in "qkv"]
            y, natural = self._one(rows[mine], *kv, *scales, options["softmax_scale"], window)
            result[mine], lse[:, mine] = y.to(out.dtype), natural.t().float()
        lse = lse.unflatten(1, (batch, -1)).transpose(0, 1) if uniform else lse
        return out, lse, torch.empty(0), torch.empty(0)

    @staticmethod
    def _scale(scale, shape):
        if scale is None:
            return torch.ones(shape)
        assert (tuple(scale.shape), scale.dtype) == (shape, torch.float32)
        return scale

    @staticmethod
    def _one(q, k, v, q_scale, k_scale, v_scale, scale, window):
        assert window[1] == (0 if window[0] >= 0 else -1)
        group = q.shape[1] // k.shape[1]
        q = q.double() * q_scale.repeat_interleave(group)[:, None]
        return attend(q, k.double() * k_scale[:, None], v.double() * v_scale[:, None], scale, window[0])


class Wrapper:
    """What FlashInfer's two wrappers share; the mask is causal, which one query cannot tell from none."""

    def __init__(self, workspace, kv_layout, **options) -> None:
        assert workspace.dtype == torch.uint8
        self.layout, self.options = kv_layout, options

    def _plan(self, starts, page_starts, pages, last, q_heads, kv_heads, dim, page_size, **options):
        assert not page_starts.is_cuda
        assert (page_starts.dtype, pages.dtype, last.dtype) == (torch.int32,) * 3
        counts = page_starts.diff()
        assert len(pages) == page_starts[-1]
        self.starts, self.heads, self.plan_options = starts, (q_heads, kv_heads, dim), options
        self.lengths = (counts - 1).clamp_min(0) * page_size + last
        self.pages = pages.split(counts.tolist())

    def run(self, q, caches, *, out, lse, return_lse, v_scale):
        k, v = caches if self.layout == "NHD" else (x.transpose(1, 2) for x in caches)
        options = self.plan_options
        assert (q.dtype, k.dtype, out.dtype) == tuple(options[f"{x}_data_type"] for x in ("q", "kv", "o"))
        assert q.dtype in HALVES
        assert out.is_contiguous()
        assert (*q.shape[1:], k.shape[2]) == (self.heads[0], self.heads[2], self.heads[1])
        assert len(q) == self.starts[-1]
        assert return_lse == (lse is not None)
        for b, length in enumerate(self.lengths.tolist()):
            mine = slice(int(self.starts[b]), int(self.starts[b + 1]))
            kv = (tokens(x, self.pages[b], length) for x in (k, v))
            y, natural = attend(
                q[mine], *kv, options["sm_scale"], options["window_left"], options["logits_soft_cap"] or 0.0
            )
            out[mine] = (y * v_scale).to(out.dtype)
            if lse is not None:
                lse[mine] = (natural / math.log(2)).float()


class DecodeWrapper(Wrapper):
    def plan(self, page_starts, *args, **options):
        assert self.options == {"use_tensor_cores": True}
        self._plan(torch.arange(len(page_starts)), page_starts, *args, **options)


class PrefillWrapper(Wrapper):
    def plan(self, starts, *args, causal, head_dim_vo, **options):
        assert causal
        self._plan(starts, *args, **options)


def xqa(
    q, caches, workspace, block_tables, seq_lens, max_seq_len, bmm1_scale, bmm2_scale, window_left, out, sinks,
    kv_layout, q_len_per_req, mask,
):  # fmt: skip
    """`flashinfer.decode.xqa_batch_decode_with_kv_cache`; the mask has to be the causal one."""
    k, v = caches if kv_layout == "NHD" else (x.transpose(1, 2) for x in caches)
    batch = len(seq_lens)
    assert all(x.is_contiguous() for x in (q, block_tables, out))
    assert max_seq_len == block_tables.shape[1] * k.shape[1]
    assert q.dtype == out.dtype
    assert (mask is None) == (q_len_per_req == 1)
    if mask is not None:
        assert (mask.dtype, tuple(mask.shape)) == (torch.uint16, (batch, q_len_per_req, 2))
        bits = mask.view(torch.int16).int() & 0xFFFF
        assert (bits[..., 0] == (2 << torch.arange(q_len_per_req)) - 1).all()
        assert (bits[..., 1] == 0).all()
    for b, length in enumerate(seq_lens.tolist()):
        kv = (tokens(x, block_tables[b][: -(-length // k.shape[1])], length) for x in (k, v))
        mine = slice(b * q_len_per_req, (b + 1) * q_len_per_req)
        y, _ = attend(q[mine], *kv, bmm1_scale, window_left, sinks=sinks)
        out.view(-1, *q.shape[1:])[mine] = (y * bmm2_scale).to(out.dtype)


FLASHINFER = {
    ("decode", "BatchDecodeWithPagedKVCacheWrapper"): DecodeWrapper,
    ("decode", "xqa_batch_decode_with_kv_cache"): xqa,
    ("prefill", "BatchPrefillWithPagedKVCacheWrapper"): PrefillWrapper,
}
