"""moe_align_block_size and moe_sum_reduce: against Python that says the same in words, and calls that are refused."""

from __future__ import annotations

import pytest
import torch
from op_tools import rejects, same_bits

from hpcjit.cases import Maker
from hpcjit.errors import ArgumentTypeError
from hpcjit.ops.moe import moe_align_block_size, moe_sum_reduce

ALIGN, SUM = "moe.moe_align_block_size", "moe.moe_sum_reduce"
NAN = float("nan")


def aligned(ids: list[int], num_experts: int, block_size: int) -> tuple[list[int], list[int]]:
    """The entries that count, and the experts of their blocks."""
    entries: list[int] = []
    experts: list[int] = []
    for expert in range(num_experts):
        pairs = [i for i, e in enumerate(ids) if e == expert]
        blocks = -(-len(pairs) // block_size)
        entries += pairs + [len(ids)] * (blocks * block_size - len(pairs))
        experts += [expert] * blocks
    return entries, experts


def check(ids: torch.Tensor, num_experts: int, block_size: int, found, local: list[int] | None = None) -> None:
    entries, experts = aligned(local or ids.flatten().tolist(), num_experts, block_size)
    sorted_token_ids, expert_ids, post = found
    count = len(entries)
    assert post.tolist() == [count]
    assert sorted_token_ids[:count].tolist() == entries
    assert (sorted_token_ids[count:] == ids.numel()).all()
    assert expert_ids[: len(experts)].tolist() == experts
    assert (expert_ids[len(experts) :] == -1).all()


class TestAlign:
    @pytest.mark.parametrize("experts", [1, 2, 60, 255, 256, 257, 384, 512, 1024])
    @pytest.mark.parametrize("tokens", [0, 1, 33, 700])
    def test_experts(self, m: Maker, experts, tokens):
        ids = m.integers(0, experts, tokens, 8)
        check(ids, experts, 64, moe_align_block_size(ids, experts, 64))

    @pytest.mark.parametrize("block_size", [1, 3, 16, 128, 1024])
    @pytest.mark.parametrize("top_k", [1, 6, 9])
    def test_block_sizes(self, m: Maker, block_size, top_k):
        ids = m.integers(0, 40, 50, top_k)
        check(ids, 40, block_size, moe_align_block_size(ids, 40, block_size))

    @pytest.mark.parametrize("tokens", [127, 128, 129, 512, 513, 1024, 1025, 5000])
    def test_borders_of_the_ways(self, m: Maker, tokens):
        """One block of few threads, of many, and several blocks."""
        ids = m.integers(0, 128, tokens, 8)
        check(ids, 128, 16, moe_align_block_size(ids, 128, 16))

    def test_many_tokens(self, m: Maker):
        """More than 16 bits count, and skewed: most go to one expert."""
        ids = m.integers(0, 64, 40_000, 4)
        ids[m.integers(0, 3, 40_000, 4) > 0] = 17
        check(ids, 64, 64, moe_align_block_size(ids, 64, 64))

    @pytest.mark.parametrize("bad", [-1, 64, -(2**31), 2**31 - 1])
    @pytest.mark.parametrize("tokens", [20, 800])
    def test_ids_of_no_expert(self, m: Maker, bad, tokens):
        """They are listed nowhere, and -1 is not the last expert."""
        ids = m.integers(0, 64, tokens, 8)
        ids[::3], ids[:, 5] = bad, bad
        found = moe_align_block_size(ids, 64, 16)
        check(ids, 64, 16, found)
        assert not torch.isin(found[0], torch.arange(8, device=m.device, dtype=torch.int32)).any()

    def test_nothing_at_all(self, m: Maker):
        ids = torch.full((9, 8), -1, dtype=torch.int32, device=m.device)
        sorted_token_ids, expert_ids, post = moe_align_block_size(ids, 16, 64)
        assert post.tolist() == [0]
        assert (sorted_token_ids == 72).all()
        assert (expert_ids == -1).all()

    @pytest.mark.parametrize("tokens", [30, 900])
    def test_expert_map(self, m: Maker, tokens):
        """The experts of one rank out of four; an empty rank; ids past the map."""
        ids = m.integers(-1, 70, tokens, 6)
        for rank in range(4):
            expert_map = torch.full((64,), -1, dtype=torch.int32, device=m.device)
            expert_map[16 * rank : 16 * (rank + 1)] = torch.arange(16, dtype=torch.int32, device=m.device)
            table = expert_map.tolist()
            local = [table[i] if 0 <= i < 64 else -1 for i in ids.flatten().tolist()]
            check(ids, 16, 8, moe_align_block_size(ids, 16, 8, expert_map=expert_map), local)
        nobody = torch.full((64,), -1, dtype=torch.int32, device=m.device)
        assert moe_align_block_size(ids, 16, 8, expert_map=nobody)[2].tolist() == [0]

    def test_views_and_longer_results(self, m: Maker):
        ids = m.integers(0, 32, 50, 20)[:, 3:9]
        results = [m.poison(n, dtype=torch.int32) for n in (5000, 700, 1)]
        names = ("sorted_token_ids", "expert_ids", "num_tokens_post_padded")
        found = moe_align_block_size(ids, 32, 16, **dict(zip(names, results, strict=True)))
        assert all(a is b for a, b in zip(found, results, strict=True))
        check(ids, 32, 16, found)

    def test_the_largest_result_fits(self, m: Maker):
        """Every expert with one pair in its last block: the size that is allocated is reached."""
        ids = torch.arange(40, dtype=torch.int32, device=m.device).repeat(17).view(-1, 8)  # 17 pairs each
        sorted_token_ids, _, post = moe_align_block_size(ids, 40, 16)
        assert post.tolist() == [len(sorted_token_ids)]

    @pytest.mark.gpu
    @pytest.mark.parametrize("tokens", [32, 3000])
    def test_replays_read_the_ids(self, tokens):
        """One graph, other ids at each replay; two streams at once; the same bits each time."""
        m = Maker("cuda")
        ids = m.integers(0, 128, tokens, 8)
        moe_align_block_size(ids, 128, 64)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = moe_align_block_size(ids, 128, 64)
        for high in (128, 3, 200, 128):
            ids.copy_(m.integers(-1, high, tokens, 8))
            for _ in range(100):
                graph.replay()
            check(ids, 128, 64, found)
            streams = [torch.cuda.Stream() for _ in range(2)]
            torch.cuda.synchronize()
            others = []
            for stream in streams:
                with torch.cuda.stream(stream):
                    others.append(moe_align_block_size(ids, 128, 64))
            torch.cuda.synchronize()
            for other in others:
                assert all(same_bits(a, b) for a, b in zip(found, other, strict=True))

    def test_refused(self, m: Maker):
        ids = m.integers(0, 8, 4, 2)
        for bad in (0, 1025):
            with rejects(ALIGN, "num_experts", match="[1, 1024]"):
                moe_align_block_size(ids, bad, 64)
            with rejects(ALIGN, "block_size", match="[1, 1024]"):
                moe_align_block_size(ids, 8, bad)
        with rejects(ALIGN, "topk_ids", error=ArgumentTypeError, match="int32"):
            moe_align_block_size(ids.long(), 8, 64)
        with rejects(ALIGN, "topk_ids", match="rank 2"):
            moe_align_block_size(ids.flatten(), 8, 64)
        with rejects(ALIGN, "sorted_token_ids", match="length 64 to 1073741824"):
            moe_align_block_size(ids, 8, 8, sorted_token_ids=m.poison(63, dtype=torch.int32))
        with rejects(ALIGN, "expert_ids", match="length 8 to"):
            moe_align_block_size(ids, 8, 8, expert_ids=m.poison(7, dtype=torch.int32))
        with rejects(ALIGN, "num_tokens_post_padded", match="of shape [1]"):
            moe_align_block_size(ids, 8, 8, num_tokens_post_padded=m.poison(2, dtype=torch.int32))
        with rejects(ALIGN, "expert_map", match="rank 1"):
            moe_align_block_size(ids, 8, 8, expert_map=ids)
        with rejects(ALIGN, "topk_ids", match="1073741824 entries"):
            moe_align_block_size(torch.empty(2**27 + 1, 8, dtype=torch.int32, device="meta"), 8, 64)

    def test_too_many_are_refused_before_anything_is_allocated(self):
        with rejects(ALIGN, "topk_ids", match="1073741824 entries"):
            moe_align_block_size(torch.zeros(1, 8, dtype=torch.int32).expand(2**40, 8), 8, 16)

    def test_results_are_apart_from_each_other_and_from_what_is_read(self, m: Maker):
        ids = torch.tensor([[0, 1], [1, 2]], dtype=torch.int32, device=m.device)
        memory = torch.zeros(64, dtype=torch.int32, device=m.device)
        mapped = torch.arange(16, dtype=torch.int32, device=m.device)
        with rejects(ALIGN, "num_tokens_post_padded", match="'sorted_token_ids'"):
            moe_align_block_size(ids, 4, 4, sorted_token_ids=memory[:16], num_tokens_post_padded=memory[:1])
        with rejects(ALIGN, "sorted_token_ids", match="'expert_map', which is read"):
            moe_align_block_size(ids, 4, 4, sorted_token_ids=mapped, expert_map=mapped)
        with rejects(ALIGN, "expert_ids", match="'topk_ids', which is read"):
            moe_align_block_size(ids, 4, 4, expert_ids=ids.view(-1))


class TestSumReduce:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    @pytest.mark.parametrize("top_k", [1, 2, 8, 9, 20])
    def test_formula(self, m: Maker, dtype, top_k):
        x, weights = m.normal(7, top_k, 520, dtype=dtype), m.normal(7, top_k, dtype=torch.float32)
        plain = moe_sum_reduce(x, scaling_factor=2.0)
        weighted = moe_sum_reduce(x, weights=weights)
        tolerance = {"rtol": torch.finfo(dtype).eps, "atol": 8 * torch.finfo(torch.float32).eps * top_k}
        torch.testing.assert_close(plain.double(), 2 * x.double().sum(1), **tolerance)
        exact = (weights.double().unsqueeze(-1) * x.double()).sum(1)
        torch.testing.assert_close(weighted.double(), exact, **tolerance)

    def test_order_of_the_sum(self, m: Maker):
        """From the first pair to the last: 1 is lost beside 2^30, and is not where that has cancelled before."""
        x = torch.zeros(1, 4, 64, device=m.device)
        x[0, :, 0] = torch.tensor([1.0, 2.0**30, -(2.0**30), 0.0], device=m.device)
        x[0, :, 1] = torch.tensor([2.0**30, -(2.0**30), 1.0, 0.0], device=m.device)
        assert moe_sum_reduce(x)[0, :2].tolist() == [0.0, 1.0]

    def test_pairs_of_weight_0_are_not_read(self, m: Maker):
        x, weights = m.normal(5, 3, 128), torch.rand(5, 3, device=m.device) + 0.5
        weights[2], weights[:, 1] = 0.0, -0.0
        x[2], x[:, 1] = NAN, float("inf")
        out = moe_sum_reduce(x, weights=weights)
        assert out.isfinite().all()
        assert (out[2] == 0).all()

    def test_nan_stays_in_its_token(self, m: Maker):
        x = m.normal(5, 3, 128)
        clean = moe_sum_reduce(x)
        x[1, 2, 7] = NAN
        out = moe_sum_reduce(x)
        assert out[1, 7].isnan()
        out[1, 7] = clean[1, 7]
        assert same_bits(out, clean)

    def test_sums_do_not_overflow_on_the_way(self, m: Maker):
        x = torch.full((2, 4, 64), 60000.0, dtype=torch.float16, device=m.device)
        assert (moe_sum_reduce(x, scaling_factor=0.25) == 60000).all()

    def test_refused(self, m: Maker):
        x = m.normal(4, 2, 64)
        with rejects(SUM, "x", match="rank 3"):
            moe_sum_reduce(x[0])
        with rejects(SUM, "x", match="[num_tokens, top_k, hidden_size]"):
            moe_sum_reduce(x[:, :0])
        with rejects(SUM, "x", match="contiguous in its last axis"):
            moe_sum_reduce(x.transpose(1, 2))
        with rejects(SUM, "weights", match="of shape [4, 2]"):
            moe_sum_reduce(x, weights=torch.ones(4, 3, device=m.device))
        with rejects(SUM, "weights", error=ArgumentTypeError, match="float32"):
            moe_sum_reduce(x, weights=torch.ones(4, 2, device=m.device, dtype=torch.bfloat16))
        with rejects(SUM, "out", error=ArgumentTypeError, match="bfloat16"):
            moe_sum_reduce(x, out=torch.empty(4, 64, device=m.device))
        with rejects(SUM, "out", match="other memory than 'x'"):
            moe_sum_reduce(x, out=x[:, 0])
        with rejects(SUM, "scaling_factor"):
            moe_sum_reduce(x, scaling_factor=NAN)
