"""Cases of the fused mixture of experts: the experts of Qwen3-235B, Hy3 and DeepSeek-V3 on one of eight GPUs.

"tp8" has all experts with an eighth of the intermediate size, "ep8" an eighth of the experts, to which every pair belongs.
Without another word routing is uniform (`routing.py` has the others), and a case is quantised per tensor, with activations
in float8.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from hpcjit.cases import Args, Case, Maker, routing
from hpcjit.ops.moe._fused_moe_args import FusedMoeArgs
from hpcjit.ops.moe._fused_moe_space import max_tiles

TOP_K = 8
FP8 = torch.float8_e4m3fn
_DEMO = frozenset({"demo", "bench"})
_BENCH = frozenset({"bench"})


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Experts:
    """A call. `codes`: activations come in float8. `global_experts`: ids are drawn among so many, from 0, if uniformly."""

    tokens: int
    experts: int
    hidden: int
    inner: int
    top_k: int = TOP_K
    quant: str = "fp8_tensor"
    codes: bool = True
    activation: str = "silu"
    shared: bool = False
    offset: int = 0
    global_experts: int = 0
    on_input: bool = False
    routed: str = "uniform"

    def make(self, m: Maker) -> Args:
        fp8 = self.quant != "bf16"
        inputs = self.codes_of(m) if fp8 and self.codes else (m.normal(self.tokens, self.hidden), None)
        w13 = self.weights(m, self.experts, 2 * self.inner, self.hidden)
        w2 = self.weights(m, self.experts, self.hidden, self.inner)
        scales = self._scales(m) if fp8 else (None, None)
        weights = m.normal(self.tokens, self.top_k, dtype=torch.float32).softmax(-1)
        shared = m.normal(self.tokens, self.hidden) if self.shared else None
        options = (self.quant, self.activation, shared, self.offset, self.global_experts or None, self.on_input)
        out = m.poison(self.tokens, self.hidden)
        return inputs[0], w13, w2, self.ids(m), weights, *scales, inputs[1], *options, out

    def ids(self, m: Maker) -> torch.Tensor:
        """Distinct experts of each token."""
        shape = (self.tokens, self.top_k)
        if m.device.type == "meta":
            return torch.empty(shape, dtype=torch.int32, device="meta")
        if self.routed != "uniform":
            return routing.ids_of(self.counts, self.top_k, m)
        scores = m.normal(self.tokens, self.global_experts or self.experts, dtype=torch.float32)
        return scores.topk(self.top_k).indices.to(torch.int32)

    @property
    def counts(self) -> routing.Counts:
        """Tokens of each expert, where routing is not uniform."""
        return routing.counts_of(self.routed, self.tokens, self.experts, self.top_k)

    def turns(self, args: Args, m: Maker) -> Iterator[Args]:
        """Endless calls on the weights of `args`, each routed to the experts whose last turn was longest ago."""
        a = FusedMoeArgs(*args)

        def own(value: torch.Tensor | None) -> torch.Tensor | None:
            return None if value is None else value.clone()

        for ids in routing.turns(lambda: self.ids(m), self.experts, m):
            b = a._replace(x=a.x.clone(), topk_ids=ids, topk_weights=a.topk_weights.clone(), out=a.out.clone())
            yield tuple(b._replace(x_scale=own(a.x_scale), shared_output=own(a.shared_output)))

    def codes_of(self, m: Maker) -> Args:
        groups = {"fp8_tensor": (1,), "fp8_channel": (self.tokens, 1)}
        shape = groups.get(self.quant, (self.tokens, _ceil(self.hidden, 128)))
        scale = m.normal(*shape, dtype=torch.float32).abs().add(0.5).mul(2.0**-6)
        return m.normal(self.tokens, self.hidden, dtype=torch.float32, std=64.0).to(FP8), scale

    def weights(self, m: Maker, *shape: int) -> torch.Tensor:
        """Small integers, which are drawn in a byte each, times what makes products of the size of one."""
        values = m.integers(-15, 16, *shape, dtype=torch.int8)
        return values.to(FP8) if self.quant != "bf16" else values.to(torch.bfloat16).mul_(0.11 / shape[-1] ** 0.5)

    def _scales(self, m: Maker) -> tuple[torch.Tensor, torch.Tensor]:
        shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
            "fp8_tensor": ((), ()),
            "fp8_channel": ((2 * self.inner,), (self.hidden,)),
            "fp8_block": (
                (2 * _ceil(self.inner, 128), _ceil(self.hidden, 128)),
                (_ceil(self.hidden, 128), _ceil(self.inner, 128)),
            ),
        }
        found = []
        for shape, depth in zip(shapes[self.quant], (self.hidden, self.inner), strict=True):
            scale = m.normal(self.experts, *shape, dtype=torch.float32).abs().add(0.5)
            found.append(scale.mul(0.11 / depth**0.5))
        return found[0], found[1]

    def case(self, name: str, tags: frozenset[str] = _BENCH) -> Case:
        size = 2 if self.quant == "bf16" else 1
        weights = round(self.active * 3 * self.inner * self.hidden * size)
        flops = 6 * self.tokens * self.top_k * self.hidden * self.inner
        moved = weights + self.tokens * self.hidden * ((1 if self.codes else 2) + 2)
        return Case("moe.fused_moe", name, self.make, moved, flops, tags, None if self.global_experts else self.turns)

    @property
    def active(self) -> float:
        """Experts that have a token; expected ones where routing is uniform."""
        if self.routed != "uniform":
            return sum(count > 0 for count in self.counts)
        return self.experts * (1 - (1 - min(1.0, self.top_k / self.experts)) ** self.tokens)


TOKENS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
MODELS = {
    "qwen3-235b": Experts(0, 128, 4096, 1536),
    "hy3": Experts(0, 192, 4096, 1536),
    "dsv3": Experts(0, 256, 7168, 2048),
}


def share(model: Experts, mode: str) -> Experts:
    """What one of eight GPUs has."""
    return replace(model, inner=model.inner // 8) if mode == "tp8" else replace(model, experts=model.experts // 8)


def _bench(
    quant: str,
    tokens: tuple[int, ...],
    models: tuple[str, ...] = tuple(MODELS),
    modes: tuple[str, ...] = ("tp8", "ep8"),
    routed: str = "uniform",
) -> list[Case]:
    suffix = ("" if quant == "fp8_tensor" else f" {quant}") + ("" if routed == "uniform" else f" {routed}")
    return [
        replace(share(MODELS[model], mode), tokens=n, quant=quant, codes=quant != "bf16", routed=routed).case(
            f"{model} {mode} {n}{suffix}"
        )
        for model in models
        for mode in modes
        for n in tokens
    ]


SKEWED = {"tp8": (16, 64, 512), "ep8": (64,)}  # tokens of the cases whose routing is not uniform

# Tokens and experts of those routed as by a model.
REAL = [(n, share(model, mode).experts) for mode, tokens in SKEWED.items() for model in MODELS.values() for n in tokens]


def plan_args(
    m: Maker, tokens: int, experts: int, top_k: int, tile_rows: int, offset: int = 0, spread: int = 0
) -> Args:
    """`spread`: ids are drawn among so many, from 0."""
    ids = Experts(tokens, experts, 0, 0, top_k, global_experts=spread).ids(m)
    tiles = max_tiles(ids.numel(), experts, tile_rows)
    shapes = ((ids.numel(),), tuple(ids.shape), (tiles, 4), (1,))
    outputs = (m.poison(*shape, dtype=torch.int32) for shape in shapes)
    return ids, experts, tile_rows, offset, *outputs


def _plan_case(tokens: int, experts: int, tile_rows: int) -> Case:
    pairs = tokens * TOP_K
    moved = 4 * (3 * pairs + 4 * -(-pairs // tile_rows))
    make = lambda m: plan_args(m, tokens, experts, TOP_K, tile_rows)  # noqa: E731
    tags = _DEMO if (tokens, experts) == (32, 128) else _BENCH
    return Case("moe.moe_plan", f"{tokens}x8 of {experts} by {tile_rows}", make, moved, tags=tags)


def counts_of(rows: int, experts: int) -> list[int]:
    """Rows of each expert: uneven, some with none where there are several."""
    even = rows // experts
    counts = [even * (0, 1, 2, 1)[e % 4] for e in range(experts)]
    counts[-1] += rows - sum(counts)
    return counts


def tiles_of(counts: list[int], tile_rows: int) -> list[tuple[int, int, int, int]]:
    firsts = [sum(counts[:e]) for e in range(len(counts))]
    return [
        (e, firsts[e] + at, min(tile_rows, count - at), 0)
        for e, count in enumerate(counts)
        for at in range(0, count, tile_rows)
    ]


def grouped_args(
    m: Maker, rows: int, experts: int, features: int, hidden: int, tile_rows: int, quant: str = "fp8_tensor"
) -> Args:
    sizes = Experts(rows, experts, hidden, features, quant=quant)
    fp8 = quant != "bf16"
    x, x_scale = sizes.codes_of(m) if fp8 else (m.normal(rows, hidden), None)
    weight = sizes.weights(m, experts, features, hidden)
    shapes = {"fp8_tensor": (), "fp8_channel": (features,), "fp8_block": (_ceil(features, 128), _ceil(hidden, 128))}
    scale = m.normal(experts, *shapes[quant], dtype=torch.float32).abs().add(0.5).mul(0.01) if fp8 else None
    tiles = tiles_of(counts_of(rows, experts), tile_rows)
    made = torch.tensor(tiles, dtype=torch.int32, device=m.device) if tiles else m.poison(1, 4, dtype=torch.int32)
    count = m.poison(1, dtype=torch.int32).fill_(len(tiles))
    return x, weight, made, count, tile_rows, x_scale, scale, quant, m.poison(rows, features)


def _grouped_case(rows: int, experts: int, features: int, hidden: int, tile_rows: int, quant: str) -> Case:
    name = f"{rows}x{features}x{hidden} of {experts} {quant}"
    size = 2 if quant == "bf16" else 1
    active = sum(count > 0 for count in counts_of(rows, experts))
    moved = active * features * hidden * size + rows * (hidden * size + 2 * features)
    make = lambda m: grouped_args(m, rows, experts, features, hidden, tile_rows, quant)  # noqa: E731
    tags = _DEMO - _BENCH if experts == 4 else _BENCH
    return Case("moe.grouped_gemm", name, make, moved, 2 * rows * features * hidden, tags)


CASES = [
    _grouped_case(50, 4, 192, 256, 16, "fp8_block"),
    *(
        _grouped_case(rows, 16, 4096, 1536, tile_rows, quant)
        for rows, tile_rows in ((128, 16), (1024, 64), (4096, 128))
        for quant in ("fp8_tensor", "fp8_block", "bf16")
    ),
    *(_plan_case(tokens, experts, 64) for experts in (128, 256) for tokens in (1, 32, 512, 2048, 8192)),
    Experts(5, 8, 256, 192, top_k=2, quant="fp8_block", codes=False, shared=True).case("5x8x256x192 fp8_block", _DEMO),
    Experts(17, 16, 512, 128, top_k=4, quant="bf16", codes=False).case("17x16x512x128 bf16", _DEMO - _BENCH),
    *_bench("fp8_tensor", TOKENS),
    *(
        case
        for routed in routing.KINDS[1:]
        for mode, tokens in SKEWED.items()
        for case in _bench("fp8_tensor", tokens, modes=(mode,), routed=routed)
    ),
    *_bench("fp8_block", TOKENS),
    *_bench("fp8_channel", (64,), ("qwen3-235b",)),
    *_bench("bf16", TOKENS, ("qwen3-235b",), ("tp8",)),
    *_bench("bf16", (1, 16, 64, 512), ("qwen3-235b",), ("ep8",)),
]
