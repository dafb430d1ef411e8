"""The kernel of the router GEMM for many tokens: which constants fit, and every way through the template."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from gemm_grid import BF16, FP16, FP32, bf16x2, router
from op_tools import same_bits

from hpcjit import numerics
from hpcjit.cases import Maker
from hpcjit.ops.gemm import _router_plan, _router_tile
from hpcjit.ops.gemm._clusters import CLUSTERS
from hpcjit.ops.gemm._gemm_bf16x2 import gemm_bf16x2_op
from hpcjit.ops.gemm._router_gemm import router_gemm_op
from hpcjit.ops.gemm._router_plan import Shape
from hpcjit.ops.gemm._router_stream import ROUTER_STREAM
from hpcjit.ops.gemm._router_tile import ROUTER_TILE, RouterTileConfig, complete

SHARED = 227 * 1024


def shared_bytes(config: RouterTileConfig) -> int:
    """As the header counts them."""
    stage = config.stage_k * (2 * config.tokens + 256 * config.groups)
    part = config.tokens * (64 * config.groups + 4) * 4
    ring = max(config.stages * stage, -(-config.slots * part // 1024) * 1024)
    return ring + (part if config.splits > 1 else 0) + 16 * config.stages + 16 + 1024


class TestRule:
    @pytest.mark.parametrize("tokens", [33, 65, 200, 1000, 8192, 131072])
    @pytest.mark.parametrize("accurate", [False, True])
    @pytest.mark.parametrize(
        "base", [{}, {"separate_low": True, "terms": 2}, {"presplit": True, "separate_low": True, "terms": 2}]
    )
    def test_fits(self, tokens, accurate, base):
        for experts, hidden in ((8, 64), (60, 1000), (160, 5120), (768, 6144), (1024, 16384)):
            config = _router_tile.best(RouterTileConfig(**base), tokens, experts, hidden, 132, accurate)
            assert shared_bytes(config) * config.blocks_per_sm <= SHARED
            assert config.slots < config.stages <= 8, "a slot keeps its stage until its next one has come"
            assert config.tokens % config.splits == 0
            assert config.splits * config.share in CLUSTERS
            assert config.promote in ((64,) if accurate else (0, 512))
            assert not (config.presplit and config.stage_k == 32)

    def test_chains_of_a_fast_product_are_bounded(self):
        for hidden in (64, 4096, 16384):
            for config in _router_tile.candidates(RouterTileConfig(terms=2), hidden, accurate=False):
                assert config.promote or hidden / config.splits / config.slots <= _router_tile.LONGEST_CHAIN + 1

    def test_too_large_is_refused(self):
        assert complete(RouterTileConfig(tokens=256, groups=3), 4096, accurate=False) is None
        assert complete(RouterTileConfig(tokens=96, splits=16, share=2), 4096, accurate=False) is None
        assert complete(RouterTileConfig(tokens=64, splits=3), 4096, accurate=False) is None
        assert complete(RouterTileConfig(tokens=128, slots=2, blocks_per_sm=2), 4096, accurate=True) is None

    def test_neighbours_share_a_choice(self):
        assert len({_router_tile.rounded(tokens) for tokens in range(1, 4097)}) <= 32
        assert all(_router_tile.rounded(tokens) >= tokens for tokens in range(1, 5000))


class TestChoice:
    def test_few_tokens_stream(self):
        assert router_gemm_op.plan(*router(Maker("meta"), 8, 160, 5120, "fast")).template is ROUTER_STREAM
        assert router_gemm_op.plan(*router(Maker("meta"), 500, 160, 5120, "fast")).template is ROUTER_TILE

    @pytest.mark.parametrize(
        ("hidden", "how", "why"),
        [(5124, "plain", "a row of x is no multiple of 16 bytes"), (5120, "padded", "nor with this stride")],
    )
    def test_what_boxes_cannot_copy_streams(self, hidden, how, why):
        args = router(Maker("meta"), 500, 160, hidden, "fast", BF16, FP32, how)
        assert router_gemm_op.plan(*args).template is ROUTER_STREAM, why

    def test_rows_that_overlap_stream(self):
        args = list(router(Maker("meta"), 500, 160, 512, "fast"))
        args[0] = args[0].as_strided((500, 512), (8, 1))
        assert router_gemm_op.plan(*args).template is ROUTER_STREAM

    def test_experts_not_in_fours(self):
        assert not router_gemm_op.plan(*router(Maker("meta"), 500, 161, 512, "fast")).config.vector_out

    def test_types(self):
        config = router_gemm_op.plan(*router(Maker("meta"), 500, 160, 512, "accurate", FP16, BF16)).config
        assert (config.x_t, config.out_t, config.terms, config.separate_low) == ("fp16", "bf16", 2, True)
        plan = gemm_bf16x2_op.plan(*bf16x2(Maker("meta"), 500, 160, 512))
        assert (plan.template, plan.config.presplit, plan.config.separate_low) == (ROUTER_TILE, True, True)
        assert (plan.values["weight"], plan.values["weight_low"]) == ("w_high", "w_low")


# (changes to the default, reason)
VARIANTS = [
    ({"tokens": 16, "slots": 1}, "few tokens"),
    ({"tokens": 64, "slots": 3, "splits": 16}, "the largest cluster"),
    ({"tokens": 96, "splits": 3, "share": 2}, "weights shared, three splits"),
    ({"tokens": 64, "groups": 3, "slots": 1}, "three groups of experts"),
    ({"tokens": 160, "groups": 1, "slots": 2, "splits": 4}, "tokens no power of two"),
    ({"tokens": 192, "groups": 2, "slots": 1}, "registers handed over"),
    ({"tokens": 64, "slots": 1, "splits": 8, "blocks_per_sm": 2}, "two blocks on a multiprocessor"),
    ({"tokens": 96, "groups": 2, "slots": 1, "splits": 2, "share": 2}, "stages of 32"),
    ({"tokens": 64, "slots": 2, "pdl": False}, "without overlap"),
]


TOKENS, EXPERTS, HIDDEN = 333, 201, 3000  # no whole tile of any, and no whole last stage


def variant(changes: dict, mode: str, dtype: torch.dtype) -> RouterTileConfig | None:
    args = router(Maker("meta"), TOKENS, EXPERTS, HIDDEN, mode, dtype)
    plan = _router_plan.tile_plan(args[0], (args[1],), mode, args[3], Shape(TOKENS, EXPERTS, HIDDEN))
    return complete(dataclasses.replace(plan.config, **changes), HIDDEN, mode == "accurate")


CALLS = [(mode, dtype) for mode in ("accurate", "fast") for dtype in (BF16, FP16)]
FITTING = [(changes, *call) for changes, _ in VARIANTS for call in CALLS if variant(changes, *call)]


def test_every_variant_fits_somewhere():
    assert {repr(changes) for changes, *_ in FITTING} == {repr(changes) for changes, _ in VARIANTS}
    assert len(FITTING) > 2 * len(VARIANTS)


@pytest.mark.gpu
@pytest.mark.parametrize(("changes", "mode", "dtype"), FITTING, ids=str)
def test_variant(changes, mode, dtype):
    args = router(Maker("cuda"), TOKENS, EXPERTS, HIDDEN, mode, dtype)
    plan = _router_plan.tile_plan(args[0], (args[1],), mode, args[3], Shape(TOKENS, EXPERTS, HIDDEN))
    config = variant(changes, mode, dtype)
    run = router_gemm_op._runner(dataclasses.replace(plan, config=config), 0, anywhere=True)
    for deviation in numerics.check(router_gemm_op, args, run):
        assert deviation.ok, str(deviation)
    first, second = numerics.copy_args(args), numerics.copy_args(args)
    run(*first)
    run(*second)
    assert same_bits(first[3], second[3])


@pytest.mark.gpu
@pytest.mark.parametrize("experts", [64, 130, 256])
@pytest.mark.parametrize("scale", [1 / 256, 0.3])
def test_presplit(experts, scale):
    args = list(bf16x2(Maker("cuda"), 500, experts, 4096))
    args[3] = scale
    assert gemm_bf16x2_op.plan(*args).template is ROUTER_TILE
    for deviation in numerics.check(gemm_bf16x2_op, tuple(args), gemm_bf16x2_op):
        assert deviation.ok, str(deviation)


@pytest.mark.gpu
def test_special_values():
    """What float32 gives, where the split weights alone could not."""
    m = Maker("cuda")
    x, weight, accuracy, out = router(m, 300, 128, 2048, "accurate")
    x[3, 7], x[5, 9] = torch.inf, torch.nan
    weight[4, 2], weight[8, 1] = -torch.inf, 3.4e38
    weight.view(torch.int32)[9, 4] = 0x7F800001  # NaN in the half that a truncated term drops
    router_gemm_op(x, weight, accuracy, out)
    exact = x.double() @ weight.double().T
    exact[:, 8] = exact[:, 8].float().double()
    assert torch.equal(out.isnan(), exact.isnan())
    assert torch.equal(out.isinf(), exact.isinf())
    others = exact.isfinite()
    assert numerics.error(out[others], exact[others]) < 1e-5
