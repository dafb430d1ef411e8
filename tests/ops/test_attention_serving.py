"""attention.decode as a server uses it: graphs, late predecessors, streams, workspaces, repeatability, sizes and views."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from decode_tools import BF16, FP8, FP16, Batch, alone, forward, judge, run
from op_tools import same_bits

from hpcjit import numerics, workspace
from hpcjit.cases import Maker
from hpcjit.ops.attention._decode import decode_op
from hpcjit.ops.attention._decode_schedule import Rules, dynamic
from hpcjit.ops.attention._decode_shape import DecodeArgs, paged
from hpcjit.ops.kvcache import reshape_and_cache
from hpcjit.ops.layernorm import rmsnorm

SKEWED = (9000, 3, 700, 0, 64, 2049)


def recorded(work: Callable[[], None]) -> Callable[[], None]:
    """A CUDA graph of `work`, which has run before."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def with_outputs(a: DecodeArgs) -> DecodeArgs:
    """The same call into memory of its own."""
    return a._replace(out=torch.empty_like(a.out), lse=torch.empty_like(a.lse))


def equal(a: DecodeArgs, b: DecodeArgs) -> bool:
    return same_bits(a.out, b.out) and same_bits(a.lse, b.lse)


@pytest.mark.gpu
class TestGraphs:
    BATCH = Batch((1500,) * 64, kv_heads=1, page=16)

    @staticmethod
    def lengths(round: int) -> torch.Tensor:
        """Another batch every round: uniform, skewed, mostly padding, empty."""
        generator = torch.Generator().manual_seed(round)
        kind = round % 5
        top = (1500, 40, 1500, 1, 200)[kind]
        lengths = torch.randint(0, top + 1, (64,), generator=generator)
        if kind == 2:
            lengths[torch.randperm(64, generator=generator)[:60]] = 0
        if kind == 3:
            lengths.zero_()
            lengths[round % 64] = 1500 if round % 2 else 0
        return lengths.int().cuda()

    @pytest.mark.parametrize("schedule", ["dynamic", "static", "invariant"])
    def test_replays_with_other_lengths(self, schedule: str):
        """1000 replays, each with lengths of its own: the bits of the eager call, and now and then the reference."""
        a = self.BATCH.but(schedule=schedule).named(Maker("cuda"))
        eager, replay = with_outputs(a), recorded(lambda: decode_op.forward_jit(*a))
        for i in range(1000):
            a.seq_lens.copy_(self.lengths(i))
            for output in (a.out, a.lse):
                output.fill_(torch.nan)
            replay()
            decode_op.forward_jit(*eager)
            assert equal(a, eager), i
            if i % 250 < 3:
                judge(a)

    @pytest.mark.parametrize("live", [0, 1, 63])
    def test_padded_batches(self, live: int):
        """A graph of 64 rows replayed with fewer: the rest has length 0 and garbage in its table."""
        a = Batch((333,) * 64, kv_heads=1, page=16).named(Maker("cuda"))
        replay = recorded(lambda: decode_op.forward_jit(*a))
        a.seq_lens[live:] = 0
        a.block_table[live:] = 2**31 - 1
        for output in (a.out, a.lse):
            output.fill_(torch.nan)
        replay()
        assert not a.out[live:].any()
        assert (a.lse[live:] == -torch.inf).all()
        eager = with_outputs(a)
        decode_op.forward_jit(*eager)
        assert equal(a, eager)
        judge(a)


@pytest.mark.gpu
class TestPredecessors:
    """What the kernel before writes last is read, although decode starts before that kernel ends."""

    BATCH = Batch(tuple(range(1, 400, 13)), kv_heads=2, page=16)

    def step(self, m: Maker, order: tuple[str, ...]) -> tuple[DecodeArgs, Callable[[], None], Callable[[], None]]:
        """The arguments, what spoils the new query, token and lengths, and what writes them in this order and decodes."""
        a = self.BATCH.named(m)
        rows = a.q.shape[0] * a.q.shape[1]
        hidden, normed = m.normal(1 << 15, 128), m.poison(1 << 15, 128)  # q is the end of a large output
        a = a._replace(q=normed[-rows:].view(a.q.shape))
        lengths = a.seq_lens.clone()
        last = (lengths - 1).long()
        pages = a.block_table.gather(1, (last // 16).unsqueeze(1)).squeeze(1).long()
        slots = pages * 16 + last % 16
        weight = m.normal(128)
        key, value = m.normal(len(lengths), 2, 128), m.normal(len(lengths), 2, 128)
        writers = {
            "q": lambda: rmsnorm(hidden, weight, out=normed),
            "kv": lambda: reshape_and_cache(key, value, a.k_cache, a.v_cache, slots),
            "lengths": lambda: torch.add(lengths, 0, out=a.seq_lens),  # a kernel, which a copy would not be
        }

        def spoil() -> None:
            for tensor in (normed, a.out, a.lse):
                tensor.fill_(torch.nan)
            for cache in (a.k_cache, a.v_cache):
                cache[pages, last % 16] = torch.nan
            a.seq_lens.zero_()

        def work() -> None:
            torch.cuda._sleep(50_000)
            for name in order:
                writers[name]()
            decode_op.forward_jit(*a)

        return a, spoil, work

    @pytest.mark.parametrize("in_graph", [False, True])
    @pytest.mark.parametrize("order", list(itertools.permutations(("q", "kv", "lengths"))), ids="-".join)
    def test_late(self, order, in_graph: bool):
        a, spoil, work = self.step(Maker("cuda"), order)
        work()
        torch.cuda.synchronize()
        expected = with_outputs(a)
        decode_op.forward_jit(*expected)
        launch = recorded(work) if in_graph else work
        for _ in range(50):
            spoil()
            torch.cuda.synchronize()
            launch()
            torch.cuda.synchronize()
            assert equal(a, expected)

    def test_layers(self):
        """Each layer reads what the one before wrote, and all share one workspace; as if each waited for the last."""
        m = Maker("cuda")
        shapes = [Batch(SKEWED, kv_heads=1, group=8), Batch((40,) * len(SKEWED), kv_heads=1, group=8)]
        layers = [shapes[0].named(m)]
        for i in range(1, 7):
            layers.append(shapes[i % 2].but(window=0 if i % 3 else 500).named(m)._replace(q=layers[-1].out))
        for a in layers:
            decode_op.forward_jit(*a)
            torch.cuda.synchronize()
        expected = [(a.out.clone(), a.lse.clone()) for a in layers]
        assert not any(out.isnan().any() for out, _ in expected)
        everything = recorded(lambda: [decode_op.forward_jit(*a) for a in layers])
        for _ in range(50):
            for a in layers:
                a.out.fill_(torch.nan)
            everything()
            for a, (out, lse) in zip(layers, expected, strict=True):
                assert same_bits(a.out, out)
                assert same_bits(a.lse, lse)


class TestWorkspace:
    @pytest.mark.gpu
    @pytest.mark.parametrize("schedule", ["dynamic", "static", "invariant"])
    @pytest.mark.parametrize("lengths", [(9000,), SKEWED, (2049,) * 40], ids=["one", "skewed", "many"])
    def test_stays_inside(self, lengths, schedule: str):
        """Counters, exactly as many as the plan asks for, are zero before and after every call. All else is untouched."""
        batch = Batch(lengths, q_lens=3, kv_heads=1, group=3, sinks=True, schedule=schedule)
        a = run(batch(Maker("cuda")))
        expected, plan = with_outputs(a), decode_op.plan(*a)
        decode_op.forward_jit(*expected)
        assert plan.workspace_bytes == 0
        size = plan.counter_bytes
        scratch, counters = (torch.full((size + 4096,), 0xFF, dtype=torch.uint8, device="cuda") for _ in range(2))
        counters[:size] = 0
        stream = torch.cuda.Stream()
        block = (scratch.data_ptr(), 0, counters.data_ptr(), size, scratch, counters)
        workspace._streams[torch.cuda.current_device()][stream.cuda_stream] = block
        torch.cuda.synchronize()
        try:
            for _ in range(3):
                with torch.cuda.stream(stream):
                    assert equal(run(a), expected)
                    assert not counters[:size].any()
                    assert (counters[size:] == 0xFF).all()
                    assert (scratch == 0xFF).all()
        finally:
            torch.cuda.synchronize()
            workspace.reset()

    @pytest.mark.gpu
    def test_long_short_long(self):
        """What one call leaves behind changes nothing for the next, whichever is larger."""
        m = Maker("cuda")
        batches = [Batch((20_000,), kv_heads=1), Batch((1,) * 300, kv_heads=1), Batch(SKEWED, q_lens=4), Batch((0,))]
        calls = [batch.named(m) for batch in batches]
        first = [with_outputs(run(a)) for a in calls]
        for a in first:
            decode_op.forward_jit(*a)
        for order in itertools.permutations(range(len(calls))):
            for i in order:
                assert equal(run(calls[i]), first[i])

    @pytest.mark.gpu
    def test_two_streams(self):
        """Calls that overlap share nothing."""
        calls = [Batch(SKEWED, kv_heads=4).named(Maker("cuda", seed)) for seed in (1, 2)]
        expected = [with_outputs(run(a)) for a in calls]
        for a in expected:
            decode_op.forward_jit(*a)
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in calls]
        for i in range(50):
            for stream, a in zip(streams, calls, strict=True):
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(20_000 * (i % 3))
                    a.out.fill_(torch.nan)
                    for _ in range(3):
                        decode_op.forward_jit(*a)
            torch.cuda.synchronize()
            assert all(equal(a, b) for a, b in zip(calls, expected, strict=True))


@pytest.mark.gpu
class TestRepeatability:
    @pytest.mark.parametrize("schedule", ["dynamic", "static", "invariant"])
    @pytest.mark.parametrize("dtype", [BF16, FP8], ids=str)
    def test_run_to_run(self, schedule: str, dtype):
        batch = Batch(SKEWED, schedule=schedule, dtype=dtype, q_scale="row" if dtype == FP8 else "")
        a = batch.named(Maker("cuda"))
        first = with_outputs(a)
        decode_op.forward_jit(*first)
        for _ in range(100):
            assert equal(run(a), first)

    @pytest.mark.parametrize("window", [0, 2500])
    @pytest.mark.parametrize("q_len", [1, 3])
    def test_invariant_is_alone_as_in_the_batch(self, q_len: int, window: int):
        """The bits of a request, alone, with a table of its own width, and in another order of the batch."""
        lengths = (5000, 3, 0, 2048, 2049, 64, 9000)
        m = Maker("cuda")
        a = run(Batch(lengths, q_lens=q_len, window=window, sinks=True, schedule="invariant")(m))
        for request, length in enumerate(lengths):
            rows = slice(request * q_len, (request + 1) * q_len)
            one = alone(a, request)
            for width in (a.block_table.shape[1], max(-(-length // 64), 1)):
                run(one._replace(block_table=one.block_table[:, :width]))
                assert same_bits(one.out, a.out[rows])
                assert same_bits(one.lse, a.lse[rows])
        flipped = with_outputs(a)._replace(
            q=a.q.unflatten(0, (-1, q_len)).flip(0).flatten(0, 1).contiguous(),
            block_table=a.block_table.flip(0).contiguous(),
            seq_lens=a.seq_lens.flip(0).contiguous(),
        )
        assert same_bits(run(flipped).out.unflatten(0, (-1, q_len)).flip(0).flatten(0, 1), a.out)

    @pytest.mark.parametrize("dtype", [BF16, FP16, FP8], ids=str)
    def test_schedules_agree(self, dtype):
        """Within the rule, on the batch that they divide most differently."""
        m = Maker("cuda")
        for schedule in ("dynamic", "static", "invariant"):
            judge(Batch(SKEWED, dtype=dtype, schedule=schedule, sinks=True)(m))


class TestSizes:
    @pytest.mark.gpu
    @pytest.mark.parametrize("batch", [1, 2, 31, 33, 255, 256, 992, 993, 1024, 1025, 2049, 4096])
    def test_batches(self, batch: int):
        """Around every size that an array of the schedule could have."""
        judge(Batch([(7 * i) % 90 for i in range(batch)], kv_heads=2, group=2, head_dim=64, page=16)(Maker("cuda")))

    @pytest.mark.gpu
    @pytest.mark.parametrize("q_len", [1, 3, 8])
    def test_tails(self, q_len: int):
        """Every remainder of a tile, for short requests and for ones that are cut, so that cuts fall among the new rows."""
        m = Maker("cuda")
        for length in [*range(1, 130), *range(8192, 8192 + 33), *range(12_000, 12_000 + 17)]:
            judge(Batch((length,), q_lens=q_len, kv_heads=1, group=2, head_dim=64)(m))

    @pytest.mark.gpu
    @pytest.mark.parametrize("others", [0, 1, 5, 20, 60, 131, 263])
    def test_cuts(self, others: int):
        """One long request beside more and more others: cut into many parts, few, and none."""
        m = Maker("cuda")
        for length in (2000, 2003, 2017, 2048):
            judge(Batch((length, *[2048] * others), q_lens=5, kv_heads=1, group=2, head_dim=64, sinks=True)(m))

    # One group of shares and several, the last of which has 1, 2, 3 or 12 of them.
    PARTS = (6, 12, 13, 14, 15, 24, 25, 26, 27, 36, 37, 38, 39, 60, 61, 62)

    def one_request(self, parts: int) -> Batch:
        return Batch((parts * 128 - 5,), kv_heads=1, group=8)

    @pytest.mark.parametrize("parts", PARTS)
    def test_number_of_parts_is_what_it_says(self, parts: int):
        plan = decode_op.plan(*self.one_request(parts)(Maker("meta")))
        names = ("num_kv_heads", "workers", "splits", "least", "whole", "slack", "less", "margin")
        rules = Rules(**{name: int(plan.values[name]) for name in names}, tile=plan.config.tile)
        assert len(dynamic([parts * 128 // plan.config.tile], rules)) == parts

    @pytest.mark.gpu
    @pytest.mark.parametrize("parts", PARTS)
    def test_number_of_parts(self, parts: int):
        judge(self.one_request(parts)(Maker("cuda")))

    def test_ragged_and_cut(self, m: Maker):
        judge(Batch((9000, 3, 4001, 0, 64), q_lens=(3, 1, 8, 2, 0), kv_heads=1, group=3)(m))

    @pytest.mark.parametrize("layout", ["NHD", "HND"])
    @pytest.mark.parametrize("dtype", [BF16, FP8], ids=str)
    def test_pool_past_4_gib(self, device, dtype, layout: str):
        """Live pages at the top of more than 2^31 elements and 2^16 pages give the bits of a small pool."""
        small = run(Batch((200, 64, 1), kv_heads=1, group=8, dtype=dtype, layout=layout)(Maker(device)))
        pages, page_bytes = small.k_cache.shape[0], small.k_cache[0].numel() * small.k_cache.element_size()
        offset = (4 << 30) // page_bytes + 1 if device.type == "cuda" else 100
        if device.type == "cuda" and torch.cuda.mem_get_info()[0] < 10 << 30:
            pytest.skip("needs 10 GiB")
        caches = []
        for cache in (small.k_cache, small.v_cache):
            large = torch.empty(offset + pages, *cache.shape[1:], dtype=cache.dtype, device=device)
            large[offset:] = cache
            caches.append(large)
        table = torch.where(small.block_table < 0, small.block_table, small.block_table + offset)
        large = with_outputs(small)._replace(k_cache=caches[0], v_cache=caches[1], block_table=table)
        assert equal(run(large), small)


class TestViews:
    def test_heads_before_slots_by_strides(self, m: Maker):
        """Storage of one layout under the other's name is the same call."""
        a = run(Batch((200, 3, 64))(m))
        swapped = [paged(cache, "HND").contiguous().transpose(1, 2) for cache in (a.k_cache, a.v_cache)]
        assert equal(run(with_outputs(a)._replace(k_cache=swapped[0], v_cache=swapped[1])), a)
        named = [paged(cache, "HND").contiguous() for cache in (a.k_cache, a.v_cache)]
        assert equal(run(with_outputs(a)._replace(k_cache=named[0], v_cache=named[1], layout="HND")), a)

    def test_slices_of_a_larger_pool(self, m: Maker):
        """Pages, slots, heads and dims that are part of something larger."""
        a = run(Batch((200, 3, 64))(m))
        caches = []
        for cache in (a.k_cache, a.v_cache):
            larger = m.poison(*(size + extra for size, extra in zip(cache.shape, (1, 2, 1, 16), strict=True)))
            part = larger[1:, : cache.shape[1], 1:, 8:-8]
            part.copy_(cache)
            caches.append(part)
        assert equal(run(with_outputs(a)._replace(k_cache=caches[0], v_cache=caches[1])), a)

    def test_queries_heads_first(self, m: Maker):
        a = run(Batch((200, 3, 64))(m))
        q = a.q.transpose(0, 1).contiguous().transpose(0, 1)
        assert equal(run(with_outputs(a)._replace(q=q)), a)

    def test_one_table_for_all(self, m: Maker):
        """Requests that share every page, through a row that is repeated without a copy."""
        a = Batch((200, 200, 200)).named(m)
        a = a._replace(
            block_table=a.block_table[:1].expand(3, -1), seq_lens=a.seq_lens - torch.arange(3, device=m.device).int()
        )
        judge(a)

    def test_scales_by_strides(self, m: Maker):
        """Scales per token that are a column of something, or the same for every slot of a page."""
        a = Batch((200, 3, 64), dtype=FP8, k_scale="token", v_scale="token").named(m)
        wide = torch.stack([a.k_scale, a.v_scale], dim=-1)
        a_view = a._replace(k_scale=wide[..., 0], v_scale=wide[..., 1])
        assert equal(run(with_outputs(a_view)), run(a))
        repeated = m.normal(*a.k_scale.shape[:1], 1, a.k_scale.shape[2], dtype=torch.float32).abs() + 0.5
        judge(a._replace(k_scale=repeated.expand_as(a.k_scale)))


def test_the_rule_notices(m: Maker):
    """The judge of these tests is no rubber stamp: a result that lacks one token of 200 does not pass."""
    args = Batch((200, 64), kv_heads=1).named(m)

    def wrong(*given) -> None:
        forward(m.device)(*DecodeArgs(*given)._replace(seq_lens=given[4] - 1))

    assert not all(deviation.ok for deviation in numerics.check(decode_op, tuple(args), wrong))
