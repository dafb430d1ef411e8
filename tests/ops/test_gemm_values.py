"""Router GEMM on values that no 16-bit term can hold: infinities, NaN, the ends of float32's range."""

from __future__ import annotations

import math

import pytest
import torch
from gemm_grid import BF16, FP16, FP32
from op_tools import same_bits
from torch._subclasses import FakeTensorMode

from hpcjit.cases import Maker
from hpcjit.ops.gemm import router_gemm

MODES = ("accurate", "fast")
pytestmark = [
    pytest.mark.parametrize("mode", MODES),
    pytest.mark.parametrize("dtype", [BF16, FP16], ids=str),
]
TOKENS, EXPERTS, HIDDEN = 11, 40, 512


@pytest.fixture
def x(m: Maker, dtype: torch.dtype) -> torch.Tensor:
    return m.normal(TOKENS, HIDDEN, dtype=dtype)


@pytest.fixture
def weight(m: Maker) -> torch.Tensor:
    return m.normal(EXPERTS, HIDDEN, dtype=FP32, std=0.02)


def compare(x: torch.Tensor, weight: torch.Tensor, mode: str) -> torch.Tensor:
    """The result, after a check that NaN and infinity are where float64 has them (no sum here overflows float32)."""
    y, exact = router_gemm(x, weight, mode=mode), x.double() @ weight.double().t()
    assert torch.equal(y.isnan(), exact.isnan())
    assert torch.equal(y.isinf(), exact.isinf())
    assert torch.equal(y[y.isinf()].double(), exact[y.isinf()])
    finite = exact.isfinite()
    scale = (x.double().abs().nan_to_num(0, 0, 0) @ weight.double().abs().nan_to_num(0, 0, 0).t())[finite]
    assert bool(((y[finite] - exact[finite]).abs() <= 2.0**-16 * scale + 1e-45).all())
    return y


def test_infinite_weight(x, weight, mode):
    weight[3, 7], weight[4, 0], weight[5, -1] = math.inf, -math.inf, math.inf
    x[2, 7] = 0  # 0 * inf
    y = compare(x, weight, mode)
    assert y[2, 3].isnan()
    assert y[0, 4].isinf()


def test_infinities_of_both_signs(x, weight, mode):
    weight[3, 7], weight[3, 8] = math.inf, math.inf
    x[0, 7], x[0, 8] = 1, -1
    x[1, 7], x[1, 8] = 1, 1
    y = compare(x, weight, mode)
    assert y[0, 3].isnan()
    assert y[1, 3] == math.inf


def test_infinite_activation(x, weight, mode):
    """A weight that is a bfloat16 number leaves rests of 0, whose product with infinity is NaN: only a detour."""
    x[1, 5], x[2, 6] = math.inf, -math.inf
    weight[:, 5] = 0.5
    y = compare(x, weight, mode)
    assert (y[1] == math.inf).all()


def test_nan_activation(x, weight, mode):
    clean = router_gemm(x, weight, mode=mode)
    x[4, 100] = math.nan
    y = compare(x, weight, mode)
    rest = torch.arange(TOKENS, device=x.device) != 4
    assert torch.equal(y[rest], clean[rest])
    assert y[4].isnan().all()


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FFFFFFF, -0x007FFFFF], ids=hex)
def test_nan_weight(x, weight, mode, bits):
    """Cut off to 16 bits, a NaN whose payload lies in the low half would become infinity."""
    weight.view(torch.int32)[9, 17] = bits
    assert weight[9, 17].isnan()
    y = compare(x, weight, mode)
    assert y[:, 9].isnan().all()


@pytest.mark.parametrize(
    "value", [3.3961e38, 3.3963e38, 3.4028234e38, 2.0**127, -(2.0**127) * 1.99, 65504.0, 65520.0, 1e6]
)
def test_largest_weights(x, weight, mode, value):
    """Finite weights that round to infinity in 16 bits give what float32 gives."""
    weight[3] = 0
    weight[3, 7] = value
    x[:, 7] = x[:, 7].clamp(-0.9, 0.9)
    assert compare(x, weight, mode)[:, 3].isfinite().all()


# bfloat16 has float32's range, fp16 ends at 2^-24.
SMALL = {BF16: (-40, -80, -100, -117, -125), FP16: (-14, -18, -22, -25, -28)}
REST = {BF16: 2.0**-134, FP16: 2.0**-36}  # of a weight, that no term holds


@pytest.mark.parametrize("step", range(5))
def test_small_weights(x, weight, mode, dtype, step):
    """Relative errors hold until rests sink below what the last term's numbers can be."""
    tiny = weight * 2.0 ** (SMALL[dtype][step] + 5)
    y, exact = router_gemm(x, tiny, mode=mode), x.double() @ tiny.double().t()
    size = x.double().abs().sum(-1, keepdim=True)
    bound = 2.0**-16 * (x.double().abs() @ tiny.double().abs().t()) + REST[dtype] * size
    assert exact.abs().max() > 20 * bound.max(), "zeros would pass"
    assert bool(((y - exact).abs() <= bound + 1e-44).all())


def test_subnormal_weights(x, weight, mode, dtype):
    """As bfloat16 numbers they keep seven bits and more; as fp16 ones nothing is left, which is within the rest."""
    tiny = torch.full_like(weight, 1.1e-38)
    y, exact = router_gemm(x, tiny, mode=mode), x.double() @ tiny.double().t()
    rest = 2.0**-133 if dtype == BF16 else REST[FP16]
    bound = rest * x.double().abs().sum(-1, keepdim=True)
    assert bool(((y - exact).abs() <= bound).all())
    if dtype == BF16:
        assert exact.abs().max() > 10 * bound.max(), "zeros would pass"


def test_zeros(x, weight, mode):
    weight[3], weight[4], x[5], x[6] = 0.0, -0.0, 0.0, -0.0
    y = compare(x, weight, mode)
    assert (y[:, 3:5] == 0).all()
    assert (y[5:7] == 0).all()


def test_all_at_once(x, weight, mode):
    weight[0, 0], weight[1, 1], weight[2, 2] = math.inf, math.nan, 3.4e38
    x[0, 0], x[1, 1], x[2, 2] = math.inf, math.nan, 0.5
    x[:2, 2], x[3:, 2] = 0.75, 0.25  # times 3.4e38: float32 must hold every product
    compare(x, weight, mode)


class TestPrecisionOfTorch:
    """The references are float32 products whatever the process has set, and leave the setting as it was."""

    @pytest.fixture(autouse=True)
    def restored(self):
        yield
        torch.set_float32_matmul_precision("highest")

    @pytest.mark.parametrize("precision", ["highest", "high", "medium"])
    def test_by_the_old_setting(self, x, weight, mode, precision):
        before = router_gemm(x, weight, mode=mode, backend="torch")
        torch.set_float32_matmul_precision(precision)
        assert same_bits(before, router_gemm(x, weight, mode=mode, backend="torch"))
        assert torch.get_float32_matmul_precision() == precision

    @pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="a torch without it")
    def test_by_the_new_setting(self, x, weight, mode):
        before = router_gemm(x, weight, mode=mode, backend="torch")
        old = torch.backends.cuda.matmul.fp32_precision
        try:
            torch.backends.cuda.matmul.fp32_precision = "tf32"
            assert same_bits(before, router_gemm(x, weight, mode=mode, backend="torch"))
            assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        finally:
            torch.backends.cuda.matmul.fp32_precision = old

    def test_autocast(self, x, weight, mode):
        before = router_gemm(x, weight, mode=mode, out_dtype=BF16, backend="torch")
        with torch.autocast(x.device.type, dtype=BF16):
            assert same_bits(before, router_gemm(x, weight, mode=mode, out_dtype=BF16, backend="torch"))


def test_tensors_without_memory(mode, dtype):
    """Fake ones have no address, so none that is that of another."""
    with FakeTensorMode():
        x, weight = torch.empty(5, 64, dtype=dtype), torch.empty(8, 64)
        assert router_gemm(x, weight, mode=mode).shape == (5, 8)
