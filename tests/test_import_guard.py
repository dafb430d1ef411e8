"""What importing the package may load. Each check runs in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "triton", "flashinfer", "flash_attn", "flash_attn_interface", "sglang", "sgl_kernel", "deep_gemm")
OWN = ("hpcjit.build", "hpcjit.cache", "hpcjit.launch", "hpcjit.toolchain", "hpcjit.cases", "hpcjit.bench")


def run(code: str, *options: str) -> str:
    result = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.parametrize(
    "statements",
    [
        "import hpcjit, hpcjit.ops",
        "import hpcjit.registry; assert hpcjit.registry.ops() is not None",  # imports every group's metadata
        "import hpcjit.fused_op, hpcjit.trace",
    ],
)
def test_metadata_loads_nothing_heavy(statements):
    code = f"import sys; {statements}; print(*(m for m in {HEAVY + OWN} if m in sys.modules))"
    assert run(code) == ""


def test_importing_ops_imports_no_group():
    code = "import sys, hpcjit.ops; print(*(m for m in sys.modules if m.startswith('hpcjit.ops.')))"
    assert run(code) == ""


def test_selection_on_a_simulated_platform_needs_no_torch():
    code = """
import sys
from hpcjit.registry import register_kernel, select_kernel
from hpcjit.spec import CapabilityRequirement, DeviceType, KernelBackend, KernelSpec, PlatformInfo
hopper = frozenset({CapabilityRequirement.cuda(min_sm=(9, 0))})
register_kernel(KernelSpec("gemm.probe", KernelBackend.JIT, "nowhere:f", hopper))
print(select_kernel("gemm.probe", platform=PlatformInfo(DeviceType.CUDA, 9, 0)).target, "torch" in sys.modules)
"""
    assert run(code) == "nowhere:f False"


def test_groups_are_attributes():
    code = "import hpcjit.ops as o; print(len(o.__all__), set(o.__all__) <= set(dir(o)), o.moe.__doc__ is not None)"
    assert run(code) == "18 True True"


def test_an_unknown_group_is_an_attribute_error():
    code = """
import hpcjit.ops
try:
    hpcjit.ops.layernrom
except AttributeError as error:
    print(error)
"""
    assert run(code) == "module 'hpcjit.ops' has no attribute 'layernrom'"


def test_groups_on_disk_are_the_18():
    from pathlib import Path

    import hpcjit.ops
    from hpcjit.spec import GROUPS

    folder = Path(hpcjit.ops.__file__).parent
    assert {p.parent.name for p in folder.glob("*/__init__.py")} == set(GROUPS) == set(hpcjit.ops.__all__)


class TestLazy:
    """The helper that the groups use, on a package made for the test."""

    @pytest.fixture
    def package(self, tmp_path, monkeypatch):
        name = "hpcjit_lazy_probe"
        folder = tmp_path / name
        folder.mkdir()
        (folder / "__init__.py").write_text(
            "from hpcjit.ops._lazy import lazy\n"
            "__getattr__, __dir__, __all__ = lazy(__name__, {'b': '_impl', 'a': '_impl', 'gone': '_impl'})\n"
        )
        (folder / "_impl.py").write_text("def a(): return 'a'\ndef b(): return 'b'\n")
        monkeypatch.syspath_prepend(tmp_path)
        yield name
        for module in [m for m in sys.modules if m.startswith(name)]:
            del sys.modules[module]

    def test_imports_the_submodule_at_first_use(self, package):
        module = __import__(package)
        assert f"{package}._impl" not in sys.modules
        assert module.__all__ == ["a", "b", "gone"]
        assert {"a", "b", "__doc__"} <= set(dir(module))
        assert "a" not in vars(module)
        assert module.a() == "a"
        assert vars(module)["a"] is module.a  # later uses are plain attribute access

    def test_from_import(self, package):
        scope = {}
        exec(f"from {package} import b", scope)
        assert scope["b"]() == "b"

    def test_missing_names(self, package):
        module = __import__(package)
        with pytest.raises(AttributeError, match="has no attribute 'c'"):
            module.c  # noqa: B018
        with pytest.raises(AttributeError, match="gone"):
            module.gone  # noqa: B018
        with pytest.raises(ImportError):
            exec(f"from {package} import c")

    def test_a_name_that_is_also_a_submodule(self):
        from hpcjit.ops._lazy import lazy

        with pytest.raises(ValueError, match="both an attribute and a submodule"):
            lazy("hpcjit_lazy_probe", {"rmsnorm": "rmsnorm"})
