"""Routing of the cases: histograms have the shape that their name says, ids have the histogram, turns go round."""

from __future__ import annotations

import itertools

import pytest
import torch

from hpcjit.cases import Maker, cases_of, qwen3_moe, routing
from hpcjit.cases.moe_experts import MODELS, REAL, SKEWED, Experts, share

KINDS = routing.KINDS[1:]
SIZES = [(16, 128), (64, 192), (512, 256), (64, 16)]

every_kind = pytest.mark.parametrize("kind", KINDS)


def uniform(tokens: int, experts: int) -> torch.Tensor:
    ids = Experts(tokens, experts, 0, 0).ids(Maker("cpu"))
    return torch.bincount(ids.flatten(), minlength=experts)


class TestCounts:
    @every_kind
    @pytest.mark.parametrize(("tokens", "experts"), SIZES)
    def test_every_token_has_eight_experts(self, kind: str, tokens: int, experts: int):
        counts = routing.counts_of(kind, tokens, experts, 8)
        assert len(counts) == experts
        assert sum(counts) == 8 * tokens
        assert max(counts) <= tokens

    @pytest.mark.parametrize(("tokens", "experts"), SIZES)
    def test_same8(self, tokens: int, experts: int):
        counts = routing.counts_of("same8", tokens, experts, 8)
        assert sorted(counts, reverse=True) == [tokens] * 8 + [0] * (experts - 8)

    def test_zipf(self):
        """A token's first choice is by Zipf's law: of many that take one expert each the shares are those of the law."""
        counts = sorted(routing.counts_of("zipf", 20000, 128, 1), reverse=True)
        harmonic = sum(1 / rank for rank in range(1, 129))
        for rank in (1, 2, 3, 5, 10):
            assert counts[rank - 1] == pytest.approx(20000 / rank / harmonic, rel=0.1)

    def test_zipf_is_in_no_order(self):
        counts = routing.counts_of("zipf", 512, 128, 8)
        assert list(counts) != sorted(counts, reverse=True)
        assert max(counts[:64]) > 0 < max(counts[64:])

    @pytest.mark.parametrize(("tokens", "experts"), [(64, 128), (64, 256), (512, 128), (512, 256)])
    def test_order_of_skew(self, tokens: int, experts: int):
        """A model's router lies between uniform and the same eight; so does Zipf's law."""
        largest = {kind: max(routing.counts_of(kind, tokens, experts, 8)) for kind in KINDS}
        for kind in ("zipf", "real"):
            assert int(uniform(tokens, experts).max()) < largest[kind] <= largest["same8"]
            active = sum(count > 0 for count in routing.counts_of(kind, tokens, experts, 8))
            assert 8 < active <= int((uniform(tokens, experts) > 0).sum()) + 1

    def test_unknown(self):
        with pytest.raises(ValueError, match="zipf, same8, real, got 'zip'"):
            routing.counts_of("zip", 16, 128, 8)


class TestIds:
    @every_kind
    @pytest.mark.parametrize(("tokens", "experts"), SIZES)
    def test_histogram_and_distinct(self, kind: str, tokens: int, experts: int):
        counts = routing.counts_of(kind, tokens, experts, 8)
        ids = routing.ids_of(counts, 8, Maker("cpu"))
        assert ids.shape == (tokens, 8)
        assert ids.dtype == torch.int32
        assert torch.bincount(ids.flatten(), minlength=experts).tolist() == list(counts)
        assert (ids.sort(-1).values.diff(dim=-1) > 0).all()

    def test_seeds(self):
        counts = routing.counts_of("zipf", 64, 128, 8)
        first, again, other = (routing.ids_of(counts, 8, Maker("cpu", seed)) for seed in (0, 0, 1))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)

    @pytest.mark.parametrize("counts", [(3, 0, 1), (2, 2, 1)])
    def test_impossible(self, counts: routing.Counts):
        """Two tokens of two experts each: none has three tokens, and five pairs are no two tokens."""
        with pytest.raises(ValueError, match="distinct experts"):
            routing.ids_of(counts, 2, Maker("cpu"))


class TestTurns:
    @pytest.mark.parametrize("kind", routing.KINDS)
    @pytest.mark.parametrize(("tokens", "experts"), [(1, 128), (16, 128), (64, 16)])
    def test_experts_wait_for_all_others(self, kind: str, tokens: int, experts: int):
        sizes = Experts(tokens, experts, 0, 0, routed=kind)
        last = torch.full((experts,), -1)
        m = Maker("cpu")
        for turn, ids in enumerate(itertools.islice(routing.turns(lambda: sizes.ids(m), experts, m), 20)):
            mine = torch.zeros(experts, dtype=torch.bool).index_fill(0, ids.flatten().long(), True)
            if not mine.all():
                assert last[mine].max() <= last[~mine].min()
            last[mine] = turn
            assert (ids.sort(-1).values.diff(dim=-1) > 0).all()
            if kind != "uniform":
                found = torch.bincount(ids.flatten(), minlength=experts)
                assert sorted(found.tolist()) == sorted(sizes.counts)


NAMES = [f"{model} {mode} {n} {kind}" for kind in KINDS for mode, ns in SKEWED.items() for n in ns for model in MODELS]


class TestCases:
    def test_all_are_there(self):
        assert set(NAMES) <= {case.name for case in cases_of("moe.fused_moe", "bench")}

    @pytest.mark.parametrize("name", [name for name in NAMES if "tp8" in name])
    def test_bytes_are_of_the_experts_drawn(self, name: str):
        (case,) = [case for case in cases_of("moe.fused_moe") if case.name == name]
        model, mode, tokens, kind = name.split()
        sizes = share(MODELS[model], mode)
        ids = Experts(int(tokens), sizes.experts, 0, 0, routed=kind).ids(Maker("cpu", 3))
        weights = 3 * sizes.inner * sizes.hidden * len(ids.unique())
        assert case.bytes == weights + 3 * int(tokens) * sizes.hidden

    def test_every_quantisation_is_measured(self):
        names = {case.name for case in cases_of("moe.fused_moe", "bench")}
        for n in (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048):
            assert f"qwen3-235b tp8 {n} bf16" in names
            assert {f"{model} {mode} {n} fp8_block" for model in MODELS for mode in SKEWED} <= names


class TestModel:
    def test_the_file_has_what_the_cases_use(self):
        assert list(qwen3_moe.kept()) == [qwen3_moe.key_of(*sizes) for sizes in dict.fromkeys(REAL)]

    @pytest.mark.parametrize(("sequences", "experts"), [(16, 128), (64, 16)])
    def test_the_file_is_what_the_model_gives(self, sequences: int, experts: int):
        """But for a few choices next to a tie, which another machine may make otherwise."""
        fresh = torch.tensor(qwen3_moe.histogram(sequences, experts))
        kept = torch.tensor(qwen3_moe.kept()[qwen3_moe.key_of(sequences, experts)])
        assert int((fresh - kept).abs().sum()) <= 0.02 * int(kept.sum())

    def test_choices(self):
        ids = qwen3_moe.topk_ids(5, 24)
        assert ids.shape == (5, 8)
        assert (ids.sort(-1).values.diff(dim=-1) > 0).all()
        assert torch.equal(qwen3_moe.topk_ids(5, 24), ids)
        assert not torch.equal(qwen3_moe.topk_ids(5, 24, seed=1), ids)

    def test_causal(self):
        """What comes later changes nothing before it."""
        weights = qwen3_moe.Weights.drawn(4, torch.Generator().manual_seed(0))
        x = torch.randn(1, 6, qwen3_moe.HIDDEN, generator=torch.Generator().manual_seed(1))
        y = x.clone()
        y[:, 4:] += 1.0
        a, b = qwen3_moe._attention(x, weights), qwen3_moe._attention(y, weights)
        torch.testing.assert_close(a[:, :4], b[:, :4])
        assert not torch.allclose(a[:, 4:], b[:, 4:])
