"""Which experts the tokens of a case choose: uniform, by Zipf's law, all the same, or as a model's router chose.

Where routing is not uniform its histogram is fixed: how many tokens each expert has decides what a call reads and how its
work divides, so `Case.bytes` can be exact. Ids are made from it: each token gets distinct experts, in random order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import torch

from hpcjit.cases import Maker, qwen3_moe

KINDS = ("uniform", "zipf", "same8", "real")

Counts = tuple[int, ...]


@cache
def counts_of(kind: str, tokens: int, experts: int, top_k: int) -> Counts:
    """How many tokens choose each expert, for the kinds that are not uniform.

    - "zipf": experts are wanted in proportion to 1, 1/2, 1/3, ..., in random order; a token takes distinct ones in turn
    - "same8": all tokens choose the same ones, as many as top_k, any of them
    - "real": `qwen3_moe.py`; of sizes that are not in its file it is drawn, which takes seconds
    """
    if kind == "real":
        kept = qwen3_moe.kept().get(qwen3_moe.key_of(tokens, experts))
        return tuple(kept or qwen3_moe.histogram(tokens, experts))
    generator = torch.Generator().manual_seed(0)
    places = torch.randperm(experts, generator=generator)
    if kind == "same8":
        counts = torch.full((experts,), tokens).where(places < top_k, 0)
    elif kind == "zipf":
        counts = torch.bincount(_zipf(tokens, experts, top_k, generator).flatten(), minlength=experts)[places]
    else:
        raise ValueError(f"routing must be one of {', '.join(KINDS[1:])}, got {kind!r}")
    return tuple(counts.tolist())


def _zipf(tokens: int, experts: int, top_k: int, generator: torch.Generator) -> torch.Tensor:
    """Ranks, drawn without replacement: the largest of log-probabilities with Gumbel noise."""
    uniform = torch.rand(tokens, experts, dtype=torch.float64, generator=generator)
    noise = -(-uniform.clamp_min(1e-300).log()).log()
    return (noise - torch.arange(1.0, experts + 1, dtype=torch.float64).log()).topk(top_k).indices


def ids_of(counts: Counts, top_k: int, m: Maker) -> torch.Tensor:
    """int32 `[num_tokens, top_k]`, on the device of `m`, in which each expert has so many distinct tokens."""
    tokens = sum(counts) // top_k
    if max(counts, default=0) > tokens or sum(counts) != tokens * top_k:
        raise ValueError(f"no {tokens} tokens have {top_k} distinct experts each in {counts}")
    each = torch.tensor(counts, device=m.device)
    pairs = torch.repeat_interleave(torch.arange(len(counts), device=m.device), each)
    ids = pairs.view(top_k, tokens).t()[m.permutation(tokens)]  # an expert's run of pairs meets no token twice
    order = m.normal(tokens, top_k, dtype=torch.float32).argsort(-1)
    return ids.gather(1, order).to(torch.int32)


def turns(draw: Callable[[], torch.Tensor], experts: int, m: Maker) -> Iterator[torch.Tensor]:
    """Endless ids: each time those of a draw, for the experts whose last turn was longest ago.

    Calls with these ids, one after the other, come back to the weights of an expert as late as can be.
    """
    order = m.permutation(experts)
    while True:
        ids = draw().long()
        active = ids.unique()
        new = torch.empty(experts, dtype=torch.int32, device=ids.device)
        new[active] = order[: len(active)].to(torch.int32)
        yield new[ids]
        order = order.roll(-len(active))
