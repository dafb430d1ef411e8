"""What the tests of operators share: bits of tensors, calls through the public functions, rejected calls."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from hpcjit.cases import Case, cases_of
from hpcjit.errors import ArgumentError
from hpcjit.jit_op import JitOp
from hpcjit.registry import registry

OPS = [
    "layernorm.rmsnorm",
    "layernorm.gemma_rmsnorm",
    "layernorm.fused_add_rmsnorm",
    "layernorm.gemma_fused_add_rmsnorm",
    "layernorm.layernorm",
    "layernorm.rmsnorm_quant_fp8",
    "layernorm.qk_norm",
    "activation.silu_and_mul",
    "activation.gelu_and_mul",
    "activation.gelu_tanh_and_mul",
    "activation.silu_and_mul_quant_fp8",
    "quantization.per_token_quant_fp8",
    "quantization.per_token_group_quant_fp8",
    "quantization.per_tensor_quant_fp8",
    "kvcache.reshape_and_cache",
    "moe.topk_softmax",
]


def operator(op: str) -> JitOp:
    """The operator object behind a name."""
    return registry.specs(op)[0].load_owner()


def public(op: str) -> Callable[..., Any]:
    """The public function of a name."""
    group, _, name = op.partition(".")
    return getattr(importlib.import_module(f"hpcjit.ops.{group}"), name)


def demo_case(op: str) -> Case:
    return cases_of(op, "demo")[0]


def call_public(op: str, args: tuple[Any, ...]) -> Any:
    """The public call that has the arguments of the schema."""
    named = dict(zip(operator(op).arguments, args, strict=True))
    function = public(op)
    if op.endswith("_and_mul"):
        return function(named["input"], out=named["out"])
    if op == "layernorm.rmsnorm_quant_fp8":
        scale = None if named["dynamic"] else named["scale"]
        return function(
            named["input"], named["weight"], named["eps"], residual=named["residual"], scale=scale, out=named["out"]
        )
    if op.startswith("layernorm.") and "out" in named:
        inputs = [value for name, value in named.items() if name != "out"]
        return function(*inputs, out=named["out"])
    if op == "activation.silu_and_mul_quant_fp8":
        if not named["dynamic"]:
            return function(named["input"], scale=named["scale"], out=named["out"])
        return function(
            named["input"],
            group_size=named["group_size"] or None,
            scale_ue8m0=named["scale_ue8m0"],
            out=named["out"],
            out_scale=named["scale"],
        )
    if op == "quantization.per_token_quant_fp8":
        return function(named["input"], out=named["out"], out_scale=named["scale"])
    if op == "quantization.per_token_group_quant_fp8":
        return function(
            named["input"],
            named["group_size"],
            scale_ue8m0=named["scale_ue8m0"],
            out=named["out"],
            out_scale=named["scale"],
        )
    if op == "quantization.per_tensor_quant_fp8":
        if named["dynamic"]:
            return function(named["input"], out=named["out"], out_scale=named["scale"])
        return function(named["input"], named["scale"], out=named["out"])
    if op == "kvcache.reshape_and_cache":
        scales = {
            f"{side}_scale": named[f"{side}_scale"] if named[f"{side}_scale"] is not None else named[f"{side}_factor"]
            for side in "kv"
        }
        return function(*args[:5], **scales, layout=named["layout"])
    if op == "moe.topk_softmax":
        options = {name: named[name] for name in ("renormalize", "softcap", "bias", "weights", "ids")}
        return function(named["logits"], named["top_k"], **options)
    return function(*args)


# --- bits -----------------------------------------------------------------------------------------------------------


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of the storage behind a tensor, as integers."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage(), 0, (count,), (1,))
    return flat.view(integer)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor as integers, so that NaN equals NaN and 0 does not equal -0."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(integer)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(bits(a), bits(b))


def outside(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of the storage that do not belong to the view."""
    flat = whole(tensor)
    mask = torch.ones(flat.numel(), dtype=torch.bool, device=tensor.device)
    mask.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(False)
    return flat[mask]


def tensors(args: Iterable[Any]) -> list[torch.Tensor]:
    return [value for value in args if isinstance(value, torch.Tensor)]


# --- rejected calls -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def rejects(
    op: str, argument: str, *watched: torch.Tensor, match: str = "", error: type[Exception] = ArgumentError
) -> Iterator[None]:
    """The block raises `error` that names operator and argument, and leaves every watched tensor as it is."""
    before = [whole(tensor).clone() for tensor in watched]
    with pytest.raises(error) as caught:
        yield
    assert caught.value.op == op
    assert caught.value.argument == argument, str(caught.value)
    assert f"'{argument}'" in str(caught.value)
    assert match in str(caught.value), str(caught.value)
    for tensor, old in zip(watched, before, strict=True):
        assert torch.equal(whole(tensor), old), "something was written"
