"""Cases of the quantization group: hidden sizes of 8B models, DeepSeek-V3 and 405B models; tokens from decode to prefill."""

from __future__ import annotations

import torch

from hpcjit.cases import Args, Case, Make, Maker

_SHAPES = [(tokens, hidden) for hidden in (4096, 7168, 16384) for tokens in (1, 32, 2048, 8192)]
_DEMO = frozenset({"demo", "bench"})
_BENCH = frozenset({"bench"})


def _outputs(m: Maker, tokens: int, hidden: int, *scale_shape: int) -> Args:
    return m.poison(tokens, hidden, dtype=torch.float8_e4m3fn), m.poison(*scale_shape, dtype=torch.float32)


def _per_token(tokens: int, hidden: int) -> Make:
    return lambda m: (m.normal(tokens, hidden), *_outputs(m, tokens, hidden, tokens, 1))


def _per_token_group(tokens: int, hidden: int, group_size: int) -> Make:
    def make(m: Maker) -> Args:
        return m.normal(tokens, hidden), group_size, False, *_outputs(m, tokens, hidden, tokens, hidden // group_size)

    return make


def _per_tensor(tokens: int, hidden: int, dynamic: bool) -> Make:
    def make(m: Maker) -> Args:
        out, scale = _outputs(m, tokens, hidden, 1)
        return m.normal(tokens, hidden), dynamic, out, scale if dynamic else scale.fill_(0.01)

    return make


def _cases() -> list[Case]:
    cases = []
    for tokens, hidden in _SHAPES:
        name, tags = f"{tokens}x{hidden}", _DEMO if (tokens, hidden) == (32, 4096) else _BENCH
        once = 3 * tokens * hidden
        make = _per_token(tokens, hidden)
        cases.append(Case("quantization.per_token_quant_fp8", name, make, once + 4 * tokens, tags=tags))
        moved = once + 4 * tokens * hidden // 128
        make = _per_token_group(tokens, hidden, 128)
        cases.append(Case("quantization.per_token_group_quant_fp8", f"{name}x128", make, moved, tags=tags))
        for kind, dynamic in (("static", False), ("dynamic", True)):
            make = _per_tensor(tokens, hidden, dynamic)
            cases.append(Case("quantization.per_tensor_quant_fp8", f"{name} {kind}", make, once, tags=tags))
    return cases


CASES = _cases()
