"""attention.decode: the reference against its definition, the public function, debug mode, and calls that are refused."""

from __future__ import annotations

import pytest
import torch
from decode_tools import BF16, FP8, FP16, Batch, run, spelled_out
from op_tools import rejects, same_bits

from hpcjit import numerics
from hpcjit.cases import Maker
from hpcjit.errors import ArgumentError, ArgumentTypeError
from hpcjit.fused_op import reset_decisions
from hpcjit.ops.attention import decode
from hpcjit.ops.attention._decode import decode_op
from hpcjit.ops.attention._decode_shape import DecodeArgs

OP = "attention.decode"
TINY = Batch((5, 0, 9), head_dim=64, page=4, group=2)
EVERYTHING = TINY.but(sinks=True, window=3, softcap=2.0, q_lens=(2, 1, 4), page=2)

DEFINITIONS = {
    "plain": TINY,
    "hnd": TINY.but(layout="HND"),
    "group 3": TINY.but(group=3, kv_heads=3),
    "rows": TINY.but(q_lens=3),
    "more rows than tokens": TINY.but(lengths=(2, 0, 3), q_lens=3),
    "ragged": TINY.but(q_lens=(2, 3, 0)),
    "window 1": TINY.but(window=1),
    "window of a page": TINY.but(window=4, q_lens=2),
    "window as long": TINY.but(window=9),
    "softcap": TINY.but(softcap=0.5),
    "sinks": TINY.but(sinks=True),
    "scale": TINY.but(scale=0.7),
    "everything": EVERYTHING,
    "fp8 rows": TINY.but(dtype=FP8, q_scale="row", k_scale="number", v_scale="number"),
    "fp8 tensors": TINY.but(dtype=FP8, q_scale="tensor", k_scale="tensor", v_scale="tensor"),
    "fp8 heads": TINY.but(dtype=FP16, cache=FP8, k_scale="head", v_scale="head"),
    "fp8 tokens": TINY.but(cache=FP8, k_scale="token", v_scale="token", layout="HND"),
    "fp8 everything": EVERYTHING.but(dtype=FP8, q_scale="row", k_scale="token", v_scale="head"),
    "192 and 128": TINY.but(head_dim=192, value_head_dim=128),
}


class TestDefinition:
    @pytest.mark.parametrize("name", DEFINITIONS)
    def test_reference(self, name: str):
        """The reference is the formula of the docstring, in float64 to its last digits, and meets the rule in float32."""
        a = DEFINITIONS[name].named(Maker("cpu"))
        out, lse = spelled_out(a)
        exact, native = DecodeArgs(*numerics.upcast(a)), DecodeArgs(*numerics.copy_args(a))
        decode_op.reference(*exact)
        decode_op.reference(*native)
        torch.testing.assert_close(exact.out, out, rtol=1e-12, atol=1e-13, equal_nan=True)
        torch.testing.assert_close(exact.lse, lse, rtol=1e-12, atol=1e-13, equal_nan=True)
        torch.testing.assert_close(native.lse.double(), lse, rtol=1e-5, atol=1e-5, equal_nan=True)
        assert numerics.error(native.out, out) <= 2**-8

    def test_against_torch(self, m: Maker):
        """A batch of equal lengths in order is torch's own attention."""
        batch, length, heads, dim = 3, 128, 4, 64
        q, k, v = m.normal(batch, heads, dim), *(m.normal(batch * 2, 64, heads // 2, dim) for _ in range(2))
        table = torch.arange(batch * 2, dtype=torch.int32, device=m.device).view(batch, 2)
        lengths = torch.full((batch,), length, dtype=torch.int32, device=m.device)
        out = decode(q, k, v, table, lengths)
        per_request = [x.double().view(batch, length, heads // 2, dim).transpose(1, 2) for x in (k, v)]
        exact = torch.nn.functional.scaled_dot_product_attention(
            q.double().unsqueeze(2), *(x.repeat_interleave(2, dim=1) for x in per_request)
        )
        assert numerics.error(out, exact.squeeze(2)) <= 2**-7


class TestPublic:
    def test_defaults(self, m: Maker):
        """Outputs are made in the dtype of q, bfloat16 for a float8 q, and lse only when it is asked for."""
        for batch, dtype in ((TINY, BF16), (TINY.but(dtype=FP16), FP16), (TINY.but(dtype=FP8), BF16)):
            a = batch.named(m)
            given = {"lse": a.lse, "out": a.out, "return_lse": True}
            expected = decode(*a[:5], **given)
            out = decode(*a[:5])
            assert isinstance(out, torch.Tensor)
            assert out.dtype == dtype
            both = decode(*a[:5], return_lse=True)
            assert same_bits(out, expected[0])
            assert all(same_bits(x, y) for x, y in zip(both, expected, strict=True))
        assert decode(*a[:5], out_dtype=FP16).dtype == FP16

    def test_a_given_lse_is_written(self, m: Maker):
        a = TINY.named(m)
        assert decode(*a[:5], lse=a.lse) is not None
        assert not a.lse.isnan().any()

    def test_numbers_are_scales(self, m: Maker):
        """A number is the tensor of that one value, for q, k and v; powers of two make it exact."""
        a = TINY.but(dtype=FP8).named(m)
        one = lambda value: torch.full((1,), value, device=m.device)  # noqa: E731
        numbers = decode(*a[:5], q_scale=2.0, k_scale=0.5, v_scale=4.0)
        tensors = decode(*a[:5], q_scale=one(2.0), k_scale=one(0.5), v_scale=one(4.0))
        assert numerics.error(numbers, tensors.double()) <= 2**-7, "one step of bfloat16"

    def test_max_q_len_follows_from_the_batch(self, m: Maker):
        a = TINY.but(q_lens=4).named(m)
        assert same_bits(decode(*a[:5]), decode(*a[:5], max_q_len=4))

    @pytest.mark.parametrize("dynamic", [None, True])
    def test_compiled_with_other_numbers(self, m: Maker, dynamic):
        """Numbers that torch.compile makes variable are no graph break."""
        a = TINY.but(dtype=FP8).named(m)
        torch._dynamo.reset()
        compiled = torch.compile(decode, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        for x in (0.5, 0.25, 2.0):
            numbers = {"scale": x, "softcap": 3 * x, "q_scale": x + 1, "k_scale": x, "v_scale": x}
            assert same_bits(compiled(*a[:5], **numbers), decode(*a[:5], **numbers))

    def test_rows_of_nobody_stay(self, m: Maker):
        a = run(TINY.but(q_lens=(2, 0, 1))(m))
        assert a.out[3:].isnan().all()
        assert a.lse[3:].isnan().all()
        assert not a.out[:3].isnan().any()

    def test_an_empty_call(self, m: Maker):
        a = Batch([]).named(m)
        assert decode(*a[:5]).shape == (0, 8, 128)


@pytest.fixture
def debug(monkeypatch):
    """Debug mode, with plans made for it."""
    monkeypatch.setenv("HPCJIT_DEBUG", "1")
    reset_decisions()
    yield
    reset_decisions()


class TestDebugMode:
    def test_a_good_call_passes(self, m: Maker, debug):
        run(TINY(m))
        run(EVERYTHING(m))

    @pytest.mark.parametrize("bad", [-1, 2**31 - 1])
    def test_a_page_id(self, m: Maker, debug, bad: int):
        """It names request, position and value."""
        a = TINY.named(m)
        a.block_table[2, 1] = bad
        with pytest.raises(ArgumentError, match=rf"'block_table'.*got {bad} at request 2, position 1 \("):
            run(a)

    def test_the_first_id_past_the_pool(self, m: Maker, debug):
        a = TINY.named(m)
        a.block_table[0, 0] = a.k_cache.shape[0]
        with pytest.raises(ArgumentError, match=rf"in \[0, {a.k_cache.shape[0]}\)"):
            run(a)

    @pytest.mark.parametrize("bad", [-1, -(2**31), 13, 2**31 - 1])
    def test_a_length(self, m: Maker, debug, bad: int):
        a = TINY.named(m)
        assert a.block_table.shape[1] == 3
        a.block_table.clamp_(0)
        a.seq_lens[1] = bad
        with pytest.raises(ArgumentError, match=rf"'seq_lens'.*in \[0, 12\].*got {bad} at request 1 \("):
            run(a)

    @pytest.mark.parametrize(
        ("starts", "request_"),
        [((0, 4, 5, 6), 0), ((0, 2, 1, 3), 1), ((-1, 0, 1, 2), 0), ((0, 1, 2, 10), 2), ((0, 2, 4, 7), 2)],
    )
    def test_rows(self, m: Maker, debug, starts: tuple[int, ...], request_: int):
        """More than max_q_len, back, or past the ends of q."""
        a = Batch((9, 5, 12), q_lens=(2, 2, 2), kv_heads=1, group=2, page=4).named(m)
        run(a)
        assert a.q.shape[0] == 9
        bad = torch.tensor(starts, dtype=torch.int32, device=m.device)
        with pytest.raises(ArgumentError, match=rf"'cu_seqlens_q' must be .*\[0, 9\].*for request {request_}$"):
            run(a._replace(cu_seqlens_q=bad))


class TestLengthsAreClamped:
    @pytest.mark.parametrize("bad", [-1, -(2**31), 2**31 - 1])
    def test_others_are_right(self, m: Maker, bad: int):
        """A length that no request can have reads nothing outside, and the other requests keep their results."""
        args = Batch((70, 5, 64), more_width=1)(m)
        good = run(args).out.clone()
        a = DecodeArgs(*args)
        a.block_table[1] = a.block_table[0]
        a.block_table[1].clamp_(0)
        a.seq_lens[1] = bad
        out = run(a).out
        torch.testing.assert_close(out[::2], good[::2], rtol=2**-7, atol=2**-7)
        if bad < 0:
            assert not out[1].any()
            assert (a.lse[1] == -torch.inf).all()


def nested(row: torch.Tensor) -> torch.Tensor:
    return torch.nested.as_nested_tensor([row, row, row])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
class TestRefused:
    @pytest.fixture
    def call(self, m: Maker):
        """A good call that single arguments are taken out of."""
        a = TINY.named(m)
        return dict(zip(("q", "k_cache", "v_cache", "block_table", "seq_lens"), a[:5], strict=True)) | {"out": a.out}

    def refused(self, call, argument, match="", error=ArgumentError, **changed):
        changed = call | changed
        watched = [changed["out"]] if isinstance(changed["out"], torch.Tensor) else []
        with rejects(OP, argument, *watched, match=match, error=error):
            decode(**changed)

    def test_q(self, m: Maker, call):
        self.refused(call, "q", "a tensor", q=None, error=ArgumentTypeError)
        self.refused(call, "q", "rank 3", q=m.normal(3, 64))
        self.refused(call, "q", "float8_e4m3fn", q=call["q"].float(), error=ArgumentTypeError)
        self.refused(call, "q", "64/64, 128/128, 256/256, 192/128", q=m.normal(3, 4, 96))
        self.refused(call, "q", "of 3 x 1 rows", q=m.normal(4, 4, 64))
        self.refused(call, "q", "1 to 16 query heads for each of 2 KV heads", q=m.normal(3, 5, 64), out=None)
        self.refused(call, "q", "66 query heads", q=m.normal(3, 66, 64), out=None)
        self.refused(call, "q", "16 bytes", q=m.normal(3, 4, 68)[..., :64])
        self.refused(call, "q", "16 bytes", q=m.normal(3 * 4 * 64 + 1)[1:].view(3, 4, 64))
        self.refused(call, "q", "last axis", q=m.normal(3, 4, 128)[..., ::2])
        self.refused(call, "q", "64/64, 128/128, 256/256, 192/128", q=m.normal(3, 4, 0))
        self.refused(call, "q", "a dense tensor", q=nested(m.normal(4, 64)), error=ArgumentTypeError)

    def test_caches(self, m: Maker, call):
        pool = call["k_cache"].shape
        self.refused(call, "k_cache", "a tensor", k_cache=3, error=ArgumentTypeError)
        self.refused(
            call, "k_cache", "bfloat16 or float8_e4m3fn", k_cache=m.normal(*pool, dtype=FP16), error=ArgumentTypeError
        )
        self.refused(call, "k_cache", "float8_e4m3fn", q=m.normal(3, 4, 64, dtype=FP8), error=ArgumentTypeError)
        self.refused(call, "k_cache", "num_pages, page_size, num_kv_heads", k_cache=m.normal(0, *pool[1:]))
        self.refused(call, "k_cache", "of head_dim 64", k_cache=m.normal(*pool[:3], 128))
        self.refused(call, "v_cache", "before value_head_dim", v_cache=m.normal(pool[0], 8, *pool[2:]))
        self.refused(call, "v_cache", "before value_head_dim", v_cache=m.normal(pool[0] + 1, *pool[1:]))
        self.refused(call, "v_cache", "128/128, 256/256, 192/128", v_cache=m.normal(*pool[:3], 128), out=None)
        self.refused(call, "v_cache", v_cache=call["v_cache"].to(FP8), error=ArgumentTypeError)
        self.refused(call, "k_cache", "16 bytes", k_cache=m.normal(*pool[:3], 68)[..., :64])
        self.refused(call, "k_cache", "stride 0", k_cache=m.normal(*pool[:2], 1, 64).expand(*pool))
        self.refused(call, "v_cache", "last axis", v_cache=m.normal(*pool[:3], 128)[..., ::2])

    def test_requests(self, m: Maker, call):
        table, lengths = call["block_table"], call["seq_lens"]
        self.refused(call, "block_table", "int32", block_table=table.long(), error=ArgumentTypeError)
        self.refused(call, "block_table", "for 3 requests", block_table=table[:2])
        self.refused(call, "block_table", "at least 1", block_table=table[:, :0])
        self.refused(call, "block_table", "last axis", block_table=table.t().contiguous().t())
        self.refused(call, "seq_lens", "int32", seq_lens=lengths.long(), error=ArgumentTypeError)
        self.refused(call, "seq_lens", "[batch]", seq_lens=lengths.view(3, 1))
        self.refused(call, "seq_lens", "a dense tensor", seq_lens=nested(lengths), error=ArgumentTypeError)
        self.refused(call, "seq_lens", "last axis", seq_lens=lengths.repeat_interleave(2)[::2])

    def test_rows(self, m: Maker, call):
        starts = torch.arange(4, dtype=torch.int32, device=m.device)
        self.refused(call, "max_q_len", "given with cu_seqlens_q", cu_seqlens_q=starts)
        self.refused(call, "cu_seqlens_q", "of shape [4]", cu_seqlens_q=starts[:3], max_q_len=1)
        self.refused(call, "cu_seqlens_q", "int32", cu_seqlens_q=starts.long(), max_q_len=1, error=ArgumentTypeError)
        self.refused(call, "max_q_len", "in [1, 8]", cu_seqlens_q=starts, max_q_len=9)
        self.refused(call, "max_q_len", "in [1, 8]", q=m.normal(27, 4, 64), out=None)
        self.refused(call, "max_q_len", "an integer", max_q_len=1.0, error=ArgumentTypeError)

    def test_scales(self, m: Maker, call):
        one = torch.ones(1, device=m.device)
        self.refused(call, "q_scale", "q is not float8", q_scale=one)
        self.refused(call, "q_scale", "q is not float8", q_scale=2.0)
        self.refused(call, "k_scale", "the cache is not float8", k_scale=one)
        self.refused(call, "v_scale", "the cache is not float8", v_scale=0.5)
        a = TINY.but(dtype=FP8).named(m)
        fp8 = dict(zip(call, (*a[:5], a.out), strict=True))
        for bad in (0.0, -1.0, float("nan"), float("inf")):
            self.refused(fp8, "k_scale", k_scale=bad)
        for bad in ("0.5", True, [0.5]):
            self.refused(fp8, "v_scale", "a number or a tensor", v_scale=bad, error=ArgumentTypeError)
        self.refused(fp8, "q_scale", "float32", q_scale=1e39)
        self.refused(fp8, "q_scale", "[3, 4] (total_q, num_q_heads)", q_scale=torch.ones(3, 2, device=m.device))
        self.refused(fp8, "k_scale", "[2] (num_kv_heads)", k_scale=torch.ones(4, device=m.device))
        pages = a.k_cache.shape[0]
        swapped = torch.ones(pages, 2, 4, device=m.device)
        self.refused(fp8, "v_scale", f"[{pages}, 4, 2] (per token and head in layout NHD)", v_scale=swapped)
        self.refused(fp8, "v_scale", "float32", v_scale=one.half(), error=ArgumentTypeError)

    def test_options(self, m: Maker, call):
        self.refused(call, "layout", "'NHD', 'HND'", layout="DHN")
        self.refused(call, "schedule", "'dynamic', 'static', 'invariant'", schedule="fast")
        self.refused(call, "scale", "positive", scale=0.0)
        self.refused(call, "scale", "a number", scale="1", error=ArgumentTypeError)
        self.refused(call, "softcap", "positive", softcap=-30.0)
        for name in ("scale", "softcap"):
            for bad in (1e39, 1e-39):
                self.refused(call, name, "the normal numbers of float32", **{name: bad})
            for bad in (float("nan"), float("inf"), -float("inf")):
                self.refused(call, name, "finite", **{name: bad})
            self.refused(call, name, "a number", error=ArgumentTypeError, **{name: True})
        self.refused(call, "return_lse", "one of False, True", return_lse=1)
        self.refused(call, "return_lse", "one of False, True", return_lse=torch.ones(2))
        self.refused(call, "window", "in [1, ", window=0)
        self.refused(call, "window", "an integer", window=1.5, error=ArgumentTypeError)
        self.refused(call, "sinks", "of shape [4]", sinks=torch.ones(2, device=m.device))
        self.refused(call, "sinks", "float32", sinks=m.normal(4), error=ArgumentTypeError)
        with pytest.raises(Exception, match="fastest"):
            decode(**call, backend="fastest")

    def test_outputs_on_inputs(self, m: Maker):
        """Whatever an output begins on top of, and an input behind it does not count."""
        a = TINY.but(dtype=FP8, q_scale="row", k_scale="token", sinks=True).named(m)
        good = dict(zip(("q", "k_cache", "v_cache", "block_table", "seq_lens"), a[:5], strict=True))
        good |= {"q_scale": a.q_scale, "k_scale": a.k_scale, "sinks": a.sinks, "out": a.out}
        for name in ("q_scale", "k_scale"):
            self.refused(good, "lse", f"other memory than '{name}'", lse=good[name].flatten()[:12].view(3, 4))
        lengths = torch.zeros(12, dtype=torch.int32, device=m.device)
        on_top = lengths.view(torch.float32).view(3, 4)
        self.refused(good, "lse", "other memory than 'seq_lens'", seq_lens=lengths[:3], lse=on_top)
        sinks = torch.zeros(16, device=m.device)
        self.refused(good, "lse", "other memory than 'sinks'", sinks=sinks[:4], lse=sinks[:12].view(3, 4))
        decode(**good | {"sinks": sinks[:4], "lse": sinks[4:].view(3, 4)})
        table = torch.zeros(3, 256, dtype=torch.int32, device=m.device)
        out = table.view(BF16).flatten()[: 3 * 4 * 64].view(3, 4, 64)
        self.refused(good, "out", "other memory than 'block_table'", block_table=table, out=out)

    def test_outputs(self, m: Maker, call):
        self.refused(call, "out", "of shape [3, 4, 64]", out=m.normal(3, 4, 128))
        self.refused(call, "out", "bfloat16 or float16", out=call["out"].float(), error=ArgumentTypeError)
        self.refused(call, "out", "out_dtype", out_dtype=FP16)
        self.refused(call, "out_dtype", "torch.float16", out_dtype=torch.float32)
        self.refused(call, "out", "do not overlap", out=m.normal(1, 4, 64).expand(3, 4, 64))
        self.refused(call, "out", "other memory than 'q'", out=call["q"])
        self.refused(call, "lse", "of shape [3, 4]", lse=m.normal(4, 3, dtype=torch.float32))
        self.refused(call, "lse", "float32", lse=m.normal(3, 4), error=ArgumentTypeError)
        self.refused(call, "lse", "do not overlap", lse=m.normal(1, 4, dtype=torch.float32).expand(3, 4))
