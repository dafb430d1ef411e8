"""The activation group: formulas against torch's own, extreme values, and calls that are refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from op_tools import rejects

from hpcjit import numerics
from hpcjit.cases import Maker
from hpcjit.errors import ArgumentTypeError
from hpcjit.ops.activation import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul, silu_and_mul_quant_fp8

FORMULAS = {
    silu_and_mul: F.silu,
    gelu_and_mul: F.gelu,
    gelu_tanh_and_mul: lambda x: F.gelu(x, approximate="tanh"),
}
every = pytest.mark.parametrize("function", list(FORMULAS), ids=lambda f: f.__name__)


@every
class TestGated:
    def test_formula(self, m: Maker, function):
        """In fp32: a few roundings of torch's exp, erf or tanh and of ours."""
        x = m.normal(9, 2 * 333, dtype=torch.float32, std=3.0)
        expected = FORMULAS[function](x[:, :333].double()) * x[:, 333:].double()
        torch.testing.assert_close(function(x).double(), expected, rtol=4e-6, atol=4e-6)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_every_16_bit_value(self, m: Maker, function, dtype):
        """All values of the dtype (below 1e38: beyond, torch's own gelu overflows): one rounding, and what exp loses."""
        x = torch.arange(2**16, dtype=torch.int32, device=m.device).to(torch.int16).view(dtype)
        x = x[x.float().abs() < 1e38]
        row = torch.cat([x, torch.ones_like(x)]).unsqueeze(0)
        got = function(row)[0].double()
        exact = FORMULAS[function](x.double())
        tiny = torch.finfo(dtype).tiny
        step = torch.finfo(dtype).eps / 2
        # The gate dies out at large negative x, where the fp32 exponential is all there is: absolute below 1e-6.
        assert ((got - exact).abs() <= exact.abs() * step * 1.02 + tiny + 1e-6).all()
        assert got.isfinite().all()

    def test_limits(self, m: Maker, function):
        """Large positive x passes, large negative x gives zero (not NaN), NaN stays NaN."""
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            x = torch.tensor([[60.0, -1e4, 0.0, torch.nan] + [1.0] * 4], device=m.device, dtype=dtype)
            out = function(x)[0].float().tolist()
            assert out[0] == 60.0
            assert out[1] == 0.0
            assert out[2] == 0.0
            assert out[3] != out[3]

    def test_shapes(self, m: Maker, function):
        assert function(m.normal(2, 3, 16)).shape == (2, 3, 8)
        assert function(m.normal(16)).shape == (8,)
        assert function(m.normal(0, 16)).shape == (0, 8)
        out = m.poison(2, 8)
        assert function(m.normal(2, 16), out=out) is out
        assert out.isfinite().all()

    def test_refused(self, m: Maker, function):
        op = f"activation.{function.__name__}"
        out = m.poison(2, 8)
        with rejects(op, "input", match="even number of columns"):
            function(m.normal(2, 7))
        with rejects(op, "input", error=ArgumentTypeError, match="a tensor"):
            function([1.0, 2.0])
        with rejects(op, "input", error=ArgumentTypeError, match="int32"):
            function(m.integers(0, 9, 2, 16))
        with rejects(op, "input", match="rank 1"):
            function(torch.tensor(1.0, device=m.device))
        with rejects(op, "out", out, match="of shape [2, 9]"):
            function(m.normal(2, 18), out=out)
        with rejects(op, "out", out, error=ArgumentTypeError, match="float32"):
            function(m.normal(2, 16, dtype=torch.float32), out=out)
        with rejects(op, "input", out, match="contiguous in its last axis"):
            function(m.normal(2, 32)[:, ::2], out=out)
        with rejects(op, "out", out, match="do not overlap"):
            function(m.normal(4, 16), out=out[:1].expand(4, 8))


class TestQuant:
    OP = "activation.silu_and_mul_quant_fp8"

    @pytest.mark.parametrize("group_size", [None, 16, 32, 64, 128, 256])
    def test_formula(self, m: Maker, group_size):
        """Scales are those of the unrounded activation; values are within half a step of it."""
        x = m.normal(5, 1024, dtype=torch.float32)
        y = F.silu(x[:, :512].double()) * x[:, 512:].double()
        out, scale = silu_and_mul_quant_fp8(x, group_size=group_size)
        size = group_size or 512
        groups = y.view(5, 512 // size, size)
        expected = groups.abs().amax(-1) / 448
        torch.testing.assert_close(scale.double(), expected, rtol=4e-6, atol=0)
        restored = out.double().view_as(groups) * scale.double().unsqueeze(-1)
        assert ((restored - groups).abs() <= groups.abs() * 2**-4 * 1.001 + expected.unsqueeze(-1) * 2**-10).all()

    def test_layout_of_scales(self, m: Maker):
        x = m.normal(6, 512)
        _, row = silu_and_mul_quant_fp8(x, group_size=64)
        _, column = silu_and_mul_quant_fp8(x, group_size=64, column_major_scales=True)
        assert row.stride() == (4, 1)
        assert column.stride() == (1, 8)
        assert torch.equal(row, column)

    def test_static(self, m: Maker):
        """Twice the scale, half the codes: the given scale is used and left alone."""
        x, scale = m.normal(3, 256), torch.full((1,), 0.125, device=m.device)
        out, same = silu_and_mul_quant_fp8(x, scale=scale)
        assert same is scale
        assert scale.item() == 0.125
        double, _ = silu_and_mul_quant_fp8(x, scale=2 * scale)
        assert (numerics.codes(out).abs() >= numerics.codes(double).abs()).all()
        y = F.silu(x[:, :128].double()) * x[:, 128:].double()
        assert ((out.double() * 0.125 - y).abs() <= y.abs() * 2**-4 * 1.001 + 0.125 * 2**-10).all()

    def test_refused(self, m: Maker):
        x, scale = m.normal(2, 256), torch.ones(1, device=m.device)
        for call, argument, match in (
            ({"group_size": 48}, "group_size", "16, 32, 64, 128, 256"),
            ({"group_size": 256}, "input", "multiple of 512 columns"),
            ({"group_size": 64, "scale": scale}, "scale", "None with group_size"),
            ({"scale_ue8m0": True}, "group_size", "given with"),
            ({"column_major_scales": True}, "group_size", "given with"),
            ({"scale": torch.ones(2, device=m.device)}, "scale", "of shape [1]"),
            ({"out_scale": torch.ones(2, device=m.device)}, "scale", "of shape [2, 1]"),
        ):
            out = m.poison(2, 128, dtype=torch.float8_e4m3fn)
            with rejects(self.OP, argument, out, match=match):
                silu_and_mul_quant_fp8(x, out=out, **call)
