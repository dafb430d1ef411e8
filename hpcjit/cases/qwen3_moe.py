"""Routing of a mixture of experts as a model does it: the router of a Qwen3-MoE with random weights.

The layers are those of Qwen3-MoE: embedding, RMSNorm, causal attention with grouped heads, RMSNorm of queries and keys and
rotary positions, then a softmax router and SwiGLU experts. They are fewer (`LAYERS` of 94) and narrower than in
Qwen3-235B-A22B, with weights drawn wider in return, so that every product has the variance that Hugging Face's
initialisation (normal, 0.02) gives it at full width. Tokens of the sequences follow Zipf's law, as words of a text do. The
experts are those that the last layer chooses for the last token of each sequence: a decode step.

Random weights are no trained model: such a router balances nothing, and tokens with like contexts choose like experts.

`python -m hpcjit.cases.qwen3_moe` draws the histograms of the cases and keeps them in `qwen3_moe.json`, so that a case is the
same everywhere: near ties a router's choice depends on how a machine adds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch.nn.functional import embedding, rms_norm, scaled_dot_product_attention, silu

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCABULARY = 256, 8, 2, 32, 32, 4096
LAYERS, CONTEXT, TOP_K = 3, 16, 8
ROPE_THETA = 1e6
EPS = 1e-6

# The width of each product's input in Qwen3-235B-A22B: of hidden states, of all heads together, of an expert.
FULL_HIDDEN, FULL_HEADS, FULL_INNER = 4096, 8192, 1536

FILE = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class Weights:
    """Of one layer, each `[inputs, outputs]`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    router: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor

    @classmethod
    def drawn(cls, experts: int, generator: torch.Generator) -> Weights:
        def normal(*shape: int, full: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator) * 0.02 * (full / shape[-2]) ** 0.5

        query = normal(HIDDEN, HEADS * HEAD_DIM, full=FULL_HIDDEN)
        key, value = (normal(HIDDEN, KV_HEADS * HEAD_DIM, full=FULL_HIDDEN) for _ in range(2))
        output = normal(HEADS * HEAD_DIM, HIDDEN, full=FULL_HEADS)
        router = normal(HIDDEN, experts, full=FULL_HIDDEN)
        gate, up = (normal(experts, HIDDEN, INNER, full=FULL_HIDDEN) for _ in range(2))
        return cls(query, key, value, output, router, gate, up, normal(experts, INNER, HIDDEN, full=FULL_INNER))


def topk_ids(num_sequences: int, experts: int, seed: int = 0) -> torch.Tensor:
    """int64 `[num_sequences, 8]` on the CPU: the experts of the last token of each sequence in the last layer."""
    generator = torch.Generator().manual_seed(seed)
    words = 1 / torch.arange(1.0, VOCABULARY + 1)
    tokens = torch.multinomial(words, num_sequences * CONTEXT, replacement=True, generator=generator)
    x = embedding(tokens.view(num_sequences, CONTEXT), torch.randn(VOCABULARY, HIDDEN, generator=generator) * 0.02)
    for layer in range(LAYERS):
        weights = Weights.drawn(experts, generator)
        x = x + _attention(_norm(x), weights)
        if layer == LAYERS - 1:
            break
        x = x + _experts(_norm(x).flatten(0, 1), weights).view_as(x)
    return (_norm(x[:, -1]) @ weights.router).topk(TOP_K).indices


def histogram(num_sequences: int, experts: int, seed: int = 0) -> list[int]:
    """How many tokens choose each expert."""
    return torch.bincount(topk_ids(num_sequences, experts, seed).flatten(), minlength=experts).tolist()


def _norm(x: torch.Tensor) -> torch.Tensor:
    """RMSNorm; its weights are ones at first."""
    return rms_norm(x, (x.shape[-1],), eps=EPS)


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions of `[..., positions, head_dim]`."""
    frequencies = ROPE_THETA ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.outer(torch.arange(float(x.shape[-2])), frequencies)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def _attention(x: torch.Tensor, weights: Weights) -> torch.Tensor:
    def heads(weight: torch.Tensor) -> torch.Tensor:
        return (x @ weight).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)

    query, key = (_rotated(_norm(heads(weight))) for weight in (weights.query, weights.key))
    key, value = (kv.repeat_interleave(HEADS // KV_HEADS, 1) for kv in (key, heads(weights.value)))
    return scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2) @ weights.output


def _experts(x: torch.Tensor, weights: Weights) -> torch.Tensor:
    chosen = (x @ weights.router).softmax(-1).topk(TOP_K)
    probabilities = chosen.values / chosen.values.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for expert in chosen.indices.unique().tolist():
        tokens, k = (chosen.indices == expert).nonzero(as_tuple=True)
        hidden = silu(x[tokens] @ weights.gate[expert]) * (x[tokens] @ weights.up[expert])
        out.index_add_(0, tokens, probabilities[tokens, k, None] * (hidden @ weights.down[expert]))
    return out


def key_of(num_tokens: int, experts: int) -> str:
    """Under which the file has a histogram."""
    return f"{num_tokens} of {experts}"


@cache
def kept() -> dict[str, list[int]]:
    """The histograms of the file."""
    found: dict[str, list[int]] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    return found


def keep(wanted: Iterable[tuple[int, int]]) -> None:
    """Draw the histograms of these (tokens, experts) and write the file."""
    lines = [f'  "{key_of(*sizes)}": {json.dumps(histogram(*sizes))}' for sizes in wanted]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    from hpcjit.cases.moe_experts import REAL

    keep(REAL)
