"""The moe group: routing against torch's softmax and topk, ties, NaN and infinities, and calls that are refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from op_tools import rejects, same_bits

from hpcjit.cases import Maker
from hpcjit.errors import ArgumentError, ArgumentTypeError
from hpcjit.ops.moe import grouped_topk, topk_sigmoid, topk_softmax

OP = "moe.topk_softmax"
NAN, INF = float("nan"), float("inf")


def row(m: Maker, *values: float) -> torch.Tensor:
    return torch.tensor([values], device=m.device)


@pytest.mark.parametrize("experts", [1, 2, 31, 32, 33, 64, 100, 128, 256, 511, 1024])
@pytest.mark.parametrize("renormalize", [False, True])
def test_formula(m: Maker, experts, renormalize):
    """Distinct logits: torch's own softmax and topk. Weights within a few fp32 roundings of exp and sum."""
    logits = torch.stack([m.permutation(experts).float() for _ in range(17)]) / experts * 8 - 4
    top_k = min(8, experts)
    weights, ids = topk_softmax(logits, top_k, renormalize=renormalize)
    exact, expected = torch.softmax(logits.double(), -1).topk(top_k)
    if renormalize:
        exact = exact / exact.sum(-1, keepdim=True)
    assert ids.dtype == torch.int32
    assert torch.equal(ids.long(), expected)
    torch.testing.assert_close(weights.double(), exact, rtol=2e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("experts", [96, 250])
def test_16_bit_logits(m: Maker, dtype, experts):
    """Ties are certain here: ids are those of a stable sort, weights those of the exact softmax."""
    logits = m.normal(33, experts, dtype=dtype)
    weights, ids = topk_softmax(logits, 10)
    order = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :10]
    assert torch.equal(ids.long(), order)
    exact = torch.softmax(logits.double(), -1).gather(-1, order)
    torch.testing.assert_close(weights.double(), exact, rtol=2e-6, atol=0)


ROWS = {
    "rising": lambda m, n: torch.arange(n, device=m.device).float(),
    "falling": lambda m, n: -torch.arange(n, device=m.device).float(),
    "all but a few equal": lambda m, n: (torch.arange(n, device=m.device) % 50 == 7).float(),
    "two values": lambda m, n: m.integers(0, 2, n).float(),
    "ten values": lambda m, n: m.integers(0, 10, n).float(),
    "four neighbours in every 128": lambda m, n: torch.where(
        torch.arange(n, device=m.device) % 128 // 4 == 5, m.normal(n, dtype=torch.float32), -INF
    ),
    "mostly minus infinity": lambda m, n: torch.where(
        torch.arange(n, device=m.device) % 40 == 3, m.normal(n, dtype=torch.float32), -INF
    ),
}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("experts", [256, 500])
@pytest.mark.parametrize("top_k", [1, 8, 16, 32])
def test_ids_are_those_of_a_stable_sort(m: Maker, rows, experts, top_k):
    """Winners that one lane holds alone, and more equal scores than lanes: both ways to choose, and both kinds of weights."""
    logits = torch.stack([ROWS[rows](m, experts) for _ in range(5)])
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    exact = torch.softmax(logits.double(), -1).gather(-1, order)
    for renormalize in (False, True):
        weights, ids = topk_softmax(logits, top_k, renormalize=renormalize)
        assert torch.equal(ids.long(), order)
        expected = exact / exact.sum(-1, keepdim=True) if renormalize else exact
        # Where float32 holds them: exp of a difference below -87 is subnormal or 0.
        torch.testing.assert_close(weights.double(), expected, rtol=4e-6, atol=1e-37)


@pytest.mark.parametrize("experts", [7, 128, 1000])
@pytest.mark.parametrize("cap", [1.0, 30.0])
def test_softcap(m: Maker, experts, cap):
    """Also with fewer experts than lanes: padding must not weigh exp(-cap)."""
    logits = m.normal(9, experts, dtype=torch.float32)
    weights, ids = topk_softmax(logits, 3, softcap=cap)
    exact = torch.softmax(cap * torch.tanh(logits.double() / cap), -1)
    torch.testing.assert_close(weights.double(), exact.gather(-1, ids.long()), rtol=4e-6, atol=0)
    assert torch.equal(ids.long().sort(-1).values, exact.topk(3).indices.sort(-1).values)


@pytest.mark.parametrize("experts", [7, 100, 257])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_softcap_with_other_options(m: Maker, experts, renormalize, biased):
    """Logits of -inf count as -cap, padding does not count, and a row of -inf alone is uniform."""
    logits = m.normal(6, experts, dtype=torch.float32, std=4.0)
    logits[1, ::2], logits[2, 1:], logits[3] = -INF, -INF, -INF
    bias = torch.linspace(0, 0.5, experts, device=m.device) if biased else None
    weights, ids = topk_softmax(logits, 5, softcap=2.0, renormalize=renormalize, bias=bias)
    exact = torch.softmax(2.0 * torch.tanh(logits.double() / 2.0), -1)
    chosen = exact.gather(-1, ids.long())
    if renormalize:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    torch.testing.assert_close(weights.double(), chosen, rtol=4e-6, atol=0)


def test_bias_steers_the_choice_only(m: Maker):
    logits = row(m, 1.0, 2.0, 3.0, 4.0)
    bias = torch.tensor([1.0, 0.0, 0.0, -1.0], device=m.device)
    weights, ids = topk_softmax(logits, 2, bias=bias)
    assert ids.tolist() == [[0, 2]]
    torch.testing.assert_close(weights, torch.softmax(logits, -1)[:, [0, 2]])
    weights, _ = topk_softmax(logits, 2, bias=bias, renormalize=True)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, device=m.device))


class TestSpecialValues:
    @pytest.mark.parametrize("experts", [4, 32, 40, 128, 1024])
    def test_ties_go_to_the_lowest_id(self, m: Maker, experts):
        top_k = min(experts, 32)
        weights, ids = topk_softmax(torch.zeros(5, experts, device=m.device), top_k)
        assert (ids == torch.arange(top_k, dtype=torch.int32, device=m.device)).all()
        torch.testing.assert_close(weights, torch.full_like(weights, 1 / experts))

    def test_both_zeros_tie(self, m: Maker):
        _, ids = topk_softmax(row(m, -0.0, 0.0, -0.0, 0.0), 4)
        assert ids.tolist() == [[0, 1, 2, 3]]

    @pytest.mark.parametrize("share", [0.1, 0.9, 1.0])
    @pytest.mark.parametrize("experts", [8, 33, 256])
    def test_nan_is_chosen_last_and_once(self, m: Maker, share, experts):
        """Ids are distinct and in range, NaN weighs nothing, and the others weigh what they would without it."""
        logits = m.normal(64, experts, dtype=torch.float32)
        nan = torch.rand(64, experts, device=m.device) < share
        logits[nan] = NAN
        top_k = min(experts, 32)
        weights, ids = topk_softmax(logits, top_k)
        assert ids.min() >= 0
        assert ids.max() < experts
        assert (ids.sort(-1).values.diff(dim=-1) > 0).all()
        chosen_nan = nan.gather(-1, ids.long())
        assert (chosen_nan.int().diff(dim=-1) >= 0).all(), "a number after a NaN"
        exact = torch.softmax(logits.double().nan_to_num(-INF), -1).nan_to_num(0.0)
        torch.testing.assert_close(weights.double(), exact.gather(-1, ids.long()), rtol=2e-6, atol=0)

    def test_infinities(self, m: Maker):
        weights, ids = topk_softmax(row(m, 0.0, INF, -INF, INF), 4)
        assert ids.tolist() == [[1, 3, 0, 2]]
        assert weights.tolist() == [[0.5, 0.5, 0.0, 0.0]]

    @pytest.mark.parametrize("value", [-INF, NAN])
    @pytest.mark.parametrize("renormalize", [False, True])
    def test_nothing_to_choose(self, m: Maker, value, renormalize):
        """All weights are 0, never NaN; ids are the lowest."""
        weights, ids = topk_softmax(row(m, *[value] * 40), 5, renormalize=renormalize)
        assert weights.tolist() == [[0.0] * 5]
        assert ids.tolist() == [[0, 1, 2, 3, 4]]

    def test_minus_infinity_before_nan(self, m: Maker):
        _, ids = topk_softmax(row(m, NAN, -INF, 1.0), 3)
        assert ids.tolist() == [[2, 1, 0]]

    def test_nan_bias(self, m: Maker):
        bias = torch.tensor([NAN, 0.0, 0.0], device=m.device)
        _, ids = topk_softmax(row(m, 5.0, 1.0, 2.0), 3, bias=bias)
        assert ids.tolist() == [[2, 1, 0]]

    def test_large_logits(self, m: Maker):
        """exp of the logits themselves would overflow."""
        weights, _ = topk_softmax(row(m, 1e30, 1e30, -1e30), 2)
        assert weights.tolist() == [[0.5, 0.5]]

    def test_a_token_does_not_depend_on_others(self, m: Maker):
        logits = m.normal(70, 128, dtype=torch.float32)
        weights, ids = topk_softmax(logits, 8)
        logits[35] = NAN
        other_weights, other_ids = topk_softmax(logits, 8)
        keep = [i for i in range(70) if i != 35]
        assert same_bits(weights[keep], other_weights[keep])
        assert torch.equal(ids[keep], other_ids[keep])


class TestRefused:
    def test_top_k(self, m: Maker):
        logits = m.normal(4, 16, dtype=torch.float32)
        for top_k in (0, -1, 17, 33):
            with rejects(OP, "top_k", match="in [1, 16]"):
                topk_softmax(logits, top_k)
        with rejects(OP, "top_k", match="in [1, 32]"):
            topk_softmax(m.normal(4, 64, dtype=torch.float32), 33)
        for top_k in (2.0, True, None):
            with rejects(OP, "top_k", error=ArgumentTypeError, match="an integer"):
                topk_softmax(logits, top_k)

    def test_logits(self, m: Maker):
        with rejects(OP, "logits", match="1 to 1024 experts"):
            topk_softmax(m.normal(4, 1025), 1)
        for gate in (topk_softmax, topk_sigmoid, partial(grouped_topk, num_groups=2, topk_groups=1)):
            with pytest.raises(ArgumentError, match=r"'logits' must be of rank 2"):
                gate(m.normal(2, 4, 256), 8)
        with rejects(OP, "logits", match="1 to 1024 experts"):
            topk_softmax(m.normal(4, 0), 4)
        with rejects(OP, "logits", match="rank 2"):
            topk_softmax(m.normal(8), 1)
        with rejects(OP, "logits", error=ArgumentTypeError, match="a tensor"):
            topk_softmax("logits", 1)
        with rejects(OP, "logits", error=ArgumentTypeError, match="bfloat16 or float16 or float32"):
            topk_softmax(m.integers(0, 9, 4, 8), 1)

    def test_options(self, m: Maker):
        logits = m.normal(4, 16, dtype=torch.float32)
        weights, ids = m.poison(4, 2, dtype=torch.float32), m.poison(4, 2, dtype=torch.int32)
        outputs = {"weights": weights, "ids": ids}
        for cap in (1e-300, 1e39, -1.0, NAN, INF):
            with rejects(OP, "softcap", weights, ids):
                topk_softmax(logits[:, :8], 2, softcap=cap, **outputs)
        with rejects(OP, "bias", weights, ids, match="of shape [16]"):
            topk_softmax(logits, 2, bias=torch.zeros(15, device=m.device), **outputs)
        with rejects(OP, "bias", weights, ids, error=ArgumentTypeError, match="float32"):
            topk_softmax(logits, 2, bias=m.normal(16), **outputs)
        with rejects(OP, "renormalize", weights, ids):
            topk_softmax(logits, 2, renormalize="yes", **outputs)

    def test_outputs(self, m: Maker):
        logits = m.normal(4, 16, dtype=torch.float32)
        weights, ids = m.poison(4, 2, dtype=torch.float32), m.poison(4, 2, dtype=torch.int32)
        with rejects(OP, "ids", weights, error=ArgumentTypeError, match="int32"):
            topk_softmax(logits, 2, weights=weights, ids=ids.long())
        with rejects(OP, "weights", ids, match="of shape [4, 3]"):
            topk_softmax(logits, 3, weights=weights, ids=ids)
        with rejects(OP, "weights", ids, match="do not overlap"):
            topk_softmax(logits, 2, weights=weights[:1].expand(4, 2), ids=ids)
