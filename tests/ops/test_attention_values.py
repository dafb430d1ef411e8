"""attention.decode: which tokens count, what must not matter, scales, caps and sinks, and accuracy at great lengths."""

from __future__ import annotations

import math

import pytest
import torch
from decode_tools import FP8, FP16, Batch, judge, outputs, run
from op_tools import same_bits

from hpcjit import numerics
from hpcjit.cases import Maker
from hpcjit.ops.attention._decode import decode_op
from hpcjit.ops.attention._decode_shape import DecodeArgs, paged

# One variant per way of reading the cache; what it means to attend does not depend on it.
KINDS = {
    "bf16": Batch(()),
    "bf16 hnd p16": Batch((), layout="HND", page=16),
    "fp16 p5": Batch((), dtype=FP16, page=5),
    "fp8": Batch((), dtype=FP8, q_scale="row", k_scale="number", v_scale="number"),
    "fp8 cache p16": Batch((), cache=FP8, page=16),
}
PER_REQUEST = ("q", "block_table", "seq_lens", "out", "lse")
kinds = pytest.mark.parametrize("kind", KINDS)


def live_cells(a: DecodeArgs) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Page and slot of the tokens of each request."""
    page_size = paged(a.k_cache, a.layout).shape[1]
    found = []
    for request, length in enumerate(a.seq_lens.tolist()):
        tokens = torch.arange(length, device=a.q.device)
        found.append((a.block_table[request][tokens // page_size].long(), tokens % page_size))
    return found


class TestDeadData:
    @kinds
    @pytest.mark.parametrize("lengths", [(1, 63, 64, 65), (0, 127, 128, 129), (5, 15, 16, 17)], ids=str)
    def test_slots_and_pages(self, m: Maker, kind: str, lengths):
        """Everything that no live token owns is NaN, in the last page too, for every remainder of the length."""
        batch = KINDS[kind].but(lengths=lengths)
        judge(batch(m))
        out, lse = outputs(batch, m)
        assert out.isfinite().all()
        assert lse[[length > 0 for length in lengths]].isfinite().all()

    @kinds
    @pytest.mark.parametrize("cleaned", ["k_cache", "v_cache"])
    def test_of_one_cache_alone(self, device, kind: str, cleaned: str):
        """NaN in K only and in V only: neither 0 * NaN nor a masked NaN comes through."""
        batch = KINDS[kind].but(lengths=(70, 3, 129))
        args = batch(Maker(device))
        before = run(args).out.clone()
        cache = getattr(DecodeArgs(*args), cleaned)
        cache.copy_(torch.where(cache.float().isnan(), 1.0, cache.float()).to(cache.dtype))
        assert same_bits(run(args).out, before)

    @kinds
    @pytest.mark.parametrize("value", [-1, -(2**31), 2**31 - 1, "foreign"])
    def test_table_entries(self, m: Maker, kind: str, value):
        """What stands after the live entries is not used: no page id, or a page of another request that is all NaN."""
        batch = KINDS[kind].but(lengths=(70, 0, 129), more_width=40)
        args = batch(m)
        before = run(args).out.clone()
        a = DecodeArgs(*args)
        used = torch.unique(torch.cat([pages for pages, _ in live_cells(a)]))
        foreign = next(page for page in range(a.k_cache.shape[0]) if page not in used.tolist())
        a.block_table[a.block_table == -1] = foreign if value == "foreign" else value
        assert same_bits(run(args).out, before)

    def test_the_last_page_of_the_pool(self, m: Maker):
        """A copy of whole pages may not reach past the pool; the table is as wide as needed, at the end of its memory."""
        for page, length in ((16, 16), (64, 3), (5, 14)):
            a = Batch((length,), page=page).named(m)
            count = a.block_table.shape[1]
            top = torch.arange(a.k_cache.shape[0] - 1, a.k_cache.shape[0] - 1 - count, -1, device=m.device)
            for cache in (a.k_cache, a.v_cache):
                cache[top] = cache[a.block_table[0].long()].clone()
            table = torch.zeros(64, dtype=torch.int32, device=m.device)[-count:].view(1, count)
            judge(a._replace(block_table=table.copy_(top)))

    def test_padding_rows(self, device):
        """Rows of length 0 are exactly 0 with lse -inf, whatever their table says, and change nothing of the others."""
        lengths = [0 if i % 3 else 40 + i for i in range(63)]
        args = Batch(lengths, kv_heads=1, page=16)(Maker(device))
        a = DecodeArgs(*args)
        a.block_table[a.seq_lens == 0] = 2**31 - 1
        run(args)
        dead = a.seq_lens == 0
        assert not a.out[dead].any()
        assert (a.lse[dead] == -torch.inf).all()
        judge(args)

    def test_all_empty(self, m: Maker):
        for batch in (Batch((0,)), Batch((0,) * 40, q_lens=3), Batch((0,) * 300, kv_heads=1), Batch((0, 0), dtype=FP8)):
            for schedule in ("dynamic", "static", "invariant"):
                out, lse = outputs(batch.but(schedule=schedule), m)
                assert not out.any()
                assert (lse == -torch.inf).all()


class TestWindow:
    @staticmethod
    def seen(m: Maker, batch: Batch) -> torch.Tensor:
        """[row, token]: which tokens a row of the only request sees, read off values that are all different axes."""
        a = batch.named(m)
        a.q.zero_()
        (pages, slots) = live_cells(a)[0]
        first = batch.first_page(0) * batch.page
        unit = torch.eye(batch.head_dim, dtype=a.v_cache.dtype, device=m.device)
        paged(a.v_cache, a.layout)[pages[first:], slots[first:]] = unit[: len(pages)][first:].unsqueeze(1)
        return run(a).out[:, 0, : batch.lengths[0]] > 0

    @pytest.mark.parametrize("page", [16, 64])
    @pytest.mark.parametrize("q_len", [1, 2, 5])
    @pytest.mark.parametrize("edge", ["1", "2", "page-1", "page", "page+1", "len-1", "len", "len+1"])
    def test_edges(self, m: Maker, page: int, q_len: int, edge: str):
        """The last `window` tokens, the row's own among them; one-hot values say which."""
        length = 100
        name, _, change = edge.partition("+") if "+" in edge else edge.partition("-")
        window = {"page": page, "len": length}.get(name) or int(name)
        window += int(change or 0) * (-1 if "-" in edge else 1)
        got = self.seen(m, Batch((length,), q_lens=q_len, window=window, page=page, group=1, kv_heads=1))
        own = torch.arange(length - q_len, length, device=m.device).unsqueeze(-1)
        tokens = torch.arange(length, device=m.device)
        assert torch.equal(got, (tokens <= own) & (tokens > own - window))

    @pytest.mark.parametrize("q_len", range(1, 9))
    def test_without_one(self, m: Maker, q_len: int):
        """Bottom-right causal: the last row sees everything, each one before it a token less."""
        got = self.seen(m, Batch((100,), q_lens=q_len, group=1, kv_heads=1))
        own = torch.arange(100 - q_len, 100, device=m.device).unsqueeze(-1)
        assert torch.equal(got, torch.arange(100, device=m.device) <= own)

    @kinds
    @pytest.mark.parametrize(("window", "length"), [(1, 4000), (63, 4000), (64, 4001), (1000, 4063), (3999, 4000)])
    def test_pages_before_it(self, m: Maker, kind: str, window: int, length: int):
        """They are NaN and have no page id."""
        batch = KINDS[kind].but(lengths=(length, 17, 300), window=window, kv_heads=1, q_lens=2)
        assert (batch.named(m).block_table[0, : batch.first_page(0)] == -1).all()
        judge(batch(m))


class TestMaskedRows:
    @kinds
    def test_more_rows_than_tokens(self, device, kind: str):
        """Rows before the first token get 0 and -inf; no sentinel stands in for -inf."""
        a = run(KINDS[kind].but(lengths=(3, 0, 8, 1), q_lens=8)(Maker(device)))
        for request, length in enumerate((3, 0, 8, 1)):
            rows = slice(8 * request, 8 * request + 8 - length)
            assert not a.out[rows].any()
            assert (a.lse[rows] == -torch.inf).all()
            assert a.lse[8 * request + 8 - length : 8 * request + 8].isfinite().all()

    def test_very_negative_logits(self, m: Maker):
        """Logits near -1e5 are masked by nothing: the weights are those of their differences."""
        a = Batch((200, 64, 1), scale=100.0, group=2).named(m)
        keys = torch.full(a.k_cache.shape, -8.0, device=m.device)
        keys[..., 0] += m.integers(0, 4, *keys.shape[:3]) / 32  # every sum over a head is exact
        a.k_cache.copy_(torch.where(a.k_cache.isnan(), torch.nan, keys))
        a.q.fill_(1.0)
        judge(a)
        assert (run(a).lse < -9e4).all()
        assert a.lse.isfinite().all()

    def test_lse_is_where_it_belongs(self, m: Maker):
        """Empty, short and long requests with ragged rows: every element of lse, through strides of its own."""
        batch = Batch((0, 700, 1, 0, 64, 130), q_lens=(1, 4, 0, 3, 8, 2), group=3, views="spaced", page=16)
        judge(batch(m))


class TestScales:
    FP8_BATCH = Batch((130, 3, 64), dtype=FP8, q_scale="row", kv_heads=4, k_scale="head", v_scale="head")

    @pytest.mark.parametrize("values", [(0.5, 0.5), (3.0, 1e-3), (1e-3, 3.0)], ids=str)
    @pytest.mark.parametrize("kind", ["tensor", "head", "token"])
    def test_values(self, m: Maker, kind: str, values):
        a = self.FP8_BATCH.but(k_scale=kind, v_scale=kind).named(m)
        for scale, value in zip((a.k_scale, a.v_scale), values, strict=True):
            scale.mul_(value)
        judge(a)

    @pytest.mark.parametrize("kind", ["number", "tensor", "head", "token"])
    def test_twice_the_value_scale_is_twice_the_result(self, device, kind: str):
        """Exactly."""
        a = self.FP8_BATCH.but(v_scale=kind).named(Maker(device))
        once = run(a).out.clone()
        if a.v_scale is None:
            a = a._replace(v_factor=2 * a.v_factor)
        else:
            a.v_scale.mul_(2)
        assert same_bits(run(a).out, once * 2)

    def test_one_head_differs(self, device):
        """Only the results of head 3 change with its scale, and those of no other."""
        a = self.FP8_BATCH.named(Maker(device))
        before = run(a).out.clone().unflatten(1, (4, 4))
        a.v_scale[3] *= 4
        after = run(a).out.unflatten(1, (4, 4))
        assert same_bits(after[:, :3], before[:, :3])
        assert same_bits(after[:, 3], before[:, 3] * 4)

    def test_one_scale_is_that_of_every_head(self, device):
        per_head = self.FP8_BATCH.named(Maker(device))
        for scale in (per_head.k_scale, per_head.v_scale):
            scale.fill_(0.75)
        one = per_head._replace(k_scale=per_head.k_scale[:1], v_scale=per_head.v_scale[:1], out=per_head.out.clone())
        assert same_bits(run(one).out, run(per_head).out)

    def test_an_outlier_token(self, m: Maker):
        """One token whose scales are 1000 times those of the others, of K, of V, of both."""
        for change_k, change_v in ((1000.0, 1.0), (1.0, 1000.0), (1000.0, 1000.0)):
            a = self.FP8_BATCH.but(k_scale="token", v_scale="token").named(m)
            page, slot = (x[77] for x in live_cells(a)[0])
            paged(a.k_scale, a.layout)[page, slot] *= change_k
            paged(a.v_scale, a.layout)[page, slot] *= change_v
            judge(a)


class TestGreatLengths:
    """FP8 caches of 128K tokens, whose sums must not lose what those of 1K keep. Outputs are fp16 to see more digits."""

    @staticmethod
    def deviation(length: int, kind: str, device: str) -> float:
        args = Batch((length,), dtype=FP8, kv_heads=1, group=8, out=FP16, k_scale="number").named(Maker(device))
        pages, slots = live_cells(args)[0]
        values = paged(args.v_cache, args.layout)
        if kind == "uniform":
            args.q.copy_((args.q.float() / 16).to(FP8))
            values[pages, slots] = torch.linspace(0.25, 4, 128, device=device).to(FP8)
        else:  # one key takes half of the weight
            key = args.q[0, 0].float()
            wanted = math.log(length) / (args.scale * args.k_factor * float(key.square().sum()))
            where = length // 3
            paged(args.k_cache, args.layout)[pages[where], slots[where]] = (key * wanted).to(FP8)
            args.q.copy_(args.q[:, :1].expand_as(args.q).clone())
        exact = DecodeArgs(*numerics.upcast(args))
        decode_op.reference(*exact)
        judge(args)
        return numerics.error(run(args).out, exact.out)

    @pytest.mark.parametrize("kind", ["uniform", "needle"])
    def test_error_does_not_grow(self, device, kind: str):
        short, long = (self.deviation(length, kind, device) for length in (1024, 128 * 1024))
        assert long <= 2 * short + 2**-11


class TestSoftcap:
    @kinds
    @pytest.mark.parametrize("cap", [30.0, 50.0])
    @pytest.mark.parametrize("scale", [0.09, 100.0])
    def test_small_and_large_logits(self, m: Maker, kind: str, cap: float, scale: float):
        """Logits of +-1e4 end at the cap, not at NaN; windows and rows mask after it."""
        judge(KINDS[kind].but(lengths=(130, 3, 0), softcap=cap, scale=scale)(m))
        judge(KINDS[kind].but(lengths=(130, 3, 0), softcap=cap, scale=scale, window=20, q_lens=3)(m))

    def test_a_cap_that_is_far_away(self, m: Maker):
        """Small logits keep their digits under it."""
        judge(Batch((130, 3, 64), softcap=1e4)(m))


class TestSinks:
    @pytest.mark.parametrize("value", [30.0, -30.0, 0.0, -math.inf])
    @pytest.mark.parametrize("batch", [Batch((9000,), kv_heads=1), Batch((70, 0, 3), q_lens=2)], ids=["long", "short"])
    def test_values(self, m: Maker, value: float, batch: Batch):
        a = batch.but(sinks=True).named(m)
        a.sinks.fill_(value)
        judge(a)
        a = run(a)
        if len(batch.lengths) > 1:  # an empty request has the sink alone
            assert not a.out[2:4].any()
            assert (a.lse[2:4] == value).all()

    @pytest.mark.parametrize("schedule", ["dynamic", "static", "invariant"])
    def test_counted_once_however_often_a_request_is_split(self, device, schedule: str):
        """A long request alone, among a few and among many, with a sink that matters."""
        a = Batch((3000, *[64] * 299), kv_heads=1, group=8, sinks=True, schedule=schedule).named(Maker(device))
        a.sinks.fill_(math.log(3000))
        for count in (1, 7, 40, 300):
            judge(a._replace(**{name: getattr(a, name)[:count] for name in PER_REQUEST}))
