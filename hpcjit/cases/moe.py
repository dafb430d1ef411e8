"""Cases of the moe group: experts of Qwen3 (128) and DeepSeek-V3 (256), 8 chosen; tokens from decode to prefill."""

from __future__ import annotations

import torch

from hpcjit.cases import Args, Case, Make, Maker

_DEMO = frozenset({"demo", "bench"})
_BENCH = frozenset({"bench"})


def _topk_softmax(tokens: int, experts: int, top_k: int) -> Make:
    def make(m: Maker) -> Args:
        logits = m.normal(tokens, experts, dtype=torch.float32)
        weights = m.poison(tokens, top_k, dtype=torch.float32)
        return logits, top_k, True, 0.0, None, weights, m.poison(tokens, top_k, dtype=torch.int32)

    return make


CASES = [
    Case(
        "moe.topk_softmax",
        f"{tokens}x{experts}x{top_k}",
        _topk_softmax(tokens, experts, top_k),
        4 * tokens * experts + 8 * tokens * top_k,
        tags=_DEMO if (tokens, experts) == (32, 128) else _BENCH,
    )
    for experts, top_k in ((128, 8), (256, 8))
    for tokens in (1, 32, 2048, 8192)
]
