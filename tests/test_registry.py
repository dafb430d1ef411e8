"""Registration and fixed resolution, on made-up platforms."""

from __future__ import annotations

import sys
import threading

import pytest

from hpcjit import registry as module
from hpcjit.errors import BackendError, HpcjitError, RegistrationError, UnknownOpError
from hpcjit.registry import KernelRegistry, register_fused_op
from hpcjit.spec import GROUPS, CapabilityRequirement, DeviceType, KernelBackend, KernelSpec, PlatformInfo

CPU = PlatformInfo()
A100 = PlatformInfo(DeviceType.CUDA, 8, 0)
H200 = PlatformInfo(DeviceType.CUDA, 9, 0)
JIT, TORCH, TRITON, FLASHINFER = (
    KernelBackend.JIT,
    KernelBackend.TORCH,
    KernelBackend.TRITON,
    KernelBackend.FLASHINFER,
)
HOPPER = frozenset({CapabilityRequirement.cuda(min_sm=(9, 0))})
ON_CPU = frozenset({CapabilityRequirement.CPU})


def make(op="gemm.matmul", backend=JIT, capabilities=frozenset(), target="math:sqrt"):
    return KernelSpec(op, backend, target, capabilities)


@pytest.fixture
def registry():
    return KernelRegistry()


class TestRegister:
    def test_an_equal_spec_again_changes_nothing(self, registry):
        registry.register(make())
        registry.register(make())
        assert registry.all_specs() == [make()]

    def test_a_conflict_is_an_error_and_keeps_the_first(self, registry):
        registry.register(make())
        with pytest.raises(RegistrationError, match=r"gemm.matmul: backend jit is already registered.*math:cos"):
            registry.register(make(target="math:cos"))
        assert registry.get("gemm.matmul", "jit").target == "math:sqrt"

    def test_listing(self, registry):
        for spec in (make("moe.b"), make("gemm.a"), make("gemm.a", TORCH)):
            registry.register(spec)
        assert registry.ops() == ["gemm.a", "moe.b"]
        assert [(s.op, s.backend) for s in registry.all_specs()] == [("gemm.a", JIT), ("gemm.a", TORCH), ("moe.b", JIT)]

    def test_from_many_threads(self, registry):
        specs = [make(f"gemm.op{i}") for i in range(50)]
        threads = [threading.Thread(target=lambda: [registry.register(s) for s in specs]) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(registry.all_specs()) == 50


class TestSelect:
    def test_the_only_backend_is_taken(self, registry):
        registry.register(make())
        assert registry.select("gemm.matmul", platform=CPU) == make()

    def test_the_only_backend_is_still_checked(self, registry):
        registry.register(make(capabilities=HOPPER))
        with pytest.raises(BackendError, match=r"gemm.matmul cannot run on cpu: backend jit: needs cuda SM >= 9.0"):
            registry.select("gemm.matmul", platform=CPU)

    def test_the_platform_decides_between_several(self, registry):
        registry.register(make(capabilities=HOPPER))
        registry.register(make(backend=TORCH, capabilities=ON_CPU))
        assert registry.select("gemm.matmul", platform=H200).backend is JIT
        assert registry.select("gemm.matmul", platform=CPU).backend is TORCH

    def test_none_usable_gives_every_reason(self, registry):
        registry.register(make(capabilities=HOPPER))
        registry.register(make(backend=TORCH, capabilities=ON_CPU))
        with pytest.raises(BackendError, match=r"backend jit: needs cuda SM >= 9.0.*backend torch: needs cpu"):
            registry.select("gemm.matmul", platform=A100)

    def test_several_usable_are_listed(self, registry):
        for backend in (JIT, TORCH, TRITON):
            registry.register(make(backend=backend))
        with pytest.raises(BackendError, match=r"several backends on cpu: jit, torch, triton"):
            registry.select("gemm.matmul", platform=CPU)
        assert registry.select("gemm.matmul", "triton", CPU).backend is TRITON

    def test_a_named_backend_is_still_checked(self, registry):
        registry.register(make(capabilities=HOPPER))
        registry.register(make(backend=TORCH))
        with pytest.raises(BackendError, match=r"needs cuda SM >= 9.0, this is cuda SM 8.0"):
            registry.select("gemm.matmul", JIT, A100)

    def test_a_named_backend_that_the_op_lacks(self, registry):
        registry.register(make())
        with pytest.raises(BackendError, match=r"gemm.matmul has no backend flashinfer; it has jit"):
            registry.select("gemm.matmul", FLASHINFER, H200)
        with pytest.raises(BackendError, match="unknown backend"):
            registry.select("gemm.matmul", "jti", H200)

    @pytest.mark.parametrize("op", ["gemm.matmull", "gem.matmul", "matmul"])
    def test_unknown_op_suggests(self, registry, op):
        registry.register(make())
        with pytest.raises(UnknownOpError, match=r"did you mean 'gemm.matmul'") as info:
            registry.select(op, platform=CPU)
        assert isinstance(info.value, HpcjitError)
        assert isinstance(info.value, KeyError)

    @pytest.mark.parametrize("op", ["", "zzz", None, 3])
    def test_unknown_op_without_a_close_name(self, registry, op):
        registry.register(make())
        with pytest.raises(UnknownOpError, match=r"^unknown operator [^,]*$"):
            registry.select(op)


class TestLoad:
    def test_is_cached_until_cleared(self, registry):
        registry.register(make(target="hpcjit_loadable:f"))
        stub = sys.modules["hpcjit_loadable"] = type(sys)("hpcjit_loadable")
        try:
            stub.f = first = lambda: 1
            assert registry.load("gemm.matmul") is first
            stub.f = second = lambda: 2
            assert registry.load("gemm.matmul") is first
            assert registry.load("gemm.matmul", "jit") is second  # another question, resolved now
            registry.clear_cache()
            assert registry.load("gemm.matmul") is second
        finally:
            del sys.modules["hpcjit_loadable"]

    def test_a_failure_is_not_cached(self, registry):
        registry.register(make(target="hpcjit_loadable:f"))
        with pytest.raises(ImportError):
            registry.load("gemm.matmul")


class TestWhyNot:
    def test_platform_level(self, registry):
        registry.register(make(capabilities=HOPPER))
        registry.register(make(backend=TORCH))
        assert registry.why_not("gemm.matmul", "torch") is None
        if PlatformInfo.detect() == CPU:
            assert registry.why_not("gemm.matmul", "jit") == "needs cuda SM >= 9.0, this is cpu"

    def test_arguments_do_not_matter_for_a_plain_function(self, registry):
        registry.register(make(backend=TORCH))
        assert registry.why_not("gemm.matmul", "torch", 1, key=2) is None

    def test_a_fused_operator_is_asked_about_the_call(self, registry, monkeypatch):
        class Op:
            @staticmethod
            def why_not(backend, *args, **kwargs):
                return f"{backend} {args} {kwargs}"

        stub = type(sys)("hpcjit_owner")
        stub.op = Op()
        monkeypatch.setitem(sys.modules, "hpcjit_owner", stub)
        registry.register(make(backend=TORCH, target="hpcjit_owner:op.forward_native"))
        assert registry.why_not("gemm.matmul", "torch", 1, key=2) == "torch (1,) {'key': 2}"
        assert registry.why_not("gemm.matmul", "torch") is None

    def test_unknown(self, registry):
        registry.register(make())
        with pytest.raises(UnknownOpError):
            registry.why_not("gemm.nothing", "jit")
        with pytest.raises(BackendError):
            registry.why_not("gemm.matmul", "torch")


class TestGroups:
    def test_one_group_for_a_name_and_all_for_a_list(self):
        asked = []
        registry = KernelRegistry(asked.append)
        registry.register(make())
        registry.get("gemm.matmul", "jit")
        assert asked == ["gemm"]
        asked.clear()
        registry.ops()
        assert asked == list(GROUPS)

    def test_a_name_is_found_through_its_group(self):
        registry = KernelRegistry(lambda group: registry.register(make("moe.topk")) if group == "moe" else None)
        assert registry.select("moe.topk", platform=CPU).op == "moe.topk"

    def test_the_global_registry_loads_every_group(self):
        module.ops()
        assert all(f"hpcjit.ops.{group}" in sys.modules for group in GROUPS)
        with pytest.raises(UnknownOpError):
            module.select_kernel("gemm.no_such_operator_at_all")

    def test_module_functions_are_those_of_the_global_registry(self, registry, monkeypatch):
        monkeypatch.setattr(module, "registry", registry)
        module.register_kernel(make(backend=TORCH))
        assert module.ops() == ["gemm.matmul"]
        assert module.all_specs() == [make(backend=TORCH)]
        assert module.select_kernel("gemm.matmul", platform=CPU) == make(backend=TORCH)
        assert module.get_kernel("gemm.matmul", "torch")(4.0) == 2.0
        assert module.why_not("gemm.matmul", "torch") is None
        module.clear_cache()

    def test_register_fused_op(self, registry, monkeypatch):
        monkeypatch.setattr(module, "registry", registry)
        for _ in range(2):  # a reload of the group
            register_fused_op("moe.topk", "hpcjit_never_imported", "topk_op", {JIT: HOPPER, FLASHINFER: HOPPER})
        targets = {s.backend.value: s.target for s in registry.specs("moe.topk")}
        assert targets == {
            "torch": "hpcjit_never_imported:topk_op.forward_native",
            "torch_compile": "hpcjit_never_imported:topk_op.forward_torch_compile",
            "jit": "hpcjit_never_imported:topk_op.forward_jit",
            "flashinfer": "hpcjit_never_imported:topk_op.forward_flashinfer",
        }
        assert registry.declared("moe.topk")[JIT] == HOPPER
        assert "hpcjit_never_imported" not in sys.modules
