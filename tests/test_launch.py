"""The call into a binary, without a GPU: a launch function written in Python stands in for a finished one."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path

import pytest
from scale_template import output, python

from hpcjit import binder, folders, launch
from hpcjit.errors import LaunchError

HAS_PYTHON_H = Path(sysconfig.get_path("include"), "Python.h").is_file() and shutil.which("cc") is not None
LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_uint64), ctypes.c_int, ctypes.c_void_p)


class Stub:
    """A launch function that notes what it is called with and returns `code`."""

    def __init__(self, slots: int) -> None:
        self.code = 0
        self.calls: list[tuple[list[int], int, int]] = []
        self._function = LAUNCH(lambda p, device, stream: self._note(p[:slots], device, stream))
        self.address = ctypes.cast(self._function, ctypes.c_void_p).value

    def _note(self, words: list[int], device: int, stream: int | None) -> int:
        self.calls.append((words, device, stream or 0))
        return self.code


def fail(code: int, arguments: tuple) -> None:
    raise LaunchError(f"code {code} for {arguments!r}")


@pytest.fixture(params=["binder", "ctypes"])
def make(request):
    """Both launchers have to behave alike."""
    if request.param == "ctypes":
        return launch.ctypes_launcher
    module = binder.module()
    if module is None:
        assert not HAS_PYTHON_H, "the binder could be built here and was not"
        pytest.skip("no Python.h or no C compiler")
    return module.make


def bits(value: float) -> int:
    return int.from_bytes(__import__("struct").pack("<d", value), "little")


@pytest.mark.parametrize(
    ("kind", "value", "word"),
    [
        ("p", None, 0),
        ("p", 0, 0),
        ("p", 2**64 - 1, 2**64 - 1),
        ("p", 2**63, 2**63),
        ("p", -1, 2**64 - 1),
        ("i", 7, 7),
        ("i", -7, 2**64 - 7),
        ("i", 2**63 - 1, 2**63 - 1),
        ("i", -(2**63), 2**63),
        ("i", True, 1),
        ("d", 1.5, bits(1.5)),
        ("d", 1, bits(1.0)),  # an int for a double is the number, not its bits
        ("d", -1.0, bits(-1.0)),
        ("d", float("inf"), bits(float("inf"))),
        ("d", False, 0),
    ],
)
def test_every_kind_of_value(make, kind, value, word):
    stub = Stub(1)
    assert make(stub.address, kind, fail)(3, 99, value) is None
    assert stub.calls == [([word], 3, 99)]


def test_numpy_scalars(make):
    numpy = pytest.importorskip("numpy")
    stub = Stub(3)
    make(stub.address, "pid", fail)(0, 0, numpy.int64(5), numpy.int32(-1), numpy.float32(0.5))
    assert stub.calls[0][0] == [5, 2**64 - 1, bits(0.5)]


@pytest.mark.parametrize(
    ("kind", "value"),
    [("i", 1.0), ("i", None), ("i", 2**63), ("i", -(2**63) - 1), ("i", "1"), ("p", 2**64), ("p", -(2**63) - 1), ("p", 1.0),
     ("d", None), ("d", "1"), ("d", b"1"), ("d", 10**400)],
)  # fmt: skip
def test_values_that_do_not_fit_never_reach_the_kernel(make, kind, value):
    stub = Stub(1)
    with pytest.raises(LaunchError, match="code -1"):
        make(stub.address, kind, fail)(0, 0, value)
    assert stub.calls == []


@pytest.mark.parametrize("arguments", [(), (0,), (0, 0), (0, 0, 1, 2), (None, 0, 1), (0, 1.5, 1)])
def test_wrong_numbers_of_arguments_never_reach_the_kernel(make, arguments):
    stub = Stub(1)
    with pytest.raises(LaunchError, match="code -1"):
        make(stub.address, "i", fail)(*arguments)
    assert stub.calls == []


def test_thirty_two_slots_in_order(make):
    stub = Stub(64)
    make(stub.address, "i" * 64, fail)(0, 0, *range(64))
    assert stub.calls[0][0] == list(range(64))


def test_an_error_code_reaches_the_handler_with_the_arguments(make):
    stub = Stub(1)
    stub.code = 700
    with pytest.raises(LaunchError, match=r"code 700 for \(1, 2, 3\)"):
        make(stub.address, "i", fail)(1, 2, 3)
    assert len(stub.calls) == 1


def test_exceptions_of_values_do_not_leak(make):
    class Evil:
        def __index__(self) -> int:
            raise ZeroDivisionError

        def __float__(self) -> float:
            raise TypeError

    stub = Stub(1)
    for kind in "id":
        with pytest.raises((LaunchError, ZeroDivisionError)):
            make(stub.address, kind, fail)(0, 0, Evil())
    assert stub.calls == []


def test_many_threads(make):
    stub = Stub(2)
    call = make(stub.address, "id", fail)
    threads = [threading.Thread(target=lambda n=n: [call(n, n, n, n) for _ in range(200)]) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stub.calls) == 1600
    assert all(words == [device, bits(device)] and stream == device for words, device, stream in stub.calls)


@pytest.mark.skipif(not HAS_PYTHON_H, reason="no Python.h or no C compiler")
class TestBinder:
    def test_handler_that_returns_is_still_an_error(self):
        stub = Stub(1)
        stub.code = 5
        with pytest.raises(RuntimeError, match="code 5"):
            binder.module().make(stub.address, "i", lambda code, arguments: None)(0, 0, 1)

    @pytest.mark.parametrize("arguments", [(0, "i", fail), (1, "x", fail), (1, "i" * 65, fail), (1, "i", 7)])
    def test_make_checks_its_arguments(self, arguments):
        with pytest.raises(ValueError, match="make needs"):
            binder.module().make(*arguments)

    def test_keywords_are_refused(self):
        with pytest.raises(TypeError, match="no keyword arguments"):
            binder.module().make(Stub(1).address, "i", fail)(0, 0, slot=1)

    def test_no_references_are_lost(self):
        stub = Stub(3)
        call = binder.module().make(stub.address, "pid", fail)
        value, big, real = 10**6, 2**63 + 5, 1.25
        before = [sys.getrefcount(x) for x in (value, big, real)]
        for _ in range(1000):
            call(0, 0, big, value, real)
        after = [sys.getrefcount(x) for x in (value, big, real)]
        assert all(abs(a - b) < 10 for a, b in zip(after, before, strict=True))

    def test_is_built_once_and_kept(self, fresh, monkeypatch):
        monkeypatch.setattr(binder, "_module", binder._UNTRIED)
        assert binder.module() is not None
        entry = binder.wanted().folder(fresh)
        assert (entry / "kernel.so").is_file()
        monkeypatch.setattr(binder, "_module", binder._UNTRIED)
        monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("compiled again"))
        assert binder.module() is not None

    def test_damaged_one_is_rebuilt(self, fresh, monkeypatch):
        monkeypatch.setattr(binder, "_module", binder._UNTRIED)
        binder.module()
        binary = binder.wanted().folder(fresh) / "kernel.so"
        binary.unlink()  # this process has it mapped: writing into it would be felt here
        binary.write_bytes(b"junk")
        binary.chmod(0o700)
        code = "from hpcjit import binder\nprint(type(binder.module()).__name__)"
        assert output(python(code, PYTHONWARNINGS="ignore")) == "module"

    @pytest.mark.parametrize(
        "obstacle",
        [
            lambda patch: patch.setenv("PATH", "/nonexistent"),
            lambda patch: patch.setattr(sysconfig, "get_path", lambda name: "/nonexistent"),
            lambda patch: patch.setattr(binder, "SOURCE", Path("/nonexistent/binder.c")),
            lambda patch: patch.setenv("HPCJIT_REQUIRE_WARM", "1"),
            lambda patch: patch.setattr(folders, "usable_root", lambda: None),
        ],
        ids=["no compiler", "no Python.h", "no source", "must not compile", "no folder"],
    )
    def test_obstacles_mean_ctypes_without_a_word(self, fresh, monkeypatch, recwarn, capfd, obstacle):
        monkeypatch.setattr(binder, "_module", binder._UNTRIED)
        monkeypatch.delenv("CC", raising=False)
        obstacle(monkeypatch)
        stub = Stub(1)
        launch.make_launcher(stub.address, "i", fail)(0, 0, 4)
        assert stub.calls == [([4], 0, 0)]
        assert binder.module() is None
        assert not recwarn.list
        assert capfd.readouterr() == ("", "")


# --- stream and capture ---------------------------------------------------------------------------------------------


def test_raw_stream_is_torch_s_own_function(monkeypatch):
    import torch

    monkeypatch.delitem(vars(launch), "raw_stream", raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 40 + index, raising=False)
    assert launch.raw_stream(2) == 42
    assert launch.raw_stream is torch._C._cuda_getCurrentRawStream
    monkeypatch.delitem(vars(launch), "raw_stream")


def test_raw_stream_of_a_cpu_build(monkeypatch):
    import torch

    monkeypatch.delitem(vars(launch), "raw_stream", raising=False)
    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream", raising=False)
    assert launch.raw_stream(0) == 0
    monkeypatch.delitem(vars(launch), "raw_stream")


def test_unknown_names_are_unknown():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        launch.nothing  # noqa: B018


def test_capturing_neither_imports_torch_nor_starts_cuda():
    code = "from hpcjit import launch\nassert not launch.capturing()\nassert 'torch' not in sys.modules\n"
    code += "import torch\nassert not launch.capturing()\nassert not torch.cuda.is_initialized()\nprint('ok')"
    assert output(python(code)) == "ok"


# --- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_scale_on_a_gpu():
    """The whole path: compile, load, prepare, launch on the current stream, replay in a graph, report an error."""
    import torch
    from scale_template import SCALE, ScaleConfig

    from hpcjit import build

    kernel = build.load(SCALE, ScaleConfig(offset=1), device=0)
    x = torch.randn(1000, device="cuda")
    y = torch.empty_like(x)

    def run() -> None:
        kernel.launch(0, launch.raw_stream(0), x.data_ptr(), y.data_ptr(), x.numel(), 2)

    run()
    torch.testing.assert_close(y, x * 2 + 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.testing.assert_close(y, x * 2 + 1)
    with pytest.raises(LaunchError, match=r"test\.scale .*launch failed: .* \(CUDA error \d+\)"):
        kernel.launch(0, 0, x.data_ptr(), y.data_ptr(), 2**62, 2)
    torch.cuda.synchronize()
    run()
    torch.testing.assert_close(y, x * 2 + 1)


@pytest.mark.gpu
def test_cold_kernel_in_a_graph_capture():
    import torch
    from scale_template import SCALE, ScaleConfig

    from hpcjit import build
    from hpcjit.errors import CaptureError

    x = torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        with pytest.raises(CaptureError, match="Call it once before capture"):
            build.load(SCALE, ScaleConfig(offset=77), device=0)
    graph.replay()
    assert x.tolist() == [1] * 8


@pytest.mark.gpu
def test_second_device():
    import torch
    from scale_template import SCALE, ScaleConfig

    from hpcjit import build

    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    x = torch.ones(100, device="cuda:1")
    kernel = build.load(SCALE, ScaleConfig(), device=1)
    kernel.launch(1, launch.raw_stream(1), x.data_ptr(), x.data_ptr(), 100, 3.0)
    assert torch.cuda.current_device() == 0
    assert x.tolist() == [3.0] * 100
