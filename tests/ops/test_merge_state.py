"""attention.merge_state: against attention over all keys, special values, results in place, and calls that are refused."""

from __future__ import annotations

import functools
import importlib.util
import math

import pytest
import torch
from op_tools import operator, rejects, same_bits

from hpcjit.cases import Maker
from hpcjit.errors import ArgumentTypeError, BackendError
from hpcjit.ops import _peers
from hpcjit.ops.attention import merge_state

OP = "attention.merge_state"
NAN, INF = float("nan"), float("inf")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

dtypes = pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of `[tokens, heads, dim]` queries over `[keys, heads, dim]`, and its log-sum-exp, in float64."""
    logits = torch.einsum("thd,khd->thk", q.double(), k.double()) * q.shape[-1] ** -0.5
    return torch.einsum("thk,khd->thd", logits.softmax(-1), v.double()), logits.logsumexp(-1)


def sides(m: Maker, tokens: int = 9, heads: int = 3, dim: int = 64, dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    shapes = ((tokens, heads, dim), dtype), ((tokens, heads), FP32)
    return [m.normal(*shape, dtype=kind) for _ in range(2) for shape, kind in shapes]


def joined(m: Maker, lse_a: float, lse_b: float, a: float = 1.0, b: float = 3.0) -> tuple[float, float]:
    """The join of two results of one value each."""
    out_a, out_b = (torch.full((1, 1, 8), value, device=m.device) for value in (a, b))
    scalars = [torch.full((1, 1), value, device=m.device) for value in (lse_a, lse_b)]
    out, lse = merge_state(out_a, scalars[0], out_b, scalars[1])
    assert torch.equal(out.nan_to_num(7.0, 8.0, 9.0), out[:, :, :1].expand_as(out).nan_to_num(7.0, 8.0, 9.0))
    return out.flatten()[0].item(), lse.item()


class TestFormula:
    @pytest.mark.parametrize("cut", [1, 40, 99])
    def test_attention_over_all_keys(self, m: Maker, cut):
        """Float32 results of both parts join to the result over all keys within a few roundings."""
        q, k, v = (m.normal(n, 4, 64, dtype=FP32) for n in (7, 100, 100))
        parts = [x.float() for part in (slice(0, cut), slice(cut, None)) for x in attention(q, k[part], v[part])]
        out, lse = merge_state(*parts)
        exact_out, exact_lse = attention(q, k, v)
        torch.testing.assert_close(out.double(), exact_out, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-6)

    @dtypes
    @pytest.mark.parametrize("dim", [1, 33, 64, 80, 128, 192, 256, 576])
    def test_definition(self, m: Maker, dtype, dim):
        out_a, lse_a, out_b, lse_b = args = sides(m, dim=dim, dtype=dtype)
        out, lse = merge_state(*args)
        assert (out.dtype, lse.dtype, out.shape, lse.shape) == (dtype, FP32, out_a.shape, lse_a.shape)
        a, b = lse_a.double().exp(), lse_b.double().exp()
        exact = (a[..., None] * out_a.double() + b[..., None] * out_b.double()) / (a + b)[..., None]
        torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)
        torch.testing.assert_close(lse.double(), (a + b).log(), rtol=1e-6, atol=1e-6)

    def test_many_parts(self, m: Maker):
        """Joined one after the other, each in the place of the first."""
        q, k, v = (m.normal(n, 2, 32, dtype=FP32) for n in (5, 128, 128))
        parts = [[x.float() for x in attention(q, k[i : i + 16], v[i : i + 16])] for i in range(0, 128, 16)]
        out, lse = parts[0]
        for part in parts[1:]:
            merge_state(out, lse, *part, out=out, lse=lse)
        exact_out, exact_lse = attention(q, k, v)
        torch.testing.assert_close(out.double(), exact_out, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(lse.double(), exact_lse, rtol=2e-6, atol=2e-6)


class TestSpecialValues:
    @pytest.mark.parametrize("other", [NAN, INF, -INF, 2.0])
    def test_a_side_without_keys_contributes_nothing(self, m: Maker, other):
        assert joined(m, -INF, 0.75, a=other) == (3.0, 0.75)
        assert joined(m, 0.75, -INF, b=other) == (1.0, 0.75)

    @pytest.mark.parametrize("value", [NAN, INF, 2.0])
    def test_two_sides_without_keys(self, m: Maker, value):
        assert joined(m, -INF, -INF, a=value, b=value) == (0.0, -INF)

    def test_infinite_weight(self, m: Maker):
        assert joined(m, INF, 5.0, b=NAN) == (1.0, INF)
        assert joined(m, 5.0, INF, a=NAN) == (3.0, INF)
        assert joined(m, INF, INF) == (2.0, INF)
        assert joined(m, INF, -INF, b=NAN) == (1.0, INF)

    @pytest.mark.parametrize("other", [NAN, INF, -INF, 0.0])
    def test_nan(self, m: Maker, other):
        for pair in ((NAN, other), (other, NAN)):
            assert all(math.isnan(value) for value in joined(m, *pair))

    @pytest.mark.parametrize("offset", [-1e4, -100.0, 0.0, 100.0, 1e4, 1e30])
    def test_an_offset_of_both_changes_nothing(self, m: Maker, offset):
        assert joined(m, offset, offset) == (2.0, pytest.approx(offset + math.log(2), rel=1e-6))

    def test_far_apart(self, m: Maker):
        """A weight that is no float32 counts as none."""
        assert joined(m, 0.0, -200.0, b=NAN) == (1.0, 0.0)
        out, lse = joined(m, 0.0, -80.0, b=1e30)
        assert out == pytest.approx(1 + 1e30 * math.exp(-80), rel=1e-5)
        assert lse == pytest.approx(math.exp(-80), rel=1e-5), "not lost in the 0 beside it"

    def test_values_that_are_not_finite_stay(self, m: Maker):
        assert joined(m, 0.0, 0.0, a=INF) == (INF, pytest.approx(math.log(2)))
        assert math.isnan(joined(m, 0.0, 0.0, b=NAN)[0])


class TestInPlace:
    @pytest.mark.parametrize("dim", [64, 100, 1000, 3000])
    @pytest.mark.parametrize(("out", "lse"), [(0, None), (None, 1), (0, 1), (2, 3), (0, 3), (2, 1)])
    def test_same_bits(self, m: Maker, dim, out, lse):
        args = sides(m, tokens=50, dim=dim)
        expected = merge_state(*args)
        mine = [x.clone() for x in args]
        targets = {"out": None if out is None else mine[out], "lse": None if lse is None else mine[lse]}
        found = merge_state(*mine, **targets)
        assert same_bits(found[0], expected[0])
        assert same_bits(found[1], expected[1])
        for i, (before, after) in enumerate(zip(args, mine, strict=True)):
            assert i in (out, lse) or same_bits(before, after)

    def test_one_side_twice(self, m: Maker):
        """A result joined with itself stays, and its weight doubles."""
        out_a, lse_a, *_ = sides(m, dtype=FP32)
        out, lse = merge_state(out_a, lse_a, out_a, lse_a)
        assert torch.equal(out, out_a)
        torch.testing.assert_close(lse, lse_a + math.log(2))

    def test_compiled(self, m: Maker):
        def model(*args):
            merge_state(*args, out=args[0], lse=args[1])
            return args[0] + 1

        args = sides(m)
        compiled = [x.clone() for x in args]
        expected = model(*args)
        torch._dynamo.reset()
        assert same_bits(torch.compile(model, fullgraph=True, backend="aot_eager")(*compiled), expected)
        for a, b in zip(args, compiled, strict=True):
            assert same_bits(a, b)


class TestRefused:
    def test_shapes(self, m: Maker):
        out_a, lse_a, out_b, lse_b = sides(m)
        with rejects(OP, "out_a"):
            merge_state(out_a[0], lse_a, out_b, lse_b)
        with rejects(OP, "out_a"):
            merge_state(out_a[..., :0], lse_a, out_b[..., :0], lse_b)
        with rejects(OP, "out_b"):
            merge_state(out_a, lse_a, out_b[:5], lse_b)
        with rejects(OP, "lse_a"):
            merge_state(out_a, lse_a.t(), out_b, lse_b)
        with rejects(OP, "lse_b"):
            merge_state(out_a, lse_a, out_b, lse_b[:, :1])
        with rejects(OP, "out"):
            merge_state(out_a, lse_a, out_b, lse_b, out=out_a[:, :2].clone())
        with rejects(OP, "lse"):
            merge_state(out_a, lse_a, out_b, lse_b, lse=lse_a[:3].clone())

    def test_dtypes(self, m: Maker):
        out_a, lse_a, out_b, lse_b = sides(m)
        refused = functools.partial(rejects, error=ArgumentTypeError)
        with refused(OP, "out_a"):
            merge_state(out_a.double(), lse_a, out_b, lse_b)
        with refused(OP, "out_b"):
            merge_state(out_a, lse_a, out_b.half(), lse_b)
        with refused(OP, "lse_a"):
            merge_state(out_a, lse_a.to(BF16), out_b, lse_b)
        with refused(OP, "lse"):
            merge_state(out_a, lse_a, out_b, lse_b, lse=lse_a.double())

    def test_views(self, m: Maker):
        out_a, lse_a, out_b, lse_b = sides(m)
        with rejects(OP, "out_a", match="contiguous"):
            merge_state(out_a[..., ::2], lse_a, out_b[..., ::2], lse_b)
        with rejects(OP, "out", match="overlap"):
            merge_state(out_a, lse_a, out_b, lse_b, out=out_a[:1].clone().expand_as(out_a))
        with rejects(OP, "lse", match="overlap"):
            merge_state(out_a, lse_a, out_b, lse_b, lse=lse_a[:, :1].clone().expand_as(lse_a))

    def test_another_view_of_an_input(self, m: Maker):
        """In place means element by element."""
        pool, lse_a, out_b, lse_b = sides(m, tokens=6, heads=6)
        with rejects(OP, "out", pool, match="in whose place"):
            merge_state(pool, lse_a, out_b, lse_b, out=pool.transpose(0, 1))
        with rejects(OP, "lse", lse_b, match="in whose place"):
            merge_state(pool, lse_a, out_b, lse_b, lse=lse_b.t())

    def test_one_memory_for_both_results(self, m: Maker):
        out_a, lse_a, out_b, lse_b = sides(m, dim=1, dtype=FP32)
        with rejects(OP, "lse", match="both are written"):
            merge_state(out_a, lse_a, out_b, lse_b, out=out_a, lse=out_a[..., 0])

    def test_the_memory_of_another_kind_of_input(self, m: Maker):
        """Values and log-sum-exps are read at different times."""
        out_a, lse_a, out_b, lse_b = sides(m, tokens=5, heads=3, dim=4, dtype=FP32)
        buffer = m.normal(5 * 3 * 4, dtype=FP32)
        values, lse = buffer.view(5, 3, 4), buffer[:15].view(5, 3)
        with rejects(OP, "out", buffer, match="other memory than 'lse_a'"):
            merge_state(out_a, lse, out_b, lse_b, out=values)
        with rejects(OP, "out", buffer, match="other memory than 'lse_b'"):
            merge_state(out_a, lse_a, out_b, lse, out=values)
        with rejects(OP, "lse", buffer, match="other memory than 'out_a'"):
            merge_state(values, lse_a, out_b, lse_b, lse=lse)
        with rejects(OP, "lse", buffer, match="other memory than 'out_b'"):
            merge_state(out_a, lse_a, values, lse_b, lse=lse)

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    def test_nested(self, m: Maker):
        out_a, *rest = sides(m)
        with rejects(OP, "out_a", match="nested", error=ArgumentTypeError):
            merge_state(torch.nested.as_nested_tensor(list(out_a)), *rest)

    def test_gradients(self, m: Maker):
        args = sides(m)
        args[3].requires_grad_()
        with rejects(OP, "lse_b"):
            merge_state(*args)


class TestSglang:
    @pytest.mark.parametrize("which", range(4))
    def test_strides_are_refused(self, monkeypatch, which):
        monkeypatch.setattr(_peers, "sglang", lambda *names: pytest.fail("called"))
        m = Maker("cpu")
        args = [*sides(m, heads=9), m.poison(9, 9, 64), m.poison(9, 9, dtype=FP32)]
        args[which] = args[which].transpose(0, 1)
        with pytest.raises(BackendError, match="contiguous"):
            operator(OP).forward_aot(*args)

    @pytest.mark.gpu
    @pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="no SGLang")
    def test_rule(self):
        m = Maker("cuda")
        args = (*sides(m), m.poison(9, 3, 64), m.poison(9, 3, dtype=FP32))
        operator(OP)(*args, backend="aot")
        torch.testing.assert_close(args[4], merge_state(*args[:4])[0], rtol=2**-7, atol=1e-3)
