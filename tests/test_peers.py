"""Adapters of other packages: what they are called with, and that nothing of them is imported before."""

from __future__ import annotations

import importlib
import sys
import types

import pytest
import torch

from hpcjit import numerics
from hpcjit.cases import Maker, cases_of
from hpcjit.cases.moe_experts import Experts
from hpcjit.errors import ArgumentError, BackendError
from hpcjit.fused_op import BaseFusedOp
from hpcjit.ops import _peers
from hpcjit.registry import all_specs
from hpcjit.replay import operator
from hpcjit.spec import KernelBackend

PEERS = (
    KernelBackend.FLASHINFER,
    KernelBackend.FLASHINFER_XQA,
    KernelBackend.FLASH_ATTN,
    KernelBackend.DEEPGEMM,
    KernelBackend.AOT,
)
DECLARED = [(spec.op, spec.backend) for spec in all_specs() if spec.backend in PEERS]


@pytest.mark.parametrize(("op", "backend"), DECLARED)
class TestEveryAdapter:
    def test_is_implemented(self, op: str, backend: KernelBackend):
        assert getattr(type(operator(op)), backend.method) is not getattr(BaseFusedOp, backend.method)

    def test_is_unusable_without_its_package(self, op: str, backend: KernelBackend, monkeypatch):
        for package in ("flashinfer", "flash_attn_interface", "deep_gemm", "sglang"):
            monkeypatch.setitem(sys.modules, package, None)
        (spec,) = [spec for spec in all_specs() if (spec.op, spec.backend) == (op, backend)]
        from hpcjit.spec import DeviceType, PlatformInfo

        reason = spec.why_not(PlatformInfo(DeviceType.CUDA, 9, 0))
        assert "which is not installed" in reason

    def test_checks_its_arguments_first(self, op: str, backend: KernelBackend, monkeypatch):
        for package in ("flashinfer", "flash_attn", "deep_gemm", "sglang"):
            monkeypatch.setattr(_peers, package, lambda *names: pytest.fail("called"))
        args = [value.to(torch.int8) if isinstance(value, torch.Tensor) else value for value in demo_args(op)]
        with pytest.raises(ArgumentError):
            getattr(operator(op), backend.method)(*args)


def demo_args(op: str):
    return cases_of(op, "demo")[0].args("cpu")


# Stand-ins that compute with torch what the peer's function is documented to compute, from the peer's own argument order.


def rmsnorm(input, weight, eps, out):
    x = input.float()
    out.copy_(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float())


def fused_add_rmsnorm(input, residual, weight, eps):
    x = input.float() + residual.float()
    residual.copy_(x)
    rmsnorm(x, weight, eps, input)


def per_token_quant(input, output_q, output_s):
    output_s.copy_(input.float().abs().amax(-1, keepdim=True) / 448)
    output_q.copy_((input.float() / output_s).to(torch.float8_e4m3fn))


def per_tensor_quant(input, output_q, output_s, is_static):
    if not is_static:
        output_s.copy_(torch.maximum(output_s, input.float().abs().max() / 448))
    output_q.copy_((input.float() / output_s).to(torch.float8_e4m3fn))


def group_quant(input, output_q, output_s, group_size):
    groups = input.float().unflatten(-1, (-1, group_size))
    output_s.copy_(groups.abs().amax(-1) / 448)
    output_q.copy_((groups / output_s.unsqueeze(-1)).flatten(-2).to(torch.float8_e4m3fn))


def topk_softmax(topk_weights, topk_ids, gating_output, renormalize, moe_softcapping, correction_bias):
    assert correction_bias is None, "is added to the logits"
    weights, ids = gating_output.float().softmax(-1).topk(topk_ids.shape[-1])
    topk_weights.copy_(weights / weights.sum(-1, keepdim=True) if renormalize else weights)
    topk_ids.copy_(ids)


def topk_sigmoid(
    topk_weights, topk_ids, gating_output, renormalize, correction_bias, routed_scaling_factor, num_fused_shared_experts
):
    scores = gating_output.float().sigmoid()
    ids = (scores if correction_bias is None else scores + correction_bias).topk(topk_ids.shape[-1]).indices
    weights = scores.gather(-1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True) * routed_scaling_factor
    topk_weights.copy_(weights)
    topk_ids.copy_(ids)


def fused_topk_deepseek(scores, bias, n_group, topk_group, topk, routed_scaling_factor, topk_values, topk_indices):
    choice = (scores.sigmoid() + bias).unflatten(-1, (n_group, -1))
    dropped = choice.topk(2).values.sum(-1).topk(n_group - topk_group, largest=False).indices
    choice = choice.scatter(1, dropped.unsqueeze(-1).expand(-1, -1, choice.shape[-1]), -torch.inf).flatten(1)
    ids = choice.topk(topk).indices
    weights = scores.sigmoid().gather(-1, ids)
    topk_values.copy_(weights / weights.sum(-1, keepdim=True) * routed_scaling_factor)
    topk_indices.copy_(ids)


def moe_align_block_size(
    topk_ids,
    num_experts,
    block_size,
    sorted_token_ids,
    expert_ids,
    num_tokens_post_pad,
    cumsum_buffer,
    pad_sorted_token_ids=False,
    *,
    pad_expert_ids=False,
):
    """Expert e is bucket e + 1 of `num_experts` of them; ids of no expert are in bucket 0."""
    assert pad_sorted_token_ids
    assert pad_expert_ids
    assert cumsum_buffer.numel() == num_experts + 1
    sorted_token_ids.fill_(topk_ids.numel())
    expert_ids.fill_(-1)
    at = 0
    for bucket in range(num_experts):
        pairs = (topk_ids.flatten() + 1 == bucket).nonzero().flatten()
        sorted_token_ids[at : at + len(pairs)] = pairs
        end = at + -(-len(pairs) // block_size) * block_size
        expert_ids[at // block_size : end // block_size] = bucket - 1
        at = end
    num_tokens_post_pad.fill_(at)


def merge_state(prefix_output, prefix_lse, suffix_output, suffix_lse, output, output_lse):
    output_lse.copy_(torch.logaddexp(prefix_lse, suffix_lse))
    shares = [(lse - output_lse).exp().unsqueeze(-1) for lse in (prefix_lse, suffix_lse)]
    output.copy_(prefix_output.float() * shares[0] + suffix_output.float() * shares[1])


def qknorm(q, k, q_weight, k_weight, eps):
    rmsnorm(q, q_weight, eps, q)
    rmsnorm(k, k_weight, eps, k)


def gated(function):
    def call(input, out):
        x, up = input.float().chunk(2, -1)
        out.copy_(function(x) * up)

    return call


GATED = {
    "silu_and_mul": gated(torch.nn.functional.silu),
    "gelu_and_mul": gated(torch.nn.functional.gelu),
    "gelu_tanh_and_mul": gated(lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
}
FLASHINFER = {
    "norm": {
        "rmsnorm": rmsnorm,
        "fused_add_rmsnorm": fused_add_rmsnorm,
        "gemma_rmsnorm": lambda x, w, eps, out: rmsnorm(x, w.float() + 1, eps, out),
        "gemma_fused_add_rmsnorm": lambda x, r, w, eps: fused_add_rmsnorm(x, r, w.float() + 1, eps),
    },
    "activation": GATED,
    "fused_moe": {"fused_topk_deepseek": fused_topk_deepseek},
}
SGLANG = {
    "layernorm.norm": {
        "rmsnorm": lambda x, w, out, eps: rmsnorm(x, w, eps, out),
        "fused_add_rmsnorm": fused_add_rmsnorm,
        "fused_inplace_qknorm": qknorm,
    },
    "activation.activation": GATED,
    "quantization.per_token_quant_fp8": {"per_token_quant_fp8": per_token_quant},
    "quantization.per_tensor_quant_fp8": {"per_tensor_quant_fp8": per_tensor_quant},
    "quantization.per_token_group_quant": {"per_token_group_quant": group_quant},
    "moe.moe_topk_softmax": {"topk_softmax": topk_softmax},
    "moe.moe_topk_sigmoid": {"topk_sigmoid": topk_sigmoid},
    "moe.moe_align": {"moe_align_block_size": moe_align_block_size},
    "moe.moe_topk_sum": {"moe_topk_sum": lambda x, out: out.copy_(x.float().sum(1))},
    "attention.merge_state": {"merge_state_triton": merge_state},
}
APART = ("layernorm.layernorm", "attention.decode", "moe.fused_moe")  # below, and in ops/test_decode_peers.py
COMPARED = [(op, backend) for op, backend in DECLARED if op not in APART]


@pytest.mark.parametrize(("op", "backend"), COMPARED)
def test_arguments_reach_the_peer_in_its_order(op: str, backend: KernelBackend, monkeypatch):
    monkeypatch.setattr(_peers, "flashinfer", lambda module, name: FLASHINFER[module][name])
    monkeypatch.setattr(_peers, "sglang", lambda module, name: SGLANG[module][name])
    found = numerics.check(operator(op), demo_args(op), getattr(operator(op), backend.method))
    assert all(deviation.ok for deviation in found), [str(deviation) for deviation in found]


class TestGates:
    """Peers read raw rows: what they would read as something else is refused."""

    @pytest.mark.parametrize(
        ("op", "backend"),
        [
            ("moe.topk_softmax", KernelBackend.AOT),
            ("moe.topk_sigmoid", KernelBackend.AOT),
            ("moe.grouped_topk", KernelBackend.FLASHINFER),
        ],
    )
    def test_views(self, op: str, backend: KernelBackend):
        args = list(demo_args(op))
        for i, value in enumerate(args):
            if isinstance(value, torch.Tensor) and value.ndim == 2:
                wide = value.new_zeros(value.shape[0], value.shape[1] + 8)
                strided = [*args[:i], wide[:, : value.shape[1]].copy_(value), *args[i + 1 :]]
                with pytest.raises(BackendError, match="contiguous"):
                    getattr(operator(op), backend.method)(*strided)

    def test_ids_that_are_a_view(self):
        args = list(demo_args("moe.moe_align_block_size"))
        args[0] = args[0].repeat(1, 2)[:, : args[0].shape[1]]
        with pytest.raises(BackendError, match="contiguous"):
            operator("moe.moe_align_block_size").forward_aot(*args)

    def test_bias_of_a_softmax(self):
        """Ours is added to the probabilities, SGLang's to the logits."""
        logits, *options, _, num_valid_tokens, weights, ids = demo_args("moe.topk_softmax")
        bias = torch.zeros(logits.shape[1])
        with pytest.raises(BackendError, match="it has no bias"):
            operator("moe.topk_softmax").forward_aot(logits, *options, bias, num_valid_tokens, weights, ids)


class TestLayernormOfFlashInfer:
    def args(self, dtype: torch.dtype = torch.bfloat16, weights: torch.dtype = torch.float32):
        x = torch.randn(4, 64, dtype=dtype)
        return x, torch.randn(64, dtype=weights), torch.randn(64, dtype=weights), 1e-5, torch.empty_like(x)

    def test_writes_into_out(self, monkeypatch):
        def kernel(out, input, gamma, beta, eps):
            out.copy_(torch.nn.functional.layer_norm(input.float(), input.shape[-1:], gamma, beta, eps))

        module = types.SimpleNamespace(layernorm=kernel)
        monkeypatch.setattr(_peers, "flashinfer", lambda *names: lambda: module)
        op = operator("layernorm.layernorm")
        assert all(d.ok for d in numerics.check(op, self.args(), op.forward_flashinfer))

    def test_refuses_what_the_kernel_cannot_take(self):
        with pytest.raises(ArgumentError, match="float32"):
            operator("layernorm.layernorm").forward_flashinfer(*self.args(weights=torch.bfloat16))


class TestFusedMoeOfDeepGemm:
    """With a stand-in that multiplies block by block, as DeepGEMM does, and leaves the rows of blocks of nobody."""

    ALIGN = 16

    @pytest.fixture(autouse=True)
    def package(self, monkeypatch):
        functions = {
            "get_mk_alignment_for_contiguous_layout": lambda: self.ALIGN,
            "m_grouped_bf16_gemm_nt_contiguous": lambda a, b, d, m: self.product(a.double(), b.double(), d, m),
            "m_grouped_fp8_gemm_nt_contiguous": self.blockwise,
        }
        monkeypatch.setattr(_peers, "deep_gemm", functions.__getitem__)

    def product(self, a, b, d, m_indices):
        assert m_indices.dtype == torch.int32
        assert len(m_indices) == len(a) == len(d)
        d.fill_(float("nan"))
        for first, expert in enumerate(m_indices[:: self.ALIGN].tolist()):
            rows = slice(first * self.ALIGN, (first + 1) * self.ALIGN)
            assert set(m_indices[rows].tolist()) == {expert}
            if expert >= 0:
                d[rows] = (a[rows] @ b[expert].t()).to(d.dtype)

    def blockwise(self, a, b, d, m_indices):
        x = a[0].double() * a[1].repeat_interleave(128, 1)
        self.product(x, b[0].double() * b[1].repeat_interleave(128, 1).repeat_interleave(128, 2), d, m_indices)

    @pytest.mark.parametrize(("quant", "codes"), [("bf16", False), ("fp8_block", True), ("fp8_block", False)])
    @pytest.mark.parametrize("offset", [0, 8])
    def test_rule(self, quant: str, codes: bool, offset: int):
        sizes = Experts(
            *(21, 8, 256, 128, 4), quant=quant, codes=codes, shared=True, offset=offset, global_experts=2 * offset
        )
        op = operator("moe.fused_moe")
        args = sizes.make(Maker("cpu"))
        args[3][5] = -1
        found = numerics.check(op, args, op.forward_deepgemm)
        assert all(deviation.ok for deviation in found), [str(deviation) for deviation in found]

    def test_no_tokens(self):
        operator("moe.fused_moe").forward_deepgemm(*Experts(0, 4, 128, 128, 2, quant="fp8_block").make(Maker("cpu")))

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"quant": "fp8_tensor"}, "blockwise"),
            ({"quant": "fp8_block", "activation": "gelu"}, "SiLU"),
            ({"quant": "fp8_block", "on_input": True}, "on the output"),
            ({"quant": "fp8_block", "inner": 192}, "whole blocks of 128"),
        ],
    )
    def test_refuses_what_it_does_not_have(self, options: dict, reason: str):
        sizes = Experts(**({"tokens": 3, "experts": 4, "hidden": 128, "inner": 128, "top_k": 2} | options))
        with pytest.raises(BackendError, match=f"deepgemm cannot run this call: it.*{reason}"):
            operator("moe.fused_moe").forward_deepgemm(*sizes.make(Maker("cpu")))


class TestLightSglang:
    """A package that looks like SGLang: importing it as a whole fails, its kernels alone do not."""

    @pytest.fixture(autouse=True)
    def package(self, tmp_path, monkeypatch):
        root = tmp_path / "sglang"
        for folder in ("kernels/ops/moe", "kernels/jit", "srt/utils"):
            (root / folder).mkdir(parents=True)
        for init in ("", "kernels", "kernels/ops", "kernels/ops/moe", "srt", "srt/utils"):
            (root / init / "__init__.py").write_text("raise RuntimeError('the whole server')\n")
        (root / "kernels" / "jit" / "__init__.py").write_text("")
        (root / "kernels" / "ops" / "moe" / "thing.py").write_text(
            "from sglang.srt.utils.custom_op import register_custom_op\n"
            "from sglang.srt.utils.common import is_cuda, get_cuda_version\n"
            "from sglang.srt.environ import envs\n"
            "import sglang.kernels.jit\n"
            "@register_custom_op(op_name='x', mutates_args=['y'])\n"
            "def first(y): return y\n"
            "@register_custom_op\n"
            "def second(y): return is_cuda(), get_cuda_version()[0], envs.HPCJIT_TEST_NAME.get()\n"
        )
        for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.syspath_prepend(str(tmp_path))
        importlib.invalidate_caches()
        _peers.sglang.cache_clear()
        yield
        _peers.sglang.cache_clear()
        for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
            del sys.modules[name]

    def test_kernels_are_imported_without_the_server(self, monkeypatch):
        monkeypatch.setenv("HPCJIT_TEST_NAME", "here")
        assert _peers.sglang("moe.thing", "first")(5) == 5
        assert _peers.sglang("moe.thing", "second")(5)[0] is True
        assert _peers.sglang("moe.thing", "second")(5)[2] == "here"

    def test_a_real_environment_module_is_used(self, tmp_path):
        (tmp_path / "sglang" / "srt" / "environ.py").write_text(
            "class V:\n    def get(self): return 'real'\nclass E:\n    def __getattr__(self, name): return V()\nenvs = E()\n"
        )
        importlib.invalidate_caches()
        assert _peers.sglang("moe.thing", "second")(5)[2] == "real"

    def test_a_missing_package(self, monkeypatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ImportError, match="'sglang' is not installed"):
            _peers.sglang("moe.thing", "first")
