"""fused_moe in one launch: which calls take it, and what only a grid of running blocks can show."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fused_moe_grid import gaps
from op_tools import same_bits
from test_fused_moe import MODES, difference, exact, made, run

from hpcjit import build, workspace
from hpcjit.cases import Maker
from hpcjit.launch import raw_stream
from hpcjit.ops.moe import _fused_moe_mono as mono
from hpcjit.ops.moe import _fused_moe_plan
from hpcjit.ops.moe._fused_moe import fused_moe_op
from hpcjit.ops.moe._fused_moe_args import FusedMoeArgs

every_mode = pytest.mark.parametrize(("quant", "codes"), MODES, ids=lambda value: str(value))


def planned(*sizes: int, **options) -> str:
    return fused_moe_op.plan(*made(Maker("meta"), *sizes, **options)).template.op


def mono_plan(a: FusedMoeArgs):
    plan = mono.plan(fused_moe_op.op, a)
    assert plan is not None
    return plan


def counters_are_zero() -> bool:
    blocks = [block for streams in workspace._streams.values() for block in streams.values()]
    return all(block[5] is None or not bool(block[5].any()) for block in blocks)


class TestChoice:
    @pytest.mark.parametrize(
        ("tokens", "experts", "few"),
        [(1, 128, True), (3, 128, True), (4, 128, False), (2048, 128, False), (1, 15, False)],
    )
    def test_few_tokens(self, tokens: int, experts: int, few: bool):
        assert planned(tokens, experts, 4096, 192, 8) == ("moe.fused_moe_mono" if few else "moe.fused_moe")

    def test_experts_of_other_ranks_count(self):
        """Of 64 choices 8 are of experts that are here."""
        a = made(Maker("meta"), 8, 16, 4096, 192, 8, global_experts=128)
        assert fused_moe_op.plan(*a).template.op == "moe.fused_moe_mono"

    def test_long_weights_are_read_faster_by_launches(self):
        """One token's, of three times the intermediate size and as many bytes as four tokens' of bfloat16."""
        assert planned(1, 128, 4096, 576, 8) == "moe.fused_moe_mono"
        assert planned(1, 128, 4096, 768, 8) == "moe.fused_moe"

    @pytest.mark.parametrize(
        ("sizes", "options"),
        [
            ((4, 8, 400, 192, 2), {}),  # half a chunk of K
            ((4, 8, 4096, 80, 2), {}),
            ((4, 8, 4096, 192, 2), {"on_input": True}),
            ((64, 8, 4096, 192, 8), {}),  # many rows of an expert
        ],
    )
    def test_what_it_does_not_take(self, sizes: tuple[int, ...], options: dict):
        a = made(Maker("meta"), *sizes, **options)
        assert mono.plan(fused_moe_op.op, a) is None
        assert fused_moe_op.plan(*a).template.op == "moe.fused_moe"

    @pytest.mark.parametrize(
        ("hidden", "expected"), [(128, 16), (2048, 16), (4096, 32), (6144, 48), (7168, 64), (9216, 80), (20480, 128)]
    )
    def test_columns(self, hidden: int, expected: int):
        """Every SM has an item of down, as far as eight warps can share it out."""
        assert mono.columns(hidden, 132) == expected

    @pytest.mark.parametrize("tokens", [1, 8, 9, 64, 128])
    def test_parts_of_the_workspace_do_not_overlap(self, tokens: int):
        a = made(Maker("meta"), tokens, 256, 7168, 256, 8, quant="fp8_block", codes=False)
        plan = mono_plan(a)
        assert plan.values["at_x_scale"] >= tokens * 7168
        assert plan.values["at_hidden"] >= plan.values["at_x_scale"] + 4 * tokens * 56
        assert plan.workspace_bytes >= plan.values["at_hidden"] + tokens * 8 * 336
        assert plan.counter_bytes >= 4 * (2 + tokens * 8)

    @pytest.mark.slow
    @every_mode
    def test_compiles_without_spills(self, quant: str, codes: bool):
        """Every number of columns, groups and token tiles that a mode can have."""
        seen = set()
        for tokens in (1, 16, 32, 64, 128):
            for experts in (8, 16, 128, 256):
                for hidden in (2048, 4096, 6144, 7168):
                    a = made(Maker("meta"), tokens, experts, hidden, 192, 8, quant=quant, codes=codes)
                    plan = mono.plan(fused_moe_op.op, a)
                    if plan is None:
                        continue
                    shape = (plan.config.columns, plan.config.groups, plan.config.token_tiles)
                    if shape not in seen:
                        seen.add(shape)
                        assert build.compile_only(plan.template, plan.config, "sm_90a").manifest["spill_bytes"] == 0
        assert len(seen) >= 5


@pytest.mark.gpu
class TestKernel:
    @staticmethod
    def launch(a: FusedMoeArgs, **changes) -> torch.Tensor:
        """The kernel, whatever the operator would take."""
        a = a._replace(**changes)
        fused_moe_op._runner(mono_plan(a), 0, anywhere=True)(*a)
        return a.out

    @pytest.mark.parametrize(
        ("tokens", "hidden"),
        [
            *(
                (tokens, hidden)
                for tokens in (1, 7, 8, 9, 31, 33, 64)
                for hidden in (256, 4096, 5120, 7168, 9216, 20480)
            ),
            *((tokens, hidden) for tokens in (100, 128) for hidden in (5120, 9216)),
        ],
    )
    def test_sizes(self, tokens: int, hidden: int):
        """Every number of columns, of token tiles and of words of a mask; 20480: more items of down than SMs."""
        a = made(Maker("cuda"), tokens, 96, hidden, 192, 4, codes=tokens % 2 > 0)
        assert difference(self.launch(a), exact(a)) < 1e-3

    @every_mode
    def test_modes(self, quant: str, codes: bool):
        a = made(Maker("cuda"), 21, 64, 1280, 320, 8, quant=quant, codes=codes, shared=True, activation="gelu")
        assert difference(self.launch(a), exact(a)) < 1e-3

    @every_mode
    def test_one_group_and_two(self, quant: str, codes: bool):
        """With as many rings of warps as fit, and with one."""
        a = made(Maker("cuda"), 12, 64, 4096, 192, 8, quant=quant, codes=codes)
        plan = mono_plan(a)
        for groups in range(1, plan.config.groups + 1):
            other = replace(plan, config=replace(plan.config, groups=groups))
            out = torch.full_like(a.out, float("nan"))
            fused_moe_op._runner(other, 0, anywhere=True)(*a._replace(out=out))
            assert difference(out, exact(a)) < 1e-3

    @pytest.mark.parametrize("tokens", [3, 20, 64])
    def test_all_to_the_same(self, tokens: int):
        """An expert has many tiles, its neighbours none."""
        a = made(Maker("cuda"), tokens, 128, 512, 64, 8)
        a.topk_ids.copy_(torch.arange(40, 48))
        assert difference(self.launch(a), exact(a)) < 1e-3

    def test_in_place(self):
        """The result may take the place of the activations, or of the shared output: all have been read by then."""
        a = made(Maker("cuda"), 7, 32, 1024, 96, 4, quant="bf16", codes=False, shared=True)
        expected = self.launch(a).clone()
        x, shared = a.x.clone(), a.shared_output.clone()
        assert same_bits(self.launch(a, x=x, out=x), expected)
        assert same_bits(self.launch(a, shared_output=shared, out=shared), expected)

    @pytest.mark.parametrize("value", [-1, -(2**31), 2**31 - 1, 7, 40])
    def test_ids_elsewhere(self, value: int):
        """Experts 8 to 39 of 64 are here. A pair of another one counts as much as a weight of zero does."""
        a = made(Maker("cuda"), 6, 32, 512, 64, 2, codes=True, offset=8, global_experts=64)
        ids, weights = a.topk_ids.clone(), a.topk_weights.clone()
        ids[:, 1], weights[:, 1] = value, 0.0
        expected = self.launch(a, topk_weights=weights, out=torch.empty_like(a.out))
        assert same_bits(self.launch(a, topk_ids=ids, out=torch.empty_like(a.out)), expected)

    def test_nobody_is_here(self):
        a = made(Maker("cuda"), 5, 32, 512, 64, 4, shared=True)
        ids = torch.full_like(a.topk_ids, -1)
        assert same_bits(self.launch(a, topk_ids=ids), a.shared_output)
        assert same_bits(self.launch(a, expert_offset=100), a.shared_output)
        assert counters_are_zero()

    @every_mode
    def test_dead_rows_and_scratch(self, quant: str, codes: bool):
        """NaN in a token of nobody, and in scratch, stays where it is."""
        a = made(Maker("cuda"), 9, 32, 512, 192, 4, quant=quant, codes=codes)
        a.topk_ids[3] = -1
        expected = self.launch(a, out=torch.empty_like(a.out))
        a.x.view(torch.uint8)[3] = 0xFF
        scratch = workspace.Need(0, 1, 0).provide(raw_stream(0))[4]
        scratch.view(torch.uint8).fill_(0xFF)
        assert same_bits(self.launch(a), expected)
        assert not a.out[3].any()

    def test_views(self):
        """Rows with gaps, scales with the tokens of a group next to each other."""
        a = made(Maker("cuda"), 7, 32, 384, 192, 2, quant="fp8_block", shared=True)
        expected = self.launch(a, out=torch.empty_like(a.out))
        wide = torch.full((7, 5), -1, dtype=torch.int32, device="cuda")
        wide[:, :2] = a.topk_ids
        views = {
            "topk_ids": wide[:, :2],
            "x_scale": a.x_scale.t().contiguous().t(),
            "shared_output": gaps(a.shared_output, 8),
        }
        assert same_bits(self.launch(a, x=gaps(a.x, 16), topk_weights=gaps(a.topk_weights, 3), **views), expected)

    def test_the_other_kernels_agree(self):
        a = made(Maker("cuda"), 32, 64, 2048, 256, 8, quant="fp8_channel", codes=False, shared=True)
        expected = torch.empty_like(a.out)
        chain = _fused_moe_plan.chain_plan(fused_moe_op.op, a)
        fused_moe_op._runner(chain, 0, anywhere=True)(*a._replace(out=expected))
        assert difference(self.launch(a), expected) < 1e-3

    @every_mode
    def test_bits_repeat(self, quant: str, codes: bool):
        """Whichever block has an item. Counters are as they were."""
        a = made(Maker("cuda"), 32, 128, 1024, 192, 8, quant=quant, codes=codes)
        first = self.launch(a, out=torch.empty_like(a.out))
        assert all(same_bits(self.launch(a, out=torch.empty_like(a.out)), first) for _ in range(200))
        assert counters_are_zero()

    def test_replays_with_other_routing(self):
        """Among them: nobody, all to one expert, tokens that drop out."""
        a = made(Maker("cuda"), 8, 128, 4096, 192, 8)
        run(a)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(a)
        m = Maker("cuda", 1)
        for step in range(1000):
            ids = m.integers(-1, 128, 8, 8) if step % 10 else torch.full_like(a.topk_ids, step // 10 % 129 - 1)
            a.topk_ids.copy_(ids)
            graph.replay()
            assert same_bits(a.out, run(a, out=torch.empty_like(a.out)))

    def test_two_streams(self):
        """Each wants every SM for itself: neither may wait for a block of its own that has no room."""
        calls = [made(Maker("cuda", seed), 8, 128, 2048, 192, 8) for seed in (1, 2, 3)]
        expected = [run(a, out=torch.empty_like(a.out)) for a in calls]
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in calls]
        for _ in range(100):
            for a, stream in zip(calls, streams, strict=True):
                with torch.cuda.stream(stream):
                    run(a)
        torch.cuda.synchronize()
        assert all(same_bits(a.out, e) for a, e in zip(calls, expected, strict=True))
        assert counters_are_zero()
