"""Which operators a language model calls, with which sizes: from its configuration in the format of Hugging Face."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpcjit import ops
from hpcjit.errors import ArgumentError, FormatError
from hpcjit.jit_op import JitOp
from hpcjit.ops.attention._decode_shape import HEAD_DIMS, MAX_GROUP
from hpcjit.replay import dtype_of
from hpcjit.spec import did_you_mean

# A plan depends on the number of tokens through few thresholds; this ladder meets each of them.
TOKENS = tuple(2**i for i in range(15))
PAGE_SIZE = 64
BLOCK_SIZE = 64  # of the pairs that go to one expert; it changes no code
TILE_ROWS = 64  # of a grouped product
INNER_SIZE = 256  # of an expert; ranks have a share of it, and it changes no code

MAX_SIZE = 1 << 24
Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Model:
    """The sizes that operators ask for by name; None where the configuration has none."""

    hidden_size: int
    intermediate_sizes: tuple[int, ...]
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int | None
    top_k: int | None
    num_groups: int | None  # of experts, where the choice is restricted to some of them
    topk_groups: int | None
    gate: str  # "topk_softmax", "topk_sigmoid" or "grouped_topk"
    dtype: torch.dtype
    activation: str
    norm: str  # "rmsnorm", "gemma_rmsnorm" or "layernorm"
    fp8: bool


@dataclass(frozen=True)
class Make:
    """Tensors without memory for one number of tokens."""

    tokens: int
    dtype: torch.dtype

    def rows(self, *sizes: int) -> torch.Tensor:
        return torch.empty(self.tokens, *sizes, dtype=self.dtype, device="meta")

    def weight(self, *sizes: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(*sizes, dtype=dtype or self.dtype, device="meta")


@dataclass(frozen=True)
class Usage:
    """How an operator is called: the names of its sizes, and the call. `fp8` ones serve FP8 models only."""

    sizes: tuple[str, ...]
    call: Callable[..., Any]
    fp8: bool = False


def _norm(name: str) -> Usage:
    return Usage(("hidden_size",), lambda m, n: getattr(ops.layernorm, name)(m.rows(n), m.weight(n)))


def _add_norm(name: str) -> Usage:
    return Usage(("hidden_size",), lambda m, n: getattr(ops.layernorm, name)(m.rows(n), m.rows(n), m.weight(n)))


def _gated(name: str, fp8: bool = False) -> Usage:
    return Usage(("intermediate_size",), lambda m, n: getattr(ops.activation, name)(m.rows(2 * n)), fp8)


def _quant(name: str) -> Usage:
    return Usage(("hidden_size",), lambda m, n: getattr(ops.quantization, name)(m.rows(n)), fp8=True)


def _logits(m: Make, num_experts: int) -> torch.Tensor:
    return torch.empty(m.tokens, num_experts, dtype=torch.float32, device="meta")


def _topk_softmax(m: Make, num_experts: int, top_k: int) -> Any:
    return ops.moe.topk_softmax(_logits(m, num_experts), top_k)


def _topk_sigmoid(m: Make, num_experts: int, top_k: int) -> Any:
    """With the bias that models of this kind have."""
    bias = m.weight(num_experts, dtype=torch.float32)
    return ops.moe.topk_sigmoid(_logits(m, num_experts), top_k, bias=bias, renormalize=True)


def _grouped_topk(m: Make, num_experts: int, top_k: int, num_groups: int, topk_groups: int) -> Any:
    """As DeepSeek-V3 calls it."""
    options: dict[str, Any] = {"num_groups": num_groups, "topk_groups": topk_groups, "scaling_factor": 2.5}
    bias = m.weight(num_experts, dtype=torch.float32)
    return ops.moe.grouped_topk(_logits(m, num_experts), top_k, bias=bias, **options)


def _align(m: Make, num_experts: int, top_k: int) -> Any:
    return ops.moe.moe_align_block_size(m.weight(m.tokens, top_k, dtype=torch.int32), num_experts, BLOCK_SIZE)


def _sum_reduce(m: Make, top_k: int, hidden_size: int) -> Any:
    return ops.moe.moe_sum_reduce(m.rows(top_k, hidden_size))


def _reduce(m: Make, top_k: int, hidden_size: int) -> Any:
    rows = m.weight(m.tokens * top_k, hidden_size)
    positions, weights = (m.weight(m.tokens, top_k, dtype=dtype) for dtype in (torch.int32, torch.float32))
    return ops.moe.moe_reduce(rows, positions, weights)


def _plan(m: Make, num_experts: int, top_k: int) -> Any:
    return ops.moe.moe_plan(m.weight(m.tokens, top_k, dtype=torch.int32), num_experts, TILE_ROWS)


def _grouped_gemm(m: Make, num_experts: int, top_k: int, hidden_size: int) -> Any:
    x = m.weight(m.tokens * top_k, hidden_size, dtype=torch.bfloat16)
    weight = m.weight(num_experts, INNER_SIZE, hidden_size, dtype=torch.bfloat16)
    tiles, count = (m.weight(*size, dtype=torch.int32) for size in ((m.tokens * top_k, 4), (1,)))
    return ops.moe.grouped_gemm(x, weight, tiles, count, TILE_ROWS)


def _fused_moe(m: Make, num_experts: int, top_k: int, hidden_size: int) -> Any:
    """With scales of blocks, as checkpoints in FP8 have them."""
    x = m.weight(m.tokens, hidden_size, dtype=torch.bfloat16)
    inner, blocks = INNER_SIZE // 128, -(-hidden_size // 128)
    weights = [
        m.weight(num_experts, *size, dtype=torch.float8_e4m3fn)
        for size in ((2 * INNER_SIZE, hidden_size), (hidden_size, INNER_SIZE))
    ]
    ids, probabilities = (m.weight(m.tokens, top_k, dtype=dtype) for dtype in (torch.int32, torch.float32))
    w13_scale = m.weight(num_experts, 2 * inner, blocks, dtype=torch.float32)
    w2_scale = m.weight(num_experts, blocks, inner, dtype=torch.float32)
    scales = {"w13_scale": w13_scale, "w2_scale": w2_scale}
    return ops.moe.fused_moe(x, *weights, ids, probabilities, quant="fp8_block", **scales)


def _router(m: Make, num_experts: int, hidden_size: int) -> Any:
    return ops.gemm.router_gemm(m.rows(hidden_size), m.weight(num_experts, hidden_size, dtype=torch.float32))


def _router_topk(m: Make, num_experts: int, top_k: int, hidden_size: int) -> Any:
    """By softmax, renormalised."""
    return ops.moe.router_topk(m.rows(hidden_size), m.weight(num_experts, hidden_size, dtype=torch.float32), top_k)


def _bf16x2(m: Make, num_experts: int, hidden_size: int) -> Any:
    x = torch.empty(m.tokens, hidden_size, dtype=torch.bfloat16, device="meta")
    parts = [m.weight(num_experts, hidden_size, dtype=torch.bfloat16) for _ in range(2)]
    return ops.gemm.gemm_bf16x2(x, *parts)


def _qk_norm(m: Make, num_q_heads: int, num_kv_heads: int, head_dim: int) -> Any:
    query, key = m.rows(num_q_heads, head_dim), m.rows(num_kv_heads, head_dim)
    return ops.layernorm.qk_norm(query, key, m.weight(head_dim), m.weight(head_dim))


def _cache(m: Make, num_kv_heads: int, head_dim: int) -> Any:
    key, value = (m.rows(num_kv_heads, head_dim) for _ in range(2))
    caches = [m.weight(m.tokens, PAGE_SIZE, num_kv_heads, head_dim) for _ in range(2)]
    slots = torch.empty(m.tokens, dtype=torch.int64, device="meta")
    return ops.kvcache.reshape_and_cache(key, value, *caches, slots)


def _decode(m: Make, num_q_heads: int, num_kv_heads: int, head_dim: int) -> Any:
    """Each token is a request."""
    caches = [m.weight(m.tokens, PAGE_SIZE, num_kv_heads, head_dim) for _ in range(2)]
    table, lengths = (torch.empty(*size, dtype=torch.int32, device="meta") for size in ((m.tokens, 64), (m.tokens,)))
    return ops.attention.decode(m.rows(num_q_heads, head_dim), *caches, table, lengths)


def _merge_state(m: Make, num_q_heads: int, head_dim: int) -> Any:
    lse = torch.empty(m.tokens, num_q_heads, dtype=torch.float32, device="meta")
    return ops.attention.merge_state(m.rows(num_q_heads, head_dim), lse, m.rows(num_q_heads, head_dim), lse)


USAGES: dict[str, Usage] = {
    "attention.decode": Usage(("num_q_heads", "num_kv_heads", "head_dim"), _decode),
    "attention.merge_state": Usage(("num_q_heads", "head_dim"), _merge_state),
    "layernorm.rmsnorm": _norm("rmsnorm"),
    "layernorm.gemma_rmsnorm": _norm("gemma_rmsnorm"),
    "layernorm.fused_add_rmsnorm": _add_norm("fused_add_rmsnorm"),
    "layernorm.gemma_fused_add_rmsnorm": _add_norm("gemma_fused_add_rmsnorm"),
    "layernorm.layernorm": Usage(
        ("hidden_size",), lambda m, n: ops.layernorm.layernorm(m.rows(n), m.weight(n), m.weight(n))
    ),
    "layernorm.rmsnorm_quant_fp8": Usage(
        ("hidden_size",), lambda m, n: ops.layernorm.rmsnorm_quant_fp8(m.rows(n), m.weight(n)), fp8=True
    ),
    "layernorm.qk_norm": Usage(("num_q_heads", "num_kv_heads", "head_dim"), _qk_norm),
    "activation.silu_and_mul": _gated("silu_and_mul"),
    "activation.gelu_and_mul": _gated("gelu_and_mul"),
    "activation.gelu_tanh_and_mul": _gated("gelu_tanh_and_mul"),
    "activation.silu_and_mul_quant_fp8": _gated("silu_and_mul_quant_fp8", fp8=True),
    "quantization.per_token_quant_fp8": _quant("per_token_quant_fp8"),
    "quantization.per_token_group_quant_fp8": _quant("per_token_group_quant_fp8"),
    "quantization.per_tensor_quant_fp8": _quant("per_tensor_quant_fp8"),
    "kvcache.reshape_and_cache": Usage(("num_kv_heads", "head_dim"), _cache),
    "gemm.router_gemm": Usage(("num_experts", "hidden_size"), _router),
    "gemm.gemm_bf16x2": Usage(("num_experts", "hidden_size"), _bf16x2),
    "moe.topk_softmax": Usage(("num_experts", "top_k"), _topk_softmax),
    "moe.topk_sigmoid": Usage(("num_experts", "top_k"), _topk_sigmoid),
    "moe.grouped_topk": Usage(("num_experts", "top_k", "num_groups", "topk_groups"), _grouped_topk),
    "moe.router_topk": Usage(("num_experts", "top_k", "hidden_size"), _router_topk),
    "moe.moe_align_block_size": Usage(("num_experts", "top_k"), _align),
    "moe.moe_sum_reduce": Usage(("top_k", "hidden_size"), _sum_reduce),
    "moe.moe_plan": Usage(("num_experts", "top_k"), _plan),
    "moe.moe_reduce": Usage(("top_k", "hidden_size"), _reduce),
    "moe.grouped_gemm": Usage(("num_experts", "top_k", "hidden_size"), _grouped_gemm),
    "moe.fused_moe": Usage(("num_experts", "top_k", "hidden_size"), _fused_moe, fp8=True),
}

_ACTIVATIONS = {
    "silu": "silu_and_mul",
    "swish": "silu_and_mul",
    "gelu": "gelu_and_mul",
    "gelu_pytorch_tanh": "gelu_tanh_and_mul",
    "gelu_new": "gelu_tanh_and_mul",
    "gelu_tanh": "gelu_tanh_and_mul",
}


def usage_of(op: str) -> Usage:
    """How `op` is called by sizes; ArgumentError for an operator that has no such description."""
    if op not in USAGES:
        raise ArgumentError(op, "--shapes", f"used with an operator that models call{did_you_mean(op, USAGES)}", op)
    return USAGES[op]


def calls_of(op: str, sizes: Sizes, tokens: Sequence[int], dtype: torch.dtype) -> list[tuple[JitOp, tuple[Any, ...]]]:
    """The calls that `op` amounts to for each number of tokens, with tensors that have no memory."""
    usage = usage_of(op)
    if len(sizes) != len(usage.sizes):
        expected = " x ".join(("num_tokens", *usage.sizes))
        got = " x ".join(map(str, (tokens[0] if len(tokens) == 1 else "num_tokens", *sizes)))
        raise ArgumentError(op, "--shapes", f"of the form {expected}", got)
    with collected() as calls:
        for count in tokens:
            usage.call(Make(count, dtype), *sizes)
    return calls


@contextlib.contextmanager
def collected() -> Iterator[list[tuple[JitOp, tuple[Any, ...]]]]:
    """Inside, operators do not run: what would have been called is put into the list."""
    calls: list[tuple[JitOp, tuple[Any, ...]]] = []

    def collect(self: JitOp, *args: Any, backend: object = None) -> None:
        calls.append((self, args))

    JitOp.__call__ = collect  # type: ignore[method-assign, assignment]
    try:
        yield calls
    finally:
        del JitOp.__call__


# --- model configurations -------------------------------------------------------------------------------------------


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
    """The calls of one forward pass, of the operators in `known`, with heads and widths divided among `shards` GPUs."""
    calls = []
    dtype = dtype or model.dtype
    for op, usage in USAGES.items():
        if op in known and _uses(model, op, usage):
            for sizes in _sizes(model, usage, shards):
                if op in ("gemm.router_gemm", "moe.router_topk") and dtype == torch.float32:
                    continue
                if op != "attention.decode" or _attends(sizes, dtype):
                    calls += calls_of(op, sizes, tokens, dtype)
    return calls


def _attends(sizes: Sizes, dtype: torch.dtype) -> bool:
    """Whether `attention.decode` takes such heads; a model whose attention is of another kind has none of its calls."""
    num_q_heads, num_kv_heads, head_dim = sizes
    group, rest = divmod(num_q_heads, num_kv_heads)
    return not rest and group <= MAX_GROUP and (head_dim, head_dim) in HEAD_DIMS and dtype != torch.float32


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
    divided = {"num_q_heads": model.num_q_heads, "num_kv_heads": model.num_kv_heads}
    sizes = [max(divided[name] // shards, 1) if name in divided else getattr(model, name) for name in usage.sizes]
    return [] if None in sizes else [tuple(sizes)]
