"""An operator as a torch operator: opcheck, and torch.compile without graph breaks."""

from __future__ import annotations

import pytest
import torch

from hpcjit import trace
from hpcjit.errors import ArgumentError, RegistrationError
from hpcjit.fused_op import BaseFusedOp, define
from hpcjit.ops.activation import silu_and_mul
from hpcjit.ops.moe import moe_align_block_size
from hpcjit.spec import KernelBackend, PlatformInfo


class Scale(BaseFusedOp):
    """out = input * scale, the shape of an operator with `out`."""

    op = "elementwise.probe_scale"
    schema = "(Tensor input, float scale, Tensor(a!) out) -> ()"

    def forward_native(self, input, scale, out):
        torch.mul(input, scale, out=out)


scale_op = Scale()


def scale(input, factor=2.0, *, out=None):
    out = torch.empty_like(input) if out is None else out
    if torch.compiler.is_compiling():
        torch.ops.hpcjit.elementwise_probe_scale(input, factor, out)
    else:
        scale_op(input, factor, out)
    return out


class TestTorchOperator:
    @pytest.fixture(autouse=True)
    def defined(self):
        define(scale_op)
        torch.compiler.reset()

    def test_runs_the_operator(self):
        x, out = torch.randn(3, 4), torch.empty(3, 4)
        assert torch.ops.hpcjit.elementwise_probe_scale(x, 3.0, out) is None
        assert torch.equal(out, x * 3)

    @pytest.mark.parametrize("shape", [(3, 4), (0, 4), (1,)])
    def test_opcheck(self, shape):
        x = torch.randn(shape)
        torch.library.opcheck(torch.ops.hpcjit.elementwise_probe_scale.default, (x, 2.0, torch.empty_like(x)))

    def test_opcheck_on_views(self):
        x = torch.randn(6, 8).t()[1:, ::2]
        torch.library.opcheck(torch.ops.hpcjit.elementwise_probe_scale.default, (x, 2.0, torch.empty(7, 3)))

    @pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
    @pytest.mark.parametrize("dynamic", [False, True])
    def test_compile_without_graph_break(self, backend, dynamic):
        def model(x, out):
            y = scale(x + 1)
            scale(y, 0.5, out=out)
            return y.sum() + out.sum()

        compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend=backend)
        for rows in (2, 5, 9):
            x, out, expected = torch.randn(rows, 4), torch.zeros(rows, 4), torch.zeros(rows, 4)
            torch.testing.assert_close(compiled(x, out), model(x, expected))
            torch.testing.assert_close(out, expected)

    def test_compiled_calls_reach_the_dispatch(self):
        compiled = torch.compile(lambda x: scale(x), fullgraph=True, backend="aot_eager")
        trace.enable_fused_op_trace()
        try:
            compiled(torch.ones(2, 2))
        finally:
            trace.disable_fused_op_trace()
        (record,) = trace.get_fused_op_trace()
        assert (record.op, record.backend) == ("elementwise.probe_scale", KernelBackend.TORCH)

    @pytest.mark.gpu
    def test_on_a_real_device(self):
        x = torch.randn(3, 4, device="cuda")
        torch.library.opcheck(torch.ops.hpcjit.elementwise_probe_scale.default, (x, 2.0, torch.empty_like(x)))
        compiled = torch.compile(lambda x: scale(x + 1), fullgraph=True)
        torch.testing.assert_close(compiled(x), (x + 1) * 2)
        assert PlatformInfo.detect(0).sm == torch.cuda.get_device_capability(0)
        assert scale_op.auto_selected_backend(0) is KernelBackend.TORCH

    def test_defining_again_replaces_the_instance(self):
        class Reloaded(Scale):
            op = "elementwise.probe_scale"

            def forward_native(self, input, scale, out):
                out.fill_(7)

        define(Reloaded())
        out = torch.empty(2)
        torch.ops.hpcjit.elementwise_probe_scale(torch.ones(2), 1.0, out)
        assert out.tolist() == [7, 7]

    def test_another_schema_is_an_error(self):
        class Other(Scale):
            op = "elementwise.probe_scale"
            schema = "(Tensor input, Tensor(a!) out) -> ()"

        with pytest.raises(RegistrationError, match="already defined with schema"):
            define(Other())

    @pytest.mark.parametrize("schema", [None, "", "(Tensor x) -> Tensor"])
    def test_a_schema_that_returns_something_is_an_error(self, schema):
        class Bad(Scale):
            op = "elementwise.probe_bad"

        Bad.schema = schema
        with pytest.raises(RegistrationError, match=r"end in '-> \(\)'"):
            define(Bad())

    def test_a_malformed_schema_can_be_corrected(self):
        class Bad(Scale):
            op = "elementwise.probe_corrected"
            schema = "(Tensor input, flaot scale, Tensor(a!) out) -> ()"

        with pytest.raises(RuntimeError):
            define(Bad())
        Bad.schema = Scale.schema
        define(Bad())
        assert torch.ops.hpcjit.elementwise_probe_corrected.default


@pytest.mark.parametrize("backend", ["torch", "jit", "no such"])
def test_compiled_code_names_no_backend(monkeypatch, backend):
    """What is compiled chooses its backend when it runs: a name must not be passed over silently."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    x, ids = torch.randn(4, 64), torch.zeros(4, 2, dtype=torch.int32)
    for call in (lambda: silu_and_mul(x, backend=backend), lambda: moe_align_block_size(ids, 8, 16, backend=backend)):
        with pytest.raises(ArgumentError, match="'backend' must be None under"):
            call()
