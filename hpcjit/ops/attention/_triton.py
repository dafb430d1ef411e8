"""Triton baseline of the attention group: split-KV decode with a number of splits that the shapes fix.

A first kernel gives every (request, KV head) the same number of programs, which share its live tokens in equal parts; a
second one merges what they found. A batch with one long request waits for it: that is what a schedule has to beat.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from hpcjit.ops._triton import refuse
from hpcjit.ops.attention._decode_shape import DecodeArgs, Shape

BLOCK = 64  # tokens of one step
MAX_SPLITS = 256
MAX_TOKENS = 2**30  # of a request: token numbers have 32 bits
HOPPER_SMS = 132

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _tanh(x):
    """By its series near 0, where `1 - exp` would lose digits."""
    z = x * x
    y = -1382.0 / 155925.0 + z * (21844.0 / 6081075.0 + z * (-929569.0 / 638512875.0))
    y = -17.0 / 315.0 + z * (62.0 / 2835.0 + z * y)
    y = 1.0 + z * (-1.0 / 3.0 + z * (2.0 / 15.0 + z * y))
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(x) < 0.5, x * y, tl.where(x < 0, -far, far))


@triton.jit
def _bounds(request, query, seq_lens, cu_seqlens_q, capacity, window, Q_LEN: tl.constexpr):
    """The request's first row of q, its number of rows, its tokens [low, high), and those that each row sees."""
    length = tl.minimum(tl.maximum(tl.load(seq_lens + request), 0), capacity)
    first = request * Q_LEN
    q_len = Q_LEN
    if cu_seqlens_q is not None:
        first = tl.load(cu_seqlens_q + request)
        q_len = tl.minimum(tl.load(cu_seqlens_q + request + 1) - first, Q_LEN)
    end = tl.where(query < q_len, length - q_len + query + 1, 0)
    # A window may be as large as an int32, so nothing negative may lose it.
    begin = tl.where(window > 0, tl.maximum(tl.maximum(end, 0) - window, 0), 0)
    low = tl.where(window > 0, tl.maximum(tl.maximum(length - q_len + 1, 0) - window, 0), 0)
    return first.to(tl.int64), q_len, low, length, begin, end


@triton.jit
def _split_kernel(
    q,
    k_cache,
    v_cache,
    block_table,
    seq_lens,
    cu_seqlens_q,  # or None, as the scales
    q_scale,
    k_scale,
    v_scale,
    products,  # [splits, total_q, num_q_heads, value_head_dim]: what each split has summed
    peaks,  # [splits, total_q, num_q_heads]: the largest logit, in units of log 2
    sums,  # the same of exponentials
    scale,
    softcap,
    window,
    capacity,
    page_size,
    total_q,
    head_dim,
    value_head_dim,
    table_stride,
    q_token_stride,
    q_head_stride,
    q_scale_token_stride,
    q_scale_head_stride,
    k_page_stride,
    k_slot_stride,
    k_head_stride,
    v_page_stride,
    v_slot_stride,
    v_head_stride,
    k_scale_page_stride,
    k_scale_slot_stride,
    k_scale_head_stride,
    v_scale_page_stride,
    v_scale_slot_stride,
    v_scale_head_stride,
    GROUP: tl.constexpr,
    Q_LEN: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    CAPPED: tl.constexpr,
    KEY_TYPE: tl.constexpr,  # in which logits and sums of values are multiplied; both hold e4m3 exactly
    VALUE_TYPE: tl.constexpr,
):
    request = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    num_kv_heads = tl.num_programs(1)
    row = tl.arange(0, ROWS)
    query = row // GROUP
    first, q_len, low, high, begin, end = _bounds(request, query, seq_lens, cu_seqlens_q, capacity, window, Q_LEN)
    share = tl.cdiv(tl.cdiv(high - low, tl.num_programs(2)), TOKENS) * TOKENS
    low = low + split * share
    high = tl.minimum(low + share, high)

    real = query < q_len
    token = first + query
    head = kv_head * GROUP + row % GROUP
    column = tl.arange(0, DIM)
    value_column = tl.arange(0, VALUE_DIM)
    q += token[:, None] * q_token_stride + head[:, None] * q_head_stride + column[None, :]
    queries = tl.load(q, mask=real[:, None] & (column < head_dim)[None, :], other=0.0).to(KEY_TYPE)
    factor = tl.full([ROWS], 1.0, tl.float32) * scale
    if q_scale is not None:
        factor *= tl.load(q_scale + token * q_scale_token_stride + head * q_scale_head_stride, mask=real, other=0.0)

    peak = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    product = tl.zeros([ROWS, VALUE_DIM], tl.float32)
    for position in range(low, high, TOKENS):
        tokens = position + tl.arange(0, TOKENS)
        live = tokens < high
        page = tl.load(block_table + request.to(tl.int64) * table_stride + tokens // page_size, mask=live, other=0)
        page = page.to(tl.int64)
        slot = (tokens % page_size).to(tl.int64)
        place = k_cache + page * k_page_stride + slot * k_slot_stride + kv_head * k_head_stride
        k = tl.load(place[None, :] + column[:, None], mask=live[None, :] & (column < head_dim)[:, None], other=0.0)
        place = v_cache + page * v_page_stride + slot * v_slot_stride + kv_head * v_head_stride
        in_value = live[:, None] & (value_column < value_head_dim)[None, :]
        v = tl.load(place[:, None] + value_column[None, :], mask=in_value, other=0.0)

        x = tl.dot(queries, k.to(KEY_TYPE)) * factor[:, None]
        if k_scale is not None:
            place = k_scale + page * k_scale_page_stride + slot * k_scale_slot_stride + kv_head * k_scale_head_stride
            x *= tl.load(place, mask=live, other=0.0)[None, :]
        if CAPPED:
            x = softcap * _tanh(x / softcap)
        seen = live[None, :] & (tokens[None, :] >= begin[:, None]) & (tokens[None, :] < end[:, None])
        x = tl.where(seen, x * _LOG2E, float("-inf"))

        new_peak = tl.maximum(peak, tl.max(x, axis=1))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # a row may have seen nothing yet
        shrink = tl.exp2(peak - base)
        p = tl.exp2(x - base[:, None])
        weight = weight * shrink + tl.sum(p, axis=1)
        if v_scale is not None:
            place = v_scale + page * v_scale_page_stride + slot * v_scale_slot_stride + kv_head * v_scale_head_stride
            p *= tl.load(place, mask=live, other=0.0)[None, :]
        product = tl.dot(p.to(VALUE_TYPE), v.to(VALUE_TYPE), product * shrink[:, None])
        peak = new_peak

    place = (split.to(tl.int64) * total_q + token) * (num_kv_heads * GROUP) + head
    tl.store(peaks + place, peak, mask=real)
    tl.store(sums + place, weight, mask=real)
    place = products + place[:, None] * value_head_dim + value_column[None, :]
    written = real[:, None] & (value_column < value_head_dim)[None, :] & (low < high)
    tl.store(place, product, mask=written)


@triton.jit
def _merge_kernel(
    products,
    peaks,
    sums,
    cu_seqlens_q,  # or None, as the sinks and lse
    sinks,
    out,
    lse,
    v_factor,
    batch,
    num_splits,
    value_head_dim,
    out_token_stride,
    out_head_stride,
    lse_token_stride,
    lse_head_stride,
    SPLITS: tl.constexpr,
    PART: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    num_q_heads = tl.num_programs(1)
    if cu_seqlens_q is not None:  # noqa: SIM102 - known when this is compiled, the other condition when it runs
        if token >= tl.load(cu_seqlens_q + batch):
            return
    split = tl.arange(0, SPLITS)
    stride = tl.num_programs(0).to(tl.int64) * num_q_heads
    first = token * num_q_heads + head
    peak = tl.load(peaks + split * stride + first, mask=split < num_splits, other=float("-inf"))
    weight = tl.load(sums + split * stride + first, mask=split < num_splits, other=0.0)
    top = tl.max(peak, axis=0)
    sink = float("-inf")
    if sinks is not None:
        sink = tl.load(sinks + head) * _LOG2E
        top = tl.maximum(top, sink)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(weight * tl.exp2(peak - base), axis=0) + tl.exp2(sink - base)

    column = tl.arange(0, VALUE_DIM)
    y = tl.zeros([VALUE_DIM], tl.float32)
    for begin in range(0, num_splits, PART):
        part = begin + tl.arange(0, PART)
        part_peak = tl.load(peaks + part * stride + first, mask=part < num_splits, other=float("-inf"))
        found = (part_peak > float("-inf"))[:, None] & (column < value_head_dim)[None, :]
        place = products + (part * stride + first)[:, None] * value_head_dim + column[None, :]
        y += tl.sum(tl.load(place, mask=found, other=0.0) * tl.exp2(part_peak - base)[:, None], axis=0)
    y = tl.where(total > 0.0, y / total * v_factor, 0.0)
    result = out + token * out_token_stride + head * out_head_stride + column
    tl.store(result, y.to(out.dtype.element_ty), mask=column < value_head_dim)
    if lse is not None:
        tl.store(lse + token * lse_token_stride + head * lse_head_stride, (top + tl.log2(total)) * _LN2)


def splits_of(shape: Shape, num_sms: int) -> int:
    """Programs per request and KV head: about two per multiprocessor in all, each with something to do at full length."""
    wanted = triton.cdiv(2 * num_sms, shape.batch * shape.num_kv_heads)
    useful = triton.cdiv(max(shape.capacity, 1), BLOCK)
    return int(triton.next_power_of_2(min(wanted, useful, MAX_SPLITS)))


def decode(op: str, a: DecodeArgs) -> None:
    """Run the operator with the arguments of its schema."""
    shape = Shape.of(a)
    if a.schedule == "invariant":
        refuse(op, "it splits by the size of the batch, so it has no schedule 'invariant'")
    if (a.v_cache.dtype, a.out.dtype) == (torch.bfloat16, torch.float16):
        refuse(op, "it sums a bfloat16 cache in bfloat16, which a float16 result does not allow")
    if shape.capacity > MAX_TOKENS:
        refuse(op, f"it takes tables of at most {MAX_TOKENS} tokens per request, got {shape.capacity}")
    if not a.out.numel():
        return
    device = a.q.device
    cuda = device.type == "cuda"
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count if cuda else HOPPER_SMS
    splits = splits_of(shape, num_sms)
    rows = (splits, shape.total_q, shape.num_q_heads)
    products = torch.empty(*rows, shape.value_head_dim, dtype=torch.float32, device=device)
    peaks, sums = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(2))
    with torch.cuda.device_of(a.q):
        _split(a, shape, products, peaks, sums)
        _merge(a, shape, products, peaks, sums)


def _split(a: DecodeArgs, shape: Shape, products: torch.Tensor, peaks: torch.Tensor, sums: torch.Tensor) -> None:
    rows = max(triton.next_power_of_2(shape.group * shape.max_q_len), 16)
    dim, value_dim = (triton.next_power_of_2(size) for size in (shape.head_dim, shape.value_head_dim))
    _split_kernel[(shape.batch, shape.num_kv_heads, products.shape[0])](
        *(a.q, a.k_cache, a.v_cache, a.block_table, a.seq_lens, a.cu_seqlens_q, a.q_scale, a.k_scale, a.v_scale),
        *(products, peaks, sums, float(a.scale * a.k_factor), float(a.softcap), a.window, shape.capacity),
        *(shape.page_size, shape.total_q, shape.head_dim, shape.value_head_dim, shape.table_stride),
        *(*shape.q, *shape.q_scale, *shape.k, *shape.v, *shape.k_scale, *shape.v_scale),
        GROUP=shape.group,
        Q_LEN=shape.max_q_len,
        ROWS=rows,
        DIM=dim,
        VALUE_DIM=value_dim,
        TOKENS=BLOCK,
        CAPPED=a.capped,
        KEY_TYPE=_TYPES.get(a.q.dtype, _TYPES[a.out.dtype]),
        VALUE_TYPE=_TYPES.get(a.v_cache.dtype, _TYPES[a.out.dtype]),
        num_warps=4 if rows * value_dim <= 32 * 128 else 8,
        num_stages=3 if dim > 128 else 4,  # one of them is for the block table
    )


def _merge(a: DecodeArgs, shape: Shape, products: torch.Tensor, peaks: torch.Tensor, sums: torch.Tensor) -> None:
    splits = products.shape[0]
    _merge_kernel[(shape.total_q, shape.num_q_heads)](
        *(products, peaks, sums, a.cu_seqlens_q, a.sinks, a.out, a.lse, float(a.v_factor)),
        *(shape.batch, splits, shape.value_head_dim, *shape.out, *shape.lse),
        SPLITS=splits,
        PART=min(splits, 16),
        VALUE_DIM=triton.next_power_of_2(shape.value_head_dim),
        num_warps=4,
    )
