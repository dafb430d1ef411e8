"""Which operators a language model calls, with which sizes: from its configuration in the format of Hugging Face."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpcjit.errors import FormatError
from hpcjit.jit_op import JitOp
from hpcjit.ops.attention._decode_shape import HEAD_DIMS, MAX_GROUP
from hpcjit.ops.moe._fused_moe_args import MAX_EXPERTS, MAX_TOP_K
from hpcjit.replay import dtype_of
from hpcjit.usages import USAGES, Sizes, Usage, calls_of

# A plan depends on the number of tokens through few thresholds; this ladder meets each of them.
TOKENS = tuple(2**i for i in range(15))

MAX_SIZE = 1 << 24

_ACTIVATIONS = {
    "silu": "silu_and_mul",
    "swish": "silu_and_mul",
    "gelu": "gelu_and_mul",
    "gelu_pytorch_tanh": "gelu_tanh_and_mul",
    "gelu_new": "gelu_tanh_and_mul",
    "gelu_tanh": "gelu_tanh_and_mul",
}


@dataclass(frozen=True)
class Model:
    """The sizes that operators ask for by name; None where the configuration has none."""

    hidden_size: int
    intermediate_sizes: tuple[int, ...]
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int | None
    moe_intermediate_size: int | None
    top_k: int | None
    num_groups: int | None  # of experts, where the choice is restricted to some of them
    topk_groups: int | None
    gate: str  # "topk_softmax", "topk_sigmoid" or "grouped_topk"
    dtype: torch.dtype
    activation: str
    norm: str  # "rmsnorm", "gemma_rmsnorm" or "layernorm"
    fp8: bool


def load(path: str | os.PathLike[str]) -> Model:
    """Read a `config.json`, or the folder that holds one.

    Raises:
        FormatError: not such a configuration; names the field.
        OSError: it cannot be read.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{file}: not JSON: {error}") from None
    if not isinstance(document, dict):
        raise FormatError(f"{file}: must be a JSON object, got a {type(document).__name__}")
    nested = document.get("text_config")  # models that also see or hear
    return _Fields(str(file), {**document, **nested} if isinstance(nested, dict) else document).model()


class _Fields:
    def __init__(self, where: str, values: dict[str, Any]) -> None:
        self._where = where
        self._values = values

    def model(self) -> Model:
        heads = self._size("num_attention_heads", "n_head")
        hidden = self._size("hidden_size", "n_embd")
        experts = self._size("num_experts", "num_local_experts", "n_routed_experts", needed=False)
        quantised = self._values.get("quantization_config")
        groups = self._groups(experts)
        return Model(
            hidden_size=hidden,
            intermediate_sizes=self._intermediate_sizes(),
            num_q_heads=heads,
            num_kv_heads=self._size("num_key_value_heads", needed=False) or heads,
            head_dim=self._size("head_dim", needed=False) or self._quotient(hidden, heads),
            num_experts=experts or None,
            moe_intermediate_size=self._size("moe_intermediate_size", "intermediate_size") if experts else None,
            top_k=self._top_k(experts),
            num_groups=groups[0],
            topk_groups=groups[1],
            gate=self._gate(groups),
            dtype=self._dtype(),
            activation=self._activation(),
            norm=self._norm(),
            fp8=isinstance(quantised, dict) and "fp8" in json.dumps(quantised).lower(),
        )

    def _size(self, *names: str, needed: bool = True) -> int:
        for name in names:
            value = self._values.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_SIZE:
                raise FormatError(f"{self._where}: field '{name}' must be an integer in [1, {MAX_SIZE}], got {value!r}")
            return value
        if needed:
            raise FormatError(f"{self._where}: field '{names[0]}' is missing")
        return 0

    def _intermediate_sizes(self) -> tuple[int, ...]:
        dense = self._size("intermediate_size", "n_inner", needed=False)
        expert = self._size("moe_intermediate_size", needed=False)
        shared = self._size("shared_expert_intermediate_size", needed=False)
        found = tuple(dict.fromkeys(size for size in (dense, expert, shared) if size))
        if not found:
            raise FormatError(f"{self._where}: field 'intermediate_size' is missing")
        return found

    def _quotient(self, hidden: int, heads: int) -> int:
        if hidden % heads:
            raise FormatError(
                f"{self._where}: field 'head_dim' is missing and hidden_size {hidden} is no multiple of "
                f"num_attention_heads {heads}"
            )
        return hidden // heads

    def _top_k(self, experts: int) -> int | None:
        top_k = self._size("num_experts_per_tok", "moe_topk", "top_k_experts", needed=bool(experts))
        if experts and top_k > experts:
            raise FormatError(
                f"{self._where}: field 'num_experts_per_tok' must be at most the {experts} experts, got {top_k}"
            )
        return top_k if experts else None

    def _groups(self, experts: int) -> tuple[int | None, int | None]:
        """Groups of experts and how many of them are kept; None without a restriction."""
        groups = self._size("n_group", needed=False)
        if not experts or groups <= 1:
            return None, None
        kept = self._size("topk_group")
        if experts % groups or kept > groups:
            raise FormatError(
                f"{self._where}: field 'n_group' must divide the {experts} experts and be at least topk_group, got "
                f"{groups} and {kept}"
            )
        return (groups, kept) if kept < groups else (None, None)

    def _gate(self, groups: tuple[int | None, int | None]) -> str:
        if groups[0]:
            return "grouped_topk"
        return "topk_sigmoid" if self._values.get("scoring_func") == "sigmoid" else "topk_softmax"

    def _dtype(self) -> torch.dtype:
        name = self._values.get("torch_dtype", self._values.get("dtype")) or "bfloat16"
        where = f"{self._where}: field 'torch_dtype'"
        if not isinstance(name, str):
            raise FormatError(f"{where} must be the name of a dtype, got {name!r}")
        return dtype_of(where, name.removeprefix("torch."))

    def _norm(self) -> str:
        if "rms_norm_eps" not in self._values and {"layer_norm_eps", "layer_norm_epsilon"} & set(self._values):
            return "layernorm"
        return "gemma_rmsnorm" if "gemma" in str(self._values.get("model_type", "")).lower() else "rmsnorm"

    def _activation(self) -> str:
        name = self._values.get("hidden_act") or self._values.get("hidden_activation") or "silu"
        if not isinstance(name, str) or name not in _ACTIVATIONS:
            raise FormatError(
                f"{self._where}: field 'hidden_act' must be one of {', '.join(_ACTIVATIONS)}, got {name!r}"
            )
        return _ACTIVATIONS[name]


def calls_of_model(
    model: Model,
    known: Sequence[str],
    tokens: Sequence[int] = TOKENS,
    shards: int = 1,
    dtype: torch.dtype | None = None,
) -> list[tuple[JitOp, tuple[Any, ...]]]:
    """The calls of one forward pass, of the operators in `known`, with heads and widths divided among `shards` GPUs.

    Every GPU has all experts, cut along their inner size; one that has some of them whole is not covered.
    """
    calls = []
    dtype = dtype or model.dtype
    for op, usage in USAGES.items():
        if op in known and _uses(model, op, usage):
            for sizes in _sizes(model, usage, shards):
                if op in ("gemm.router_gemm", "moe.router_topk") and dtype == torch.float32:
                    continue
                if op == "attention.decode" and not _attends(sizes, dtype):
                    continue
                if op != "moe.fused_moe" or _mixes(sizes, model.fp8):
                    calls += calls_of(op, sizes, tokens, dtype, model.fp8)
    return calls


def _attends(sizes: Sizes, dtype: torch.dtype) -> bool:
    """Whether `attention.decode` takes such heads; a model whose attention is of another kind has none of its calls."""
    num_q_heads, num_kv_heads, head_dim = sizes
    group, rest = divmod(num_q_heads, num_kv_heads)
    return not rest and group <= MAX_GROUP and (head_dim, head_dim) in HEAD_DIMS and dtype != torch.float32


def _mixes(sizes: Sizes, fp8: bool) -> bool:
    """Whether `moe.fused_moe` takes such experts."""
    num_experts, top_k, hidden_size, inner = sizes
    step = 16 if fp8 else 8
    return num_experts <= MAX_EXPERTS and top_k <= MAX_TOP_K and not hidden_size % step and not inner % step


def _uses(model: Model, op: str, usage: Usage) -> bool:
    group, _, name = op.partition(".")
    if usage.fp8 and not model.fp8:
        return False
    if name == "gemm_bf16x2":  # what router_gemm does too, from weights that no checkpoint holds
        return False
    if name == "router_topk":
        return model.gate == "topk_softmax"
    if name in ("topk_softmax", "topk_sigmoid", "grouped_topk"):
        return name == model.gate
    if group == "activation":
        return name.removesuffix("_quant_fp8") == model.activation
    if usage.sizes == ("hidden_size",) and group == "layernorm":
        return name.replace("fused_add_", "").removesuffix("_quant_fp8") == model.norm
    return True


def _sizes(model: Model, usage: Usage, shards: int) -> list[Sizes]:
    """The values of the operator's sizes; none when the model has no such thing."""
    if usage.sizes == ("intermediate_size",):
        return [(max(size // shards, 1),) for size in model.intermediate_sizes]
    if any(getattr(model, name) is None for name in usage.sizes):
        return []
    divided = ("num_q_heads", "num_kv_heads", "moe_intermediate_size")
    return [tuple(max(getattr(model, name) // (shards if name in divided else 1), 1) for name in usage.sizes)]
