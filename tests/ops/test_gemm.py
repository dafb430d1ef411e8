"""Router GEMM: its formula, weights that change, views, refused calls, rows that keep to themselves, routing as in float64."""

from __future__ import annotations

import pytest
import torch
from gemm_grid import BF16, FP16, FP32, router
from op_tools import rejects, same_bits

from hpcjit import numerics
from hpcjit.cases import Maker
from hpcjit.errors import ArgumentTypeError
from hpcjit.ops.gemm import gemm_bf16x2, prepare_router_weight, router_gemm
from hpcjit.ops.gemm._router_gemm import router_gemm_op, tf32

MODES = ("accurate", "fast")
modes = pytest.mark.parametrize("mode", MODES)
# A term is lost with 2^-17 of a weight at most; over a row that is far less than this.
FAST = 2.0**-16


def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.double() @ weight.double().t()


class TestFormula:
    @modes
    @pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
    @pytest.mark.parametrize("out_dtype", [FP32, BF16], ids=str)
    def test_product(self, m: Maker, mode: str, dtype: torch.dtype, out_dtype: torch.dtype):
        x, weight = m.normal(19, 640, dtype=dtype), m.normal(72, 640, dtype=FP32, std=0.02)
        y = router_gemm(x, weight, mode=mode, out_dtype=out_dtype)
        assert y.dtype == out_dtype
        bound = 2.0**-8 if out_dtype == BF16 else FAST if mode == "fast" else 2.0**-19
        assert numerics.error(y, exact(x, weight)) < bound

    def test_out_is_filled_and_returned(self, m: Maker):
        x, weight, out = m.normal(5, 64), m.normal(9, 64, dtype=FP32), m.poison(9, 5, dtype=FP32).t().contiguous()
        assert router_gemm(x, weight, out=out) is out
        assert same_bits(out, router_gemm(x, weight))

    def test_a_weight_changed_in_place_changes_the_result(self, m: Maker):
        """Nothing of a weight is kept between calls."""
        x, weight = m.normal(4, 256), m.normal(16, 256, dtype=FP32)
        first = router_gemm(x, weight)
        weight.mul_(-2)
        assert torch.equal(router_gemm(x, weight), -2 * first)

    def test_no_tokens(self, m: Maker):
        assert router_gemm(m.normal(0, 64), m.normal(9, 64, dtype=FP32)).shape == (0, 9)

    @modes
    def test_views_give_the_bits_of_copies(self, m: Maker, mode: str):
        """Alignment decides how values are loaded, not what comes out (the same steps in the same order)."""
        x, weight = m.normal(7, 325)[:, 3:323], m.normal(40, 2, 320, dtype=FP32)[:, 0]
        out = m.poison(7, 50, dtype=FP32)
        router_gemm(x, weight, mode=mode, out=out[:, 3:43])
        assert same_bits(out[:, 3:43].contiguous(), router_gemm(x.contiguous(), weight.contiguous(), mode=mode))
        assert out[:, :3].isnan().all()
        assert out[:, 43:].isnan().all()

    def test_tf32_setting_has_no_say(self, m: Maker):
        x, weight = m.normal(33, 512), m.normal(64, 512, dtype=FP32)
        with tf32(True, x.device):
            y = router_gemm(x, weight, backend="torch")
            if x.is_cuda:
                assert torch.backends.cuda.matmul.allow_tf32
        assert same_bits(y, router_gemm(x, weight, backend="torch"))


class TestBf16x2:
    def test_split(self, m: Maker):
        weight = m.normal(40, 200, dtype=FP32)
        high, low = prepare_router_weight(weight)
        assert high.dtype == low.dtype == BF16
        assert torch.equal(high, weight.bfloat16())
        rest = weight.double() - high.double() - low.double() / 256
        assert float((rest / weight.double()).abs().max()) <= 2.0**-17

    @pytest.mark.parametrize("scale", [1 / 256, 0.0, -3.5])
    def test_product(self, m: Maker, scale: float):
        x, (high, low) = m.normal(9, 512), prepare_router_weight(m.normal(65, 512, dtype=FP32))
        y = gemm_bf16x2(x, high, low, scale=scale)
        assert numerics.error(y, exact(x, high) + scale * exact(x, low)) < 2.0**-20

    def test_makes_what_the_fast_mode_makes(self, m: Maker):
        x, weight = m.normal(9, 512), m.normal(65, 512, dtype=FP32)
        y = gemm_bf16x2(x, *prepare_router_weight(weight), out_dtype=FP32)
        assert numerics.error(y, router_gemm(x, weight, mode="fast").double()) < FAST

    def test_low_part_does_not_vanish(self, m: Maker):
        """Without the factor 256 the rest of a small weight would be below bfloat16's normal range."""
        weight = m.normal(8, 64, dtype=FP32).sign() * 1.23456789e-35
        high, low = prepare_router_weight(weight)
        assert float(((high.double() + low.double() / 256 - weight.double()) / weight.double()).abs().max()) <= 2.0**-17


class TestRefused:
    @pytest.mark.parametrize(
        ("argument", "x", "weight", "options"),
        [
            ("x", (4, 64, FP32), (8, 64, FP32), {}),
            ("x", (4, 64, torch.int32), (8, 64, FP32), {}),
            ("x", (2, 4, 64, BF16), (8, 64, FP32), {}),
            ("x", (64, BF16), (8, 64, FP32), {}),
            ("x", (4, 0, BF16), (8, 0, FP32), {}),
            ("weight", (4, 64, BF16), (8, 63, FP32), {}),
            ("weight", (4, 64, BF16), (64, 8, FP32), {}),
            ("weight", (4, 64, BF16), (8, 64, BF16), {}),
            ("weight", (4, 64, BF16), (8, 64, torch.int32), {}),
            ("weight", (4, 64, BF16), (2, 8, 64, FP32), {}),
            ("weight", (4, 64, BF16), (64, FP32), {}),
            ("weight", (4, 64, BF16), (0, 64, FP32), {}),
            ("mode", (4, 64, BF16), (8, 64, FP32), {"mode": "exact"}),
            ("mode", (4, 64, BF16), (8, 64, FP32), {"mode": 3}),
            ("out_dtype", (4, 64, BF16), (8, 64, FP32), {"out_dtype": FP16}),
        ],
        ids=str,
    )
    def test_arguments(self, device: torch.device, argument: str, x, weight, options):
        made = [torch.zeros(shape, dtype=dtype, device=device) for *shape, dtype in (x, weight)]
        with rejects("gemm.router_gemm", argument, *made):
            router_gemm(*made, **options)

    @pytest.mark.parametrize("shape", [(4, 9), (5, 8), (8, 4), (32,)], ids=str)
    def test_out_of_another_shape(self, m: Maker, shape):
        out = m.poison(*shape, dtype=FP32)
        with rejects("gemm.router_gemm", "out", out):
            router_gemm(m.normal(4, 64), m.normal(8, 64, dtype=FP32), out=out)

    def test_out_of_another_kind(self, m: Maker):
        x, weight = m.normal(4, 64), m.normal(8, 64, dtype=FP32)
        for out in (m.poison(4, 8, dtype=FP16), m.poison(8, 4, dtype=FP32).t(), m.poison(8, dtype=FP32).expand(4, 8)):
            with rejects("gemm.router_gemm", "out", out):
                router_gemm(x, weight, out=out)

    def test_out_in_an_input(self, m: Maker):
        x, weight = m.normal(4, 64), m.normal(8, 64, dtype=FP32)
        with rejects("gemm.router_gemm", "out", weight, match="read meanwhile"):
            router_gemm(x, weight, out=weight[:4, :8])

    def test_strided_last_axis(self, m: Maker):
        with rejects("gemm.router_gemm", "x", match="contiguous"):
            router_gemm(m.normal(64, 4).t(), m.normal(8, 64, dtype=FP32))
        with rejects("gemm.router_gemm", "weight", match="contiguous"):
            router_gemm(m.normal(4, 64), m.normal(64, 8, dtype=FP32).t())

    def test_no_tensor(self):
        for args in ((None, torch.zeros(8, 64)), (torch.zeros(4, 64, dtype=BF16), [[1.0]])):
            with pytest.raises(ArgumentTypeError):
                router_gemm(*args)

    @pytest.mark.parametrize(
        ("argument", "low", "options"),
        [
            ("w_low", (9, 64, BF16), {}),
            ("w_low", (8, 65, BF16), {}),
            ("w_low", (8, 64, FP32), {}),
            ("scale", (8, 64, BF16), {"scale": float("nan")}),
            ("scale", (8, 64, BF16), {"scale": "1"}),
        ],
        ids=str,
    )
    def test_bf16x2(self, m: Maker, argument: str, low, options):
        *shape, dtype = low
        with rejects("gemm.gemm_bf16x2", argument):
            gemm_bf16x2(m.normal(4, 64), m.normal(8, 64), m.normal(*shape, dtype=dtype), **options)

    def test_bf16x2_takes_no_fp16(self, m: Maker):
        with rejects("gemm.gemm_bf16x2", "x"):
            gemm_bf16x2(m.normal(4, 64, dtype=FP16), m.normal(8, 64), m.normal(8, 64))

    def test_prepare_takes_fp32(self, m: Maker):
        with rejects("gemm.prepare_router_weight", "weight"):
            prepare_router_weight(m.normal(8, 64))


@modes
@pytest.mark.parametrize("tokens", [5, 16, 61, 200])
class TestRows:
    def test_bits_repeat(self, m: Maker, mode: str, tokens: int):
        args = router(m, tokens, 48, 1024, mode)
        first, second = numerics.copy_args(args), numerics.copy_args(args)
        router_gemm_op(*first)
        router_gemm_op(*second)
        assert same_bits(first[3], second[3])

    def test_a_row_does_not_depend_on_others(self, m: Maker, mode: str, tokens: int):
        """Whatever the other rows hold, NaN and infinities too."""
        x, weight, *_ = router(m, tokens, 48, 1024, mode)
        alone = router_gemm(x, weight, mode=mode)
        others = torch.arange(tokens, device=m.device) % 3 != 1
        x[others] = float("nan")
        x[0] = float("inf")
        y = router_gemm(x, weight, mode=mode)
        assert same_bits(y[~others], alone[~others])
        assert y[1:][others[1:]].isnan().all()


@pytest.mark.gpu
class TestOnGpu:
    @modes
    def test_thousand_replays(self, mode: str):
        args = router(Maker("cuda"), 8, 192, 4096, mode)
        router_gemm_op(*args)
        expected = args[3].clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            router_gemm_op(*args)
        args[3].fill_(float("nan"))
        for _ in range(1000):
            graph.replay()
        assert same_bits(args[3], expected)

    def test_chain_of_dependent_calls(self):
        """Launches overlap: each must see the weights and activations that the one before it made, and no older ones."""
        m = Maker("cuda")
        x, a, weight = m.normal(8, 512), m.normal(64, 512), m.normal(512, 512, dtype=FP32, std=0.04)
        made, out = m.poison(64, 512, dtype=FP32), m.poison(8, 64, dtype=FP32)

        def chain(wait: bool) -> list[torch.Tensor]:
            found = []
            for step in range(8):
                router_gemm(a[:, : 512 - 32 * step], weight[:, : 512 - 32 * step], out=made)  # the next call's weights
                torch.cuda.synchronize() if wait else None
                router_gemm(x, made, out=out)
                torch.cuda.synchronize() if wait else None
                found.append(router_gemm(out.bfloat16(), made[:, :64]))
            torch.cuda.synchronize()
            return found

        for overlapped, stepped in zip(chain(False), chain(True), strict=True):
            assert same_bits(overlapped, stepped)

    @modes
    @pytest.mark.parametrize("shape", [(192, 4096), (768, 6144), (384, 3072), (256, 7168), (128, 4096)], ids=str)
    @pytest.mark.parametrize("tokens", [1, 8, 16, 48, 128, 1024])
    def test_error(self, shape, tokens: int, mode: str):
        """The rule on the sizes of real routers."""
        args = router(Maker("cuda"), tokens, *shape, mode)
        for deviation in numerics.check(router_gemm_op, args, router_gemm_op.forward_jit):
            assert deviation.ok, str(deviation)

    @modes
    def test_routes_as_float64_does(self, mode: str):
        """The eight best experts are those of float64, unless the ninth is nearer than the error of the logits."""
        m = Maker("cuda")
        weight, flips, top = m.normal(128, 4096, dtype=FP32, std=0.02), 0, 8
        for _ in range(8):
            x = m.normal(4096, 4096)
            y, reference = router_gemm(x, weight, mode=mode), exact(x, weight)
            error = float((y - reference).abs().max())
            best = reference.topk(top + 1)
            gap = best.values[:, top - 1] - best.values[:, top]
            found = y.topk(top).indices.sort().values
            same = (found == best.indices[:, :top].sort().values).all(-1)
            assert bool((gap[~same] <= 2 * error).all())
            flips += int((~same).sum())
        assert flips <= 40
