"""Calls of `router_topk` that are easy to get wrong, each with the reason it is here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from hpcjit.cases import Args, Maker

BF16, FP16, FP32, INT32 = torch.bfloat16, torch.float16, torch.float32, torch.int32

Placed = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Routed:
    """A call. Values are small integers, scaled: logits are exact however they are added, so ids cannot differ.

    `bias` is the spread of one, `valid` how many tokens are no padding, `logits` whether they are wanted.
    """

    tokens: int
    experts: int
    hidden: int
    top_k: int = 8
    mode: str = "accurate"
    dtype: torch.dtype = BF16
    how: str = "plain"
    scoring: str = "softmax"
    groups: tuple[int, int] = (1, 1)
    renormalize: bool = True
    scale: float = 1.0
    shared: int = 0
    bias: float = 0.0
    valid: int | None = None
    logits: bool = False

    def args(self, m: Maker, placed: Placed) -> Args:
        def integers(most: int, unit: float) -> Callable[..., torch.Tensor]:
            def fill(*shape: int, dtype: torch.dtype) -> torch.Tensor:
                return m.integers(-most, most + 1, *shape, dtype=FP32).mul(unit).to(dtype)

            return fill

        x = placed(m, integers(3, 0.5), (self.tokens, self.hidden), self.dtype, self.how)
        weight = placed(m, integers(127, 2.0**-12), (self.experts, self.hidden), FP32, self.how)
        bias = m.normal(self.experts, dtype=FP32, std=self.bias) if self.bias else None
        valid = None if self.valid is None else m.poison(1, dtype=INT32).fill_(self.valid)
        logits = placed(m, m.poison, (self.tokens, self.experts), FP32, self.how) if self.logits else None
        outputs = (placed(m, m.poison, (self.tokens, self.top_k + self.shared), t, self.how) for t in (FP32, INT32))
        options = self.scoring, *self.groups, self.renormalize, self.scale, self.shared, self.mode
        return x, weight, self.top_k, *options, bias, valid, logits, *outputs

    @property
    def label(self) -> str:
        flags = {"bias": self.bias, "padding": self.valid is not None, "fused": self.shared, "logits": self.logits}
        sizes = f"{self.tokens}x{self.experts}x{self.hidden} top{self.top_k} {str(self.dtype)[6:]}"
        groups = f"{self.groups[1]}of{self.groups[0]} " if self.groups != (1, 1) else ""
        words = [f"{sizes} {self.mode} {self.how} {groups}{self.scoring}", *(name for name, on in flags.items() if on)]
        return " ".join(words)


CALLS = [
    (Routed(1, 1, 1, 1), "the least call"),
    (Routed(1, 192, 4096), "one token: one warp gates"),
    (Routed(8, 128, 4096, mode="fast", logits=True), "a tile of tokens, logits wanted too"),
    (Routed(9, 65, 24, 3, logits=True), "odd experts: the last quad of a row is not whole"),
    (Routed(3, 7, 100, 7, renormalize=False), "fewer experts than a tile, all of them chosen"),
    (Routed(13, 256, 1024, groups=(8, 4), scoring="sigmoid", bias=0.1, scale=2.5), "DeepSeek-V3"),
    (Routed(21, 160, 512, 6, groups=(8, 3), scale=16.0), "DeepSeek-V2: softmax, groups of 20"),
    (Routed(33, 1024, 256, 32, mode="fast"), "most experts, most winners: by rounds"),
    (Routed(40, 384, 640, shared=2, valid=17, scoring="sigmoid", bias=0.1), "shared experts, padding"),
    (Routed(40, 96, 512, 4, valid=0, logits=True), "everything is padding; logits all the same"),
    (Routed(70, 48, 640, 6), "two tiles of tokens, the second nearly empty"),
    (Routed(97, 200, 768, mode="fast", logits=True), "the kernel for many tokens; experts that end within a tile"),
    (Routed(300, 257, 512), "likewise, odd experts"),
    (Routed(300, 768, 1024, mode="fast", valid=299, shared=1), "likewise, more blocks than divide a tile's tokens"),
    (Routed(1100, 24, 512, 4, logits=True), "many tokens, one block has all experts"),
    (Routed(5000, 512, 256, scoring="sigmoid", groups=(4, 2)), "several waves of blocks"),
    (Routed(31, 50, 512, 5, dtype=FP16, logits=True), "fp16"),
    (Routed(200, 100, 512, 5, "fast", FP16), "fp16, many tokens"),
    (Routed(20, 40, 512, 4, how="padded", logits=True), "rows with gaps: no wide accesses"),
    (Routed(200, 40, 512, 4, how="padded", bias=0.1), "likewise, more tokens"),
    (Routed(6, 33, 512, 4, how="misaligned", logits=True), "storage offset 1"),
    (Routed(0, 64, 128), "no tokens"),
    (Routed(40, 64, 256, 4, shared=2, valid=39), "every lane has experts, but half of them no quad of a row"),
    (Routed(300, 64, 256, 4, logits=True), "likewise, many tokens"),
    (Routed(70, 32, 512, 4), "likewise, a quarter of the lanes"),
    (Routed(200, 96, 256, 6, mode="fast"), "likewise, three quarters"),
]


def calls(placed: Placed) -> Iterator[tuple[str, str, Callable[[Maker], Args], str]]:
    """Operator, label, maker of the arguments, reason."""
    for call, why in CALLS:
        yield "moe.router_topk", call.label, lambda m, call=call: call.args(m, placed), why
