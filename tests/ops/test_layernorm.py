"""The layernorm group: formulas against torch's own, what may share memory, and calls that are refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from op_tools import rejects, same_bits

from hpcjit import build
from hpcjit.errors import ArgumentTypeError, CaptureError
from hpcjit.fused_op import reset_decisions
from hpcjit.ops.layernorm import (
    fused_add_rmsnorm,
    gemma_fused_add_rmsnorm,
    gemma_rmsnorm,
    layernorm,
    qk_norm,
    rmsnorm,
    rmsnorm_quant_fp8,
)

# Against torch in fp32: both round each of about four operations, and sums of 1000 squares differ in order.
CLOSE = {"rtol": 2e-6, "atol": 2e-6}


@pytest.fixture
def x(m):
    return m.normal(19, 1000, dtype=torch.float32)


@pytest.fixture
def weight(m):
    return m.normal(1000, dtype=torch.float32)


class TestFormulas:
    def test_rmsnorm(self, x, weight):
        torch.testing.assert_close(rmsnorm(x, weight, 1e-3), F.rms_norm(x, (1000,), weight, 1e-3), **CLOSE)

    def test_gemma_rmsnorm(self, x, weight):
        expected = F.rms_norm(x, (1000,), 1 + weight, 1e-2)
        torch.testing.assert_close(gemma_rmsnorm(x, weight, 1e-2), expected, **CLOSE)

    @pytest.mark.parametrize("affine", [True, False])
    def test_layernorm(self, x, weight, m, affine):
        bias = m.normal(1000, dtype=torch.float32) if affine else None
        expected = F.layer_norm(x, (1000,), weight, bias, 1e-2)
        torch.testing.assert_close(layernorm(x, weight, bias, 1e-2), expected, **CLOSE)

    @pytest.mark.parametrize(("function", "offset"), [(fused_add_rmsnorm, 0), (gemma_fused_add_rmsnorm, 1)])
    def test_fused_add(self, x, weight, m, function, offset):
        residual = m.normal(19, 1000, dtype=torch.float32)
        total = x + residual
        expected = F.rms_norm(total, (1000,), weight + offset, 1e-2)
        assert function(x, residual, weight, 1e-2) is None
        assert torch.equal(residual, total)
        torch.testing.assert_close(x, expected, **CLOSE)

    def test_the_sum_is_not_rounded_before_it_is_normalised(self, m):
        """bf16: residual + 2^-9 rounds to residual, but its norm moves."""
        x, residual = (torch.full((1, 256), v, dtype=torch.bfloat16, device=m.device) for v in (2.0**-9, 1.0))
        x[0, 0], residual[0, 0] = 64.0, 0.0
        exact = residual.double() + x.double()
        fused_add_rmsnorm(x, residual, torch.ones(256, dtype=torch.bfloat16, device=m.device), 0.0)
        expected = exact * exact.square().mean().rsqrt()
        assert torch.equal(x, expected.to(torch.bfloat16))

    def test_qk_norm(self, m):
        q, k = m.normal(5, 4, 64, dtype=torch.float32), m.normal(5, 2, 64, dtype=torch.float32)
        q_weight, k_weight = m.normal(64, dtype=torch.float32), m.normal(64, dtype=torch.float32)
        expected = F.rms_norm(q, (64,), q_weight, 1e-2), F.rms_norm(k, (64,), k_weight, 1e-2)
        assert qk_norm(q, k, q_weight, k_weight, 1e-2) is None
        torch.testing.assert_close((q, k), expected, **CLOSE)

    def test_qk_norm_leaves_values_of_a_fused_projection(self, m):
        qkv = m.normal(7, 12, 128)
        values = qkv[:, 10:].clone()
        weight = m.normal(128)
        qk_norm(qkv[:, :8], qkv[:, 8:10], weight, weight)
        assert same_bits(qkv[:, 10:], values)

    def test_rmsnorm_quant_restores_the_norm(self, x, weight):
        out, scale = rmsnorm_quant_fp8(x, weight, 1e-2)
        expected = F.rms_norm(x, (1000,), weight, 1e-2)
        largest = expected.abs().amax(-1, keepdim=True)
        torch.testing.assert_close(scale, largest / 448, **CLOSE)
        # Half a step is 2^-4 of a value, and never less than half of 2^-9 of the scale.
        assert ((out.float() * scale - expected).abs() <= expected.abs() * 2**-4 + scale * 2**-10 * 1.01).all()


def test_nan_stays_in_its_row(m):
    """A row's bits depend on that row alone."""
    x, weight = m.normal(9, 520), m.normal(520)
    clean = rmsnorm(x, weight)
    x[4, 17] = torch.nan
    dirty = rmsnorm(x, weight)
    assert dirty[4].isnan().all()
    keep = [i for i in range(9) if i != 4]
    assert same_bits(clean[keep], dirty[keep])


def test_zeros_and_eps_zero(m):
    """A row of zeros with eps = 0 is 0 * inf: NaN like in torch, never another row's."""
    x = m.normal(3, 64, dtype=torch.float32)
    x[1] = 0
    weight = torch.ones(64, device=m.device)
    out = rmsnorm(x, weight, 0.0)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()
    assert (rmsnorm(x, weight, 1e-6)[1] == 0).all()


class TestRefused:
    OP = "layernorm.rmsnorm"

    def test_dtype(self, m):
        with rejects(self.OP, "input", error=ArgumentTypeError, match="bfloat16 or float16 or float32"):
            rmsnorm(m.normal(2, 8, dtype=torch.float64), m.normal(8))

    def test_weight_shape_and_dtype(self, m):
        out = m.poison(2, 8)
        with rejects(self.OP, "weight", out, match="of shape [8]"):
            rmsnorm(m.normal(2, 8), m.normal(9), out=out)
        with rejects(self.OP, "weight", out, error=ArgumentTypeError):
            rmsnorm(m.normal(2, 8), m.normal(8, dtype=torch.float16), out=out)

    def test_strided_last_axis(self, m):
        with rejects(self.OP, "input", match="contiguous in its last axis"):
            rmsnorm(m.normal(4, 16)[:, ::2], m.normal(8))

    def test_axes_that_do_not_fold(self, m):
        with rejects(self.OP, "input", match="fold into one"):
            rmsnorm(m.normal(4, 3, 8).transpose(0, 1), m.normal(8))

    def test_out(self, m):
        x, weight = m.normal(4, 8), m.normal(8)
        with rejects(self.OP, "out", match="of shape [4, 8]"):
            rmsnorm(x, weight, out=m.poison(4, 9))
        with rejects(self.OP, "out", error=ArgumentTypeError):
            rmsnorm(x, weight, out=m.poison(4, 8, dtype=torch.float32))
        row = m.poison(1, 8)
        with rejects(self.OP, "out", row, match="do not overlap"):
            rmsnorm(x, weight, out=row.expand(4, 8))

    @pytest.mark.parametrize("eps", [-1.0, float("nan"), float("inf")])
    def test_eps(self, m, eps):
        out = m.poison(5, 24)
        with rejects(self.OP, "eps", out):
            rmsnorm(m.normal(5, 24), m.normal(24), eps, out=out)

    def test_no_columns(self, m):
        with rejects(self.OP, "input", match="at least one column"):
            rmsnorm(m.normal(2, 0), m.normal(0))

    def test_expanded_input_is_fine(self, m):
        x, weight = m.normal(1, 64), m.normal(64)
        assert same_bits(rmsnorm(x.expand(3, 64), weight), rmsnorm(x, weight).expand(3, 64))

    def test_fused_add_on_overlapping_rows(self, m):
        x, residual = m.normal(1, 8), m.normal(4, 8)
        with rejects("layernorm.fused_add_rmsnorm", "input", x, residual, match="do not overlap"):
            fused_add_rmsnorm(x.expand(4, 8), residual, m.normal(8))

    def test_scale_of_quant(self, m):
        x, weight = m.normal(4, 8), m.normal(8)
        with rejects("layernorm.rmsnorm_quant_fp8", "scale", match="of shape [1]"):
            rmsnorm_quant_fp8(x, weight, scale=torch.ones(4, 1, device=m.device))

    def test_bias_dtype(self, m):
        x, weight, bias = m.normal(4, 8), m.normal(8), m.normal(8, dtype=torch.float32)
        with rejects("layernorm.layernorm", "bias", error=ArgumentTypeError, match="like weight"):
            layernorm(x, weight, bias)


class TestQkNormRefused:
    OP = "layernorm.qk_norm"

    def test_rank(self, m):
        q = m.normal(2, 64)
        with rejects(self.OP, "q", q, match="rank 3"):
            qk_norm(q, q, m.normal(64), m.normal(64))

    def test_tokens_and_head_dim_of_k(self, m):
        q, w = m.normal(2, 4, 64), m.normal(64)
        for k in (m.normal(3, 4, 64), m.normal(2, 4, 32)):
            with rejects(self.OP, "k", q, k, match="like q"):
                qk_norm(q, k, w, w)

    def test_dtypes(self, m):
        q, w = m.normal(2, 4, 64), m.normal(64)
        with rejects(self.OP, "k", q, error=ArgumentTypeError):
            qk_norm(q, m.normal(2, 4, 64, dtype=torch.float16), w, w)
        with rejects(self.OP, "k_weight", q, error=ArgumentTypeError, match="like q_weight"):
            qk_norm(q, m.normal(2, 4, 64), w, w.float())

    def test_weight_shape(self, m):
        q, w = m.normal(2, 4, 64), m.normal(64)
        with rejects(self.OP, "k_weight", q, match="of shape [64]"):
            qk_norm(q, m.normal(2, 4, 64), w, m.normal(32))

    def test_heads_that_overlap(self, m):
        q, w = m.normal(2, 1, 64), m.normal(64)
        with rejects(self.OP, "q", q, match="do not overlap"):
            qk_norm(q.expand(2, 4, 64), m.normal(2, 4, 64), w, w)


def test_one_tensor_in_two_written_places_is_refused(m):
    """Also when the same shapes have run on two tensors before: the plan of that call must not serve this one."""
    x, y, weight = m.normal(3, 64), m.normal(3, 64), m.normal(64)
    fused_add_rmsnorm(x, y, weight)
    with rejects("layernorm.fused_add_rmsnorm", "residual", x, match="other memory"):
        fused_add_rmsnorm(x, x, weight)
    q = m.normal(3, 2, 64)
    qk_norm(q, q.clone(), weight, weight)
    with rejects("layernorm.qk_norm", "k", q, match="other memory"):
        qk_norm(q, q, weight, weight)


@pytest.mark.gpu
def test_a_cold_kernel_is_refused_while_a_graph_is_captured():
    """The error names the operator that was called, not the template it shares; afterwards all is as before."""
    x, weight = torch.randn(3, 264, device="cuda"), torch.randn(264, device="cuda")
    out = torch.empty_like(x)
    build.forget()
    reset_decisions()
    with (
        pytest.raises(CaptureError, match=r"Call it once before capture.*hpcjit prewarm layernorm\.gemma_rmsnorm"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        gemma_rmsnorm(x, weight, out=out)
    gemma_rmsnorm(x, weight, out=out)
    want = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gemma_rmsnorm(x, weight, out=out)
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, want)
