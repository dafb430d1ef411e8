"""How operators are called, by sizes: what `hpcjit prewarm --shapes` and `models.py` make calls of."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hpcjit import ops
from hpcjit.errors import ArgumentError
from hpcjit.jit_op import JitOp
from hpcjit.spec import did_you_mean

PAGE_SIZE = 64
BLOCK_SIZE = 64  # of the pairs that go to one expert; it changes no code
TILE_ROWS = 64  # of a grouped product
INNER_SIZE = 256  # features of a grouped product; it changes no code

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Make:
    """Tensors without memory for one number of tokens."""

    tokens: int
    dtype: torch.dtype
    fp8: bool = True  # weights of experts

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


def _fused_moe(m: Make, num_experts: int, top_k: int, hidden_size: int, moe_intermediate_size: int) -> Any:
    """In FP8 with scales of blocks, as checkpoints have them."""
    x = m.weight(m.tokens, hidden_size, dtype=torch.bfloat16)
    inner, blocks = -(-moe_intermediate_size // 128), -(-hidden_size // 128)
    weights = [
        m.weight(num_experts, *size, dtype=torch.float8_e4m3fn if m.fp8 else torch.bfloat16)
        for size in ((2 * moe_intermediate_size, hidden_size), (hidden_size, moe_intermediate_size))
    ]
    ids, probabilities = (m.weight(m.tokens, top_k, dtype=dtype) for dtype in (torch.int32, torch.float32))
    if not m.fp8:
        return ops.moe.fused_moe(x, *weights, ids, probabilities, quant="bf16")
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
    "moe.fused_moe": Usage(("num_experts", "top_k", "hidden_size", "moe_intermediate_size"), _fused_moe),
}


def usage_of(op: str) -> Usage:
    """How `op` is called by sizes; ArgumentError for an operator that has no such description."""
    if op not in USAGES:
        raise ArgumentError(op, "--shapes", f"used with an operator that models call{did_you_mean(op, USAGES)}", op)
    return USAGES[op]


def calls_of(
    op: str, sizes: Sizes, tokens: Sequence[int], dtype: torch.dtype, fp8: bool = True
) -> list[tuple[JitOp, tuple[Any, ...]]]:
    """The calls that `op` amounts to for each number of tokens, with tensors that have no memory; of experts in FP8 or not."""
    usage = usage_of(op)
    if len(sizes) != len(usage.sizes):
        expected = " x ".join(("num_tokens", *usage.sizes))
        got = " x ".join(map(str, (tokens[0] if len(tokens) == 1 else "num_tokens", *sizes)))
        raise ArgumentError(op, "--shapes", f"of the form {expected}", got)
    with collected() as calls:
        for count in tokens:
            usage.call(Make(count, dtype, fp8), *sizes)
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
