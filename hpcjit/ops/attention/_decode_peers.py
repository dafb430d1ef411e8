"""`attention.decode` on FlashAttention-3 and FlashInfer: the result that we define, computed by them, or a refusal.

Both plan a batch before they attend: FlashInfer on the CPU, from lengths that it reads from the device, FlashAttention-3 in a
kernel. A server plans once per step, for all of its layers. Here a plan is kept as long as the tensors of a call live and
those that it was made from are not written, so that a repeated call, one in a CUDA graph above all, attends and does nothing
else. That favours the peers: our schedule is part of every call, theirs is wrong once lengths change between replays.

Part of a plan is also what our arguments have to be turned into: lists of pages, scales as numbers of the host, and, for
FlashInfer, float8 queries as 16-bit ones. The workspaces are shared by all calls on a device: use one stream.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hpcjit.ops import _peers
from hpcjit.ops.attention._decode_shape import DecodeArgs, Shape, paged
from hpcjit.spec import KernelBackend

FP8 = torch.float8_e4m3fn
XQA_PAGES = (16, 32, 64, 128)

_Plan = tuple[list[int], Any, list[weakref.ref[torch.Tensor]]]
_plans: dict[tuple[Any, ...], _Plan] = {}


def _planned(make: Callable[[str, DecodeArgs], Any], op: str, a: DecodeArgs) -> Any:
    """`make(op, a)`, kept until a tensor of `a` goes or one of those that a plan depends on is written through torch."""
    key = (make, *(id(value) if isinstance(value, torch.Tensor) else value for value in a))
    sources = (a.q, a.block_table, a.seq_lens, a.cu_seqlens_q, a.q_scale, a.k_scale, a.v_scale)
    versions = [_version(tensor) for tensor in sources if tensor is not None]
    found = _plans.get(key)
    if found is not None and found[0] == versions and -1 not in versions:
        return found[1]
    made = make(op, a)
    watched = [weakref.ref(value, lambda _: _plans.pop(key, None)) for value in a if isinstance(value, torch.Tensor)]
    _plans[key] = (versions, made, watched)
    return made


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version  # nobody counts what is written to an inference tensor


# --- FlashAttention-3 -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _FlashAttnPlan:
    metadata: torch.Tensor
    rows: int  # of q that belong to requests
    q_descale: torch.Tensor | None
    k_descale: torch.Tensor | None
    v_descale: torch.Tensor | None


def flash_attn(op: str, a: DecodeArgs) -> None:
    """Through the function below `flash_attn_with_kvcache`, which takes `out`: the result needs no copy."""
    if not a.out.numel():
        return
    plan: _FlashAttnPlan = _planned(_plan_flash_attn, op, a)
    q, out = a.q, a.out
    if a.cu_seqlens_q is None:
        q, out = (x.unflatten(0, (a.seq_lens.shape[0], a.max_q_len)) for x in (q, out))
    _, lse, *_ = _peers.flash_attn("flash_attn_3_gpu").fwd(
        q,
        *(paged(cache, a.layout) for cache in (a.k_cache, a.v_cache)),
        out=out,
        cu_seqlens_q=a.cu_seqlens_q,
        seqused_k=a.seq_lens,
        max_seqlen_q=None if a.cu_seqlens_q is None else a.max_q_len,
        page_table=a.block_table,
        q_descale=plan.q_descale,
        k_descale=plan.k_descale,
        v_descale=plan.v_descale,
        softmax_scale=a.scale * a.k_factor,
        is_causal=a.max_q_len > 1,
        window_size_left=a.window - 1,
        window_size_right=0 if a.window else -1,
        scheduler_metadata=plan.metadata,
    )
    if a.lse is not None:
        # [batch, num_q_heads, q_len], or [num_q_heads, total_q] of ragged requests
        rows = lse.transpose(-2, -1).reshape(a.lse.shape)[: plan.rows]
        a.lse[: plan.rows].copy_(rows)


def _plan_flash_attn(op: str, a: DecodeArgs) -> _FlashAttnPlan:
    _check_flash_attn(op, a)
    shape = Shape.of(a)
    heads = (shape.batch, shape.num_kv_heads)
    metadata = _peers.flash_attn("get_scheduler_metadata")(
        *(shape.batch, shape.max_q_len, shape.table_width * shape.page_size),
        *(shape.num_q_heads, shape.num_kv_heads, shape.head_dim, a.seq_lens),
        qkv_dtype=a.q.dtype,
        headdim_v=shape.value_head_dim,
        cu_seqlens_q=a.cu_seqlens_q,
        page_size=shape.page_size,
        causal=a.max_q_len > 1,
        window_size=(a.window - 1, 0 if a.window else -1),
    )
    v_scale = a.v_scale
    if a.v_factor != 1:  # that of K is part of the scale of the logits
        v_scale = a.v_factor * (torch.ones(1, device=a.q.device) if v_scale is None else v_scale)
    return _FlashAttnPlan(
        metadata,
        shape.total_q if a.cu_seqlens_q is None else int(a.cu_seqlens_q[-1]),
        *(None if scale is None else scale.flatten().expand(heads) for scale in (a.q_scale, a.k_scale, v_scale)),
    )


def _check_flash_attn(op: str, a: DecodeArgs) -> None:
    no = functools.partial(_peers.refuse, op, KernelBackend.FLASH_ATTN)
    if a.q.dtype != a.k_cache.dtype:
        no("it takes q and a cache of one dtype")
    if a.out.dtype != (torch.bfloat16 if a.q.dtype == FP8 else a.q.dtype):
        no("it gives bfloat16 for float8, and otherwise the dtype of q")
    if a.k_cache.shape[3] != a.v_cache.shape[3]:
        no("it is built without a value_head_dim of its own")
    if a.capped or a.sinks is not None:
        no("it is built without softcap, and its sinks are bfloat16")
    if a.q_scale is not None and a.q_scale.numel() > 1:
        no("it takes a scale of q per request and KV head, not per token and head")
    if any(scale is not None and scale.ndim > 1 and scale.numel() > 1 for scale in (a.k_scale, a.v_scale)):
        no("it takes scales per KV head, not per token")
    _check_schedule(no, a)


def _check_schedule(no: Callable[[str], Any], a: DecodeArgs) -> None:
    if a.schedule == "invariant":
        no("it has no schedule 'invariant'")


# --- FlashInfer -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _FlashInferPlan:
    wrapper: Any  # of FlashInfer, planned
    q: torch.Tensor  # in 16 bits, the rows that belong to requests
    v_scale: float


def flashinfer(op: str, a: DecodeArgs) -> None:
    """The kernels for tensor cores, planned for just these lengths: the graph mode would leave room for longer ones.

    A scale of V other than 1 costs FlashInfer a pass over the result, and `lse`, which it gives to base 2, costs us one.
    """
    if not a.out.numel():
        return
    plan: _FlashInferPlan = _planned(_plan_flashinfer, op, a)
    rows = plan.q.shape[0]
    lse = None if a.lse is None else a.lse[:rows]
    options = {"out": a.out[:rows], "lse": lse, "return_lse": lse is not None, "v_scale": plan.v_scale}
    plan.wrapper.run(plan.q, (a.k_cache, a.v_cache), **options)
    if lse is not None:
        lse.mul_(math.log(2))


def _plan_flashinfer(op: str, a: DecodeArgs) -> _FlashInferPlan:
    no = functools.partial(_peers.refuse, op, KernelBackend.FLASHINFER)
    if a.sinks is not None:
        no("its kernels for tensor cores have no sinks")
    if not a.out.is_contiguous() or (a.lse is not None and not a.lse.is_contiguous()):
        no("it writes contiguous results")
    _check_flashinfer(no, a)
    shape = Shape.of(a)
    lengths, starts = _lengths(no, a, shape), _starts(a, shape)
    counts = (lengths + shape.page_size - 1) // shape.page_size
    live = torch.arange(shape.table_width) < counts.unsqueeze(1)
    page_starts = torch.cat((torch.zeros(1, dtype=torch.int32), counts.cumsum(0, dtype=torch.int32)))
    pages = (
        page_starts,
        a.block_table[live.to(a.block_table.device)].clamp_min(0),  # there may be no page before a window
        lengths - (counts - 1).clamp_min(0) * shape.page_size,
    )
    heads = (shape.num_q_heads, shape.num_kv_heads, shape.head_dim, shape.page_size)
    q, scale, v_scale = _sixteen_bits(no, a)
    options = {
        "window_left": a.window - 1,
        "logits_soft_cap": a.softcap if a.capped else None,
        "q_data_type": q.dtype,
        "kv_data_type": a.k_cache.dtype,
        "o_data_type": a.out.dtype,
        "sm_scale": scale,
    }
    workspace = _workspace("flashinfer", a.q.device, 2**29)
    if a.cu_seqlens_q is None and a.max_q_len == 1 and shape.head_dim == shape.value_head_dim:
        wrapper = _peers.flashinfer("decode", "BatchDecodeWithPagedKVCacheWrapper")(
            workspace, a.layout, use_tensor_cores=True
        )
        wrapper.plan(*pages, *heads, **options)
    else:
        wrapper = _peers.flashinfer("prefill", "BatchPrefillWithPagedKVCacheWrapper")(workspace, a.layout)
        wrapper.plan(starts, *pages, *heads, head_dim_vo=shape.value_head_dim, causal=True, **options)
    return _FlashInferPlan(wrapper, q[: int(starts[-1])], v_scale)


def _check_flashinfer(no: Callable[[str], Any], a: DecodeArgs) -> None:
    """What holds for both kinds of its kernels."""
    if a.q.dtype not in (FP8, a.out.dtype):
        no("it gives the dtype of q")
    if any(scale is not None and scale.numel() > 1 for scale in (a.k_scale, a.v_scale)):
        no("it takes one scale of K and one of V")
    _check_schedule(no, a)


def _starts(a: DecodeArgs, shape: Shape) -> torch.Tensor:
    """The first row of each request, and the end, on the CPU."""
    if a.cu_seqlens_q is not None:
        return a.cu_seqlens_q.cpu()
    return torch.arange(shape.batch + 1, dtype=torch.int32) * shape.max_q_len


def _lengths(no: Callable[[str], Any], a: DecodeArgs, shape: Shape) -> torch.Tensor:
    """The live lengths, on the CPU."""
    lengths = a.seq_lens.cpu().clamp(0, shape.capacity)
    if bool((lengths < _starts(a, shape).diff()).any()):
        no("it takes requests with at least as many tokens as queries")
    return lengths


def _sixteen_bits(no: Callable[[str], Any], a: DecodeArgs) -> tuple[torch.Tensor, float, float]:
    """The queries in 16 bits, and the scales of logits and result. Only a scale of q per token and head is rounded."""
    q, scale = a.q, a.scale * a.k_factor * _number(a.k_scale)
    if a.q.dtype == FP8:
        q = a.q.to(a.out.dtype)
        if a.q_scale is not None and a.q_scale.numel() > 1:
            q = (a.q.float() * a.q_scale.unsqueeze(-1)).to(a.out.dtype)
        else:
            scale *= _number(a.q_scale)
    return q, scale, a.v_factor * _number(a.v_scale)


def _number(scale: torch.Tensor | None) -> float:
    return 1.0 if scale is None else float(scale.item())


@functools.cache
def _workspace(of: str, device: torch.device, size: int) -> torch.Tensor:
    """Scratch, zero at first, as counters in it have to be."""
    return torch.zeros(size, dtype=torch.uint8, device=device)


# --- XQA ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _XqaPlan:
    q: torch.Tensor
    scale: float
    v_scale: float
    mask: torch.Tensor | None


def flashinfer_xqa(op: str, a: DecodeArgs) -> None:
    """With a float8 cache, XQA rounds queries to float8 (float8 ones keep their values) and probabilities too."""
    if not a.out.numel():
        return
    plan: _XqaPlan = _planned(_plan_xqa, op, a)
    _peers.flashinfer("decode", "xqa_batch_decode_with_kv_cache")(
        plan.q,
        (a.k_cache, a.v_cache),
        _workspace("xqa", a.q.device, 2**27),
        a.block_table,
        a.seq_lens,
        a.block_table.shape[1] * paged(a.k_cache, a.layout).shape[1],
        bmm1_scale=plan.scale,
        bmm2_scale=plan.v_scale,
        window_left=a.window - 1,
        out=a.out.unflatten(0, (-1, a.max_q_len)) if a.max_q_len > 1 else a.out,
        sinks=a.sinks,
        kv_layout=a.layout,
        q_len_per_req=a.max_q_len,
        mask=plan.mask,
    )


def _plan_xqa(op: str, a: DecodeArgs) -> _XqaPlan:
    no = functools.partial(_peers.refuse, op, KernelBackend.FLASHINFER_XQA)
    shape = Shape.of(a)
    if shape.page_size not in XQA_PAGES:
        no(f"it takes pages of {', '.join(map(str, XQA_PAGES))} slots")
    if a.cu_seqlens_q is not None or (a.window and a.max_q_len > 1):
        no("it takes the same number of queries of each request, and with a window one")
    if a.capped or a.lse is not None:
        no("it has no softcap and no lse")
    if a.k_cache.stride() != a.v_cache.stride() or shape.head_dim != shape.value_head_dim:
        no("it takes caches of K and V with the same strides")
    if not all(tensor.is_contiguous() for tensor in (a.q, a.block_table, a.out)):
        no("it takes contiguous q, block_table and out")
    _check_flashinfer(no, a)
    _lengths(no, a, shape)
    q, scale, v_scale = _sixteen_bits(no, a)
    return _XqaPlan(q, scale, v_scale, _causal_bits(shape, a.q.device) if a.max_q_len > 1 else None)


def _causal_bits(shape: Shape, device: torch.device) -> torch.Tensor:
    """For each query a bit per new token that it sees, in words of 32 given as halves: [batch, q_len, 2]."""
    words = (2 << torch.arange(shape.max_q_len, dtype=torch.int32, device=device)) - 1
    return words.expand(shape.batch, -1).contiguous().unsqueeze(-1).view(torch.uint16)
