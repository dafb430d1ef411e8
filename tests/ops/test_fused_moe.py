"""fused_moe: against a formula of its own, at the borders of tiles, in parallel parts, and calls that are refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from fused_moe_grid import gaps
from op_tools import rejects, same_bits

from hpcjit import build, workspace
from hpcjit.cases import Maker
from hpcjit.cases.moe_experts import FP8, Experts
from hpcjit.errors import ArgumentError, ArgumentTypeError
from hpcjit.fused_op import reset_decisions
from hpcjit.launch import raw_stream
from hpcjit.ops.moe import _fused_moe_plan, fused_moe
from hpcjit.ops.moe._fused_moe import fused_moe_op
from hpcjit.ops.moe._fused_moe_args import FusedMoeArgs

OP = "moe.fused_moe"
NAN = float("nan")
MODES = [
    ("bf16", False),
    *((f"fp8_{kind}", codes) for kind in ("tensor", "channel", "block") for codes in (True, False)),
]

every_mode = pytest.mark.parametrize(("quant", "codes"), MODES, ids=lambda value: str(value))


def made(m: Maker, *sizes: int, **options) -> FusedMoeArgs:
    return FusedMoeArgs(*Experts(*sizes, **options).make(m))


def run(a: FusedMoeArgs, **changes) -> torch.Tensor:
    """The public call: of the kernels on a GPU, of the reference elsewhere."""
    a = a._replace(**changes)
    options = {name: value for name, value in a._asdict().items() if name not in FusedMoeArgs._fields[:5]}
    backend = "jit" if a.x.is_cuda else None
    return fused_moe(*a[:5], **options, backend=backend)


def exact(a: FusedMoeArgs) -> torch.Tensor:
    """The float64 reference, with the hidden activation as it is."""
    doubled = [v.double() if isinstance(v, torch.Tensor) and v.dtype not in (FP8, torch.int32) else v for v in a]
    doubled[-1] = torch.empty_like(doubled[-1])
    fused_moe_op.reference(*doubled)
    return doubled[-1]


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest normalised difference of a token's results."""
    a, b = a.double(), b.double()
    scale = (a.square() + b.square()).sum(-1)
    return float(torch.where(scale > 0, 1 - 2 * (a * b).sum(-1) / scale.clamp_min(1e-300), 0.0).max())


class TestValues:
    def test_formula(self, m: Maker):
        """In words of its own: one token, its experts one after the other, weights as they are."""
        a = made(m, 3, 4, 128, 64, 2, quant="bf16", codes=False, shared=True)
        found = run(a)
        for t in range(3):
            x, total = a.x[t].double(), a.shared_output[t].double()
            for k in range(2):
                w13, w2 = (w[int(a.topk_ids[t, k])].double() for w in (a.w13, a.w2))
                gate, up = w13[:64] @ x, w13[64:] @ x
                total += a.topk_weights[t, k].double() * (w2 @ (gate / (1 + (-gate).exp()) * up))
            torch.testing.assert_close(
                found[t].double(), total, rtol=0.02, atol=0.02 * float(total.square().mean() ** 0.5)
            )

    def test_block_scales(self, m: Maker):
        """Gate and up have their own rows of blocks, also where the last one is short: I = 192."""
        a = made(m, 4, 2, 256, 192, 1, quant="fp8_block")
        rows = torch.arange(192, device=m.device) // 128
        gate = a.w13_scale[:, rows].repeat_interleave(128, 2)
        up = a.w13_scale[:, 2 + rows].repeat_interleave(128, 2)
        w13 = a.w13.double() * torch.cat([gate, up], 1)
        w2 = a.w2.double() * a.w2_scale.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :, :192]
        x = a.x.double() * a.x_scale.repeat_interleave(128, 1)
        for t, (expert,) in enumerate(a.topk_ids.tolist()):
            halves = (w13[expert] @ x[t]).chunk(2)
            y = w2[expert] @ (torch.nn.functional.silu(halves[0]) * halves[1]) * a.topk_weights[t, 0]
            assert difference(run(a)[t : t + 1], y[None]) < 1e-3

    @every_mode
    def test_difference(self, m: Maker, quant: str, codes: bool):
        """What the issue of FP8 is judged by: the difference from float64 with nothing rounded in between."""
        a = made(m, 40, 8, 512, 192, 4, quant=quant, codes=codes)
        assert difference(run(a), exact(a)) < (1e-3 if quant != "bf16" else 1e-5)

    @every_mode
    def test_activation_and_weights_on_input(self, m: Maker, quant: str, codes: bool):
        a = made(m, 6, 4, 256, 64, 2, quant=quant, codes=codes, activation="gelu", on_input=True)
        assert difference(run(a), exact(a)) < 1e-3
        assert difference(run(a, apply_weights_on_input=False), exact(a)) > 1e-3

    def test_in_place(self, m: Maker):
        """The result may take the place of the activations, or of the shared output."""
        a = made(m, 5, 4, 256, 64, 2, quant="bf16", codes=False, shared=True)
        expected = run(a)
        x, shared = a.x.clone(), a.shared_output.clone()
        assert same_bits(run(a, x=x, out=x), expected)
        assert same_bits(run(a, shared_output=shared, out=shared), expected)


class TestRouting:
    def test_nobody_is_here(self, m: Maker):
        a = made(m, 4, 4, 128, 64, 2, quant="bf16", codes=False, shared=True)
        ids = torch.full_like(a.topk_ids, -1)
        assert same_bits(run(a, topk_ids=ids), a.shared_output)
        assert not run(a, topk_ids=ids, shared_output=None).any()
        assert not run(a, expert_offset=100, shared_output=None).any()

    @pytest.mark.parametrize("value", [-1, -(2**31), 4, 2**31 - 1])
    def test_ids_elsewhere(self, m: Maker, value: int):
        """An id outside counts as much as a weight of zero does."""
        a = made(m, 6, 4, 128, 64, 2)
        ids, weights = a.topk_ids.clone(), a.topk_weights.clone()
        ids[:, 1], weights[:, 1] = value, 0.0
        assert same_bits(run(a, topk_ids=ids), run(a, topk_weights=weights))

    @every_mode
    def test_expert_parallel(self, m: Maker, quant: str, codes: bool):
        """The parts of two ranks add up to the whole."""
        a = made(m, 9, 8, 256, 64, 4, quant=quant, codes=codes)
        parts = []
        for first, count in ((0, 3), (3, 5)):
            here = slice(first, first + count)
            mine = {n: None if v is None else v[here] for n, v in a._asdict().items() if n in ("w13_scale", "w2_scale")}
            parts.append(
                run(a, w13=a.w13[here], w2=a.w2[here], expert_offset=first, out=torch.empty_like(a.out), **mine)
            )
        # Each of three roundings to bfloat16 costs up to 2^-9 of what it rounds, and parts may cancel.
        first, second = (part.double() for part in parts)
        off = (first + second - run(a).double()).abs()
        assert bool((off <= 2**-7 * (first.abs() + second.abs()) + 1e-3).all())

    def test_tensor_parallel(self, m: Maker):
        """So do those of two slices of the intermediate size."""
        a = made(m, 5, 4, 256, 128, 2, quant="bf16", codes=False)
        parts = []
        for first in (0, 64):
            w13 = torch.cat([a.w13[:, first : first + 64], a.w13[:, 128 + first : 192 + first]], 1)
            w2 = a.w2[:, :, first : first + 64].contiguous()
            parts.append(run(a, w13=w13, w2=w2, out=torch.empty_like(a.out)).double())
        torch.testing.assert_close(sum(parts), run(a).double(), rtol=0.02, atol=0.03)

    def test_same_expert_twice(self, m: Maker):
        a = made(m, 3, 4, 128, 64, 2, quant="bf16", codes=False)
        ids = a.topk_ids[:, :1].expand(-1, 2).contiguous()
        once = run(a, topk_ids=ids[:, :1].contiguous(), topk_weights=a.topk_weights.sum(-1, keepdim=True))
        torch.testing.assert_close(run(a, topk_ids=ids).double(), once.double(), rtol=0.02, atol=0.02)


class TestDebugMode:
    @pytest.fixture(autouse=True)
    def debug(self, monkeypatch):
        """Debug mode, with plans made for it."""
        monkeypatch.setenv("HPCJIT_DEBUG", "1")
        reset_decisions()
        yield
        reset_decisions()

    @pytest.mark.parametrize("bad", [-2, -(2**31), 16, 2**31 - 1])
    def test_an_id(self, m: Maker, bad: int):
        """The first one is named, and nothing is written."""
        a = made(m, 4, 4, 128, 64, 2, quant="bf16", codes=False, offset=8, global_experts=16)
        a.topk_ids[2, 1], a.topk_ids[3, 0] = bad, bad
        with rejects(OP, "topk_ids", a.out, match=f"[0, 16), got {bad} at position [2, 1] (2 such entries)"):
            run(a)

    def test_how_many_there_are_is_not_known(self, m: Maker):
        """Then those of another rank cannot be told from mistakes, but for numbers that no layer has."""
        a = made(m, 4, 4, 128, 64, 2, quant="bf16", codes=False)
        a.topk_ids[1], a.topk_ids[2, 0] = 100, -1
        assert run(a).isfinite().all()
        a.topk_ids[3, 1] = 1024
        with rejects(OP, "topk_ids", match="[0, 1024), got 1024 at position [3, 1]"):
            run(a)

    @pytest.mark.gpu
    def test_capture(self):
        """Nothing is read while a graph is captured, and nothing raises then."""
        a = made(Maker("cuda"), 4, 4, 128, 64, 2, quant="bf16", codes=False)
        run(a)
        a.topk_ids[0, 0] = 5000
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(a)
        graph.replay()
        assert a.out.isfinite().all()


@pytest.mark.gpu
class TestKernels:
    @pytest.mark.parametrize("rows", [1, 15, 16, 17, 31, 33, 47, 63, 64, 65, 127, 128, 129, 200, 257])
    def test_rows_of_an_expert(self, rows: int):
        """Every border of tiles and warpgroups: so many rows for one expert, few for others."""
        a = made(Maker("cuda"), rows + 3, 4, 256, 192, 1, quant="fp8_block")
        a.topk_ids[:rows], a.topk_ids[rows:] = 2, 3
        assert difference(run(a), exact(a)) < 1e-3

    @pytest.mark.parametrize("rows", [1, 64, 65, 127, 128, 129, 130, 159, 160, 161, 191, 192, 193, 257, 400, 450])
    @pytest.mark.parametrize("quant", ["bf16", "fp8_tensor", "fp8_channel", "fp8_block"])
    def test_rows_of_an_expert_with_room_for_192(self, quant: str, rows: int):
        a = made(Maker("cuda"), 450, 4, 640, 192, 1, quant=quant)
        a.topk_ids[:], a.topk_ids[:rows], a.topk_ids[rows : rows + 9] = -1, 2, 3
        assert difference(run(a), exact(a)) < 1e-3

    @pytest.mark.parametrize("mean", [2, 9, 16, 40, 72, 101, 144, 230])
    @pytest.mark.parametrize("quant", ["bf16", "fp8_tensor"])
    def test_uneven_routing(self, mean: int, quant: str):
        m = Maker("cuda")
        a = made(m, 8 * mean, 8, 256, 128, 1, quant=quant, codes=False)
        a.topk_ids.copy_(m.normal(8 * mean, 1, dtype=torch.float32).abs().mul(3).int().clamp_max(7))
        assert difference(run(a), exact(a)) < 1e-3

    @every_mode
    def test_bits_repeat(self, quant: str, codes: bool):
        for tokens in (70, 300):
            a = made(Maker("cuda"), tokens, 8, 512, 192, 4, quant=quant, codes=codes)
            first = run(a)
            assert all(same_bits(run(a, out=torch.empty_like(a.out)), first) for _ in range(100))

    @every_mode
    def test_scratch_holds_anything(self, quant: str, codes: bool):
        """NaN in the workspace, in tokens of nobody and in other tokens stays where it is."""
        a = made(Maker("cuda"), 20, 8, 256, 192, 4, quant=quant, codes=codes)
        expected = run(a, out=torch.empty_like(a.out))
        ids, x = a.topk_ids.clone(), a.x.clone()
        ids[3], x.view(torch.uint8)[3] = -1, 0xFF
        scratch = workspace.Need(0, 1, 0).provide(raw_stream(0))[4]
        scratch.view(torch.uint8).fill_(0xFF)
        found = run(a, x=x, topk_ids=ids)
        others = [t for t in range(20) if t != 3]
        assert not found[3].any()
        assert same_bits(found[others], expected[others])

    def test_replays_with_other_routing(self):
        """Among them: nobody, all to one expert, tokens that drop out."""
        a = made(Maker("cuda"), 24, 16, 256, 128, 4, quant="fp8_channel")
        run(a)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(a)
        m = Maker("cuda", 1)
        for step in range(200):
            ids = m.integers(-1, 16, 24, 4) if step % 10 else torch.full_like(a.topk_ids, step // 10 % 17 - 1)
            a.topk_ids.copy_(ids)
            graph.replay()
            assert same_bits(a.out, run(a, out=torch.empty_like(a.out)))

    def test_two_streams(self):
        """Both at once, again and again: neither waits for the other nor uses its scratch."""
        calls = [made(Maker("cuda", seed), 33, 16, 512, 192, 4, quant="fp8_block", codes=False) for seed in (1, 2)]
        expected = [run(a, out=torch.empty_like(a.out)) for a in calls]
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in calls]
        for _ in range(50):
            for a, stream in zip(calls, streams, strict=True):
                with torch.cuda.stream(stream):
                    run(a)
        torch.cuda.synchronize()
        assert all(same_bits(a.out, e) for a, e in zip(calls, expected, strict=True))


class TestPlan:
    def test_tiles_fit(self):
        """However pairs are spread, their tiles are no more than there is room for."""
        m = Maker("cpu")
        for rows in (16, 32, 64, 128, 192):
            for experts in (1, 3, 64):
                for pairs in (1, 5, 16, 1000):
                    counts = torch.bincount(m.integers(0, experts, pairs, dtype=torch.int64), minlength=experts)
                    assert int((-(-counts // rows)).sum()) <= _fused_moe_plan.max_tiles(pairs, experts, rows)
        assert _fused_moe_plan.max_tiles(10, 100, 16) == 10

    def test_tile_rows(self):
        pairs = (1, 64, 65, 160, 161, 384, 385, 800, 801, 1760, 1761, 2400, 2401, 10**6)
        sizes = {quant: [_fused_moe_plan.tile_rows(n, 8, quant) for n in pairs] for quant in ("bf16", "fp8_tensor")}
        assert sizes["bf16"] == [16, 16, 32, 32, 64, 64, 128, 128, *[192] * 6]
        assert sizes["fp8_tensor"] == [*sizes["bf16"][:10], 128, 128, 192, 192]

    @pytest.mark.parametrize(("tokens", "rows"), [(128, 128), (129, 192)])
    def test_no_more_rows_than_tokens_of_a_plan_of_the_block(self, tokens: int, rows: int):
        """The mean is 128 and more, but an expert has each token once."""
        plan = _fused_moe_plan.chain_plan(OP, made(Maker("meta"), tokens, 8, 128, 64, 8))
        assert (plan.config.tokens, plan.config.own_experts > 0) == (rows, tokens == 128)
        assert plan.values["most_tiles"] == _fused_moe_plan.max_tiles(tokens * 8, 8, rows)

    @pytest.mark.parametrize(
        ("tokens", "experts", "top_k", "own"),
        [(64, 128, 8, (128, 512)), (65, 129, 8, (256, 1024)), (128, 512, 8, (512, 1024)), (20, 32, 1, (32, 512))],
    )
    def test_blocks_find_the_plan_of_few_pairs(self, tokens: int, experts: int, top_k: int, own: tuple[int, int]):
        config = _fused_moe_plan.chain_plan(OP, made(Maker("meta"), tokens, experts, 128, 64, top_k)).config
        assert (config.own_experts, config.own_pairs) == own

    @pytest.mark.parametrize(
        ("tokens", "experts", "top_k", "options"),
        [(129, 128, 1, {}), (128, 128, 9, {}), (16, 513, 8, {}), (16, 128, 8, {"on_input": True})],
    )
    def test_a_launch_finds_that_of_more(self, tokens: int, experts: int, top_k: int, options: dict):
        config = _fused_moe_plan.chain_plan(OP, made(Maker("meta"), tokens, experts, 128, 64, top_k, **options)).config
        assert (config.own_experts, config.own_pairs) == (0, 0)

    @every_mode
    def test_parts_of_the_workspace_do_not_overlap(self, quant: str, codes: bool):
        a = made(Maker("meta"), 300, 8, 512, 192, 4, quant=quant, codes=codes)
        plan, pairs, fp8 = fused_moe_op.plan(*a), 300 * 4, quant != "bf16"
        least = {"sorted": 4 * pairs, "position": 4 * pairs, "rows": pairs * 512 * 2, "tiles": 16 * (1 + pairs // 192)}
        least |= {"hidden": pairs * 192 * (1 if fp8 else 2), **({"hidden_scale": 4 * pairs * 3} if fp8 else {})}
        least |= {"x": 300 * 512, "x_scale": 4 * 300} if fp8 and not codes else {}
        begins = sorted((plan.values[f"at_{name}"], name) for name in least)
        for (begin, name), (end, _) in pairwise([*begins, (plan.workspace_bytes, "")]):
            assert begin % 256 == 0, name
            assert end - begin >= least[name], name

    @pytest.mark.slow
    @pytest.mark.parametrize(("tokens", "top_k"), [(4, 1), (100, 1), (128, 3), (128, 8), (300, 1), (600, 1), (900, 1)])
    @every_mode
    def test_compiles_without_spills(self, quant: str, codes: bool, tokens: int, top_k: int):
        """Every size of tile, with a plan of the block's own and from a launch."""
        compiled(made(Maker("meta"), tokens, 8, 512, 192, top_k, quant=quant, codes=codes, shared=True))

    @pytest.mark.slow
    @pytest.mark.parametrize("tokens", [4, 900])
    @every_mode
    def test_weights_on_the_input_compile_without_spills(self, quant: str, codes: bool, tokens: int):
        compiled(made(Maker("meta"), tokens, 8, 512, 192, 1, quant=quant, codes=codes, on_input=True))

    @pytest.mark.slow
    @every_mode
    def test_gelu_compiles_without_spills(self, quant: str, codes: bool):
        compiled(made(Maker("meta"), 900, 8, 512, 192, 1, quant=quant, codes=codes, activation="gelu"))


def compiled(a: FusedMoeArgs) -> None:
    plan = _fused_moe_plan.chain_plan(OP, a)
    manifest = build.compile_only(plan.template, plan.config, "sm_90a").manifest
    assert manifest["spill_bytes"] == 0
    assert not [kernel["name"] for kernel in manifest["kernels"] if kernel["serialized"]]  # its products


def _bad(m: Maker) -> dict[str, tuple[FusedMoeArgs, dict, str]]:
    """What is changed, and the argument that is named."""
    plain = made(m, 4, 4, 256, 192, 2, quant="bf16", codes=False)
    tensor, block = (made(m, 4, 4, 256, 192, 2, quant=q) for q in ("fp8_tensor", "fp8_block"))
    inner = made(m, 4, 4, 256, 192, 2, quant="fp8_block", codes=False)
    short = Experts(4, 4, 256, 200, 2)
    return {
        "quant": (plain, {"quant": "fp4"}, "quant"),
        "activation": (plain, {"activation": "relu"}, "activation"),
        "offset": (plain, {"expert_offset": -1}, "expert_offset"),
        "fewer than are here": (plain, {"num_global_experts": 3}, "num_global_experts"),
        "on input": (plain, {"apply_weights_on_input": 1}, "apply_weights_on_input"),
        "gate and up do not agree": (plain, {"w13": plain.w13[:, :-2].contiguous()}, "w2"),
        "odd rows": (plain, {"w13": plain.w13[:, :-1].contiguous()}, "w13"),
        "hidden size": (plain, {"w13": plain.w13[..., :-8].contiguous()}, "w13"),
        "experts": (plain, {"w2": plain.w2[:3]}, "w2"),
        "slice without a copy": (plain, {"w2": torch.cat([plain.w2, plain.w2], 2)[..., :192]}, "w2"),
        "intermediate size": (FusedMoeArgs(*short.make(m)), {}, "w2"),
        "tokens": (plain, {"topk_ids": plain.topk_ids[:3]}, "topk_ids"),
        "top-k": (plain, {"topk_ids": plain.topk_ids.repeat(1, 17)}, "topk_ids"),
        "weights": (plain, {"topk_weights": plain.topk_weights[:, :1]}, "topk_weights"),
        "scales of bfloat16": (plain, {"w13_scale": tensor.w13_scale}, "w13_scale"),
        "no scale": (tensor, {"w2_scale": None}, "w2_scale"),
        "granularity": (tensor, {"w13_scale": block.w13_scale}, "w13_scale"),
        "gate and up in the same blocks": (block, {"w13_scale": block.w13_scale[:, :3].contiguous()}, "w13_scale"),
        "one scale too few": (block, {"w2_scale": block.w2_scale[:, :, :1].contiguous()}, "w2_scale"),
        "no scale of codes": (tensor, {"x_scale": None}, "x_scale"),
        "scales of other groups": (block, {"x_scale": block.x_scale[:, :1]}, "x_scale"),
        "scale of what is quantised": (inner, {"x_scale": block.x_scale}, "x_scale"),
        "shared output": (plain, {"shared_output": plain.out[:2]}, "shared_output"),
        "out": (plain, {"out": plain.out[:, :128]}, "out"),
        "rows off 16 bytes": (plain, {"x": gaps(plain.x, 3)}, "x"),
        "out over the weights": (plain, {"out": plain.w13.view(-1)[:1024].view(4, 256)}, "out"),
        "weights of pairs in out": (
            plain,
            {"topk_weights": plain.out.view(-1)[:16].view(torch.float32).view(4, 2)},
            "out",
        ),
    }


@pytest.mark.parametrize("name", _bad(Maker("meta")))
def test_refused(m: Maker, name: str):
    a, changes, argument = _bad(m)[name]
    with rejects(OP, argument, a.out):
        run(a, **changes)


def test_refused_reach():
    """Rows of tokens are found by 32 bits, in units of 16 bytes."""
    a = made(Maker("meta"), 4, 4, 256, 192, 2, quant="bf16", codes=False)
    far = torch.empty_strided((4, 256), (2**34, 1), dtype=torch.bfloat16, device="meta")
    with pytest.raises(ArgumentError, match="64 GiB"):
        run(a, x=far)


@pytest.mark.parametrize(
    ("argument", "dtype"), [("x", torch.float16), ("w13", torch.float16), ("topk_ids", torch.int64)]
)
def test_refused_dtypes(m: Maker, argument: str, dtype: torch.dtype):
    a = made(m, 4, 4, 256, 192, 2, quant="bf16", codes=False)
    with rejects(OP, argument, a.out, error=ArgumentTypeError):
        run(a, **{argument: getattr(a, argument).to(dtype)})
