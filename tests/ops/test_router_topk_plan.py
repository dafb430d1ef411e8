"""router_topk: which kernels it takes, and what they are told."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from op_grid import placed
from router_topk_grid import CALLS, FP32, Routed

from hpcjit import build, tune
from hpcjit.cases import Args, Maker, cases_of
from hpcjit.folders import CacheWarning
from hpcjit.jit_op import Plan
from hpcjit.ops.gemm._router_gemm import router_gemm_op
from hpcjit.ops.moe import _router_topk_plan
from hpcjit.ops.moe._router_topk import router_topk_op
from hpcjit.ops.moe._router_topk_plan import FUSED, LAUNCHES, POLLED, WAYS, RouterTopkStreamConfig

OP = "moe.router_topk"
TEMPLATES = (
    (_router_topk_plan.ROUTER_TOPK_STREAM_PAIR, _router_topk_plan.ROUTER_TOPK_TILE_PAIR),
    (_router_topk_plan.ROUTER_TOPK_STREAM, _router_topk_plan.ROUTER_TOPK_TILE),
)

every_call = pytest.mark.parametrize("call", [call for call, _ in CALLS], ids=lambda call: call.label.replace(" ", "_"))


def plans(args: Args) -> dict[str, Plan]:
    """By way; none where there is nothing to launch."""
    return {str(values["way"]): plan for values, plan in router_topk_op.alternatives(*args)}


@pytest.mark.parametrize("case", cases_of(OP), ids=lambda case: case.name.replace(" ", "_"))
def test_product_is_that_of_router_gemm(case):
    """The same kernel with the same constants: hence the same bits."""
    args = case.args("meta")
    x, weight = args[:2]
    out = torch.empty(x.shape[0], weight.shape[0], dtype=FP32, device="meta")
    alone = router_gemm_op.plan(x, weight, args[9], out)
    tile = "share" in vars(alone.config)
    for way, plan in plans(args).items():
        for field in dataclasses.fields(alone.config):
            assert getattr(plan.config, field.name) == getattr(alone.config, field.name)
        assert plan.template is TEMPLATES[way == FUSED][tile]
        assert {key: plan.values[key] for key in alone.values if key != "out"} == alone.values
    assert router_topk_op.plan(*args) in plans(args).values()


@every_call
def test_memory(call: Routed):
    """A word for every tile of tokens, then 16-byte rows; or rows alone; or scratch, unless logits are wanted."""
    found = plans(call.args(Maker("meta"), placed))
    assert bool(found) == bool(call.tokens)
    for way, plan in found.items():
        config, offset = plan.config, plan.values["rows_offset"]
        words = 0
        if isinstance(config, RouterTopkStreamConfig):
            words = 4 * config.splits * -(-call.tokens // (8 * config.token_tiles))
        elif way == FUSED:
            words = 8 * config.share * -(-call.tokens // (config.tokens * config.share))
            assert config.splits * -(-call.experts // (64 * config.groups)) < 1 << 16
        assert words <= offset < words + 128
        assert offset % 128 == 0
        rows = 4 * call.tokens * (-(-call.experts // 4) * 4)
        assert plan.counter_bytes == (0 if way == LAUNCHES else offset + rows)
        scratch = way == LAUNCHES and not call.logits
        assert plan.workspace_bytes == (4 * call.tokens * call.experts if scratch else 0)


@pytest.mark.parametrize("way", WAYS)
def test_logits_change_the_code(way: str):
    """Except where they are written anyway."""
    with_logits, without = (
        plans(Routed(9, 64, 256, logits=wanted).args(Maker("meta"), placed))[way] for wanted in (True, False)
    )
    assert with_logits.config == dataclasses.replace(without.config, has_logits=way != LAUNCHES)
    assert (with_logits.values["out"], without.values["out"]) == ("logits", 0)


def test_layout_of_logits_decides_the_order_of_sums():
    """Rows with gaps allow no wide accesses. The other ways have rows of their own, but would add up in another order."""
    wide = plans(Routed(20, 40, 512, 4, logits=True).args(Maker("meta"), placed))
    narrow = plans(Routed(20, 40, 512, 4, how="padded", logits=True).args(Maker("meta"), placed))
    assert {plan.config.vec for plan in wide.values()} == {2}
    assert {plan.config.vec for plan in narrow.values()} == {1}


@pytest.mark.parametrize(
    ("tokens", "way"), [(1, POLLED), (1536, POLLED), (1537, FUSED), (3072, FUSED), (3073, LAUNCHES)]
)
def test_rule(tokens: int, way: str):
    x = torch.empty(tokens, 640, dtype=torch.bfloat16, device="meta")
    assert _router_topk_plan.way_of(x, 100, "fast") == way


def test_table(monkeypatch: pytest.MonkeyPatch):
    """What was measured holds; what makes no sense is passed over with a warning."""
    x = torch.empty(200, 640, dtype=torch.bfloat16, device="meta")
    found = {"way": LAUNCHES}
    monkeypatch.setattr(tune, "lookup", lambda *args: found)
    assert _router_topk_plan.way_of(x, 100, "fast") == LAUNCHES
    found["way"] = "some other"
    with pytest.warns(CacheWarning, match="N=100 K=640 fast is not used"):
        assert _router_topk_plan.way_of(x, 100, "fast") == POLLED


def test_measured():
    """The package's table names ways, for shapes that are cases."""
    cases = {router_topk_op.tuned_shape(*case.args("meta"))[0] for case in cases_of(OP)}
    for device in tune.read(tune.FOLDER / f"{_router_topk_plan.TABLE}.json").values():
        assert set(device["shapes"]) <= cases
        assert all(values["way"] in WAYS for entries in device["shapes"].values() for _, values in entries)


@pytest.mark.slow
@every_call
def test_compiles(call: Routed):
    """Tiles of many tokens that were measured to be the fastest may keep a few words in memory (docs/perf/router_gemm.md)."""
    for plan in plans(call.args(Maker("meta"), placed)).values():
        manifest = build.compile_only(plan.template, plan.config, "sm_90a").manifest
        assert manifest["spill_bytes"] <= (48 if manifest["registers"] >= 128 else 0)
        assert not any(kernel["serialized"] for kernel in manifest["kernels"])
