"""Specs, capabilities and platform detection, with platforms made up: no GPU is needed."""

from __future__ import annotations

import logging
import sys
import types

import pytest
import torch

from hpcjit import spec
from hpcjit.errors import BackendError, RegistrationError
from hpcjit.spec import (
    GROUPS,
    CapabilityRequirement,
    DeviceType,
    KernelBackend,
    KernelSpec,
    PlatformInfo,
    capabilities_satisfied,
    package_available,
    why_unsatisfied,
)

CPU = PlatformInfo()
A100 = PlatformInfo(DeviceType.CUDA, 8, 0)
L40 = PlatformInfo(DeviceType.CUDA, 8, 9)
H200 = PlatformInfo(DeviceType.CUDA, 9, 0)
B200 = PlatformInfo(DeviceType.CUDA, 10, 0)
MI300 = PlatformInfo(DeviceType.HIP, 9, 4)


def make_spec(**changes: object) -> KernelSpec:
    fields = {"op": "layernorm.rmsnorm", "backend": KernelBackend.JIT, "target": "math:sqrt"}
    return KernelSpec(**{**fields, **changes})


class TestBackendNames:
    @pytest.mark.parametrize("name", [b.value for b in KernelBackend])
    def test_parses_its_own_names_in_any_case(self, name):
        assert KernelBackend.of(name) is KernelBackend.of(name.upper())
        assert str(KernelBackend.of(name)) == name

    def test_unknown_name_suggests_and_lists(self):
        with pytest.raises(BackendError, match=r"unknown backend 'flashinfr', did you mean 'flashinfer'\?.*deepgemm"):
            KernelBackend.of("flashinfr")

    @pytest.mark.parametrize("value", [None, 3, [], object()])
    def test_other_types_are_a_typed_error(self, value):
        with pytest.raises(BackendError, match="unknown backend"):
            KernelBackend.of(value)

    def test_methods(self):
        assert KernelBackend.TORCH.method == "forward_native"
        assert KernelBackend.FLASH_ATTN.method == "forward_flash_attn"


class TestCapabilities:
    @pytest.mark.parametrize(
        ("low", "high", "platform", "satisfied"),
        [
            ((8, 0), None, A100, True),  # the bounds belong to the window
            ((8, 0), None, B200, True),
            ((9, 0), None, L40, False),
            ((9, 0), (9, 0), H200, True),
            ((9, 0), (9, 0), B200, False),  # sm_90a code does not run on a later architecture
            (None, (8, 9), L40, True),
            (None, (8, 9), H200, False),
            ((8, 0), None, CPU, False),
            ((8, 0), None, MI300, False),  # a HIP version is not a compute capability
        ],
    )
    def test_window(self, low, high, platform, satisfied):
        requirement = CapabilityRequirement.cuda(min_sm=low, max_sm=high)
        assert requirement.is_satisfied_by(platform) is satisfied
        assert (requirement.why_not(platform) is None) is satisfied

    def test_shortcuts(self):
        for device in DeviceType:
            assert getattr(CapabilityRequirement, device.name) == CapabilityRequirement(device)

    def test_reason_names_both_sides(self):
        requirement = CapabilityRequirement.cuda(min_sm=(9, 0))
        assert requirement.why_not(L40) == "needs cuda SM >= 9.0, this is cuda SM 8.9"
        assert requirement.why_not(CPU) == "needs cuda SM >= 9.0, this is cpu"

    def test_reason_names_the_missing_package(self):
        requirement = CapabilityRequirement.cuda(package="hpcjit_no_such_package")
        assert requirement.why_not(H200) == "needs the package 'hpcjit_no_such_package', which is not installed"
        assert CapabilityRequirement.cuda(package="json").why_not(H200) is None

    def test_none_means_everywhere_and_several_are_alternatives(self):
        assert capabilities_satisfied(frozenset(), CPU)
        either = frozenset({CapabilityRequirement.cuda(), CapabilityRequirement.HIP})
        assert capabilities_satisfied(either, MI300)
        assert capabilities_satisfied(either, H200)
        assert not capabilities_satisfied(either, CPU)
        assert why_unsatisfied(either, CPU) == "needs cuda SM >= 8.0, this is cpu; or needs hip, this is cpu"

    def test_contradictions_are_rejected(self):
        with pytest.raises(RegistrationError, match=r"above max_sm"):
            CapabilityRequirement.cuda(min_sm=(9, 0), max_sm=(8, 0))
        with pytest.raises(RegistrationError, match="needs device cuda"):
            CapabilityRequirement(DeviceType.CPU, min_sm=(8, 0))


class TestPackageAvailable:
    def test_dotted_name_imports_no_parent(self, tmp_path, monkeypatch):
        package = tmp_path / "hpcjit_probe"
        package.mkdir()
        (package / "__init__.py").write_text("raise RuntimeError('imported')")
        (package / "inner.py").write_text("")
        monkeypatch.syspath_prepend(tmp_path)
        assert package_available("hpcjit_probe")
        assert package_available("hpcjit_probe.inner")
        assert not package_available("hpcjit_probe.other")
        assert not package_available("hpcjit_probe.inner.deeper")
        assert "hpcjit_probe" not in sys.modules

    def test_loaded_and_blocked_modules(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "hpcjit_stub", types.ModuleType("hpcjit_stub"))  # has no __spec__
        assert package_available("hpcjit_stub")
        monkeypatch.setitem(sys.modules, "hpcjit_stub", None)
        assert not package_available("hpcjit_stub")


class TestKernelSpec:
    def test_group_and_name(self):
        spec_ = make_spec(op="moe.topk_softmax")
        assert (spec_.group, spec_.name) == ("moe", "topk_softmax")

    @pytest.mark.parametrize(
        "op", ["rmsnorm", "layernorm.", ".x", "layernorm.a.b", "layernorm.Rms", "", None, 3, "a b.c"]
    )
    def test_malformed_op(self, op):
        with pytest.raises(RegistrationError, match=r"group\.name"):
            make_spec(op=op)

    def test_unknown_group_suggests(self):
        with pytest.raises(RegistrationError, match="unknown group 'layernrom', did you mean 'layernorm'"):
            make_spec(op="layernrom.rmsnorm")

    @pytest.mark.parametrize("target", ["math", "math:", ":sqrt", "ma th:sqrt", "math:a.", "math::sqrt", None])
    def test_malformed_target(self, target):
        with pytest.raises(RegistrationError, match="module:attribute"):
            make_spec(target=target)

    def test_other_fields_are_checked(self):
        with pytest.raises(RegistrationError, match="backend must be"):
            make_spec(backend="jit")
        with pytest.raises(RegistrationError, match="frozenset"):
            make_spec(capabilities={CapabilityRequirement.CUDA})
        with pytest.raises(RegistrationError, match="frozenset"):
            make_spec(capabilities=frozenset({"cuda"}))

    def test_availability(self):
        on_hopper = make_spec(capabilities=frozenset({CapabilityRequirement.cuda(min_sm=(9, 0))}))
        assert on_hopper.is_available(H200)
        assert not on_hopper.is_available(A100)
        assert make_spec().is_available()

    def test_load(self):
        assert make_spec(target="os:path.join").load()("a", "b")
        with pytest.raises(ImportError):
            make_spec(target="hpcjit_no_such_module:f").load()
        with pytest.raises(AttributeError):
            make_spec(target="math:no_such_function").load()

    def test_owner(self):
        import os

        assert make_spec(target="os:path.join").load_owner() is os.path
        assert make_spec(target="os:getcwd").load_owner() is None

    def test_there_are_18_groups_in_order(self):
        assert len(set(GROUPS)) == 18
        assert list(GROUPS) == sorted(GROUPS)


class FakeCuda(types.SimpleNamespace):
    """torch.cuda of a machine with an A100 and an H200."""

    def __init__(self, **changes):
        capability = {0: (8, 0), 1: (9, 0), None: (9, 0)}
        defaults = {"is_available": lambda: True, "device_count": lambda: 2, "get_device_capability": capability.get}
        super().__init__(**{**defaults, **changes})


def raising(error):
    def call(*args):
        raise error

    return call


class TestDetect:
    def test_each_device_for_itself(self, monkeypatch):
        monkeypatch.setattr(torch, "cuda", FakeCuda())
        assert PlatformInfo.detect(0) == A100
        assert PlatformInfo.detect(1) == H200
        assert PlatformInfo.detect() == H200  # the current device
        assert PlatformInfo.detect(-1) == CPU  # a CPU tensor on a CUDA machine
        assert PlatformInfo.detect(7) == CPU

    def test_hip(self, monkeypatch):
        monkeypatch.setattr(torch, "cuda", FakeCuda(get_device_capability=lambda index: (9, 4)))
        monkeypatch.setattr(torch.version, "hip", "6.4")
        found = PlatformInfo.detect(0)
        assert found == MI300
        assert (found.device, found.is_cuda) == ("cuda", False)

    @pytest.mark.parametrize("error", [RuntimeError("forked"), ImportError("libcuda")])
    def test_ordinary_failures_are_quiet(self, monkeypatch, caplog, error):
        monkeypatch.setattr(torch, "cuda", FakeCuda(get_device_capability=raising(error)))
        with caplog.at_level(logging.DEBUG, logger=spec.__name__):
            assert PlatformInfo.detect(0) == CPU
        assert [r.levelname for r in caplog.records] == ["DEBUG"]
        assert str(error) in caplog.text

    def test_surprising_failures_are_reported(self, monkeypatch, caplog):
        monkeypatch.setattr(torch, "cuda", FakeCuda(get_device_capability=raising(ZeroDivisionError("surprise"))))
        assert PlatformInfo.detect(0) == CPU
        assert [r.levelname for r in caplog.records] == ["WARNING"]
        assert "surprise" in caplog.text

    def test_without_torch(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "torch", None)
        assert PlatformInfo.detect() == CPU

    def test_other_accelerators(self, monkeypatch):
        monkeypatch.setattr(torch, "cuda", FakeCuda(is_available=lambda: False))
        monkeypatch.setattr(torch, "npu", types.SimpleNamespace(is_available=lambda: True), raising=False)
        assert PlatformInfo.detect() == PlatformInfo(DeviceType.NPU)
        monkeypatch.delattr(torch, "npu")
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
        assert PlatformInfo.detect() == PlatformInfo(DeviceType.MPS)

    def test_text(self):
        assert [str(p) for p in (CPU, H200, MI300)] == ["cpu", "cuda SM 9.0", "hip"]
