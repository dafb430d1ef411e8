"""Discovery of nvcc, host compiler, ninja and headers: every way to find them, one clear error when they are missing."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from scale_template import output, pip_layout, python

from hpcjit import toolchain
from hpcjit.errors import ToolchainError

pytestmark = pytest.mark.usefixtures("fresh")
PIP_TOOLKITS = toolchain.pip_toolkits


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """No nvcc anywhere: each test adds the one place that it is about."""
    for name in ("CUDA_HOME", "CUDA_PATH", "CC", "CXX", "HPCJIT_CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    tools = tmp_path / "bare-bin"
    tools.mkdir()
    for name in ("sh", "c++", "g++", "gcc", "cc", "ninja"):
        found = shutil.which(name)
        if found:
            (tools / name).symlink_to(found)
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setattr(toolchain, "DEFAULT_HOMES", ())
    monkeypatch.setattr(toolchain, "pip_toolkits", list)
    return tools


def fake_nvcc(home: Path, version: str) -> Path:
    """A toolkit of another CUDA version, as far as discovery can tell."""
    for folder in ("bin", "include", "lib64"):
        (home / folder).mkdir(parents=True)
    (home / "include" / "cuda_runtime.h").touch()
    (home / "lib64" / f"libcudart.so.{version.split('.')[0]}").touch()
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(f'#!/bin/sh\necho "Cuda compilation tools, release {version[:4]}, V{version}"\necho "Build fake"\n')
    nvcc.chmod(0o755)
    return home


# --- architectures --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((8, 0), "sm_80"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((10, 3), "sm_103a"),
        ((12, 0), "sm_120a"),
    ],
)
def test_arch_of_capability(capability, arch):
    assert toolchain.arch_of_capability(*capability) == arch


def test_gencode_is_machine_code_only():
    assert toolchain.gencode("sm_90a") == "-gencode=arch=compute_90a,code=sm_90a"


@pytest.mark.parametrize("bad", ["90a", "sm_9", "sm_90a -x", "", "Hopper", "9.0+PTX"])
def test_malformed_arch_is_refused(bad):
    with pytest.raises(ToolchainError, match="must look like sm_90a"):
        toolchain.gencode(bad)


def test_arch_follows_the_device_of_the_tensor(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: {0: (9, 0), 1: (10, 0)}[index])
    assert [toolchain.arch_of_device(i) for i in (0, 1, None)] == ["sm_90a", "sm_100a", "sm_100a"]


def test_arch_without_a_gpu(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")  # torch's variable plays no part
    assert toolchain.arch_of_device(0) == "sm_90a"
    monkeypatch.setenv("HPCJIT_ARCH", "sm_80")
    assert toolchain.arch_of_device(0) == "sm_80"


# --- nvcc -----------------------------------------------------------------------------------------------------------


def test_missing_nvcc_lists_every_place_and_the_remedy(bare):
    with pytest.raises(ToolchainError) as error:
        toolchain.find_nvcc()
    text = str(error.value)
    assert all(place in text for place in ("CUDA_HOME", "CUDA_PATH", "PATH", "pip"))
    assert "pip install 'hpcjit[nvcc]'" in text


@pytest.mark.parametrize("spelling", ["{}", ":{}", "{}/", " {} "])
def test_cuda_home_spellings(bare, monkeypatch, toolkit, spelling):
    monkeypatch.setenv("CUDA_HOME", spelling.format(toolkit.home))
    assert toolchain.find_nvcc().home == str(toolkit.home)


def test_cuda_home_that_does_not_exist_is_passed_over(bare, monkeypatch, toolkit):
    monkeypatch.setenv("CUDA_HOME", "/nonexistent")
    monkeypatch.setenv("CUDA_PATH", str(toolkit.home))
    assert toolchain.find_nvcc().home == str(toolkit.home)


def test_hpcjit_cuda_home_is_an_order_not_a_hint(bare, monkeypatch, toolkit):
    monkeypatch.setenv("CUDA_HOME", str(toolkit.home))
    monkeypatch.setenv("HPCJIT_CUDA_HOME", "/nonexistent")
    with pytest.raises(ToolchainError, match="HPCJIT_CUDA_HOME: /nonexistent/bin/nvcc does not exist"):
        toolchain.find_nvcc()


def test_wrapper_script_on_path_leads_to_the_real_toolkit(bare, toolkit):
    wrapper = bare / "nvcc"
    wrapper.write_text(f'#!/bin/sh\nexec "{toolkit.real}" "$@"\n')
    wrapper.chmod(0o755)
    found = toolchain.find_nvcc()
    assert Path(found.home).resolve() == toolkit.real.resolve().parent.parent
    assert Path(found.home, "include", "cuda_runtime.h").is_file()
    assert Path(found.cudart).is_file()


def test_link_on_path_leads_to_the_real_toolkit(bare, toolkit):
    (bare / "nvcc").symlink_to(toolkit.real)
    assert Path(toolchain.find_nvcc().home).resolve() == toolkit.real.resolve().parent.parent


def test_pip_layout_is_found_on_the_import_path(bare, monkeypatch, tmp_path):
    toolkit = pip_layout(tmp_path / "site")
    monkeypatch.setattr(toolchain, "pip_toolkits", PIP_TOOLKITS)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])  # this environment may have them too
    found = toolchain.find_nvcc()
    assert found.home == str(toolkit.home)
    assert Path(found.cudart).name.startswith("libcudart.so.")


def test_nvcc_of_another_major_version_is_refused(bare, monkeypatch, tmp_path):
    monkeypatch.setattr(toolchain, "torch_cuda_major", lambda: 13)
    monkeypatch.setenv("CUDA_HOME", str(fake_nvcc(tmp_path / "old", "12.8.93")))
    with pytest.raises(ToolchainError, match=r"uses CUDA 13 .*\n  CUDA_HOME: .* is CUDA 12.8.93"):
        toolchain.find_nvcc()


def test_a_fitting_nvcc_is_preferred_to_the_first_one(bare, monkeypatch, tmp_path):
    monkeypatch.setattr(toolchain, "torch_cuda_major", lambda: 12)
    monkeypatch.setenv("CUDA_HOME", str(fake_nvcc(tmp_path / "new", "13.1.20")))
    monkeypatch.setenv("CUDA_PATH", str(fake_nvcc(tmp_path / "old", "12.8.93")))
    assert toolchain.find_nvcc().cuda_major == 12


def test_cpu_build_of_torch_takes_any_nvcc(bare, monkeypatch, tmp_path):
    monkeypatch.setattr(toolchain, "torch_cuda_major", lambda: None)
    monkeypatch.setenv("CUDA_HOME", str(fake_nvcc(tmp_path / "old", "12.8.93")))
    assert toolchain.find_nvcc().cuda_major == 12


def test_something_else_called_nvcc_is_no_toolkit(bare):
    (bare / "nvcc").write_text("#!/bin/sh\necho hello\n")
    (bare / "nvcc").chmod(0o755)
    with pytest.raises(ToolchainError, match="does not say where its toolkit is: hello"):
        toolchain.find_nvcc()


def test_version_is_asked_once_and_again_when_the_compiler_changes(bare, monkeypatch, tmp_path):
    home = fake_nvcc(tmp_path / "cuda", "13.0.88")
    nvcc, count = home / "bin" / "nvcc", tmp_path / "asked"
    nvcc.write_text(nvcc.read_text() + f'echo x >>"{count}"\n')
    monkeypatch.setattr(toolchain, "torch_cuda_major", lambda: None)
    monkeypatch.setenv("CUDA_HOME", str(home))
    for _ in range(3):
        monkeypatch.setattr(toolchain, "_answers", {})  # as in a new process
        assert toolchain.find_nvcc().version.startswith("13.0.88")
    assert count.read_text() == "x\n"
    times = os.stat(nvcc)
    nvcc.write_text(nvcc.read_text().replace("13.0.88", "13.0.99"))  # same size, and then the same mtime
    os.utime(nvcc, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert toolchain.find_nvcc().version.startswith("13.0.99")


# --- the others -----------------------------------------------------------------------------------------------------


def test_missing_host_compiler(bare):
    for name in ("c++", "g++", "gcc", "cc"):
        (bare / name).unlink(missing_ok=True)
    with pytest.raises(ToolchainError, match=r"no host C\+\+ compiler found .*install g\+\+"):
        toolchain.find_host_compiler()


def test_host_compiler_variables(bare, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(ToolchainError, match="CC=no-such-compiler names no executable"):
        toolchain.nvcc_host_compiler()
    monkeypatch.delenv("CC")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ToolchainError, match="CXX=no-such-compiler"):
        toolchain.nvcc_host_compiler()


def test_ninja_comes_from_its_package_when_path_lacks_it(bare):
    pytest.importorskip("ninja")
    (bare / "ninja").unlink(missing_ok=True)
    assert os.access(toolchain.find_ninja(), os.X_OK)


def test_missing_ninja(bare, monkeypatch):
    (bare / "ninja").unlink(missing_ok=True)
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ToolchainError, match="pip install ninja"):
        toolchain.find_ninja()


def test_cute_headers_are_found_without_importing_the_package():
    code = "from hpcjit import toolchain\nprint(toolchain.find_cutlass_include())\nassert 'cutlass_library' not in sys.modules"
    assert Path(output(python(code)), "cute", "tensor.hpp").is_file()


def test_discovery_does_not_import_torch_and_agrees_with_it():
    import torch

    expected = int(torch.version.cuda.split(".")[0]) if torch.version.cuda else None
    code = "from hpcjit import toolchain\nprint(toolchain.torch_cuda_major())\nassert 'torch' not in sys.modules"
    assert output(python(code)) == str(expected)


@pytest.mark.parametrize(
    ("major", "remedy"), [(13, "hpcjit[nvcc]"), (12, "a CUDA 12 toolkit (pip's packages hold no nvcc")]
)
def test_the_remedy_is_one_that_works(bare, monkeypatch, major, remedy):
    """pip's CUDA 12 packages hold ptxas and no nvcc, so installing them must not be the advice."""
    monkeypatch.setattr(toolchain, "torch_cuda_major", lambda: major)
    with pytest.raises(ToolchainError) as caught:
        toolchain.find_nvcc()
    assert remedy in str(caught.value)
    assert ("pip install" in str(caught.value)) == (major == 13)
