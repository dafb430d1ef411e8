"""Gates by sigmoid and by groups, shared experts and padding tokens: against plain torch, on values that mislead."""

from __future__ import annotations

import pytest
import torch
from op_tools import operator, rejects, same_bits

from hpcjit.cases import Maker
from hpcjit.errors import ArgumentError, ArgumentTypeError
from hpcjit.ops.moe import grouped_topk, topk_sigmoid, topk_softmax

NAN, INF = float("nan"), float("inf")
SIZES = [1, 2, 32, 33, 64, 255, 256, 257, 384, 512, 1024]
GATES = {
    "softmax": lambda x, k, **options: topk_softmax(x, k, **options),
    "sigmoid": lambda x, k, **options: topk_sigmoid(x, k, **options),
    "grouped": lambda x, k, **options: grouped_topk(x, k, num_groups=4, topk_groups=2, **options),
}
every_gate = pytest.mark.parametrize("gate", GATES.values(), ids=GATES)


def distinct(m: Maker, tokens: int, experts: int) -> torch.Tensor:
    """Logits without ties, from -4 to 4."""
    return torch.stack([m.permutation(experts).float() for _ in range(tokens)]) / experts * 8 - 4


def deepseek(logits: torch.Tensor, bias: torch.Tensor, groups: int, kept: int, top_k: int) -> tuple[torch.Tensor, ...]:
    """Ids and weights as DeepSeek-V3 defines them, in float64."""
    scores = torch.sigmoid(logits.double())
    choice = scores + bias.double()
    best = choice.unflatten(-1, (groups, -1)).topk(2, dim=-1).values.sum(-1).topk(kept, dim=-1).indices
    mask = torch.full_like(choice.unflatten(-1, (groups, -1)), -INF)
    mask.scatter_(1, best.unsqueeze(-1).expand(-1, -1, mask.shape[-1]), 0.0)
    ids = (choice + mask.flatten(-2)).topk(top_k, dim=-1).indices
    weights = scores.gather(-1, ids)
    return weights / weights.sum(-1, keepdim=True), ids


def assert_sound(ids: torch.Tensor, weights: torch.Tensor, experts: int) -> None:
    assert ids.min() >= 0
    assert ids.max() < experts
    assert (ids.sort(-1).values.diff(dim=-1) > 0).all(), "an expert twice"
    assert weights.isfinite().all()


class TestSigmoid:
    @pytest.mark.parametrize("experts", SIZES)
    @pytest.mark.parametrize("renormalize", [False, True])
    def test_formula(self, m: Maker, experts, renormalize):
        logits, top_k = distinct(m, 17, experts), min(8, experts)
        weights, ids = topk_sigmoid(logits, top_k, renormalize=renormalize, scaling_factor=2.5)
        chosen, expected = logits.double().topk(top_k)
        exact = torch.sigmoid(chosen)
        if renormalize:
            exact = exact / exact.sum(-1, keepdim=True)
        assert torch.equal(ids.long(), expected)
        torch.testing.assert_close(weights.double(), 2.5 * exact, rtol=2e-6, atol=0)

    @pytest.mark.parametrize("experts", SIZES)
    def test_bias(self, m: Maker, experts):
        """It steers the choice by steps that rounding cannot undo, and does not enter the weights."""
        logits, top_k = distinct(m, 9, experts), min(6, experts)
        bias = m.permutation(experts).float() * 2
        weights, ids = topk_sigmoid(logits, top_k, bias=bias)
        expected = bias.topk(top_k).indices.expand(9, -1)
        assert torch.equal(ids.long(), expected)
        exact = torch.sigmoid(logits.double()).gather(-1, expected)
        torch.testing.assert_close(weights.double(), exact, rtol=2e-6, atol=0)

    def test_a_large_bias_costs_no_digits(self, m: Maker):
        """s + 1000 keeps four digits of s: weights taken from there would show it."""
        logits = m.normal(33, 256, dtype=torch.float32)
        weights, ids = topk_sigmoid(logits, 8, bias=torch.full((256,), 1e3, device=m.device))
        exact = torch.sigmoid(logits.double()).gather(-1, ids.long())
        torch.testing.assert_close(weights.double(), exact, rtol=2e-6, atol=0)

    def test_near_ties(self, m: Maker):
        """What is chosen with a bias differs from the best by rounding at most, and comes in that order."""
        logits = m.normal(500, 256, dtype=torch.float32)
        bias = m.normal(256, dtype=torch.float32, std=0.1)
        _, ids = topk_sigmoid(logits, 8, bias=bias)
        choice = torch.sigmoid(logits.double()) + bias.double()
        assert_sound(ids, choice, 256)
        gap = choice.topk(8).values - choice.gather(-1, ids.long())
        assert float(gap.abs().max()) < 1e-6
        assert float((gap != 0).double().mean()) < 1e-3

    def test_saturated_logits_keep_their_order(self, m: Maker):
        """The sigmoid of all of them is 1."""
        logits = 100 + distinct(m, 5, 64)
        weights, ids = topk_sigmoid(logits, 8)
        assert torch.equal(ids.long(), logits.topk(8).indices)
        assert (weights == 1).all()

    def test_sigmoids_that_underflow(self, m: Maker):
        """A sum of 0 is not divided by."""
        logits = torch.full((3, 40), -1e4, device=m.device)
        for renormalize in (False, True):
            weights, ids = topk_sigmoid(logits, 5, renormalize=renormalize)
            assert (weights == 0).all()
            assert ids[0].tolist() == [0, 1, 2, 3, 4]

    def test_tiny_sums_are_normalised(self, m: Maker):
        weights, _ = topk_sigmoid(torch.full((3, 40), -60.0, device=m.device), 4, renormalize=True)
        torch.testing.assert_close(weights, torch.full_like(weights, 0.25))


class TestGroups:
    @pytest.mark.parametrize(("experts", "groups", "kept", "top_k"), [(256, 8, 4, 8), (160, 8, 3, 6), (96, 3, 2, 5)])
    def test_deepseek_v3(self, m: Maker, experts, groups, kept, top_k):
        logits, bias = m.normal(200, experts, dtype=torch.float32), m.normal(experts, dtype=torch.float32, std=0.1)
        options = {"num_groups": groups, "topk_groups": kept, "bias": bias, "scaling_factor": 2.5}
        weights, ids = grouped_topk(logits, top_k, **options)
        exact, expected = deepseek(logits, bias, groups, kept, top_k)
        same = (ids.long() == expected).all(-1)
        assert float(same.double().mean()) > 0.99, "more than near ties differ"
        torch.testing.assert_close(weights[same].double(), 2.5 * exact[same], rtol=2e-6, atol=0)

    @pytest.mark.parametrize("experts", [64, 160, 256, 1024])
    @pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
    def test_without_a_bias_the_best_expert_counts(self, m: Maker, experts, scoring):
        logits = distinct(m, 33, experts)
        options = {"num_groups": 8, "topk_groups": 3, "scoring": scoring, "renormalize": False}
        weights, ids = grouped_topk(logits, 6, **options)
        groups = logits.unflatten(-1, (8, -1)).amax(-1).topk(3).indices
        owner = ids.long() // (experts // 8)
        assert (owner.unsqueeze(-1) == groups.unsqueeze(1)).any(-1).all()
        kept = torch.zeros(33, 8, dtype=torch.bool, device=m.device).scatter(1, groups, True)
        masked = logits.masked_fill(~kept.repeat_interleave(experts // 8, 1), -INF)
        assert torch.equal(ids.long(), masked.topk(6).indices)
        scores = torch.sigmoid(logits.double()) if scoring == "sigmoid" else torch.softmax(logits.double(), -1)
        torch.testing.assert_close(weights.double(), scores.gather(-1, ids.long()), rtol=2e-6, atol=0)

    def test_negative_choices_beat_dropped_groups(self, m: Maker):
        """All scores are negative: a masked group that counted as 0 would win."""
        logits = m.normal(20, 64, dtype=torch.float32)
        bias = torch.full((64,), -10.0, device=m.device)
        bias[:16] = -5.0
        _, ids = grouped_topk(logits, 8, num_groups=4, topk_groups=1, bias=bias)
        assert ids.max() < 16

    @pytest.mark.parametrize("value", [-INF, NAN])
    @pytest.mark.parametrize("biased", [False, True])
    def test_too_few_numbers_in_the_kept_groups(self, m: Maker, value, biased):
        """The rest comes from the kept groups all the same, each expert once; it weighs nothing."""
        logits = torch.full((6, 64), value, device=m.device)
        logits[:, 40], logits[:, 41] = 5.0, 4.0
        bias = torch.zeros(64, device=m.device) if biased else None
        weights, ids = grouped_topk(logits, 8, num_groups=4, topk_groups=1, bias=bias)
        assert ids[0].tolist() == [40, 41, 32, 33, 34, 35, 36, 37]
        assert_sound(ids, weights, 64)
        assert (weights[:, 2:] == 0).all()

    def test_equal_groups_go_to_the_lowest(self, m: Maker):
        for bias in (None, torch.zeros(64, device=m.device)):
            _, ids = grouped_topk(torch.zeros(3, 64, device=m.device), 6, num_groups=8, topk_groups=2, bias=bias)
            assert ids[0].tolist() == [0, 1, 2, 3, 4, 5]

    def test_a_group_score_is_a_sum(self, m: Maker):
        """One outstanding expert loses to two good ones with a bias, and wins without."""
        logits = torch.full((1, 32), -20.0, device=m.device)
        logits[0, 0], logits[0, 8], logits[0, 9] = 3.0, 1.0, 1.0
        _, ids = grouped_topk(logits, 1, num_groups=4, topk_groups=1, bias=torch.zeros(32, device=m.device))
        assert ids.tolist() == [[8]]
        _, ids = grouped_topk(logits, 1, num_groups=4, topk_groups=1)
        assert ids.tolist() == [[0]]

    def test_all_groups_kept(self, m: Maker):
        logits, bias = m.normal(20, 64, dtype=torch.float32), m.normal(64, dtype=torch.float32)
        grouped = grouped_topk(logits, 8, num_groups=4, topk_groups=4, bias=bias)
        plain = topk_sigmoid(logits, 8, bias=bias, renormalize=True)
        assert all(same_bits(a, b) for a, b in zip(grouped, plain, strict=True))


class TestSpecialValues:
    @every_gate
    @pytest.mark.parametrize("share", [0.02, 0.5, 0.97, 1.0])
    @pytest.mark.parametrize("value", [NAN, INF, -INF])
    @pytest.mark.parametrize("biased", [False, True])
    def test_ids_are_distinct_and_weights_finite(self, m: Maker, gate, share, value, biased):
        logits = m.normal(64, 256, dtype=torch.float32)
        logits[torch.rand(64, 256, device=m.device) < share] = value
        bias = m.normal(256, dtype=torch.float32) if biased else None
        for renormalize in (False, True):
            weights, ids = gate(logits, 8, bias=bias, renormalize=renormalize)
            assert_sound(ids, weights, 256)
            assert (weights[logits.gather(-1, ids.long()).isnan()] == 0).all(), "NaN weighs nothing"

    @every_gate
    @pytest.mark.parametrize("experts", [8, 32, 40, 256, 1024])
    def test_equal_logits(self, m: Maker, gate, experts):
        weights, ids = gate(torch.full((5, experts), 0.5, device=m.device), 4, renormalize=True)
        assert (ids == torch.arange(4, dtype=torch.int32, device=m.device)).all()
        torch.testing.assert_close(weights, torch.full_like(weights, 0.25))

    @every_gate
    def test_nan_and_infinite_bias(self, m: Maker, gate):
        bias = torch.zeros(64, device=m.device)
        bias[3], bias[4], bias[5] = NAN, INF, -INF
        weights, ids = gate(m.normal(9, 64, dtype=torch.float32), 8, bias=bias)
        assert_sound(ids, weights, 64)
        assert (ids[:, 0] == 4).all()
        assert not ((ids == 3) | (ids == 5)).any()

    @every_gate
    def test_a_token_does_not_depend_on_others(self, m: Maker, gate):
        logits = m.normal(70, 128, dtype=torch.float32)
        weights, ids = gate(logits, 8)
        logits[35] = NAN
        other_weights, other_ids = gate(logits, 8)
        keep = [i for i in range(70) if i != 35]
        assert same_bits(weights[keep], other_weights[keep])
        assert torch.equal(ids[keep], other_ids[keep])

    @every_gate
    def test_many_tokens(self, m: Maker, gate):
        """More than 16 bits count; rows repeat, so results must."""
        logits = m.normal(100, 64, dtype=torch.float32)
        few = gate(logits, 4)
        many = gate(logits.repeat(700, 1), 4)
        for a, b in zip(few, many, strict=True):
            assert same_bits(a.repeat(700, 1), b)


@every_gate
class TestColumnsAndPadding:
    def test_shared_experts(self, m: Maker, gate):
        logits = m.normal(19, 64, dtype=torch.float32)
        weights, ids = gate(logits, 6, num_shared_experts=2, scaling_factor=3.0, renormalize=True)
        plain_weights, plain_ids = gate(logits, 6, scaling_factor=3.0, renormalize=True)
        assert same_bits(weights[:, :6].contiguous(), plain_weights)
        assert torch.equal(ids[:, :6], plain_ids)
        assert (ids[:, 6:] == torch.tensor([64, 65], device=m.device)).all()
        assert (weights[:, 6:] == 1).all()

    @pytest.mark.parametrize("valid", [-3, 0, 1, 18, 19, 1000])
    def test_padding(self, m: Maker, gate, valid):
        """Any count is safe; padding gets id -1 and weight 0, whatever its logits are."""
        logits = m.normal(19, 64, dtype=torch.float32)
        expected = gate(logits, 6, num_shared_experts=1)
        count = max(0, min(19, valid))
        logits[count:] = NAN
        number = torch.tensor([valid], dtype=torch.int32, device=m.device)
        outputs = m.poison(19, 7, dtype=torch.float32), m.poison(19, 7, dtype=torch.int32)
        weights, ids = gate(
            logits, 6, num_shared_experts=1, num_valid_tokens=number, weights=outputs[0], ids=outputs[1]
        )
        assert same_bits(weights[:count], expected[0][:count])
        assert torch.equal(ids[:count], expected[1][:count])
        assert (weights[count:] == 0).all()
        assert (ids[count:] == -1).all()


@pytest.mark.gpu
@every_gate
def test_replays_read_the_number_of_valid_tokens(gate):
    """One graph, other logits and counts at each replay."""
    m = Maker("cuda")
    logits, number = m.normal(40, 256, dtype=torch.float32), torch.tensor([40], dtype=torch.int32, device="cuda")
    gate(logits, 8, num_valid_tokens=number)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weights, ids = gate(logits, 8, num_valid_tokens=number)
    for valid in (3, 40, 0, 17):
        logits.copy_(m.normal(40, 256, dtype=torch.float32))
        number.fill_(valid)
        expected = gate(logits, 8)
        for _ in range(50):
            graph.replay()
        assert same_bits(weights[:valid], expected[0][:valid])
        assert torch.equal(ids[:valid], expected[1][:valid])
        assert (ids[valid:] == -1).all()


class TestRefused:
    def test_groups(self, m: Maker):
        logits, op = m.normal(4, 64, dtype=torch.float32), "moe.grouped_topk"
        for groups, kept, argument, match in (
            (5, 2, "num_groups", "a divisor of the 64 experts"),
            (0, 1, "num_groups", "[1, 32]"),
            (64, 1, "num_groups", "[1, 32]"),
            (8, 9, "topk_groups", "[1, 8]"),
            (8, 0, "topk_groups", "[1, 8]"),
            (8, 1, "top_k", "at most the 8 experts of 1 groups of 8"),
        ):
            with rejects(op, argument, match=match):
                grouped_topk(logits, 9, num_groups=groups, topk_groups=kept)
        with rejects(op, "scoring"):
            grouped_topk(logits, 4, num_groups=8, topk_groups=2, scoring="relu")

    @pytest.mark.parametrize("name", ["topk_softmax", "topk_sigmoid"])
    def test_options(self, m: Maker, name):
        logits, op, gate = m.normal(4, 64, dtype=torch.float32), f"moe.{name}", GATES[name[5:]]
        for bad in (NAN, INF):
            with rejects(op, "scaling_factor"):
                gate(logits, 4, scaling_factor=bad)
        for bad in (-1, 33):
            with rejects(op, "num_shared_experts", match="[0, 32]"):
                gate(logits, 4, num_shared_experts=bad)
        with rejects(op, "num_valid_tokens", error=ArgumentTypeError, match="int32"):
            gate(logits, 4, num_valid_tokens=torch.ones(1, dtype=torch.int64, device=m.device))
        with rejects(op, "num_valid_tokens", error=ArgumentTypeError, match="a tensor"):
            gate(logits, 4, num_valid_tokens=4)
        with rejects(op, "num_valid_tokens", match="of shape [1]"):
            gate(logits, 4, num_valid_tokens=torch.ones(2, dtype=torch.int32, device=m.device))
        with rejects(op, "ids", match="of shape [4, 5]"):
            gate(logits, 4, num_shared_experts=1, ids=m.poison(4, 4, dtype=torch.int32))
        with pytest.raises(ArgumentError, match="top_k"):
            gate(logits, 65)

    def test_peers(self, m: Maker):
        """Options that a peer lacks are refused before it is called."""
        args = operator("moe.topk_sigmoid"), m.normal(4, 64, dtype=torch.float32)
        outputs = m.poison(4, 5, dtype=torch.float32), m.poison(4, 5, dtype=torch.int32)
        with pytest.raises(Exception, match="num_shared_experts"):
            args[0].forward_aot(args[1], 4, True, 1.0, 1, None, None, *outputs)
