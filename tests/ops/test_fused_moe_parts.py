"""moe_plan and grouped_gemm: against Python that says the same in words, together, and calls that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_tools import rejects, same_bits

from hpcjit import build
from hpcjit.cases import Maker
from hpcjit.cases.moe_experts import grouped_args
from hpcjit.errors import ArgumentTypeError
from hpcjit.ops.moe import grouped_gemm, moe_plan
from hpcjit.ops.moe._grouped_gemm import GroupedGemmArgs, grouped_gemm_op

PLAN, GEMM = "moe.moe_plan", "moe.grouped_gemm"
every_quant = pytest.mark.parametrize("quant", ["bf16", "fp8_tensor", "fp8_channel", "fp8_block"])


def how(m: Maker) -> dict[str, Any]:
    return {"backend": "jit"} if m.device.type == "cuda" else {}


def multiply(m: Maker, a: GroupedGemmArgs, **changes) -> torch.Tensor:
    a = a._replace(**changes)
    options = {"x_scale": a.x_scale, "weight_scale": a.weight_scale, "quant": a.quant, "out": a.out}
    return grouped_gemm(*a[:5], **options, **how(m))


class TestPlan:
    @pytest.mark.parametrize("tokens", [1, 2, 127, 128, 129, 512, 513, 1500])
    @pytest.mark.parametrize(("experts", "offset", "rows"), [(1, 0, 16), (60, 0, 64), (512, 0, 128), (24, 8, 7)])
    def test_in_words(self, m: Maker, tokens: int, experts: int, offset: int, rows: int):
        """Around every border between the ways to sort."""
        ids = m.integers(-1, experts + 2 * offset, tokens, 8)
        sorted_pairs, positions, tiles, num_tiles = (
            t.cpu() for t in moe_plan(ids, experts, rows, expert_offset=offset, **how(m))
        )
        flat = [i - offset for i in ids.flatten().tolist()]
        expected, cut = [], []
        for expert in range(experts):
            pairs = [pair for pair, e in enumerate(flat) if e == expert]
            for first in range(0, len(pairs), rows):
                cut.append([expert, len(expected) + first, len(pairs[first : first + rows]), 0])
            expected += pairs
        assert sorted_pairs[: len(expected)].tolist() == expected
        places = {pair: row for row, pair in enumerate(expected)}
        assert positions.flatten().tolist() == [places.get(pair, -1) for pair in range(len(flat))]
        assert num_tiles.tolist() == [len(cut)]
        assert tiles[: len(cut)].tolist() == cut

    def test_many_pairs_of_one_expert(self, m: Maker):
        ids = m.integers(0, 1, 40000, 1) + 3
        sorted_pairs, positions, tiles, num_tiles = moe_plan(ids, 4, 128, **how(m))
        assert sorted_pairs.tolist() == positions.flatten().tolist() == list(range(40000))
        assert int(num_tiles) == 313
        assert tiles[312].tolist() == [3, 312 * 128, 64, 0]

    def test_no_tokens(self, m: Maker):
        found = moe_plan(m.integers(0, 4, 0, 2), 4, 16, **how(m))
        assert [t.shape[0] for t in found] == [0, 0, 0, 1]
        assert not found[3].any()

    @pytest.mark.parametrize(
        ("changes", "argument"),
        [
            ({"num_experts": 0}, "num_experts"),
            ({"num_experts": 513}, "num_experts"),
            ({"tile_rows": 0}, "tile_rows"),
            ({"expert_offset": -1}, "expert_offset"),
            ({"tiles": (3, 4)}, "tiles"),
            ({"positions": (10,)}, "positions"),
            ({"num_tiles": (2,)}, "num_tiles"),
        ],
    )
    def test_refused(self, m: Maker, changes: dict[str, Any], argument: str):
        options = {n: m.poison(*v, dtype=torch.int32) if isinstance(v, tuple) else v for n, v in changes.items()}
        options = {"num_experts": 4, "tile_rows": 16} | options
        with rejects(PLAN, argument):
            moe_plan(m.integers(0, 4, 5, 2), **options)

    def test_refused_ids(self, m: Maker):
        with rejects(PLAN, "topk_ids", error=ArgumentTypeError):
            moe_plan(m.integers(0, 4, 5, 2, dtype=torch.int64), 4, 16)
        ids = m.integers(0, 4, 5, 2)
        with rejects(PLAN, "positions", ids):
            moe_plan(ids, 4, 16, positions=ids)


class TestGroupedGemm:
    @pytest.mark.parametrize(("tile_rows", "tokens"), [(16, 200), (32, 200), (64, 200), (128, 200), (192, 800)])
    @every_quant
    def test_of_a_plan(self, m: Maker, quant: str, tile_rows: int, tokens: int):
        """Rows sorted by a plan: each is multiplied with its expert's weights, and no other row is written."""
        a = GroupedGemmArgs(*grouped_args(m, tokens + 20, 4, 136, 256, tile_rows, quant))
        ids = m.integers(-1, 4, tokens, 1)
        sorted_pairs, _, tiles, num_tiles = moe_plan(ids, 4, tile_rows, **how(m))
        found = multiply(m, a, tiles=tiles, num_tiles=num_tiles)
        live = int((ids >= 0).sum())
        experts = ids.flatten()[sorted_pairs[:live].long()].long()
        single = torch.stack(
            [experts, torch.arange(live, device=m.device), *torch.ones(1, live, device=m.device), experts * 0], 1
        )
        count = num_tiles.clone().fill_(live)
        again = multiply(m, a, tiles=single.int().contiguous(), num_tiles=count, out=torch.empty_like(a.out))
        assert found[:live].isfinite().all()
        assert found[live:].isnan().all()
        if m.device.type == "cuda":
            assert same_bits(found[:live], again[:live])
        torch.testing.assert_close(found[:live].double(), again[:live].double(), rtol=0.01, atol=0.01)

    @pytest.mark.slow
    @pytest.mark.parametrize("tile_rows", [128, 192])
    @every_quant
    def test_compiles_without_spills(self, quant: str, tile_rows: int):
        plan = grouped_gemm_op.plan(*grouped_args(Maker("meta"), 600, 4, 136, 256, tile_rows, quant))
        manifest = build.compile_only(plan.template, plan.config, "sm_90a").manifest
        assert manifest["spill_bytes"] == 0
        assert not any(kernel["serialized"] for kernel in manifest["kernels"])

    def test_nan_stays_in_its_row(self, m: Maker):
        a = GroupedGemmArgs(*grouped_args(m, 40, 4, 64, 128, 16, "bf16"))
        expected = multiply(m, a, out=torch.empty_like(a.out))
        a.x[5] = float("nan")
        found = multiply(m, a)
        assert found[5].isnan().all()
        assert same_bits(found[:5], expected[:5])
        assert same_bits(found[6:], expected[6:])

    def test_no_tiles(self, m: Maker):
        a = GroupedGemmArgs(*grouped_args(m, 40, 4, 64, 128, 16))
        assert multiply(m, a, num_tiles=a.num_tiles * 0).isnan().all()

    @pytest.mark.parametrize("expert", [-1, -1000])
    def test_tile_of_nobody(self, m: Maker, expert: int):
        """The call ends, and other tiles are what they are without it. It was taken for the end of all tiles once."""
        a = GroupedGemmArgs(*grouped_args(m, 48, 4, 136, 256, 16, "bf16"))
        tiles = torch.tensor([[0, 0, 16, 0], [1, 16, 16, 0], [2, 32, 16, 0]], dtype=torch.int32, device=m.device)
        count = a.num_tiles.clone().fill_(3)
        expected = multiply(m, a, tiles=tiles, num_tiles=count)
        if m.device.type == "cuda":
            tiles[1, 0] = expert
        found = multiply(m, a, tiles=tiles, num_tiles=count)
        assert same_bits(found[:16], expected[:16])
        assert same_bits(found[32:], expected[32:])

    def test_more_rows_than_a_tile_has(self, m: Maker):
        a = GroupedGemmArgs(*grouped_args(m, 48, 4, 136, 256, 16, "bf16"))
        tiles = torch.tensor([[0, 0, 40, 0]], dtype=torch.int32, device=m.device)
        found = multiply(m, a, tiles=tiles, num_tiles=a.num_tiles.clone().fill_(1))
        assert found[:16].isfinite().all()
        assert found[16:].isnan().all()

    def test_more_tiles_than_there_are(self, m: Maker):
        a = GroupedGemmArgs(*grouped_args(m, 48, 4, 136, 256, 16, "bf16"))
        tiles = torch.tensor([[3, 0, 16, 0], [1, 16, 9, 0]], dtype=torch.int32, device=m.device)
        expected = multiply(m, a, tiles=tiles, num_tiles=a.num_tiles.clone().fill_(2))
        found = multiply(m, a, tiles=tiles, num_tiles=a.num_tiles.clone().fill_(2**30))
        assert same_bits(found, expected)

    def test_out_in_the_memory_of_a_scale(self, m: Maker):
        a = GroupedGemmArgs(*grouped_args(m, 40, 4, 64, 128, 16))
        memory = m.normal(a.out.numel(), dtype=torch.float32)
        out = memory.view(torch.bfloat16)[: a.out.numel()].view_as(a.out)
        with rejects(GEMM, "out", out):
            multiply(m, a, x_scale=memory[:1], out=out)

    @pytest.mark.parametrize("kind", ["bf16", "fp8_block"])
    def test_refused(self, m: Maker, kind: str):
        a = GroupedGemmArgs(*grouped_args(m, 40, 4, 192, 256, 16, kind))
        bad: dict[str, dict[str, Any]] = {
            "x": {"x": a.x[:, :-8].contiguous()},
            "weight": {"weight": a.weight[..., :-16].contiguous()},
            "tiles": {"tiles": a.tiles[:, :3].contiguous()},
            "num_tiles": {"num_tiles": a.num_tiles.repeat(2)},
            "tile_rows": {"tile_rows": 48},
            "quant": {"quant": "int8"},
            "x_scale": {"x_scale": m.normal(7, dtype=torch.float32)},
            "weight_scale": {"weight_scale": m.normal(4, dtype=torch.float32)},
            "out": {"out": a.out[:, :100]},
        }
        for argument, changes in bad.items():
            if argument == "x" and kind == "bf16":
                argument = "weight"  # 248 columns are as good as 256, but not those of the weights
            with rejects(GEMM, argument, a.out):
                multiply(m, a, **changes)
