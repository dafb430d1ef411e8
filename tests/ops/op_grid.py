"""Calls of every operator on shapes, dtypes, views and options that are easy to get wrong, each with the reason it is here.

An entry makes the arguments of the operator's schema, as a `Case` does, also on the meta device: prewarming plans them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import decode_grid
import fused_moe_grid
import gemm_grid
import moe_grid
import router_topk_grid
import torch

from hpcjit.cases import Args, Maker

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
PLAIN, PADDED, MISALIGNED = "plain", "padded", "misaligned"


@dataclass(frozen=True)
class Entry:
    op: str
    label: str
    make: Callable[[Maker], Args]
    why: str

    @property
    def id(self) -> str:
        return f"{self.op}-{self.label}".replace(" ", "_")


def placed(m: Maker, fill: Callable[..., torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype, how: str):
    """A tensor of this shape: contiguous, with a gap of 5 elements after each row, or one element off alignment."""
    if how == PADDED:
        return fill(*shape[:-1], shape[-1] + 5, dtype=dtype)[..., : shape[-1]]
    if how == MISALIGNED:
        return fill(math.prod(shape) + 1, dtype=dtype)[1:].view(shape)
    return fill(*shape, dtype=dtype)


def _rows(m: Maker, shape, dtype=BF16, how=PLAIN):
    return placed(m, m.normal, shape, dtype, how)


def _out(m: Maker, shape, dtype=BF16, how=PLAIN):
    return placed(m, m.poison, shape, dtype, how)


# (leading axes, columns, dtype, view, why)
_ROWS = [
    ((1,), 4096, BF16, PLAIN, "one row"),
    ((3, 2, 5), 256, FP16, PLAIN, "leading axes are folded; a warp per row with one vector per lane"),
    ((7,), 4097, BF16, PLAIN, "odd columns: element accesses, and the last thread has fewer"),
    ((5,), 1, FP32, PLAIN, "one column"),
    ((9,), 8, BF16, PLAIN, "one vector: most lanes idle"),
    ((257,), 1000, BF16, PLAIN, "a multiple of 8 but not of 256; one block more than a power of two"),
    ((300,), 2056, FP32, PLAIN, "fp32, more rows than SMs, not a multiple of the block"),
    ((2,), 65536, BF16, PLAIN, "largest fast row"),
    ((2,), 70001, BF16, PLAIN, "longer than any block holds, odd: streamed"),
    ((4,), 4104, FP16, PADDED, "rows with gaps of 5: no row but the first is aligned"),
    ((6,), 1024, BF16, MISALIGNED, "storage offset 1: no address is aligned"),
    ((0,), 128, BF16, PLAIN, "no rows"),
]


def _row_entries() -> Iterator[Entry]:
    for lead, columns, dtype, how, why in _ROWS:
        label = f"{'x'.join(map(str, (*lead, columns)))} {str(dtype)[6:]} {how}"
        shape = (*lead, columns)

        def unary(m, shape=shape, dtype=dtype, how=how):
            return _rows(m, shape, dtype, how), m.normal(shape[-1], dtype=dtype), 1e-6, _out(m, shape, dtype, how)

        def fused(m, shape=shape, dtype=dtype, how=how):
            x, residual = _rows(m, shape, dtype, how), _rows(m, shape, dtype, how)
            return x, residual, m.normal(shape[-1], dtype=dtype), 1e-6

        def layernorm(m, shape=shape, dtype=dtype, how=how):
            weight, bias = m.normal(shape[-1], dtype=dtype), m.normal(shape[-1], dtype=dtype)
            return _rows(m, shape, dtype, how), weight, bias, 1e-5, _out(m, shape, dtype, how)

        def quant(m, shape=shape, dtype=dtype, how=how):
            out, scale = _out(m, shape, FP8, how), _out(m, (*shape[:-1], 1), FP32)
            return _rows(m, shape, dtype, how), None, m.normal(shape[-1], dtype=dtype), 1e-6, True, out, scale

        def gated(m, shape=shape, dtype=dtype, how=how):
            return _rows(m, (*shape[:-1], 2 * shape[-1]), dtype, how), _out(m, shape, dtype, how)

        def gated_quant(m, shape=shape, dtype=dtype, how=how):
            out, scale = _out(m, shape, FP8, how), _out(m, (*shape[:-1], 1), FP32)
            return _rows(m, (*shape[:-1], 2 * shape[-1]), dtype, how), True, 0, False, out, scale

        def per_token(m, shape=shape, dtype=dtype, how=how):
            return _rows(m, shape, dtype, how), _out(m, shape, FP8, how), _out(m, (*shape[:-1], 1), FP32)

        def per_tensor(m, shape=shape, dtype=dtype, how=how):
            return _rows(m, shape, dtype, how), True, _out(m, shape, FP8, how), _out(m, (1,), FP32)

        def per_tensor_static(m, shape=shape, dtype=dtype, how=how):
            scale = m.poison(1, dtype=FP32).fill_(0.0078)
            return _rows(m, shape, dtype, how), False, _out(m, shape, FP8, how), scale

        yield Entry("layernorm.rmsnorm", label, unary, why)
        yield Entry("layernorm.gemma_rmsnorm", label, unary, why)
        yield Entry("layernorm.fused_add_rmsnorm", label, fused, why)
        yield Entry("layernorm.layernorm", label, layernorm, why)
        yield Entry("layernorm.rmsnorm_quant_fp8", label, quant, why)
        yield Entry("activation.silu_and_mul", label, gated, why)
        yield Entry("activation.silu_and_mul_quant_fp8", label, gated_quant, why)
        yield Entry("quantization.per_token_quant_fp8", label, per_token, why)
        yield Entry("quantization.per_tensor_quant_fp8", label, per_tensor, why)
        yield Entry("quantization.per_tensor_quant_fp8", f"{label} static", per_tensor_static, why)
        if dtype != BF16 or how != PLAIN:
            yield Entry("layernorm.gemma_fused_add_rmsnorm", label, fused, why)
            yield Entry("activation.gelu_and_mul", label, gated, why)
            yield Entry("activation.gelu_tanh_and_mul", label, gated, why)


def _norm_options() -> Iterator[Entry]:
    def mixed(m):
        return m.normal(33, 768), m.normal(768, dtype=FP32), 1e-6, m.poison(33, 768)

    def in_place(m):
        x = m.normal(33, 768)
        return x, m.normal(768), 1e-6, x

    def offset_mean(m):
        x = m.normal(40, 1024, dtype=FP32) + 1000.0
        return x, m.normal(1024, dtype=FP32), None, 1e-5, m.poison(40, 1024, dtype=FP32)

    def residual_quant(m):
        scale = m.poison(33, 1, dtype=FP32)
        return m.normal(33, 768), m.normal(33, 768), m.normal(768), 1e-6, True, m.poison(33, 768, dtype=FP8), scale

    def static_quant(m):
        scale = m.poison(1, dtype=FP32).fill_(0.01)
        return m.normal(33, 768), None, m.normal(768), 1e-6, False, m.poison(33, 768, dtype=FP8), scale

    def expanded_weight(m):
        return m.normal(33, 1), m.normal(1), 1e-6, m.poison(33, 1)

    yield Entry("layernorm.rmsnorm", "fp32 weight", mixed, "weights of a dtype of their own are wider than the input")
    yield Entry("layernorm.rmsnorm", "in place", in_place, "out may be the input")
    yield Entry("layernorm.rmsnorm", "one column", expanded_weight, "a weight of one element has any stride")
    yield Entry("layernorm.layernorm", "mean 1000", offset_mean, "E[x^2] - E[x]^2 would lose every digit; no bias")
    yield Entry("layernorm.rmsnorm_quant_fp8", "residual", residual_quant, "the residual is written as well")
    yield Entry("layernorm.rmsnorm_quant_fp8", "static", static_quant, "a given scale is read, not written")


def _group_entries() -> Iterator[Entry]:
    sizes = [
        (3, 512, 16, BF16, PLAIN, "two lanes per group"),
        (7, 96, 32, FP16, PLAIN, "rows of 12 vectors: a warp spans rows"),
        (1, 7168, 64, BF16, PLAIN, "one row"),
        (129, 640, 128, BF16, PLAIN, "the last block is partly empty"),
        (5, 768, 256, FP32, PLAIN, "a whole warp per group, two accesses per vector"),
        (4, 512, 128, BF16, PADDED, "rows with gaps of 5"),
        (6, 256, 128, FP32, MISALIGNED, "storage offset 1"),
        (9000, 1024, 128, BF16, PLAIN, "large enough for several vectors per thread"),
        (0, 256, 128, BF16, PLAIN, "no rows"),
    ]
    for tokens, hidden, group, dtype, how, why in sizes:
        for column_major, ue8m0 in ((False, False), (True, False), (False, True)):
            if (column_major or ue8m0) and tokens not in (7, 129, 5):
                continue
            kind = "column" if column_major else "ue8m0" if ue8m0 else "row"
            label = f"{tokens}x{hidden}x{group} {str(dtype)[6:]} {how} {kind}"
            groups = hidden // group

            def scales(m, tokens=tokens, groups=groups, column_major=column_major):
                if column_major:
                    return m.poison(groups, -(-tokens // 4) * 4, dtype=FP32)[:, :tokens].t()
                return m.poison(tokens, groups, dtype=FP32)

            def plain(m, tokens=tokens, hidden=hidden, group=group, dtype=dtype, how=how, ue8m0=ue8m0, scales=scales):
                x, out = _rows(m, (tokens, hidden), dtype, how), _out(m, (tokens, hidden), FP8, how)
                return x, group, ue8m0, out, scales(m)

            def gated(m, tokens=tokens, hidden=hidden, group=group, dtype=dtype, how=how, ue8m0=ue8m0, scales=scales):
                x, out = _rows(m, (tokens, 2 * hidden), dtype, how), _out(m, (tokens, hidden), FP8, how)
                return x, True, group, ue8m0, out, scales(m)

            yield Entry("quantization.per_token_group_quant_fp8", label, plain, why)
            yield Entry("activation.silu_and_mul_quant_fp8", label, gated, why)

    def static(m):
        scale = m.poison(1, dtype=FP32).fill_(0.02)
        return m.normal(33, 1536), False, 0, False, m.poison(33, 768, dtype=FP8), scale

    yield Entry("activation.silu_and_mul_quant_fp8", "static", static, "one given scale")


def _large_entries() -> Iterator[Entry]:
    """Shapes at which the plans change for large tensors: other splits of a row, cache hints, weights loaded late."""
    why = "large enough for several vectors per thread"
    yield Entry("activation.silu_and_mul", "1100x8192", lambda m: (m.normal(1100, 8192), m.poison(1100, 4096)), why)

    def fused(m, tokens, hidden):
        return m.normal(tokens, hidden), m.normal(tokens, hidden), m.normal(hidden), 1e-6

    def fused_quant(m):
        out, scale = m.poison(900, 5000, dtype=FP8), m.poison(900, 1, dtype=FP32)
        return *fused(m, 900, 5000)[:3], 1e-6, True, out, scale

    def plain(m):
        return m.normal(300, 15000), m.normal(15000), 1e-6, m.poison(300, 15000)

    def row_quant(m):
        return m.normal(1100, 4104), m.poison(1100, 4104, dtype=FP8), m.poison(1100, 1, dtype=FP32)

    yield Entry("layernorm.fused_add_rmsnorm", "900x5000", lambda m: fused(m, 900, 5000), "one vector for most threads")
    yield Entry(
        "layernorm.fused_add_rmsnorm", "400x10248", lambda m: fused(m, 400, 10248), "four vectors, weights late"
    )
    yield Entry("layernorm.rmsnorm_quant_fp8", "900x5000 residual", fused_quant, "one vector for most threads")
    yield Entry("layernorm.rmsnorm", "300x15000", plain, "four vectors for most threads, weights late")
    yield Entry("quantization.per_token_quant_fp8", "1100x4104", row_quant, "full occupancy, the last threads idle")

    def per_tensor(m, pad=0):
        x, out = m.normal(1100, 4096 + pad)[:, :4096], m.poison(1100, 4096 + pad, dtype=FP8)[:, :4096]
        return x, True, out, m.poison(1, dtype=FP32)

    yield Entry("quantization.per_tensor_quant_fp8", "1100x4096", per_tensor, f"{why}, blocks stride")
    padded = lambda m: per_tensor(m, 16)  # noqa: E731
    yield Entry(
        "quantization.per_tensor_quant_fp8", "1100x4096 gaps", padded, "aligned rows with gaps: not one flat list"
    )


def _cache_entries() -> Iterator[Entry]:
    def entry(m, tokens, heads, key_dim, value_dim, page, dtype, cache_dtype, layout, kind):
        pages = tokens // page + 2
        axes = (page, heads) if layout == "NHD" else (heads, page)
        key, value = m.normal(tokens, heads, key_dim, dtype=dtype), m.normal(tokens, heads, value_dim, dtype=dtype)
        caches = [m.poison(pages, *axes, dim, dtype=cache_dtype) for dim in (key_dim, value_dim)]
        slots = m.permutation(pages * page)[:tokens].contiguous()
        k_scale = v_scale = None
        factors = (1.0, 1.0)
        if kind == "fused":
            qkv = m.normal(tokens, 3 * heads, key_dim, dtype=dtype)
            key, value = qkv[:, heads : 2 * heads], qkv[:, 2 * heads :]
        elif kind == "joint":
            joint = m.poison(pages, 2, *axes, key_dim, dtype=cache_dtype)
            caches = [joint[:, 0], joint[:, 1]]
        elif kind == "misaligned":
            key = placed(m, m.normal, key.shape, dtype, MISALIGNED)
        elif kind == "skip":
            slots = slots.to(torch.int32)
            if m.device.type != "meta":
                slots[::3], slots[1::7] = -1, -(2**31)
                slots[5] = pages * page  # past the end: not written
        if cache_dtype == FP8:
            factors = (0.02, 0.5)
            if kind == "head scales":
                k_scale, v_scale = m.normal(heads, dtype=FP32).abs() * 0.01 + 0.01, m.poison(1, dtype=FP32).fill_(0.03)
                factors = (1.0, 1.0)
        return key, value, *caches, slots, k_scale, v_scale, *factors, layout

    shapes = [
        (1, 1, 128, 128, 16, BF16, BF16, "NHD", "", "one token, one head"),
        (37, 8, 128, 128, 64, BF16, BF16, "NHD", "fused", "key and value are views of one projection"),
        (37, 8, 128, 128, 64, BF16, BF16, "HND", "joint", "both caches are views of one tensor"),
        (37, 3, 192, 128, 7, FP16, FP16, "NHD", "", "value heads differ; a page that is no power of two"),
        (37, 3, 192, 128, 7, FP16, FP8, "HND", "head scales", "a scale per head and one for all"),
        (70, 2, 128, 128, 1, BF16, FP8, "NHD", "skip", "pages of one slot; negative slots and one past the end, int32"),
        (70, 2, 80, 72, 5, FP32, FP32, "HND", "skip", "fp32; heads of 80 and 72"),
        (11, 2, 17, 33, 4, BF16, FP8, "NHD", "", "odd heads: element accesses"),
        (11, 2, 64, 64, 4, BF16, BF16, "NHD", "misaligned", "storage offset 1"),
        (9001, 8, 128, 128, 64, BF16, BF16, "NHD", "", "several vectors per thread, last block partly empty"),
        (9001, 8, 128, 128, 64, BF16, FP8, "HND", "", "likewise with conversion"),
        (0, 8, 128, 128, 64, BF16, BF16, "NHD", "", "no tokens"),
    ]
    for *shape, kind, why in shapes:
        tokens, heads, key_dim, value_dim, page, dtype, cache_dtype, layout = shape
        label = (
            f"{tokens}x{heads}x{key_dim}+{value_dim} p{page} {str(dtype)[6:]} {str(cache_dtype)[6:11]} {layout} {kind}"
        )
        make = lambda m, shape=shape, kind=kind: entry(m, *shape, kind)  # noqa: E731
        yield Entry("kvcache.reshape_and_cache", label.strip(), make, why)


def _moe_entries() -> Iterator[Entry]:
    for calls in (moe_grid.calls, router_topk_grid.calls):
        for call in calls(placed):
            yield Entry(*call)
    for call in fused_moe_grid.calls():
        yield Entry(*call)


def _qk_entries() -> Iterator[Entry]:
    def entry(m, tokens, q_heads, k_heads, dim, dtype, kind):
        weights = [m.normal(dim, dtype=FP32 if kind == "fp32 weight" else dtype) for _ in range(2)]
        if kind == "fused":
            qkv = m.normal(tokens, q_heads + 2 * k_heads, dim, dtype=dtype)
            return qkv[:, :q_heads], qkv[:, q_heads : q_heads + k_heads], *weights, 1e-6
        if kind == "heads first":
            q, k = m.normal(q_heads, tokens, dim, dtype=dtype), m.normal(k_heads, tokens, dim, dtype=dtype)
            return q.transpose(0, 1), k.transpose(0, 1), *weights, 1e-6
        how = MISALIGNED if kind == "misaligned" else PLAIN
        q, k = (placed(m, m.normal, (tokens, heads, dim), dtype, how) for heads in (q_heads, k_heads))
        return q, k, *weights, 1e-6

    calls = [
        (1, 1, 1, 128, BF16, "", "one token, one head each"),
        (37, 8, 2, 64, BF16, "fused", "views of one projection; four heads per warp"),
        (37, 5, 1, 128, FP16, "heads first", "token stride below head stride"),
        (37, 4, 4, 256, BF16, "fp32 weight", "weights wider than the heads"),
        (19, 4, 2, 512, FP32, "", "four vectors per lane"),
        (19, 4, 2, 1024, BF16, "", "four vectors per lane"),
        (19, 3, 2, 80, BF16, "", "10 vectors in 16 lanes"),
        (19, 3, 2, 33, BF16, "", "odd head: element accesses"),
        (5, 2, 1, 2049, FP16, "", "longer than registers hold: read twice"),
        (19, 3, 2, 128, BF16, "misaligned", "storage offset 1"),
        (2000, 32, 8, 128, BF16, "", "two heads per group of lanes"),
        (0, 8, 2, 128, BF16, "", "no tokens"),
    ]
    for *call, why in calls:
        tokens, q_heads, k_heads, dim, dtype, kind = call
        label = f"{tokens}x{q_heads}x{k_heads}x{dim} {str(dtype)[6:]} {kind}".strip()
        yield Entry("layernorm.qk_norm", label, lambda m, call=call: entry(m, *call), why)


def _decode_entries() -> Iterator[Entry]:
    for label, batch, why in decode_grid.calls():
        yield Entry("attention.decode", label, batch, why)


def _gemm_entries() -> Iterator[Entry]:
    for call in gemm_grid.calls():
        yield Entry(*call)


def _merge_entries() -> Iterator[Entry]:
    def sides(m, tokens, heads, dim, dtype, kind):
        how = MISALIGNED if kind == "misaligned" else PLAIN
        for _ in range(2):
            yield placed(m, m.normal, (tokens, heads, dim), dtype, how), m.normal(tokens, heads, dtype=FP32, std=3.0)

    def entry(m, tokens, heads, dim, dtype, kind):
        (out_a, lse_a), (out_b, lse_b) = sides(m, tokens, heads, dim, dtype, kind)
        out, lse = m.poison(tokens, heads, dim, dtype=dtype), m.poison(tokens, heads, dtype=FP32)
        if kind == "views":
            out_a, out_b = m.normal(heads, tokens, 2, dim, dtype=dtype).transpose(0, 1).unbind(2)
            lse_a, lse_b = m.normal(heads, tokens, 2, dtype=FP32).transpose(0, 1).unbind(2)
            out, lse = m.poison(tokens, heads + 1, dim + 5, dtype=dtype)[:, 1:, :dim], lse.t().contiguous().t()
        elif kind == "expanded":
            out_b, lse_b = out_b[:1].expand(tokens, heads, dim), lse_b[:, :1].expand(tokens, heads)
        elif kind == "in place":
            out, lse = out_a, lse_a
        elif kind == "in place crosswise":
            out, lse = out_b, lse_a
        elif kind == "special" and m.device.type != "meta":
            special = torch.tensor([-math.inf, math.inf, math.nan, 0.0, 200.0, 1e30], device=m.device)
            lse_a[:6], lse_b[:, :6] = special[:, None], special
            out_a[0, :], out_b[:, 0] = math.nan, math.inf  # of sides without keys
        return out_a, lse_a, out_b, lse_b, out, lse

    calls = [
        (1, 1, 128, BF16, "", "one head"),
        (37, 8, 64, FP16, "", "four heads per warp"),
        (37, 4, 256, FP32, "", "two vectors per lane"),
        (19, 3, 192, BF16, "", "24 vectors: three for each of 8 lanes"),
        (19, 3, 80, BF16, "", "10 vectors in 16 lanes"),
        (19, 3, 33, BF16, "", "odd head: element accesses, and the last lanes have fewer"),
        (5, 2, 2056, FP16, "", "more vectors than one step takes, the last step not full"),
        (300, 3, 8, BF16, "", "one vector: a lane per head"),
        (19, 3, 128, BF16, "misaligned", "storage offset 1"),
        (19, 6, 128, BF16, "views", "heads first, both results interleaved; gaps in out, lse transposed"),
        (19, 6, 128, BF16, "expanded", "one result for all tokens, one log-sum-exp for all heads"),
        (41, 7, 128, BF16, "in place", "the first result is replaced"),
        (41, 7, 512, FP32, "in place crosswise", "out of one side, lse of the other"),
        (8, 7, 128, BF16, "special", "infinities and NaN of the log-sum-exp; what has no weight holds NaN"),
        (3000, 32, 128, BF16, "", "more heads than run at once; large enough to bypass the caches"),
        (0, 8, 128, BF16, "", "no tokens"),
    ]
    for *call, why in calls:
        label = f"{'x'.join(map(str, call[:3]))} {str(call[3])[6:]} {call[4]}".strip()
        yield Entry("attention.merge_state", label, lambda m, call=call: entry(m, *call), why)


GRID: list[Entry] = [
    *_row_entries(),
    *_norm_options(),
    *_group_entries(),
    *_large_entries(),
    *_cache_entries(),
    *_moe_entries(),
    *_qk_entries(),
    *_decode_entries(),
    *_merge_entries(),
    *_gemm_entries(),
]
