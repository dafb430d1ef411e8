"""Cases of the moe group: experts of Qwen3 (128) and DeepSeek-V3 (256), 8 chosen; tokens from decode to prefill."""

from __future__ import annotations

import torch

from hpcjit.cases import Args, Case, Make, Maker, moe_experts
from hpcjit.cases.gemm import SHAPES as ROUTERS
from hpcjit.cases.gemm import TOKENS as ROUTED
from hpcjit.ops.moe._moe_align_block_size import sorted_size

_DEMO = frozenset({"demo", "bench"})
_BENCH = frozenset({"bench"})

BF16 = torch.bfloat16
_TOKENS = (1, 32, 2048, 8192)
_NEAR = 5e-7  # a few roundings of scores up to 1


def _outputs(m: Maker, tokens: int, columns: int) -> Args:
    return m.poison(tokens, columns, dtype=torch.float32), m.poison(tokens, columns, dtype=torch.int32)


def separated(logits: torch.Tensor, bias: torch.Tensor | None, scoring: str, num_groups: int = 1) -> torch.Tensor:
    """The logits, with a copy of another row for each in which scores are so near that float32 may order them otherwise."""
    if bias is None or logits.is_meta or not logits.numel():
        return logits
    x = logits.double()
    choice = (torch.sigmoid(x) if scoring == "sigmoid" else torch.softmax(x, -1)) + bias.double()
    apart = choice.sort(-1).values.diff(dim=-1).amin(-1) > _NEAR if choice.shape[1] > 1 else choice[:, 0].isfinite()
    if num_groups > 1:
        groups = choice.unflatten(-1, (num_groups, -1))
        groups = groups.topk(min(2, groups.shape[-1])).values.sum(-1)
        apart &= groups.sort(-1).values.diff(dim=-1).amin(-1) > _NEAR
    rows = torch.arange(len(logits), device=logits.device)
    logits.copy_(logits[torch.where(apart, rows, apart.int().argmax())])
    return logits


def _topk_softmax(tokens: int, experts: int) -> Make:
    def make(m: Maker) -> Args:
        logits = m.normal(tokens, experts, dtype=torch.float32)
        return logits, 8, True, 0.0, 1.0, 0, None, None, *_outputs(m, tokens, 8)

    return make


def _topk_sigmoid(tokens: int, experts: int, biased: bool) -> Make:
    def make(m: Maker) -> Args:
        logits = m.normal(tokens, experts, dtype=torch.float32)
        bias = m.normal(experts, dtype=torch.float32, std=0.1) if biased else None
        separated(logits, bias, "sigmoid")
        return logits, 8, True, 2.5 if biased else 1.0, 0, bias, None, *_outputs(m, tokens, 8)

    return make


def _grouped_topk(tokens: int, experts: int) -> Make:
    """DeepSeek-V3: 8 groups, 4 of them kept."""

    def make(m: Maker) -> Args:
        logits = m.normal(tokens, experts, dtype=torch.float32)
        bias = m.normal(experts, dtype=torch.float32, std=0.1)
        separated(logits, bias, "sigmoid", 8)
        return logits, 8, 8, 4, "sigmoid", True, 2.5, 0, bias, None, *_outputs(m, tokens, 8)

    return make


def _gate(op: str, name: str, tokens: int, experts: int, make: Make, demo: bool) -> Case:
    return Case(op, name, make, 4 * tokens * experts + 8 * tokens * 8, tags=_DEMO if demo else _BENCH)


def _router_topk(tokens: int, experts: int, hidden: int, mode: str) -> Make:
    """Logits are sums of integers below 2^24, exact however they are added: ids do not depend on rounding."""

    def make(m: Maker) -> Args:
        x = m.integers(-3, 4, tokens, hidden, dtype=torch.float32).mul(0.5).to(torch.bfloat16)
        weight = m.integers(-127, 128, experts, hidden, dtype=torch.float32).mul(2.0**-12)
        options: Args = (8, "softmax", 1, 1, True, 1.0, 0, mode, None, None, None)
        if experts == 256:  # DeepSeek-V3
            bias = m.normal(experts, dtype=torch.float32, std=0.1)
            options = (8, "sigmoid", 8, 4, True, 2.5, 0, mode, bias, None, None)
            if not x.is_meta:
                logits = x.float() @ weight.t()
                kept = (separated(logits.clone(), bias, "sigmoid", 8) == logits).all(-1)
                x.copy_(x[torch.where(kept, torch.arange(tokens, device=x.device), kept.int().argmax())])
        return x, weight, *options, *_outputs(m, tokens, 8)

    return make


def _router_case(tokens: int, experts: int, hidden: int, mode: str, tags: frozenset[str] = _BENCH) -> Case:
    name = f"N={experts} K={hidden} M={tokens}{' fast' * (mode == 'fast')}"
    moved = 4 * experts * hidden + 2 * tokens * hidden + 8 * tokens * 8
    flops = 2 * (2 if mode == "fast" else 3) * tokens * experts * hidden
    return Case("moe.router_topk", name, _router_topk(tokens, experts, hidden, mode), moved, flops, tags)


def _align(tokens: int, experts: int, block_size: int) -> Make:
    """Ids of distinct experts per token."""

    def make(m: Maker) -> Args:
        shape = (tokens, 8)
        if m.device.type == "meta":
            ids = torch.empty(shape, dtype=torch.int32, device="meta")
        else:
            ids = m.normal(tokens, experts, dtype=torch.float32).topk(8).indices.to(torch.int32)
        size = sorted_size(ids.numel(), experts, block_size)
        outputs = (m.poison(n, dtype=torch.int32) for n in (size, size // block_size, 1))
        return ids, experts, block_size, None, *outputs

    return make


def _align_bytes(tokens: int, experts: int, block_size: int) -> int:
    size = sorted_size(8 * tokens, experts, block_size)
    return 4 * (8 * tokens + size + size // block_size + 1)


def _sum_reduce(tokens: int, hidden: int, weighted: bool) -> Make:
    def make(m: Maker) -> Args:
        weights = m.normal(tokens, 8, dtype=torch.float32).softmax(-1) if weighted else None
        return m.normal(tokens, 8, hidden), 1.0, weights, m.poison(tokens, hidden)

    return make


def reduce_args(m: Maker, tokens: int, top_k: int, hidden: int, shared: bool, dtype: torch.dtype = BF16) -> Args:
    """Every pair has a row, in random order."""
    pairs = tokens * top_k
    rows = m.normal(pairs, hidden, dtype=dtype)
    positions = m.permutation(pairs, dtype=torch.int32).view(tokens, top_k)
    weights = m.normal(tokens, top_k, dtype=torch.float32).softmax(-1)
    shared_output = m.normal(tokens, hidden, dtype=dtype) if shared else None
    return rows, positions, weights, shared_output, m.poison(tokens, hidden, dtype=dtype)


CASES = [
    *(
        _gate("moe.topk_softmax", f"{tokens}x{experts}x8", tokens, experts, _topk_softmax(tokens, experts), demo)
        for experts in (128, 256)
        for tokens in _TOKENS
        for demo in [(tokens, experts) == (32, 128)]
    ),
    *(
        _gate(
            "moe.topk_sigmoid",
            f"{tokens}x{experts}x8{' bias' * biased}",
            tokens,
            experts,
            _topk_sigmoid(tokens, experts, biased),
            tokens == 32 and not biased,
        )
        for experts, biased in ((256, False), (384, True))
        for tokens in _TOKENS
    ),
    *(
        _gate("moe.grouped_topk", f"{tokens}x256x8 4/8", tokens, 256, _grouped_topk(tokens, 256), tokens == 32)
        for tokens in _TOKENS
    ),
    _router_case(5, 128, 512, "accurate", _DEMO - _BENCH),
    *(
        _router_case(tokens, experts, hidden, mode)
        for experts, hidden in ROUTERS
        for tokens in ROUTED
        for mode in ("accurate", "fast")
    ),
    *(
        Case(
            "moe.moe_align_block_size",
            f"{tokens}x8 of {experts} by {block_size}",
            _align(tokens, experts, block_size),
            _align_bytes(tokens, experts, block_size),
            tags=_DEMO if (tokens, experts) == (32, 128) else _BENCH,
        )
        for experts, block_size in ((128, 64), (256, 64))
        for tokens in (1, 32, 512, 2048, 8192, 32768)
    ),
    *(
        Case(
            "moe.moe_sum_reduce",
            f"{tokens}x8x{hidden}{' weights' * weighted}",
            _sum_reduce(tokens, hidden, weighted),
            2 * tokens * hidden * 9 + 4 * 8 * tokens * weighted,
            tags=_DEMO if (tokens, weighted) == (32, False) else _BENCH,
        )
        for hidden, weighted in ((4096, False), (7168, True))
        for tokens in _TOKENS
    ),
    *(
        Case(
            "moe.moe_reduce",
            f"{tokens}x8x{hidden}{' shared' * shared}",
            lambda m, call=(tokens, 8, hidden, shared): reduce_args(m, *call),  # type: ignore[misc]
            2 * tokens * hidden * (9 + shared) + 8 * 8 * tokens,
            tags=_DEMO if (tokens, shared) == (32, False) else _BENCH,
        )
        for hidden, shared in ((4096, False), (7168, True))
        for tokens in _TOKENS
    ),
    *moe_experts.CASES,
]
