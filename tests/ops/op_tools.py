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
    "moe.topk_sigmoid",
    "moe.grouped_topk",
    "moe.router_topk",
    "moe.moe_align_block_size",
    "moe.moe_sum_reduce",
    "moe.fused_moe",
    "moe.moe_plan",
    "moe.moe_reduce",
    "moe.grouped_gemm",
    "attention.decode",
    "attention.merge_state",
    "gemm.router_gemm",
    "gemm.gemm_bf16x2",
]


def operator(op: str) -> JitOp:
    """The operator object behind a name."""
    return registry.specs(op)[0].load_owner()


def public(op: str) -> Callable[..., Any]:
    """The public function of a name."""
    group, _, name = op.partition(".")
    return getattr(importlib.import_module(f"hpcjit.ops.{group}"), name)


DEMOS: list[Case] = [case for op in OPS for case in cases_of(op, "demo")]


def as_public(op: str, args: tuple[Any, ...]) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments of the public call that has these arguments of the schema."""
    named = dict(zip(operator(op).arguments, args, strict=True))
    group, _, name = op.partition(".")
    if name == "rmsnorm_quant_fp8":
        scale = None if named["dynamic"] else named["scale"]  # a dynamic one is always a new tensor
        options = {"residual": named["residual"], "out": named["out"], "scale": scale}
        return [named["input"], named["weight"], named["eps"]], options
    if name == "silu_and_mul_quant_fp8":
        options = {"group_size": named["group_size"] or None, "scale_ue8m0": named["scale_ue8m0"], "out": named["out"]}
        return [named["input"]], options | _scale(named)
    if name == "per_tensor_quant_fp8":
        return [named["input"]], {"out": named["out"]} | _scale(named)
    if group == "kvcache":
        scales = {
            f"{side}_scale": named[f"{side}_scale"] if named[f"{side}_scale"] is not None else named[f"{side}_factor"]
            for side in "kv"
        }
        return list(args[:5]), {**scales, "layout": named["layout"]}
    if group == "gemm":
        names = {"accuracy": "mode", "scale": "scale", "out": "out"}
        options = {names[key]: value for key, value in named.items() if key in names}
        return [value for key, value in named.items() if key not in names], options
    if name == "router_topk":
        named["mode"] = named.pop("accuracy")
        return list(args[:3]), dict(list(named.items())[3:])
    if name == "moe_plan":
        return list(args[:3]), {key: value for key, value in named.items() if key in operator(op).arguments[3:]}
    if name == "moe_reduce":
        return list(args[:3]), {"shared_output": args[3], "out": args[4]}
    if name == "grouped_gemm":
        return list(args[:5]), {key: value for key, value in named.items() if key in operator(op).arguments[5:]}
    if name == "decode":
        return list(args[:5]), _options_of_decode(named)
    # In the others the outputs and options have the names of the schema, but for `scale`.
    keywords = {"out", "scale_ue8m0", "bias", "lse", *_OF_MOE}
    if name == "layernorm":
        keywords -= {"bias"}
    options = {key: value for key, value in named.items() if key in keywords}
    if "scale" in named:
        options["out_scale"] = named["scale"]
    return [value for key, value in named.items() if key not in keywords and key != "scale"], options


_OF_MOE = (
    *("renormalize", "softcap", "scaling_factor", "num_shared_experts", "num_valid_tokens", "weights", "ids"),
    *("num_groups", "topk_groups", "scoring", "expert_map"),
    *("sorted_token_ids", "expert_ids", "num_tokens_post_padded"),
    *("w13_scale", "w2_scale", "x_scale", "quant", "activation", "shared_output"),
    *("expert_offset", "num_global_experts", "apply_weights_on_input"),
)


def _options_of_decode(named: dict[str, Any]) -> dict[str, Any]:
    same = ("scale", "cu_seqlens_q", "max_q_len", "q_scale", "sinks", "out", "lse", "layout", "schedule")
    scales = {f"{x}_scale": named[f"{x}_factor"] if named[f"{x}_scale"] is None else named[f"{x}_scale"] for x in "kv"}
    options = {"window": named["window"] or None, "softcap": named["softcap"] if named["capped"] else None}
    return {name: named[name] for name in same} | scales | options | {"return_lse": named["lse"] is not None}


def _scale(named: dict[str, Any]) -> dict[str, Any]:
    return {"out_scale" if named["dynamic"] else "scale": named["scale"]}


def call_public(op: str, args: tuple[Any, ...]) -> Any:
    """The public call that has these arguments of the schema."""
    positional, keywords = as_public(op, args)
    return public(op)(*positional, **keywords)


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
