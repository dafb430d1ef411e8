"""Compiling with the real nvcc: what is in a binary, how it is loaded, what happens when the compiler fails."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import struct
import subprocess
import threading
from pathlib import Path

import pytest
from scale_template import (
    ARCH,
    DATA,
    LOAD,
    SCALE,
    ScaleConfig,
    Toolkit,
    load,
    output,
    pip_layout,
    python,
    real_nvcc,
    scale_template,
)

from hpcjit import build, cache, folders, launch, toolchain
from hpcjit.errors import ArgumentTypeError, CacheError, CaptureError, CompileError, LaunchError, ToolchainError

pytestmark = pytest.mark.skipif(real_nvcc() is None, reason="no nvcc on this machine")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """One finished kernel for the tests that only look at it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPCJIT_CACHE_DIR", str(tmp_path_factory.mktemp("built")))
        build.forget()
        kernel = load()
        yield kernel
        build.forget()


# --- the binary -----------------------------------------------------------------------------------------------------


def test_binary_exports_the_abi_and_nothing_else(built):
    table = subprocess.run(
        ["nm", "-D", "--defined-only", built.path], capture_output=True, text=True, check=True
    ).stdout
    assert {line.split()[-1] for line in table.splitlines()} == {"hpcjit_launch", "hpcjit_prepare", "hpcjit_error"}


def test_binary_needs_no_torch_no_python_no_driver(built):
    needed = subprocess.run(["readelf", "-d", built.path], capture_output=True, text=True, check=True).stdout
    libraries = [line.split("[")[1].split("]")[0] for line in needed.splitlines() if "NEEDED" in line]
    assert {name.split(".")[0] for name in libraries} <= {"libcudart", "libstdc++", "libgcc_s", "libc", "libm"}


def fat_binaries(binary: Path) -> list[tuple[str, int]]:
    """(PTX or machine code, architecture number) of each part of the embedded fat binary."""
    data, parts, at = binary.read_bytes(), [], 0
    while (at := data.find(struct.pack("<I", 0xBA55ED50), at)) >= 0:
        header_size, total = struct.unpack_from("<HQ", data, at + 6)
        entry, end = at + header_size, at + header_size + total
        while entry < end:
            kind, _, size, body = struct.unpack_from("<HHIQ", data, entry)
            parts.append(({1: "ptx", 2: "elf"}.get(kind, str(kind)), struct.unpack_from("<I", data, entry + 28)[0]))
            entry += size + body
        at = end
    return parts


@pytest.mark.parametrize("arch_list", [None, "8.0;9.0+PTX", "Hopper"])
def test_binary_holds_machine_code_of_one_arch_whatever_torch_is_told(fresh, monkeypatch, arch_list):
    if arch_list:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", arch_list)
    assert fat_binaries(load().path) == [("elf", 90)]


def test_binary_loads_and_speaks_without_a_gpu(built):
    assert built.error_text(2) == "out of memory"
    assert built.kinds == "ppid"


def test_launch_without_a_gpu_names_kernel_and_cuda_error(built):
    import torch

    if torch.cuda.is_available():
        pytest.skip("has a GPU")
    with pytest.raises(
        LaunchError, match=r"test\.scale \[threads=256, offset=0\] for sm_90a: launch failed: .*CUDA error"
    ):
        built.launch(0, 0, None, None, 5, 2.0)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ((None, None, 1.5, 2.0), "argument 'count' must be a 64-bit integer, got float 1.5"),
        ((None, None, 1, "2"), "argument 'scale' must be a number, got str '2'"),
        ((None, None, None, 2.0), "argument 'count' must be a 64-bit integer, got NoneType"),
        ((1.0, None, 1, 2.0), "argument 'input' must be a pointer"),
        ((None, None, 2**63, 2.0), "argument 'count'"),
        ((None, None, 1), r"must be 6 values \(device, stream, input, output, count, scale\), got 5"),
    ],
)
def test_wrong_slots_are_named(built, slots, message):
    with pytest.raises(ArgumentTypeError, match=message):
        built.launch(0, 0, *slots)


def test_manifest_describes_the_binary(built):
    facts = json.loads((built.path.parent / cache.MANIFEST).read_text())
    assert facts["config"] == {"threads": 256, "offset": 0}
    assert facts["op"] == "test.scale"
    assert facts["arch"] == ARCH
    assert facts["registers"] > 0
    assert facts["spill_bytes"] == 0
    assert facts["shared_bytes"] == 0
    assert facts["compile_seconds"] > 0
    assert facts["binary_bytes"] == built.path.stat().st_size
    assert "nvcc" in facts["command"]
    assert built.path.parent.name == f"threads256-offset0-{facts['key'][:12]}"


def test_params_must_match_the_header(fresh):
    short = build.Template(
        "test.scale", "scale.cuh", "scale_test::Scale", ScaleConfig, ("a", "b"), include=SCALE.include
    )
    with pytest.raises(CompileError, match="exactly one 64-bit field for each name"):
        build.load(short, ScaleConfig(), arch=ARCH)


# --- memory, threads, processes -------------------------------------------------------------------------------------


def test_load_returns_the_same_kernel(fresh, toolkit, monkeypatch):
    monkeypatch.setenv("HPCJIT_CUDA_HOME", str(toolkit.home))
    assert load() is load()
    build.forget()
    load()
    assert toolkit.compiles == 1


def test_threads_compile_once(fresh, toolkit, monkeypatch):
    monkeypatch.setenv("HPCJIT_CUDA_HOME", str(toolkit.home))
    kernels: list[launch.Kernel] = []
    threads = [threading.Thread(target=lambda: kernels.append(load())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(kernels) == 8
    assert len(set(map(id, kernels))) == 1
    assert toolkit.compiles == 1


def test_threads_compile_different_kernels_at_once_and_leave_torch_as_it_was(fresh):
    from torch.utils import cpp_extension

    before = cpp_extension.CUDA_HOME, cpp_extension.TORCH_LIB_PATH, os.environ["PATH"]
    threads = [threading.Thread(target=load, kwargs={"offset": i}) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(cache.entries(root=fresh)) == 3
    assert (cpp_extension.CUDA_HOME, cpp_extension.TORCH_LIB_PATH, os.environ["PATH"]) == before


def test_one_compile_reads_its_headers_no_more_often_than_it_must(fresh, toolkit, tmp_path, monkeypatch):
    """Listing dependencies, for a rebuild that never comes, would be one more pass."""
    asked = tmp_path / "asked"
    toolkit.behave(f'echo "$*" >"{asked}"')
    monkeypatch.setenv("HPCJIT_CUDA_HOME", str(toolkit.home))
    load()
    assert " -c " in asked.read_text()
    assert "-MD" not in asked.read_text()
    assert "TORCH_EXTENSION_SKIP_NVCC_GEN_DEPENDENCIES" not in os.environ


def test_new_process_opens_the_binary_without_compiler_or_torch(fresh):
    load()
    code = (
        "from hpcjit import toolchain\ntoolchain.DEFAULT_HOMES = ()\ntoolchain.pip_toolkits = list\n" + LOAD +
        "assert toolchain.shutil.which('nvcc') is None\nassert 'torch' not in sys.modules\n"
    )  # fmt: skip
    env = {"PATH": "/nonexistent", "CUDA_HOME": None, "CUDA_PATH": None}
    assert output(python(code, **env)) == "out of memory"


@pytest.mark.slow
def test_fork_in_the_middle_of_a_compile(fresh, toolkit, monkeypatch):
    """A child forked while another thread compiles has neither its locks nor its changes to torch."""
    monkeypatch.setenv("HPCJIT_CUDA_HOME", str(toolkit.home))
    toolkit.behave("sleep 1.5")
    code = (
        "import threading\nt = threading.Thread(target=lambda: build.load(SCALE, ScaleConfig(), arch=ARCH)); t.start()\n"
        f"while not os.path.exists({str(toolkit.log)!r}): time.sleep(0.02)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    from torch.utils import cpp_extension\n"
        "    ok = cpp_extension.CUDA_HOME != 'cuda' and 'hpcjit-ninja' not in os.environ['PATH']\n"
        "    build.load(SCALE, ScaleConfig(), arch=ARCH); os._exit(0 if ok else 3)\n"
        "t.join(); print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    assert output(python(code)) == "0"
    assert toolkit.compiles == 1


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_multiprocessing_children_load(fresh, method):
    load()
    code = (
        "import multiprocessing\nimport spawn_target\nbuild.load(SCALE, ScaleConfig(), arch=ARCH)\n"
        f"with multiprocessing.get_context({method!r}).Pool(2) as pool:\n"
        "    print(pool.map(spawn_target.error_text, [2, 2]))\n"
    )
    assert output(python(code)) == "['out of memory', 'out of memory']"


def test_memory_is_per_arch(fresh):
    assert load() is not build.load(SCALE, ScaleConfig(), arch="sm_80")
    assert {entry.arch for entry in cache.entries(root=fresh)} == {"sm_90a", "sm_80"}


# --- guards ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def capture(monkeypatch):
    import torch

    state = {"on": True}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["on"])
    return state


def test_capture_never_builds(fresh, capture, toolkit, monkeypatch):
    monkeypatch.setenv("HPCJIT_CUDA_HOME", str(toolkit.home))
    with pytest.raises(CaptureError, match=r"Call it once before capture.*hpcjit prewarm test\.scale --arch sm_90a"):
        load()
    assert toolkit.compiles == 0


def test_capture_uses_what_is_ready_and_prepares_no_second_device(fresh, capture, monkeypatch):
    monkeypatch.setattr(toolchain, "has_gpu", lambda: True)
    capture["on"] = False
    kernel = load()
    kernel._prepared.add(0)
    capture["on"] = True
    assert build.load(SCALE, ScaleConfig(), device=0, arch=ARCH) is kernel
    with pytest.raises(CaptureError, match="would have to be loaded"):
        build.load(SCALE, ScaleConfig(), device=1, arch=ARCH)


def test_require_warm_raises_instead_of_compiling(fresh, toolkit, monkeypatch):
    monkeypatch.setenv("HPCJIT_CUDA_HOME", str(toolkit.home))
    monkeypatch.setenv("HPCJIT_REQUIRE_WARM", "1")
    with pytest.raises(CacheError, match=r"HPCJIT_REQUIRE_WARM .*hpcjit prewarm test\.scale --arch sm_90a"):
        load()
    assert toolkit.compiles == 0
    monkeypatch.delenv("HPCJIT_REQUIRE_WARM")
    load()
    build.forget()
    monkeypatch.setenv("HPCJIT_REQUIRE_WARM", "1")
    load()
    assert toolkit.compiles == 1


def test_without_a_compiler_the_error_names_kernel_and_remedy(fresh, monkeypatch):
    monkeypatch.setenv("HPCJIT_CUDA_HOME", "/nonexistent")
    with pytest.raises(
        ToolchainError, match=r"(?s)test\.scale .* is not in the kernel cache and cannot be compiled.*pip install"
    ):
        load()


# --- every way to find the compiler also links ----------------------------------------------------------------------


def test_pip_layout_compiles_and_links(fresh, monkeypatch, tmp_path):
    """pip's runtime library has no development link: a plain -lcudart would fail."""
    monkeypatch.setenv("HPCJIT_CUDA_HOME", str(pip_layout(tmp_path / "site").home))
    assert load().error_text(2) == "out of memory"


def test_wrapper_script_compiles_and_links(fresh, monkeypatch, tmp_path):
    """torch alone would take the wrapper's parent for the toolkit."""
    wrapper = tmp_path / "bin" / "nvcc"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec "{real_nvcc().path}" "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", os.pathsep.join([str(wrapper.parent), os.environ["PATH"]]))
    assert load().error_text(2) == "out of memory"


def test_spaces_and_letters_in_every_path(monkeypatch, tmp_path, fresh):
    odd = tmp_path / "größe mit leerzeichen"
    toolkit = Toolkit(odd / "cuda")
    shutil.copytree(DATA, odd / "meine daten")
    (odd / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(odd / "tmp"))
    monkeypatch.setenv("HPCJIT_CUDA_HOME", str(toolkit.home))
    monkeypatch.setenv("HPCJIT_CACHE_DIR", str(odd / "cache: 1 $dollar it's"))
    kernel = build.load(scale_template(odd / "meine daten"), ScaleConfig(), arch=ARCH)
    assert odd in kernel.path.parents
    assert toolkit.compiles == 1


def test_ninja_off_path_compiles(fresh, monkeypatch, tmp_path):
    pytest.importorskip("ninja")
    for name in ("sh", "c++", "g++", "gcc", "cc", "as", "ld", "which", "env", "setpriv", "nvcc"):
        if shutil.which(name):
            (tmp_path / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("ninja") is None
    load()


# --- compiler failures ----------------------------------------------------------------------------------------------


def broken(tmp_path: Path, text: str) -> build.Template:
    (tmp_path / "broken.cuh").write_text(text)
    return scale_template(tmp_path, header="broken.cuh")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("namespace scale_test { int x = ; }\n", r"broken\.cuh\(1\): error: expected an expression"),
        ('#include "no/such.cuh"\n', r"no/such\.cuh: No such file"),
    ],
)
def test_compile_error_says_what_where_and_how_to_repeat(fresh, tmp_path, text, expected):
    with pytest.raises(CompileError, match=expected) as error:
        build.load(broken(tmp_path, text), ScaleConfig(), arch=ARCH)
    message = str(error.value)
    assert message.startswith("test.scale [threads=256, offset=0] for sm_90a: the compiler failed\n")
    assert len(message.splitlines()) < 40
    log = Path(next(line for line in message.splitlines() if line.startswith("full log: ")).removeprefix("full log: "))
    assert log.parent == fresh / "logs"
    assert "broken.cuh" in log.read_text()
    command = (
        next(line for line in message.splitlines() if line.startswith("repeat: ")).removeprefix("repeat: ").strip()
    )
    repeated = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert repeated.returncode != 0
    assert "broken.cuh" in repeated.stdout + repeated.stderr
    assert not cache.entries(root=fresh)
    assert not list((fresh / "staging").iterdir())


def test_long_error_lists_are_cut(fresh, tmp_path):
    many = "".join(f"undefined_type_{i} f{i}();\n" for i in range(90))
    with pytest.raises(CompileError) as error:
        build.load(broken(tmp_path, many), ScaleConfig(), arch=ARCH)
    assert len(str(error.value).splitlines()) < 40


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("exit 0", "wrote no binary|cannot find|No such file"),
        ('echo half >cuda.cuda.o; echo "internal trouble: error 7" >&2; exit 1', "internal trouble"),
        ("kill -9 $$", "Killed|failed"),
    ],
)
def test_nothing_is_published_by_a_compiler_that_breaks_off(fresh, toolkit, monkeypatch, script, expected):
    monkeypatch.setenv("HPCJIT_CUDA_HOME", str(toolkit.home))
    toolkit.behave(script)
    with pytest.raises(CompileError, match=expected):
        load()
    assert not cache.entries(root=fresh)
    toolkit.behave("")
    assert load().error_text(2) == "out of memory"


def test_missing_runtime_library_is_found_or_named(built, monkeypatch):
    monkeypatch.setattr(launch, "_runtime_candidates", lambda name: [])
    with pytest.raises(CacheError, match=r"needs libcudart\.so\.99.*pip install nvidia-cuda-runtime"):
        launch._open_runtime("libcudart.so.99", built.path)
    monkeypatch.undo()
    assert ctypes.CDLL(launch._runtime_candidates(f"libcudart.so.{real_nvcc().cuda_major}")[0])
    assert folders.configured_root()
