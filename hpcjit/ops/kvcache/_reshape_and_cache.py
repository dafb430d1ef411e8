"""Write keys and values of new tokens into a paged cache."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from hpcjit import checks, settings
from hpcjit.build import Config, Template
from hpcjit.errors import ArgumentError
from hpcjit.fused_op import define
from hpcjit.jit_op import NOTHING, JitOp, Plan, raise_fault
from hpcjit.ops._fp8 import quantize
from hpcjit.ops._rows import TYPE_NAMES
from hpcjit.ops._tensors import FLOATS, accumulation_dtype, compiling, distinct, require

LAYOUTS = ("NHD", "HND")

_FAULT = "slot_mapping: below the number of slots {limit}"
_FEW_VECS = 2**17  # below, more threads in flight are worth more than more loads per thread


@dataclass(frozen=True)
class ReshapeAndCacheConfig(Config):
    input_t: str = "bf16"
    cache_t: str = "bf16"
    slot_t: str = "int64"
    threads: int = 256
    vec: int = 8
    vecs_per_thread: int = 2
    pdl: bool = True


_SIDE = ("dim", "token_stride", "head_stride", "cache_page_stride", "cache_slot_stride", "cache_head_stride")

RESHAPE_AND_CACHE = Template(
    op="kvcache.reshape_and_cache",
    header="kvcache/reshape_and_cache.cuh",
    entry="hpcjit::kvcache::ReshapeAndCache",
    config=ReshapeAndCacheConfig,
    params=(
        *("key", "value", "key_cache", "value_cache", "slot_mapping", "k_scale", "v_scale", "fault"),
        *("k_factor", "v_factor", "num_tokens", "num_heads", "page_size", "num_slots"),
        *(f"key_{name}" for name in _SIDE),
        "k_scale_stride",
        *(f"value_{name}" for name in _SIDE),
        "v_scale_stride",
    ),
)


def _nhd(cache: torch.Tensor, layout: str) -> torch.Tensor:
    """The cache as [num_pages, page_size, num_kv_heads, head_dim], whatever its layout."""
    return cache if layout == "NHD" else cache.transpose(1, 2)


class ReshapeAndCacheOp(JitOp):
    """The scale of head h is `k_factor * k_scale[h]`, with 1 for a tensor that is absent."""

    op = "kvcache.reshape_and_cache"
    schema = (
        "(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping,"
        " Tensor? k_scale, Tensor? v_scale, float k_factor, float v_factor, str layout) -> ()"
    )
    trace_values = ("slot_mapping",)

    def check(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
        k_factor: float,
        v_factor: float,
        layout: str,
    ) -> None:
        checks.choice(self.op, "layout", layout, LAYOUTS)
        checks.tensor(self.op, "key", key, dtypes=FLOATS, min_ndim=3)
        if key.ndim != 3 or 0 in key.shape[1:]:
            raise ArgumentError(self.op, "key", "[num_tokens, num_kv_heads, head_dim]", checks.describe(key))
        checks.tensor(self.op, "value", value, dtypes=(key.dtype,), min_ndim=3, like=key)
        if value.shape[:2] != key.shape[:2] or value.ndim != 3 or not value.shape[2]:
            expected = f"of shape [{key.shape[0]}, {key.shape[1]}, value_head_dim]"
            raise ArgumentError(self.op, "value", expected, checks.describe(value))
        self._check_cache("key_cache", key_cache, key, layout)
        pages = _nhd(key_cache, layout).shape[:2]
        self._check_cache("value_cache", value_cache, value, layout, pages, key_cache.dtype)
        dtypes = (torch.int32, torch.int64)
        checks.tensor(self.op, "slot_mapping", slot_mapping, dtypes=dtypes, shape=key.shape[:1], like=key)
        for side, scale, factor in (("k", k_scale, k_factor), ("v", v_scale, v_factor)):
            self._check_scale(side, scale, factor, key, quantised=key_cache.dtype != key.dtype)
        checks.no_grad(self.op, key=key, value=value, key_cache=key_cache, value_cache=value_cache)

    def _check_cache(
        self,
        name: str,
        cache: torch.Tensor,
        source: torch.Tensor,
        layout: str,
        pages: torch.Size | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        dtypes = (source.dtype, torch.float8_e4m3fn) if dtype is None else (dtype,)
        checks.tensor(self.op, name, cache, dtypes=dtypes, min_ndim=4, like=source)
        if cache.ndim != 4 or _nhd(cache, layout).shape[2:] != source.shape[1:] or 0 in cache.shape[1:]:
            axes = "num_pages, page_size, {}, {}" if layout == "NHD" else "num_pages, {}, page_size, {}"
            expected = f"[{axes.format(*source.shape[1:])}] in layout {layout}"
            raise ArgumentError(self.op, name, expected, checks.describe(cache))
        if pages is not None and _nhd(cache, layout).shape[:2] != pages:
            expected = f"of {pages[0]} pages of {pages[1]} slots like key_cache"
            raise ArgumentError(self.op, name, expected, checks.describe(cache))
        distinct(self.op, name, cache)

    def _check_scale(
        self, side: str, scale: torch.Tensor | None, factor: float, key: torch.Tensor, *, quantised: bool
    ) -> None:
        name = f"{side}_scale"
        _check_factor(name, factor, quantised=quantised)
        if scale is None:
            return
        if not quantised:
            raise ArgumentError(self.op, name, "None, because the cache is not float8", checks.describe(scale))
        checks.tensor(self.op, name, scale, dtypes=(torch.float32,), min_ndim=1, like=key)
        if scale.ndim != 1 or scale.shape[0] not in (1, key.shape[1]):
            expected = f"of shape [1] or [{key.shape[1]}] (num_kv_heads)"
            raise ArgumentError(self.op, name, expected, checks.describe(scale))
        checks.no_grad(self.op, **{name: scale})

    def plan(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
        k_factor: float,
        v_factor: float,
        layout: str,
    ) -> Plan | str:
        if key.shape[0] == 0:
            return NOTHING
        num_tokens, num_heads = key.shape[:2]
        key_cache, value_cache = _nhd(key_cache, layout), _nhd(value_cache, layout)
        vec = min(_vector_width(key, key_cache), _vector_width(value, value_cache))
        vecs = num_tokens * num_heads * (key.shape[2] + value.shape[2]) // vec
        config = ReshapeAndCacheConfig(
            TYPE_NAMES[key.dtype],
            TYPE_NAMES[key_cache.dtype],
            TYPE_NAMES[slot_mapping.dtype],
            vec=vec,
            vecs_per_thread=1 if vecs <= _FEW_VECS else 4,
        )
        values: dict[str, int | float | str] = {
            "k_scale": 0 if k_scale is None else "k_scale",
            "v_scale": 0 if v_scale is None else "v_scale",
            "num_tokens": num_tokens,
            "num_heads": num_heads,
            "page_size": key_cache.shape[1],
            "num_slots": key_cache.shape[0] * key_cache.shape[1],
            "k_scale_stride": _scale_stride(k_scale),
            "v_scale_stride": _scale_stride(v_scale),
        }
        for side, source, cache in (("key", key, key_cache), ("value", value, value_cache)):
            extent = (source.shape[2], *source.stride()[:2], *cache.stride()[:3])
            values.update(zip((f"{side}_{name}" for name in _SIDE), extent, strict=True))
        return Plan(RESHAPE_AND_CACHE, config, values, fault_text=_FAULT)

    def reference(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
        k_factor: float,
        v_factor: float,
        layout: str,
    ) -> None:
        if slot_mapping.is_meta:  # no slots to read
            return
        num_pages, page_size = _nhd(key_cache, layout).shape[:2]
        limit = num_pages * page_size
        if settings.read().debug:
            _raise_first_fault(self.op, slot_mapping, limit)
        tokens = ((slot_mapping >= 0) & (slot_mapping < limit)).nonzero().flatten()
        slots = slot_mapping[tokens].long()
        for source, cache, scale, factor in (
            (key, key_cache, k_scale, k_factor),
            (value, value_cache, v_scale, v_factor),
        ):
            rows = source[tokens]
            if cache.dtype == torch.float8_e4m3fn:
                scales = factor * (torch.ones(1, device=source.device) if scale is None else scale)
                rows = quantize(rows.to(accumulation_dtype(rows.dtype)), scales.unsqueeze(-1))
            _nhd(cache, layout)[slots // page_size, slots % page_size] = rows

    def forward_triton(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
        k_factor: float,
        v_factor: float,
        layout: str,
    ) -> None:
        """Slots past the end are skipped in debug mode too."""
        self.check(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, k_factor, v_factor, layout)
        from hpcjit.ops.kvcache import _triton

        caches = (_nhd(key_cache, layout), _nhd(value_cache, layout))
        _triton.reshape_and_cache(self.op, key, value, *caches, slot_mapping, k_scale, v_scale, k_factor, v_factor)


def _vector_width(source: torch.Tensor, cache: torch.Tensor) -> int:
    """Elements per access: 16 bytes of the wider of the two, if all heads of both are aligned to it."""
    vec = 16 // source.element_size()
    for tensor in (source, cache):
        itemsize = tensor.element_size()
        steps = [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
        vec = math.gcd(vec, tensor.shape[-1], tensor.data_ptr() // itemsize, *steps[:-1])
    return vec


def _scale_stride(scale: torch.Tensor | None) -> int:
    return 0 if scale is None or scale.shape[0] == 1 else scale.stride(0)


def _raise_first_fault(op: str, slot_mapping: torch.Tensor, limit: int) -> None:
    bad = (slot_mapping >= limit).nonzero().flatten()
    if bad.numel():
        first = int(bad[0])
        raise_fault(op, _FAULT, [bad.numel(), first, int(slot_mapping[first]), limit])


reshape_and_cache_op = ReshapeAndCacheOp()
define(reshape_and_cache_op)

Scale = float | torch.Tensor | None


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: Scale = None,
    v_scale: Scale = None,
    layout: str = "NHD",
    backend: str | None = None,
) -> None:
    """Write the keys and values of new tokens into their slots of a paged cache, in place.

        key_cache[slot / page_size, slot % page_size, h, :] = key[t, h, :]       with slot = slot_mapping[t]

    and likewise the values; an FP8 cache receives `e4m3(key / k_scale)` (nearest, saturating), any other the bits of `key`.

    Args:
        key: `[num_tokens, num_kv_heads, head_dim]`, bfloat16, float16 or float32; any token and head strides, such as those
            of a view of a fused QKV projection. Heads aligned to 16 bytes are fast; any others work.
        value: `[num_tokens, num_kv_heads, value_head_dim]`, dtype of `key`.
        key_cache: `[num_pages, page_size, num_kv_heads, head_dim]` for layout NHD, `[num_pages, num_kv_heads, page_size,
            head_dim]` for HND; the dtype of `key` or float8_e4m3fn; any strides, such as those of a view of one tensor that
            holds keys and values. Slots that are not written keep every bit.
        value_cache: as `key_cache`, with `value_head_dim`.
        slot_mapping: int32 or int64 `[num_tokens]` on the device. Negative: the token is skipped. No two tokens may share a
            slot. Slots past the end are never written; with HPCJIT_DEBUG=1 they raise.
        k_scale, v_scale: for an FP8 cache, a positive number or a float32 tensor `[1]` or `[num_kv_heads]` on the device;
            None is 1.
        layout: "NHD" or "HND".
        backend: run this backend or fail.

    Raises:
        ArgumentError: a wrong dtype, shape, stride or device, scales without an FP8 cache, a tensor that requires grad; in
            debug mode also a slot past the end, with its position and value.

    Safe under CUDA graphs once the signature has run or been prewarmed: slots are read on the device.
    """
    k_tensor, k_factor = _split_scale("k_scale", k_scale, key_cache)
    v_tensor, v_factor = _split_scale("v_scale", v_scale, key_cache)
    args = (key, value, key_cache, value_cache, slot_mapping, k_tensor, v_tensor, k_factor, v_factor, layout)
    if compiling("kvcache.reshape_and_cache", backend):
        torch.ops.hpcjit.kvcache_reshape_and_cache(*args)
    elif backend is None:
        reshape_and_cache_op.fast(*args)
    else:
        reshape_and_cache_op(*args, backend=backend)


def _split_scale(name: str, scale: Scale, cache: torch.Tensor) -> tuple[torch.Tensor | None, float]:
    """The tensor and the number of a scale. A number is no part of a call's signature, so each is checked here."""
    if scale is None or isinstance(scale, torch.Tensor):
        return scale, 1.0
    require(ReshapeAndCacheOp.op, "key_cache", cache, 4)
    _check_factor(name, scale, quantised=cache.dtype == torch.float8_e4m3fn)
    return None, float(scale)


def _check_factor(name: str, factor: float, *, quantised: bool) -> None:
    if not quantised and factor != 1:
        raise ArgumentError(ReshapeAndCacheOp.op, name, "None, because the cache is not float8", factor)
    if checks.number(ReshapeAndCacheOp.op, name, factor) <= 0:
        raise ArgumentError(ReshapeAndCacheOp.op, name, "positive", factor)
