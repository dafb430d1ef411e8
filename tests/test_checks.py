"""The argument checks that every operator shares: what they refuse, and how they say it."""

from __future__ import annotations

import math

import pytest
import torch

from hpcjit import checks
from hpcjit.errors import ArgumentError, ArgumentTypeError


@pytest.mark.parametrize(
    "value", [2**63, -(2**63) - 1, 10**5000, math.nan, math.inf, -1.0], ids=lambda v: type(v).__name__
)
def test_a_number_out_of_range(value: float):
    with pytest.raises(ArgumentError, match="'eps' must be a"):
        checks.number("layernorm.rmsnorm", "eps", value, low=0.0)


@pytest.mark.parametrize("value", [0, 1e-6, 2**62, 3e38])
def test_a_number(value: float):
    assert checks.number("layernorm.rmsnorm", "eps", value, low=0.0) == value


class Incomparable:
    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared")

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("value", [128.0, True, "128", None, torch.tensor(128), torch.tensor([1, 2]), Incomparable()])
def test_a_choice_has_the_type_of_what_it_is_chosen_from(value: object):
    with pytest.raises(ArgumentError, match="one of 1, 128, got"):
        checks.choice("quantization.x", "group_size", value, (1, 128))


def test_a_flag_is_a_bool():
    assert checks.choice("moe.x", "renormalize", True, (False, True)) is True
    with pytest.raises(ArgumentError, match="one of False, True, got int 1"):
        checks.choice("moe.x", "renormalize", 1, (False, True))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(ArgumentTypeError, match="'weight' must be a dense tensor, got a nested one"):
        checks.tensor("layernorm.rmsnorm", "weight", nested)


@pytest.mark.parametrize("value", [[[0.125] * 512] * 512, torch.ones(64, 64).numpy(), "x" * 10_000], ids=type)
def test_what_came_is_shown_in_one_short_line(value: object):
    text = checks.describe(value)
    assert text.startswith(type(value).__name__)
    assert len(text) < 400
    assert "\n" not in text
