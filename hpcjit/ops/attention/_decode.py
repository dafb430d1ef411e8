"""Attention of the newest tokens of a batch over their paged KV cache."""

from __future__ import annotations

import math
from typing import Any

import torch

from hpcjit import checks
from hpcjit.errors import ArgumentError, ArgumentTypeError
from hpcjit.fused_op import define
from hpcjit.jit_op import NOTHING, JitOp, Plan
from hpcjit.ops._tensors import compiling, distinct, overwrites_none, require
from hpcjit.ops.attention._decode_shape import (
    HEAD_DIMS,
    LAYOUTS,
    MAX_GROUP,
    MAX_LENGTH,
    MAX_Q_LEN,
    SCHEDULES,
    DecodeArgs,
    alignment,
    paged,
)

_HALVES = (torch.bfloat16, torch.float16)
_FP8 = torch.float8_e4m3fn
_LEAST, _MOST = 2.0**-126, 2.0**128 - 2.0**104  # the normal numbers of float32: all of them have an inverse
_NUMBERS = (int, float)  # a tuple: torch 2.8 cannot trace isinstance with a union
_PAIRS = ", ".join(f"{head_dim}/{value}" for head_dim, value in HEAD_DIMS)


class DecodeOp(JitOp):
    """`window` 0 is none; `softcap` counts if `capped`. The scale of K is `k_factor * k_scale`, 1 for an absent tensor."""

    op = "attention.decode"
    schema = (
        "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, Tensor? cu_seqlens_q,"
        " Tensor? q_scale, Tensor? k_scale, Tensor? v_scale, Tensor? sinks, float scale, float k_factor, float v_factor,"
        " float softcap, bool capped, int window, int max_q_len, str layout, str schedule, Tensor(a!) out,"
        " Tensor(b!)? lse) -> ()"
    )
    trace_values = ("seq_lens",)
    tensor_core_sums = ("lse",)

    def check(self, *args: Any) -> None:
        a = DecodeArgs(*args)
        self._check_options(a)
        self._check_q(a)
        self._check_cache("k_cache", a.k_cache, a)
        self._check_cache("v_cache", a.v_cache, a)
        self._check_heads(a)
        self._check_requests(a)
        self._check_scales(a)
        self._check_outputs(a)
        checks.no_grad(self.op, **{k: v for k, v in a._asdict().items() if isinstance(v, torch.Tensor)})

    def check_values(self, *args: Any) -> None:
        a = DecodeArgs(*args)
        if a.cu_seqlens_q is None or a.cu_seqlens_q.is_meta:
            return
        starts, total_q = a.cu_seqlens_q.long(), a.q.shape[0]
        rows = starts.diff()
        wrong = ((starts[:-1] < 0) | (rows < 0) | (rows > a.max_q_len) | (starts[1:] > total_q)).nonzero().flatten()
        if wrong.numel():
            request = int(wrong[0])
            expected = f"non-decreasing in [0, {total_q}] by at most {a.max_q_len} (max_q_len)"
            got = f"{starts[request]} and {starts[request + 1]} for request {request}"
            raise ArgumentError(self.op, "cu_seqlens_q", expected, got)

    def _check_options(self, a: DecodeArgs) -> None:
        checks.choice(self.op, "layout", a.layout, LAYOUTS)
        checks.choice(self.op, "schedule", a.schedule, SCHEDULES)
        checks.integer(self.op, "window", a.window, low=0, high=MAX_LENGTH)
        checks.integer(self.op, "max_q_len", a.max_q_len, low=1, high=MAX_Q_LEN)
        checks.choice(self.op, "capped", a.capped, (False, True))
        _positive("scale", a.scale)
        if a.capped:
            _positive("softcap", a.softcap)

    def _check_q(self, a: DecodeArgs) -> None:
        checks.tensor(self.op, "q", a.q, dtypes=(*_HALVES, _FP8), min_ndim=3)
        if a.q.ndim != 3 or not a.q.shape[1]:
            raise ArgumentError(self.op, "q", "[total_q, num_q_heads, head_dim]", checks.describe(a.q))
        if a.q.shape[2] not in (head_dim for head_dim, _ in HEAD_DIMS):
            expected = f"of a supported head_dim/value_head_dim: {_PAIRS}"
            raise ArgumentError(self.op, "q", expected, checks.describe(a.q))
        self._check_aligned("q", a.q)

    def _check_cache(self, name: str, cache: torch.Tensor, a: DecodeArgs) -> None:
        """The K cache is checked against `q`, the V cache against the K cache."""
        dtypes = (a.k_cache.dtype,) if name == "v_cache" else (_FP8,) if a.q.dtype == _FP8 else (a.q.dtype, _FP8)
        checks.tensor(self.op, name, cache, dtypes=dtypes, min_ndim=4, like=a.q)
        if cache.ndim != 4 or 0 in cache.shape:
            axes = "page_size, num_kv_heads" if a.layout == "NHD" else "num_kv_heads, page_size"
            expected = f"[num_pages, {axes}, {'head_dim' if name == 'k_cache' else 'value_head_dim'}]"
            raise ArgumentError(self.op, name, f"{expected} in layout {a.layout}", checks.describe(cache))
        dim, head_dim = cache.shape[3], a.q.shape[2]
        if name == "k_cache" and dim != head_dim:
            raise ArgumentError(self.op, name, f"of head_dim {head_dim} like q", checks.describe(cache))
        if name == "v_cache" and cache.shape[:3] != a.k_cache.shape[:3]:
            expected = f"of shape {list(a.k_cache.shape[:3])} before value_head_dim like k_cache"
            raise ArgumentError(self.op, name, expected, checks.describe(cache))
        if name == "v_cache" and (head_dim, dim) not in HEAD_DIMS:
            expected = f"of a supported head_dim/value_head_dim: {_PAIRS}"
            raise ArgumentError(self.op, name, expected, f"{head_dim}/{dim}")
        self._check_aligned(name, cache)
        if any(step == 0 and size > 1 for step, size in zip(cache.stride(), cache.shape, strict=True)):
            raise ArgumentError(self.op, name, "without repeated axes (stride 0)", f"strides {cache.stride()}")

    def _check_aligned(self, name: str, value: torch.Tensor) -> None:
        if torch.compiler.is_compiling() or alignment(value) == 16:
            return
        got = f"address {value.data_ptr() % 16} past a multiple, strides {value.stride()}"
        raise ArgumentError(self.op, name, "with every head at a multiple of 16 bytes", got)

    def _check_heads(self, a: DecodeArgs) -> None:
        num_q_heads, num_kv_heads = a.q.shape[1], paged(a.k_cache, a.layout).shape[2]
        if num_q_heads % num_kv_heads or num_q_heads > MAX_GROUP * num_kv_heads:
            expected = f"1 to {MAX_GROUP} query heads for each of {num_kv_heads} KV heads"
            raise ArgumentError(self.op, "q", expected, f"{num_q_heads} query heads")

    def _check_requests(self, a: DecodeArgs) -> None:
        int32 = (torch.int32,)
        checks.tensor(self.op, "seq_lens", a.seq_lens, dtypes=int32, min_ndim=1, like=a.q)
        if a.seq_lens.ndim != 1:
            raise ArgumentError(self.op, "seq_lens", "[batch]", checks.describe(a.seq_lens))
        batch = a.seq_lens.shape[0]
        checks.tensor(self.op, "block_table", a.block_table, dtypes=int32, min_ndim=2, like=a.q)
        if a.block_table.ndim != 2 or a.block_table.shape[0] != batch or not a.block_table.shape[1]:
            expected = f"[{batch}, table_width] for {batch} requests (seq_lens), table_width at least 1"
            raise ArgumentError(self.op, "block_table", expected, checks.describe(a.block_table))
        if a.cu_seqlens_q is not None:
            checks.tensor(self.op, "cu_seqlens_q", a.cu_seqlens_q, dtypes=int32, shape=(batch + 1,), like=a.q)
        elif a.q.shape[0] != batch * a.max_q_len:
            expected = f"of {batch} x {a.max_q_len} rows (batch x max_q_len), or with cu_seqlens_q"
            raise ArgumentError(self.op, "q", expected, checks.describe(a.q))

    def _check_scales(self, a: DecodeArgs) -> None:
        if a.q_scale is not None:
            rows = (a.q.shape[0], a.q.shape[1])
            self._check_scale("q_scale", a.q_scale, a.q, [rows], f"{list(rows)} (total_q, num_q_heads)")
        heads = paged(a.k_cache, a.layout).shape[2]
        shapes = [(heads,), tuple(a.k_cache.shape[:3])]
        described = f"[{heads}] (num_kv_heads) or {list(shapes[1])} (per token and head in layout {a.layout})"
        for name, scale, factor, cache in (
            ("k_scale", a.k_scale, a.k_factor, a.k_cache),
            ("v_scale", a.v_scale, a.v_factor, a.v_cache),
        ):
            if _positive(name, factor) != 1 and cache.dtype != _FP8:
                raise ArgumentError(self.op, name, "None, because the cache is not float8", factor)
            if scale is not None:
                self._check_scale(name, scale, cache, shapes, described)
        if a.sinks is not None:
            checks.tensor(self.op, "sinks", a.sinks, dtypes=(torch.float32,), shape=(a.q.shape[1],), like=a.q)

    def _check_scale(
        self, name: str, scale: torch.Tensor, of: torch.Tensor, shapes: list[tuple[int, ...]], described: str
    ) -> None:
        what = "q" if name == "q_scale" else "the cache"
        if of.dtype != _FP8:
            raise ArgumentError(self.op, name, f"None, because {what} is not float8", checks.describe(scale))
        checks.tensor(self.op, name, scale, dtypes=(torch.float32,), like=of, dense_last=False)
        if tuple(scale.shape) not in [(1,), *shapes]:
            raise ArgumentError(self.op, name, f"of shape [1] or {described}", checks.describe(scale))

    def _check_outputs(self, a: DecodeArgs) -> None:
        rows = (a.q.shape[0], a.q.shape[1])
        checks.tensor(self.op, "out", a.out, dtypes=_HALVES, shape=(*rows, a.v_cache.shape[3]), like=a.q)
        distinct(self.op, "out", a.out)
        inputs = {
            name: x for name, x in a._asdict().items() if isinstance(x, torch.Tensor) and name not in self.mutated
        }
        overwrites_none(self.op, "out", a.out, inputs)
        if a.lse is not None:
            checks.tensor(self.op, "lse", a.lse, dtypes=(torch.float32,), shape=rows, like=a.q, dense_last=False)
            distinct(self.op, "lse", a.lse)
            checks.apart(self.op, "lse", a.lse, "out", a.out)
            overwrites_none(self.op, "lse", a.lse, inputs)

    def plan(self, *args: Any) -> Plan | str:
        a = DecodeArgs(*args)
        if not a.q.shape[0] or not a.seq_lens.shape[0]:
            return NOTHING
        from hpcjit.ops.attention import _decode_plan

        return _decode_plan.plan(self, *args)

    def forward_triton(self, *args: Any) -> None:
        self.check(*args)
        from hpcjit.ops.attention import _triton

        _triton.decode(self.op, DecodeArgs(*args))

    def forward_flashinfer(self, *args: Any) -> None:
        self._on_peer("flashinfer", args)

    def forward_flashinfer_xqa(self, *args: Any) -> None:
        self._on_peer("flashinfer_xqa", args)

    def forward_flash_attn(self, *args: Any) -> None:
        self._on_peer("flash_attn", args)

    def _on_peer(self, peer: str, args: tuple[Any, ...]) -> None:
        self.check(*args)
        from hpcjit.ops.attention import _decode_peers

        getattr(_decode_peers, peer)(self.op, DecodeArgs(*args))

    def reference(self, *args: Any) -> None:
        a = DecodeArgs(*args)
        if a.seq_lens.is_meta:  # no lengths to read
            return
        from hpcjit.ops.attention import _decode_reference

        _decode_reference.attend(self.op, a)


def _positive(name: str, value: Any) -> float:
    if isinstance(value, _NUMBERS) and not isinstance(value, bool) and _LEAST <= value <= _MOST:
        return float(value)  # nothing else is asked of a good value: torch.compile can trace this of any float
    if checks.number(DecodeOp.op, name, value, low=-math.inf, high=math.inf) <= 0:
        raise ArgumentError(DecodeOp.op, name, "positive", value)
    raise ArgumentError(DecodeOp.op, name, f"in [{_LEAST:g}, {_MOST:g}], the normal numbers of float32", value)


decode_op = DecodeOp()
define(decode_op)

Scale = float | torch.Tensor | None


def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_q_len: int | None = None,
    q_scale: Scale = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    sinks: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
    layout: str = "NHD",
    schedule: str = "dynamic",
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of the newest 1 to 8 tokens of each request over the request's pages of a KV cache.

    With q, k, v after their scales, h a query head and its KV head `h / group`, row j of the q_len rows of a request, and
    token t of its `seq_len` ones, which is in slot `t % page_size` of page `block_table[b, t / page_size]`:

        s[t]  = scale * <q[j, h], k[t]>               with a softcap c:  c * tanh(s[t] / c)
        seen  = {t <= p}                              p = seq_len - q_len + j, the token that row j belongs to
                {p - window < t <= p}                 with a window: the last `window` tokens, p among them
        lse   = log(sum of exp(s[t]) over seen, + exp(sinks[h]))
        out   = sum of exp(s[t] - lse) * v[t] over seen

    A row that sees no token gets out 0 and lse -inf (the sink, if there are sinks). Sums are float32.

    Args:
        q: `[total_q, num_q_heads, head_dim]`, bfloat16, float16 or float8_e4m3fn; heads at multiples of 16 bytes, otherwise
            any strides. Request b owns `max_q_len` rows each, or those from `cu_seqlens_q[b]` to `cu_seqlens_q[b + 1]`.
            head_dim/value_head_dim are 64/64, 128/128, 256/256 or 192/128.
        k_cache: `[num_pages, page_size, num_kv_heads, head_dim]` for layout NHD, `[num_pages, num_kv_heads, page_size,
            head_dim]` for HND, of the dtype of `q` or float8_e4m3fn (which a float8 `q` needs); heads at multiples of 16
            bytes, otherwise any strides but 0. The new tokens are in it already. num_q_heads is 1 to 16 times num_kv_heads; any
            page_size; multiples of 32 are fast, 16 too where heads are 16-bit and at least 128, and from 17 query rows on
            of a KV head only those of 64. Slots that hold no live token may hold anything, NaN too.
        v_cache: as `k_cache`, with `value_head_dim`.
        block_table: int32 `[batch, table_width]`, the pages of each request in order; rows at any stride. Entries after the
            last live page, and before a window, are not used.
        seq_lens: int32 `[batch]`, live tokens including the new ones; 0 for a row of padding.
        scale: of the logits, positive; None is `head_dim ** -0.5`.
        cu_seqlens_q: int32 `[batch + 1]`, non-decreasing from 0; a request may have no rows. Rows of `q` outside every
            request are not written. None: `max_q_len` rows each.
        max_q_len: 1 to 8, the most rows of a request; needed with `cu_seqlens_q`, else `total_q / batch`. Of a request with
            more rows only so many are seen, as if it had no others: its further rows are not written.
        q_scale: of a float8 `q`: a positive number, or float32 `[total_q, num_q_heads]` or `[1]`; None is 1.
        k_scale, v_scale: of float8 caches: a positive number, or float32 `[1]`, `[num_kv_heads]`, or one per token and head
            in the axes of the cache without the last; any strides; None is 1.
        sinks: float32 `[num_q_heads]`, a further logit (natural log, not scaled) that only the denominator has.
        window: at least 1; None: no window.
        softcap: positive; None: no cap.
        out: `[total_q, num_q_heads, value_head_dim]`, bfloat16 or float16, receives the result.
        lse: float32 `[total_q, num_q_heads]`, any strides, receives the natural log of the denominator.
        return_lse: return `lse` as well, allocated if it is not given.
        out_dtype: of an allocated `out`; None is the dtype of `q`, bfloat16 for a float8 `q`.
        layout: "NHD" or "HND", of caches and their scales.
        schedule: "dynamic" (work follows the live lengths), "static" (each request is cut into the same number of parts), or
            "invariant" (the bits of a request do not depend on the rest of the batch).
        backend: run this backend or fail.

    Returns:
        `out`, or `(out, lse)` if `return_lse`.

    Raises:
        ArgumentError: a wrong dtype, shape, stride, alignment or device, an unsupported combination (says what is supported),
            scales of what is not float8, a number that float32 does not hold, a tensor that requires grad, an output that
            begins where an input does. With HPCJIT_DEBUG=1 also a length below 0 or past `table_width * page_size`, rows in
            `cu_seqlens_q` that do not exist or are more than `max_q_len`, and a page id of a live token outside of the pool,
            with request and position; without it such lengths are clamped, and the result of such a request is undefined.

    Every call with the same arguments gives the same bits. Safe under CUDA graphs once the signature has run or been
    prewarmed: lengths, rows and pages are read on the device and may change between replays. Blocks that share a request wait
    for each other: a partition of a device must have room for two blocks of a launch at once, one per multiprocessor.

    The dynamic schedule divides the tokens of the batch evenly by a prefix sum, as Stream-K (arXiv 2301.03598) and
    LeanAttention (arXiv 2405.10480) do; parts of a request merge by their log-sum-exp as in Flash-Decoding.
    """
    require(DecodeOp.op, "q", q, 3)
    require(DecodeOp.op, "v_cache", v_cache, 4)
    require(DecodeOp.op, "seq_lens", seq_lens)
    if return_lse is not False and return_lse is not True:
        checks.choice(DecodeOp.op, "return_lse", return_lse, (False, True))
    scale = max(q.shape[2], 1) ** -0.5 if scale is None else _positive("scale", scale)
    q_scale, q_factor = _split_scale("q_scale", q_scale)
    if q_factor != 1 and q.dtype != _FP8:
        raise ArgumentError(DecodeOp.op, "q_scale", "None, because q is not float8", q_factor)
    k_scale, k_factor = _split_scale("k_scale", k_scale)
    v_scale, v_factor = _split_scale("v_scale", v_scale)
    if max_q_len is None:
        max_q_len = _rows_per_request(q, seq_lens, cu_seqlens_q)
    if window is not None:
        checks.integer(DecodeOp.op, "window", window, low=1, high=MAX_LENGTH)
    cap = 1.0 if softcap is None else _positive("softcap", softcap)
    out = _output(q, v_cache, out, out_dtype)
    if return_lse and lse is None:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    args = (
        *(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, q_scale, k_scale, v_scale, sinks),
        *(scale * q_factor, k_factor, v_factor, cap, softcap is not None, window or 0, max_q_len),
        *(layout, schedule, out, lse),
    )
    if compiling("attention.decode", backend):
        torch.ops.hpcjit.attention_decode(*args)
    elif backend is None:
        decode_op.fast(*args)
    else:
        decode_op(*args, backend=backend)
    return (out, lse) if return_lse and lse is not None else out


def _split_scale(name: str, scale: Scale) -> tuple[torch.Tensor | None, float]:
    """The tensor and the number of a scale."""
    if scale is None or isinstance(scale, torch.Tensor):
        return scale, 1.0
    if isinstance(scale, bool) or not isinstance(scale, _NUMBERS):
        raise ArgumentTypeError(DecodeOp.op, name, "a number or a tensor", checks.describe(scale))
    return None, _positive(name, scale)


def _rows_per_request(q: torch.Tensor, seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor | None) -> int:
    if cu_seqlens_q is not None:
        expected = f"given with cu_seqlens_q (an integer in [1, {MAX_Q_LEN}]), whose values are on the device"
        raise ArgumentError(DecodeOp.op, "max_q_len", expected, None)
    return max(q.shape[0] // max(seq_lens.shape[0], 1), 1)


def _output(
    q: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor | None, dtype: torch.dtype | None
) -> torch.Tensor:
    if dtype is not None:
        checks.choice(DecodeOp.op, "out_dtype", dtype, _HALVES)
    if out is None:
        dtype = dtype or (q.dtype if q.dtype in _HALVES else torch.bfloat16)
        return torch.empty((*q.shape[:2], v_cache.shape[3]), dtype=dtype, device=q.device)
    if dtype is not None and isinstance(out, torch.Tensor) and out.dtype != dtype:
        raise ArgumentError(DecodeOp.op, "out", f"of out_dtype {dtype}", checks.describe(out))
    return out
