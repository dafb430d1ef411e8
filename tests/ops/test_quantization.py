"""The quantization group: scales and codes against plain formulas, special values, layouts, and calls that are refused."""

from __future__ import annotations

import pytest
import torch
from op_tools import rejects, same_bits

from hpcjit.cases import Maker
from hpcjit.errors import ArgumentTypeError
from hpcjit.ops.quantization import per_tensor_quant_fp8, per_token_group_quant_fp8, per_token_quant_fp8

FP8 = torch.float8_e4m3fn
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


def quantisers(hidden: int):
    """Each quantiser as a function of a tensor, with the number of columns that share a scale (None: all elements)."""
    return [(per_token_quant_fp8, hidden), (per_token_group_quant_fp8, 128), (per_tensor_quant_fp8, None)]


def shared(values: torch.Tensor, size: int | None) -> torch.Tensor:
    """One row per scale."""
    return values.reshape(1, -1) if size is None else values.reshape(-1, size)


every = pytest.mark.parametrize(("function", "size"), quantisers(640), ids=lambda f: getattr(f, "__name__", ""))


@every
class TestEveryQuantiser:
    @DTYPES
    def test_scale_and_nearest_code(self, m: Maker, function, size, dtype):
        """The scale is max / 448, and each code is the nearest: within half a step, 2^-4 of a value or 2^-10 of the scale."""
        x = m.normal(7, 640, dtype=dtype)
        out, scale = function(x)
        rows, codes, scales = (
            shared(t.double(), size) for t in (x, out, scale.reshape(-1, 1).expand(-1, size or 4480))
        )
        torch.testing.assert_close(scales[:, 0], rows.abs().amax(-1) / 448, rtol=2.0**-22, atol=0)
        error = (codes * scales - rows).abs()
        assert (error <= rows.abs() * 2**-4 * (1 + 2**-18) + scales * 2**-10).all()
        assert (codes.abs().amax(-1) == 448).all(), "the largest element gets the largest code"

    @pytest.mark.parametrize("exponent", [-120, -30, 0, 30, 120])
    def test_codes_do_not_depend_on_a_power_of_two(self, m: Maker, function, size, exponent):
        """Scaling the input by a power of two scales the scale, exactly, over the whole range above the floor."""
        x = m.normal(3, 640, dtype=torch.float32)
        factor = 2.0**exponent
        out, scale = function(x)
        scaled, scaled_scale = function(x * factor)
        if exponent == -120:  # below the floor of 1e-10: zeros
            assert (scaled_scale == torch.tensor(1e-10 / 448, device=m.device)).all()
            assert (scaled.float() == 0).all()
            return
        assert same_bits(scaled, out)
        assert torch.equal(scaled_scale, scale * factor)

    def test_zeros(self, m: Maker, function, size):
        out, scale = function(torch.zeros(4, 640, dtype=torch.bfloat16, device=m.device))
        assert (out.float() == 0).all()
        torch.testing.assert_close(scale, torch.full_like(scale, 1e-10 / 448), rtol=1e-6, atol=0)

    def test_nan_and_inf(self, m: Maker, function, size):
        """NaN stays NaN and leaves the scale alone; inf takes its scale with it, and only that one."""
        x = m.normal(4, 640, dtype=torch.float32)
        dirty = x.clone()
        dirty[1, 5] = torch.nan
        x[1, 5] = 0
        clean_out, clean_scale = function(x)
        out, scale = function(dirty)
        assert torch.equal(scale, clean_scale)
        assert out.float().isnan().nonzero().tolist() == [[1, 5]]
        dirty[1, 5] = 0
        out, _ = function(dirty)
        assert same_bits(out, clean_out)
        dirty[2, 9] = torch.inf
        out, scale = function(dirty)
        assert int(scale.isinf().sum()) == 1
        hit = shared(torch.arange(x.numel(), device=m.device), size)
        hit = hit[(hit == 2 * 640 + 9).any(-1)].flatten()
        assert out.float().flatten()[hit].nan_to_num(7.0).sum() == 7.0, "NaN for inf, 0 for the others"

    def test_outputs_can_be_given(self, m: Maker, function, size):
        x = m.normal(4, 640)
        out, scale = function(x)
        mine, my_scale = m.poison(4, 640, dtype=FP8), m.poison(*scale.shape, dtype=torch.float32)
        result = function(x, out=mine, out_scale=my_scale)
        assert result[0] is mine
        assert result[1] is my_scale
        assert same_bits(mine, out)
        assert same_bits(my_scale, scale)

    def test_refused(self, m: Maker, function, size):
        op, x = f"quantization.{function.__name__}", m.normal(4, 640)
        out, scale = m.poison(4, 640, dtype=FP8), function(x)[1]
        with rejects(op, "input", error=ArgumentTypeError, match="a tensor"):
            function(None)
        with rejects(op, "input", out, error=ArgumentTypeError, match="bfloat16 or float16 or float32"):
            function(x.to(FP8), out=out)
        with rejects(op, "out", out, match="of shape [3, 640]"):
            function(x[:3], out=out)
        with rejects(op, "out", error=ArgumentTypeError, match="float8_e4m3fn"):
            function(x, out=m.poison(4, 640))
        with rejects(op, "out", match="do not overlap"):
            function(x, out=out[:1].expand(4, 640))
        with rejects(op, "scale", out, scale, error=ArgumentTypeError, match="float32"):
            function(x, out=out, out_scale=scale.double())
        with rejects(op, "scale", out, match="of shape"):
            function(x, out=out, out_scale=torch.ones(3, 3, device=m.device))
        with rejects(op, "input", out, match="contiguous in its last axis"):
            function(m.normal(640, 4).t(), out=out)
        with rejects(op, "input", out, match="at least one column"):
            function(m.normal(4, 0), out=out)


class TestGroups:
    @pytest.mark.parametrize("group_size", [16, 32, 64, 128, 256])
    def test_power_of_two_scales(self, m: Maker, group_size):
        """Each is the least power of two that is not below the exact scale."""
        x = m.normal(5, 512, dtype=torch.float32)
        x[0, :group_size] = 0
        x[0, 0] = 448 * 2.0**-3  # an exact power of two stays
        out, scale = per_token_group_quant_fp8(x, group_size, scale_ue8m0=True)
        exact = x.double().view(5, -1, group_size).abs().amax(-1) / 448
        assert scale[0, 0] == 2.0**-3
        assert (torch.frexp(scale).mantissa == 0.5).all()
        assert (scale >= exact * (1 - 2.0**-23)).all()
        assert (scale < exact * 2).all()
        restored = out.double().view(5, -1, group_size) * scale.double().unsqueeze(-1)
        assert (
            (restored - x.view_as(restored)).abs() <= x.view_as(restored).abs() * 2**-4 + scale[..., None] * 2**-10
        ).all()

    @pytest.mark.parametrize("shape", [(6, 512), (2, 3, 512), (512,), (1, 512)], ids=str)
    def test_column_major_scales(self, m: Maker, shape):
        """Tokens of a group are neighbours, padded to 16 bytes; values are those of row-major scales."""
        x = m.normal(*shape)
        out, row = per_token_group_quant_fp8(x, 128)
        same, column = per_token_group_quant_fp8(x, 128, column_major_scales=True)
        assert same_bits(out, same)
        assert torch.equal(row, column)
        assert column.stride(-1) == -(-(x.numel() // 512) // 4) * 4
        if x.ndim > 1:
            assert column.stride(-2) == 1

    def test_refused(self, m: Maker):
        op, x = "quantization.per_token_group_quant_fp8", m.normal(4, 512)
        out = m.poison(4, 512, dtype=FP8)
        with rejects(op, "group_size", out, match="one of 16, 32, 64, 128, 256"):
            per_token_group_quant_fp8(x, 100, out=out)
        for flag in ("column_major_scales", "scale_ue8m0"):
            with rejects(op, flag, match="one of False, True"):
                per_token_group_quant_fp8(x, 128, **{flag: torch.tensor([1, 2])})
        with rejects(op, "input", match="multiple of 128 columns"):
            per_token_group_quant_fp8(m.normal(4, 500), 128)
        scale = m.poison(1, 4, dtype=torch.float32)
        with rejects(op, "scale", out, scale, match="do not overlap"):
            per_token_group_quant_fp8(x, 128, out=out, out_scale=scale.expand(4, 4))


class TestPerTensor:
    def test_static(self, m: Maker):
        """The given scale is used and left alone; values beyond 448 scales saturate."""
        x = torch.tensor([[0.0, 1.0, -3.0, 1e4, -1e4, 448.0, 0.4, torch.nan]], device=m.device)
        scale = torch.full((1,), 2.0, device=m.device)
        out, same = per_tensor_quant_fp8(x, scale)
        assert same is scale
        assert scale.item() == 2.0
        assert out.float()[0, :7].tolist() == [0.0, 0.5, -1.5, 448.0, -448.0, 224.0, 0.203125]
        assert out.float()[0, 7].isnan()

    def test_empty(self, m: Maker):
        """An empty tensor still has a scale: that of zeros."""
        out, scale = per_tensor_quant_fp8(m.normal(0, 64))
        assert out.shape == (0, 64)
        torch.testing.assert_close(scale, torch.full_like(scale, 1e-10 / 448), rtol=1e-6, atol=0)

    @pytest.mark.parametrize("position", [(0, 0), (1023, 4095), (511, 2049)], ids=str)
    def test_the_maximum_is_found_anywhere(self, m: Maker, position):
        x = m.normal(1024, 4096)
        x[position] = -1000.0
        out, scale = per_tensor_quant_fp8(x)
        torch.testing.assert_close(scale, torch.full_like(scale, 1000 / 448))
        assert out[position].float() == -448

    def test_both_scales(self, m: Maker):
        scale = torch.ones(1, device=m.device)
        with rejects("quantization.per_tensor_quant_fp8", "out_scale", match="None when scale is given"):
            per_tensor_quant_fp8(m.normal(2, 8), scale, out_scale=scale)
