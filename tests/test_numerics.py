"""The numerics rule: what it accepts, what it refuses, and that copies of arguments are faithful."""

from __future__ import annotations

import math

import pytest
import torch

from hpcjit import numerics
from hpcjit.ops.layernorm._rmsnorm import rmsnorm_op


def rmsnorm_args(tokens: int = 4, hidden: int = 256):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, hidden, generator=generator).bfloat16()
    return x, torch.randn(hidden, generator=generator).bfloat16(), 1e-6, torch.full_like(x, math.nan)


class TestCheck:
    def test_the_reference_itself_is_right(self):
        (deviation,) = numerics.check(rmsnorm_op, rmsnorm_args(), rmsnorm_op.reference)
        assert deviation.ok
        assert deviation.output == "out"
        assert 0 < deviation.err < 2**-7

    def test_arguments_are_left_alone(self):
        args = rmsnorm_args()
        numerics.check(rmsnorm_op, args, rmsnorm_op.reference)
        assert args[3].isnan().all()

    @pytest.mark.parametrize("factor", [1.05, 0.95, -1.0])
    def test_a_scaled_result_is_wrong(self, factor: float):
        def run(x, weight, eps, out):
            rmsnorm_op.reference(x, weight, eps, out)
            out.mul_(factor)

        assert not numerics.check(rmsnorm_op, rmsnorm_args(), run)[0].ok

    def test_one_wrong_element_is_wrong(self):
        def run(x, weight, eps, out):
            rmsnorm_op.reference(x, weight, eps, out)
            out[-1, -1] += 1

        assert not numerics.check(rmsnorm_op, rmsnorm_args(), run)[0].ok

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_what_is_not_finite_is_wrong(self, value: float):
        def run(x, weight, eps, out):
            rmsnorm_op.reference(x, weight, eps, out)
            out[0, 0] = value

        (deviation,) = numerics.check(rmsnorm_op, rmsnorm_args(), run)
        assert deviation.err == math.inf
        assert not deviation.ok

    def test_an_output_that_nobody_wrote_is_wrong(self):
        assert not numerics.check(rmsnorm_op, rmsnorm_args(), lambda *args: None)[0].ok


class TestError:
    def test_large_elements_count_relatively_and_small_ones_against_the_scale(self):
        exact = torch.tensor([100.0, 0.0], dtype=torch.float64)
        rms = math.sqrt(100.0**2 / 2)
        assert numerics.error(torch.tensor([101.0, 0.0]), exact) == pytest.approx(0.01)
        assert numerics.error(torch.tensor([100.0, 1.0]), exact) == pytest.approx(1 / rms)

    def test_coinciding_specials_cost_nothing(self):
        exact = torch.tensor([1.0, math.nan, math.inf, -math.inf], dtype=torch.float64)
        assert numerics.error(exact.float(), exact) == 0

    @pytest.mark.parametrize("other", [[1.0, math.inf], [1.0, -math.inf], [math.nan, math.inf], [1.0, 2.0]])
    def test_other_specials_are_infinitely_wrong(self, other: list[float]):
        exact = torch.tensor([1.0, math.nan], dtype=torch.float64)
        assert numerics.error(torch.tensor(other), exact) == math.inf

    def test_signs_of_infinity_matter(self):
        assert numerics.error(torch.tensor([-math.inf]), torch.tensor([math.inf])) == math.inf


class TestFloat8:
    def test_codes_are_in_the_order_of_the_values(self):
        every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
        finite = ~every.float().isnan()
        order = every.float()[finite].argsort(stable=True)
        codes = numerics.codes(every)[finite][order]
        assert (codes.diff() >= 0).all()
        assert codes.min() == -0x7E
        assert codes.max() == 0x7E
        assert numerics.codes(every)[~finite].unique().tolist() == [0x7F]

    @pytest.mark.parametrize(("steps", "right"), [(1, True), (2, False)])
    def test_one_code_off_is_right_and_two_are_wrong(self, steps: int, right: bool):
        exact = {"out": torch.tensor([1.0, 2.0, 4.0]).to(torch.float8_e4m3fn), "scale": torch.ones(1)}
        moved = (exact["out"].view(torch.uint8) + torch.tensor([0, steps, 0], dtype=torch.uint8)).view(
            torch.float8_e4m3fn
        )
        (deviation,) = numerics.compare({**exact, "out": moved}, exact, exact, ("out",))
        assert deviation.code_steps == steps
        assert deviation.ok is right

    def test_the_scale_counts(self):
        exact = {"out": torch.tensor([[1.0, 2.0]]).to(torch.float8_e4m3fn), "scale": torch.ones(1, 1)}
        wrong = {**exact, "scale": torch.full((1, 1), 2.0)}
        assert not numerics.compare(wrong, exact, exact, ("out",))[0].ok

    def test_scales_of_groups_are_spread(self):
        out = torch.ones(2, 8).to(torch.float8_e4m3fn)
        values = {"out": out, "scale": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
        spread = numerics._dequantised("out", values)
        assert spread[0].tolist() == [1] * 4 + [2] * 4
        assert spread[1].tolist() == [3] * 4 + [4] * 4


def test_integers_must_be_equal():
    exact = {"ids": torch.tensor([1, 2, 3], dtype=torch.int32)}
    assert numerics.compare(exact, exact, exact, ("ids",))[0].ok
    assert not numerics.compare({"ids": torch.tensor([1, 3, 2])}, exact, exact, ("ids",))[0].ok


class TestCopies:
    def test_strides_gaps_and_alignment_are_kept(self):
        base = torch.arange(64, dtype=torch.int16)
        view = base[3:51].view(4, 12)[:, 2:9]
        (copy,) = numerics.copy_args((view,))
        assert copy.stride() == view.stride()
        assert copy.data_ptr() % 16 == view.data_ptr() % 16
        assert torch.equal(copy, view)
        copy.zero_()
        assert base.sum() == sum(range(64))

    def test_shared_tensors_stay_shared(self):
        x = torch.ones(4)
        a, b, number = numerics.copy_args((x, x, 3))
        assert a is b
        assert number == 3

    @pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), ()])
    def test_empty_and_scalar_tensors(self, shape: tuple[int, ...]):
        (copy,) = numerics.copy_args((torch.ones(shape),))
        assert copy.shape == shape

    def test_an_expanded_tensor(self):
        (copy,) = numerics.copy_args((torch.arange(4.0).expand(3, 4),))
        assert copy.stride() == (0, 1)
        assert torch.equal(copy, torch.arange(4.0).expand(3, 4))

    def test_upcast_leaves_float8_and_integers(self):
        args = torch.ones(2).bfloat16(), torch.ones(2).to(torch.float8_e4m3fn), torch.ones(2, dtype=torch.int32), 1.5
        assert [getattr(value, "dtype", None) for value in numerics.upcast(args)] == [
            torch.float64,
            torch.float8_e4m3fn,
            torch.int32,
            None,
        ]


def test_sums_of_tensor_cores_may_be_cut_off():
    exact = {"lse": torch.tensor([1.0, 2.0, 3.0])}
    moved = {"lse": exact["lse"] * (1 + 2.0**-22)}
    assert not numerics.compare(moved, exact, exact, ("lse",))[0].ok
    assert numerics.compare(moved, exact, exact, ("lse",), ("lse",))[0].ok
    assert not numerics.compare({"lse": exact["lse"] * (1 + 2.0**-21)}, exact, exact, ("lse",), ("lse",))[0].ok
