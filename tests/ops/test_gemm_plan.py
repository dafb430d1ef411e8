"""Plans of the gemm group: what the rule and the tables choose, and that each choice is one that the kernel can run."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from gemm_grid import BF16, FP16, FP32, bf16x2, router
from op_tools import same_bits

from hpcjit import build, numerics, tune
from hpcjit.cases import Maker, cases_of
from hpcjit.jit_op import NOTHING
from hpcjit.ops.gemm import _router_plan, _router_stream, _router_tile
from hpcjit.ops.gemm._clusters import CLUSTERS, room
from hpcjit.ops.gemm._gemm_bf16x2 import gemm_bf16x2_op
from hpcjit.ops.gemm._router_gemm import router_gemm_op
from hpcjit.ops.gemm._router_plan import Shape, stream_rule
from hpcjit.ops.gemm._router_stream import ROUTER_STREAM, STEP_K, RouterStreamConfig
from hpcjit.ops.gemm._router_tile import RouterTileConfig

REGISTERS, SHARED = 65536, 227 * 1024
SIZES = [1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 500, 8192, 131072]


def steps_of(hidden: int) -> int:
    return -(-hidden // STEP_K)


def runs(config: RouterStreamConfig, *, measured: bool = False) -> bool:
    """Whether a multiprocessor can hold a block of it. Of what was `measured` the compiler has shown that registers do."""
    tiles = config.row_tiles * config.token_tiles
    shared = 512 * tiles * (config.warps + (config.splits > 1)) + 16 * config.splits + 16
    least = (
        16 * config.row_tiles * config.depth + 4 * config.token_tiles * config.depth + 4 * tiles
    )  # registers of data
    return (
        config.splits in CLUSTERS
        and 1 <= config.warps <= 32
        and shared <= SHARED
        and least <= 200
        and (measured or 32 * config.warps * (least + 16) * config.blocks_per_sm <= REGISTERS)
    )


class TestRule:
    @pytest.mark.parametrize("tokens", SIZES)
    @pytest.mark.parametrize("sms", [78, 114, 132])
    def test_fits(self, tokens: int, sms: int):
        for experts in (1, 16, 60, 128, 192, 256, 384, 768, 4096):
            for hidden in (1, 33, 512, 3072, 4096, 6144, 7168, 16384, 100000):
                config = stream_rule(Shape(tokens, experts, hidden, sms))
                assert runs(config)
                assert config.splits * config.warps <= max(2 * steps_of(hidden), 1), "no warp is idle by far"

    @pytest.mark.parametrize("shape", [(192, 4096), (768, 6144), (384, 3072), (256, 7168), (32, 2880)], ids=str)
    def test_few_tokens_fill_the_device_at_once(self, shape):
        config = stream_rule(Shape(8, *shape))
        clusters = _router_stream.tiles_of(config, 8, shape[0])
        assert clusters * config.splits >= min(80, shape[0] // 16 * 16)
        assert clusters <= room(config.splits, config.blocks_per_sm), "none waits for another"

    def test_neighbours_share_a_choice(self):
        chosen = {stream_rule(Shape(tokens, 160, 5120)) for tokens in range(17, 33)}
        assert len(chosen) == 1

    def test_more_weights_than_pay_are_not_asked_for_early(self):
        assert stream_rule(Shape(8, 256, 4096)).prefetch
        assert not stream_rule(Shape(8, 768, 6144)).prefetch

    def test_tokens_decide_the_width(self):
        widths = [stream_rule(Shape(tokens, 192, 4096)).token_tiles for tokens in (1, 8, 9, 16, 17, 32, 33, 1000)]
        assert widths == [1, 1, 2, 2, 4, 4, 8, 8]


class TestConfig:
    @pytest.mark.parametrize("case", cases_of("gemm.router_gemm"), ids=lambda case: case.name.replace(" ", "_"))
    def test_of_the_cases(self, case):
        plan = router_gemm_op.plan(*case.args("meta"))
        config = plan.config
        if plan.template is ROUTER_STREAM:
            assert runs(config, measured=True)
            assert config.aligned
            assert config.exact
            assert config.once == (steps_of(plan.values["hidden_size"]) == config.splits * config.warps * config.depth)
            assert config.terms == (2 if case.name.endswith("fast") else 3)

    @pytest.mark.parametrize(
        ("hidden", "how", "aligned", "exact"),
        [
            (512, "plain", True, True),
            (516, "plain", True, False),
            (512, "fours", True, True),
            (512, "padded", False, False),
            (510, "plain", False, False),
            (512, "repeated", True, True),
        ],
    )
    @pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
    def test_alignment(self, dtype, hidden, how, aligned, exact):
        config = router_gemm_op.plan(*router(Maker("meta"), 5, 16, hidden, "fast", dtype, FP32, how)).config
        assert (config.aligned, config.exact) == (aligned, exact)

    @pytest.mark.parametrize("moved", [0, 1])
    def test_misaligned_address(self, moved):
        """Four neighbours are read at once only where all three tensors allow it; one row has any stride."""
        args = list(router(Maker("cpu"), 5, 16, 512, "fast"))
        args[moved] = torch.zeros(args[moved].numel() + 1, dtype=args[moved].dtype)[1:].view(args[moved].shape)
        assert not router_gemm_op.plan(*args).config.aligned
        one = list(router(Maker("meta"), 1, 1, 512, "fast"))
        one[0], one[1] = one[0].as_strided((1, 512), (3, 1)), one[1].as_strided((1, 512), (7, 1))
        assert router_gemm_op.plan(*one).config.aligned

    def test_types(self):
        config = router_gemm_op.plan(*router(Maker("meta"), 5, 16, 512, "accurate", FP16, BF16)).config
        assert (config.x_t, config.out_t, config.terms, config.presplit) == ("fp16", "bf16", 2, False)
        plan = gemm_bf16x2_op.plan(*bf16x2(Maker("meta"), 5, 16, 512))
        assert (plan.config.x_t, plan.config.terms, plan.config.presplit) == ("bf16", 2, True)
        assert (plan.values["weight"], plan.values["weight_low"]) == ("w_high", "w_low")

    def test_nothing(self):
        assert router_gemm_op.plan(*router(Maker("meta"), 0, 16, 512, "fast")) == NOTHING

    def test_tokens_past_a_tile_do_not_compile_anew(self):
        """A server sees every number of tokens; they share few kernels."""
        configs = {
            router_gemm_op.plan(*router(Maker("meta"), tokens, 192, 4096, "accurate")).config
            for tokens in range(1, 513)
        }
        assert len(configs) <= 12


class TestTable:
    @pytest.fixture
    def table(self, tmp_path, monkeypatch):
        def write(found) -> None:
            (tmp_path / "router_gemm.json").write_text(json.dumps(found))
            monkeypatch.setattr(tune, "FOLDER", tmp_path)
            tune.forget()

        yield write
        monkeypatch.undo()
        tune.forget()

    def test_the_package_table_is_of_the_form(self):
        for path in tune.FOLDER.glob("*.json"):
            tune.check(json.loads(path.read_text()), str(path))

    def test_what_it_says_is_run(self, table):
        values = {"kernel": "stream", "row_tiles": 2, "warps": 4, "splits": 16, "depth": 2, "prefetch": False}
        table({"NVIDIA H200": {"sm_count": 132, "shapes": {"N=192 K=4096 fast": [[1, values]]}}})
        config = router_gemm_op.plan(*router(Maker("meta"), 5, 192, 4096, "fast")).config
        assert {name: getattr(config, name) for name in values if name != "kernel"} == {
            name: value for name, value in values.items() if name != "kernel"
        }
        assert config.once
        ruled = router_gemm_op.plan(*router(Maker("meta"), 5, 192, 4096, "accurate")).config
        assert ruled == dataclasses.replace(stream_rule(Shape(5, 192, 4096)), once=True), "the other mode has no entry"

    def test_every_entry_can_run(self):
        for device in tune.table(_router_plan.TABLE).values():
            for shape, entries in device["shapes"].items():
                for _, values in entries:
                    if values.get("kernel", "stream") == "stream":
                        found = {name: values[name] for name in _router_stream.TUNED if name in values}
                        assert runs(RouterStreamConfig(**found), measured=True), (shape, values)
                    else:
                        hidden = int(shape.split("K=")[1].split()[0])
                        mode = shape.split()[-1]
                        found = {name: values[name] for name in _router_tile.TUNED}
                        tile = RouterTileConfig(terms=_router_plan.TERMS[mode], **found)
                        assert _router_tile.complete(tile, hidden, mode == "accurate"), (shape, values)


# Every way through the template, whichever plan would take it: (changes to the default, reason)
VARIANTS = [
    ({"splits": 1}, "no cluster"),
    ({"splits": 2, "warps": 3}, "warps that do not divide the vectors"),
    ({"splits": 4, "warps": 1}, "one warp: no sum over warps"),
    ({"splits": 16, "warps": 2}, "the largest cluster, shares of two vectors"),
    ({"splits": 14, "warps": 2}, "shares of three vectors, the last of them short, and two blocks without"),
    ({"splits": 7, "warps": 3, "row_tiles": 2}, "shares of ten vectors, the last of four"),
    ({"splits": 12, "warps": 4, "token_tiles": 8}, "shares of 22 vectors, more than one warp"),
    ({"splits": 8, "warps": 8, "depth": 1, "once": True}, "once"),
    ({"splits": 4, "warps": 16, "depth": 1, "once": True}, "once, more warps than vectors of a share"),
    ({"row_tiles": 4, "token_tiles": 2, "warps": 4, "depth": 1}, "several tiles of experts"),
    ({"row_tiles": 2, "token_tiles": 8, "splits": 2, "depth": 1}, "many tiles"),
    ({"token_tiles": 8, "splits": 16, "warps": 4}, "shares of whole warps"),
    ({"prefetch": False, "pdl": False}, "without overlap"),
    ({"exact": False}, "ends of rows are looked for"),
    ({"aligned": False, "exact": False, "token_tiles": 2}, "elements one by one"),
    ({"blocks_per_sm": 3, "depth": 3}, "bounded registers"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("changes", "why"), VARIANTS, ids=[why.replace(" ", "_") for _, why in VARIANTS])
@pytest.mark.parametrize("mode", ["accurate", "fast"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_variant(monkeypatch, changes, why, mode, dtype):
    m = Maker("cuda")
    args = router(m, 37, 90, 2048, mode, dtype)
    plan = router_gemm_op.plan(*args)
    config = dataclasses.replace(
        RouterStreamConfig(), x_t=plan.config.x_t, terms=plan.config.terms, **({"once": False} | changes)
    )
    plan = _router_plan.stream_plan(args[0], (args[1],), mode, args[3], Shape(37, 90, 2048))
    run = router_gemm_op._runner(dataclasses.replace(plan, config=config), 0, anywhere=True)
    for deviation in numerics.check(router_gemm_op, args, run):
        assert deviation.ok, str(deviation)
    first, second = numerics.copy_args(args), numerics.copy_args(args)
    run(*first)
    run(*second)
    assert same_bits(first[3], second[3])


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "why"), VARIANTS, ids=[why.replace(" ", "_") for _, why in VARIANTS])
def test_variant_compiles(changes, why):
    entry = build.compile_only(ROUTER_STREAM, RouterStreamConfig(**changes), "sm_90a")
    assert entry.manifest["spill_bytes"] <= (360 if why == "bounded registers" else 0)  # with exact sizes these suffice
    assert runs(RouterStreamConfig(**changes))
