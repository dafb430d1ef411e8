"""Dispatch among backends, on simulated platforms."""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
import weakref
from typing import ClassVar

import pytest
import torch

from hpcjit import fused_op, trace
from hpcjit.errors import BackendError, RegistrationError
from hpcjit.fused_op import BaseFusedOp, set_fused_op_backend, use_backend
from hpcjit.registry import KernelRegistry
from hpcjit.spec import CapabilityRequirement, DeviceType, KernelBackend, PlatformInfo

JIT, TORCH, TRITON, FLASHINFER, AOT = (
    KernelBackend.JIT,
    KernelBackend.TORCH,
    KernelBackend.TRITON,
    KernelBackend.FLASHINFER,
    KernelBackend.AOT,
)
COMPILE = KernelBackend.TORCH_COMPILE
CPU = PlatformInfo()
A100 = PlatformInfo(DeviceType.CUDA, 8, 0)
H200 = PlatformInfo(DeviceType.CUDA, 9, 0)
CUDA = frozenset({CapabilityRequirement.cuda()})
HOPPER = frozenset({CapabilityRequirement.cuda(min_sm=(9, 0))})
MISSING = frozenset({CapabilityRequirement.cuda(package="hpcjit_no_such_package")})


class OnDevice:
    """Stands for a tensor of a CUDA device that this machine lacks."""

    def __init__(self, index: int) -> None:
        self.index = index

    def get_device(self) -> int:
        return self.index


class Named(BaseFusedOp):
    """Every backend answers with its own name."""

    op = "elementwise.named"
    capabilities: ClassVar = {JIT: HOPPER, TRITON: CUDA, FLASHINFER: MISSING}

    def forward_native(self, input, scale=1.0, *, flag=False):
        return "native"

    def forward_jit(self, input, scale=1.0, *, flag=False):
        return "jit"

    def forward_triton(self, input, scale=1.0, *, flag=False):
        return "triton"

    def forward_flashinfer(self, input, scale=1.0, *, flag=False):
        return "flashinfer"

    def forward_aot(self, input, scale=1.0, *, flag=False):
        return "aot"


class Choosy(Named):
    """Its backends take only some calls."""

    op = "elementwise.choosy"

    def backend_eligible(self, backend, input, scale=1.0, *, flag=False):
        if backend is JIT:
            return True if scale < 10 else "scale must be below 10"
        return not flag


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine with an H200 (device 0) and an A100 (device 1), and clean global state."""
    devices = {None: H200, -1: CPU, 0: H200, 1: A100}
    calls = []

    def detect(index=None):
        calls.append(index)
        return devices[index]

    monkeypatch.setattr(PlatformInfo, "detect", staticmethod(detect))
    monkeypatch.delenv("HPCJIT_BACKEND", raising=False)
    yield calls
    trace.disable_fused_op_trace()
    trace.clear_fused_op_trace()
    set_fused_op_backend(None)


on_cpu, on_h200, on_a100 = torch.zeros(2), OnDevice(0), OnDevice(1)


class TestAutomatic:
    def test_each_device_for_itself(self):
        op = Named()
        assert [op(t) for t in (on_h200, on_a100, on_cpu)] == ["jit", "triton", "native"]

    def test_the_choice_is_made_once_per_device(self, machine):
        op = Named()
        for _ in range(5):
            op(on_h200)
            op(on_cpu)
        assert machine == [0, -1]

    def test_first_tensor_may_be_anywhere(self, machine):
        op = Named()
        for _ in range(2):
            assert op(input=on_h200) == "jit"
            assert op(None, on_h200) == "jit"
            assert op([on_a100]) == "triton"
            assert op(3, flag=True) == "native"  # no tensor at all
        assert machine == [0, 1, -1]

    def test_arguments_arrive_unchanged(self):
        class Echo(BaseFusedOp):
            op = "elementwise.echo"

            def forward_native(self, *args, **kwargs):
                return args, kwargs

        assert Echo()(on_cpu, 2, key=3) == ((on_cpu, 2), {"key": 3})

    def test_priority_of_the_class(self):
        class Triton(Named):
            op = "elementwise.triton_first"
            priority = (TRITON, JIT, TORCH)

        assert Triton()(on_h200) == "triton"

    def test_backends_behind_torch_are_never_automatic(self):
        class Reference(Named):
            op = "elementwise.reference_first"
            priority = (TORCH, JIT)

        assert Reference()(on_h200) == "native"
        assert Reference().auto_selected_backend(H200) is TORCH

    def test_a_backend_needs_both_method_and_declaration(self):
        class Half(Named):
            op = "elementwise.half"
            capabilities: ClassVar = {KernelBackend.DEEPGEMM: CUDA}  # has no method; jit has one and is not declared

        op = Half()
        assert op(on_h200) == "native"
        assert op.why_not(KernelBackend.DEEPGEMM) == "elementwise.half has no forward_deepgemm"
        assert op.why_not("jit") == "elementwise.half does not declare jit in its capabilities"

    def test_torch_compile_is_never_automatic(self):
        assert COMPILE not in fused_op.DEFAULT_PRIORITY

    def test_lists(self):
        op = Named()
        assert op.available_backends(H200) == (JIT, TRITON, TORCH, COMPILE)
        assert op.available_backends(A100) == (TRITON, TORCH, COMPILE)
        assert op.available_backends(CPU) == (TORCH, COMPILE)
        assert op.available_backends() == (JIT, TRITON, TORCH, COMPILE)
        assert [op.auto_selected_backend(d) for d in (0, 1, -1, None, CPU)] == [JIT, TRITON, TORCH, JIT, TORCH]

    def test_an_error_of_a_backend_comes_through_unchained(self):
        class Broken(BaseFusedOp):
            op = "elementwise.broken"

            def forward_native(self, input):
                raise KeyError("from the backend")

        op = Broken()
        for _ in range(2):
            with pytest.raises(KeyError, match="from the backend") as info:
                op(on_cpu)
            assert info.value.__context__ is None


class TestNamedBackend:
    def test_runs_it(self):
        op = Named()
        assert op(on_h200, backend="triton") == "triton"
        assert op(on_h200, backend=TORCH) == "native"
        assert op(input=on_h200, backend="JIT") == "jit"

    @pytest.mark.parametrize(
        ("tensor", "backend", "reason"),
        [
            (on_cpu, "jit", r"needs cuda SM >= 9.0, this is cpu"),
            (on_a100, "jit", r"needs cuda SM >= 9.0, this is cuda SM 8.0"),
            (on_h200, "flashinfer", r"the package 'hpcjit_no_such_package', which is not installed"),
            (on_h200, "aot", r"does not declare aot"),
            (on_h200, "deepgemm", r"has no forward_deepgemm"),
        ],
    )
    def test_is_strict(self, tensor, backend, reason):
        with pytest.raises(
            BackendError, match=rf"elementwise.named: backend {backend} cannot run this call: .*{reason}"
        ):
            Named()(tensor, backend=backend)

    def test_unknown(self):
        with pytest.raises(BackendError, match="unknown backend 'jitt', did you mean 'jit'"):
            Named()(on_h200, backend="jitt")

    def test_the_call_is_checked_too(self):
        with pytest.raises(BackendError, match="scale must be below 10"):
            Choosy()(on_h200, 10, backend="jit")

    def test_wins_over_the_forced_one(self):
        with use_backend("torch"):
            assert Named()(on_h200, backend="jit") == "jit"

    def test_the_device_is_asked_once(self, machine):
        op = Named()
        for _ in range(3):
            op(on_h200, backend="jit")
        assert machine == [0]


class TestForced:
    def test_acts_on_every_operator_and_ends(self):
        op, other = Named(), Choosy()
        assert (op(on_h200), other(on_h200)) == ("jit", "jit")
        set_fused_op_backend("torch")
        assert (op(on_h200), other(on_h200)) == ("native", "native")
        set_fused_op_backend(None)
        assert (op(on_h200), other(on_h200)) == ("jit", "jit")

    def test_context_manager_nests_and_survives_errors(self):
        op = Named()
        with use_backend("torch"):
            with contextlib.suppress(ZeroDivisionError), use_backend(TRITON):
                assert op(on_h200) == "triton"
                raise ZeroDivisionError
            assert op(on_h200) == "native"
        assert op(on_h200) == "jit"
        assert fused_op.get_fused_op_backend() is None

    def test_falls_back_with_one_warning(self):
        op = Named()
        with use_backend("triton"), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                assert op(on_cpu) == "native"
                assert op(on_h200) == "triton"
        assert [str(w.message) for w in caught] == [
            "elementwise.named: the forced backend triton is not used: needs cuda SM >= 8.0, this is cpu"
        ]

    def test_falls_back_to_the_automatic_choice(self):
        with use_backend("flashinfer"), pytest.warns(RuntimeWarning, match="hpcjit_no_such_package"):
            assert Named()(on_h200) == "jit"

    def test_a_call_that_it_cannot_take(self):
        op = Choosy()
        with use_backend("jit"), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert [op(on_h200, s) for s in (1, 10, 10, 1)] == ["jit", "triton", "triton", "jit"]
        assert [str(w.message).rpartition(": ")[2] for w in caught] == ["scale must be below 10"]

    def test_environment(self, monkeypatch):
        op = Named()
        monkeypatch.setenv("HPCJIT_BACKEND", "Torch")
        assert op(on_h200) == "native"
        with use_backend("triton"):
            assert op(on_h200) == "triton"
        monkeypatch.delenv("HPCJIT_BACKEND")
        fused_op.reset_decisions()
        assert op(on_h200) == "jit"

    def test_unknown(self, monkeypatch):
        with pytest.raises(BackendError, match="unknown backend"):
            set_fused_op_backend("cudnn")
        monkeypatch.setenv("HPCJIT_BACKEND", "cudnn")
        with pytest.raises(BackendError, match="HPCJIT_BACKEND: unknown backend 'cudnn'"):
            Named()(on_h200)


class TestPerCall:
    def test_the_first_eligible_one_runs(self):
        op = Choosy()
        assert op(on_h200, 1) == "jit"
        assert op(on_h200, 10) == "triton"
        assert op(on_h200, 10, flag=True) == "native"
        assert op(on_h200, 1, flag=True) == "jit"

    def test_why_not(self):
        op = Choosy()
        assert op.why_not("jit", on_h200, 10) == "scale must be below 10"
        assert (
            op.why_not("triton", on_h200, flag=True)
            == "elementwise.choosy finds triton not eligible for these arguments"
        )
        assert op.why_not("jit", on_a100, 1) == "needs cuda SM >= 9.0, this is cuda SM 8.0"
        assert op.why_not("jit", on_h200, 1) is None
        assert op.why_not("jit") is None
        assert op.why_not("torch", on_cpu, 100, flag=True) is None


class TestClass:
    def test_native_is_mandatory(self):
        class Nothing(BaseFusedOp):
            op = "elementwise.nothing"

        with pytest.raises(TypeError, match="forward_native"):
            Nothing()

    def test_op_is_mandatory_and_checked(self):
        class NoName(BaseFusedOp):
            def forward_native(self, input):
                return None

        with pytest.raises(RegistrationError, match="must set op"):
            NoName()
        with pytest.raises(RegistrationError, match="unknown group"):
            type("Bad", (NoName,), {"op": "nowhere.x"})

    def test_capabilities_are_checked(self):
        with pytest.raises(RegistrationError, match="frozenset"):
            type("Bad", (Named,), {"op": "elementwise.bad", "capabilities": {JIT: {CapabilityRequirement.CUDA}}})
        with pytest.raises(BackendError, match="unknown backend"):
            type("Bad", (Named,), {"op": "elementwise.bad", "capabilities": {"jitt": CUDA}})

    def test_capabilities_left_out_come_from_the_registry(self, monkeypatch):
        from hpcjit import registry as registry_module

        registry = KernelRegistry()
        monkeypatch.setattr(registry_module, "registry", registry)
        monkeypatch.setattr(fused_op, "registry", registry)
        registry_module.register_fused_op("elementwise.tabled", "nowhere", "tabled", {JIT: HOPPER})

        class Tabled(BaseFusedOp):
            op = "elementwise.tabled"

            def forward_native(self, input):
                return "native"

            def forward_jit(self, input):
                return "jit"

        assert Tabled()(on_h200) == "jit"
        assert Tabled()(on_a100) == "native"

        registry_module.register_fused_op("elementwise.variant", "nowhere", "variant", {JIT: CUDA})

        class Variant(Tabled):  # its own row of the table, not that of its base
            op = "elementwise.variant"

        assert Variant()(on_a100) == "jit"

        class Explicit(Variant):
            op = "elementwise.explicit"
            capabilities: ClassVar = {JIT: HOPPER}

        class Inherits(Explicit):
            op = "elementwise.inherits"

        assert Inherits()(on_h200) == "jit"
        assert Inherits()(on_a100) == "native"

    @pytest.mark.parametrize(
        ("schema", "names"),
        [
            (None, ("input", "scale", "flag")),
            ("(Tensor input, float eps, Tensor(a!) out) -> ()", ("input", "eps", "out")),
            (
                "(Tensor(a!)? x, int[] sizes=[1, 2], *, ScalarType? dtype=None, str mode='a', Tensor(b!)[] out ) -> ()",
                ("x", "sizes", "dtype", "mode", "out"),
            ),
        ],
    )
    def test_argument_names(self, schema, names):
        assert type("Op", (Named,), {"op": "elementwise.names", "schema": schema}).arguments == names

    def test_instances_are_not_kept_alive(self):
        op = Named()
        op(on_cpu)
        reference = weakref.ref(op)
        del op
        gc.collect()
        assert reference() is None


def test_a_choice_that_was_overtaken_is_not_kept(monkeypatch):
    """Another thread forces a backend while this one is choosing."""
    op = Named()
    detect = PlatformInfo.detect

    def slow_detect(index=None):
        monkeypatch.setattr(PlatformInfo, "detect", staticmethod(detect))
        thread = threading.Thread(target=set_fused_op_backend, args=("torch",))
        thread.start()
        thread.join()
        return detect(index)

    monkeypatch.setattr(PlatformInfo, "detect", staticmethod(slow_detect))
    op(on_h200)
    assert op(on_h200) == "native"


def test_torch_compile_compiles_once_and_only_when_asked(monkeypatch):
    compiled = []

    def compile_(function):
        compiled.append(function)
        return lambda *args, **kwargs: "compiled"

    monkeypatch.setattr(torch, "compile", compile_)
    op = Named()
    op(on_h200)
    assert compiled == []
    assert [op(on_cpu, backend="torch_compile") for _ in range(3)] == ["compiled"] * 3
    with use_backend("torch_compile"):
        assert op(on_h200) == "compiled"
    assert compiled == [op.forward_native]
