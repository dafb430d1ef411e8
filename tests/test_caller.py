"""The eager path of an operator, without a GPU: CPU tensors, a launch function and a stream getter written in Python."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from test_launch import HAS_PYTHON_H, Stub

from hpcjit import binder, build, caller, jit_op, launch, trace
from hpcjit.errors import ArgumentError, LaunchError
from hpcjit.fused_op import use_backend
from hpcjit.jit_op import NOTHING, JitOp, Plan
from hpcjit.spec import KernelBackend

STREAM = 0x5EED
_GET_STREAM = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
_NAME = b"dlpack_exchange_api"


class Exchange:
    """torch's exchange table with another getter of the current stream (torch's own fails without a driver)."""

    def __init__(self) -> None:
        api = ctypes.pythonapi
        api.PyCapsule_GetPointer.restype = ctypes.c_void_p
        api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
        api.PyCapsule_New.restype = ctypes.py_object
        api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        source = api.PyCapsule_GetPointer(torch.Tensor.__dlpack_c_exchange_api__, _NAME)
        self.table = (ctypes.c_uint64 * 7)()
        ctypes.memmove(self.table, source, ctypes.sizeof(self.table))
        self.get_stream = _GET_STREAM(self._stream)
        self.table[6] = ctypes.cast(self.get_stream, ctypes.c_void_p).value
        self.capsule = api.PyCapsule_New(ctypes.addressof(self.table), _NAME, None)

    def _stream(self, device_type: int, device: int, out) -> int:
        assert device_type == 2
        out[0] = STREAM
        return 0


@dataclass(frozen=True)
class ToyConfig(build.Config):
    wide: bool = False


TOY = build.Template(
    "elementwise.toy", "toy.cuh", "toy", ToyConfig, params=("x", "y", "rows", "stride", "alpha", "extra", "fault")
)


class ToyOp(JitOp):
    op = "elementwise.toy"
    schema = "(Tensor x, Tensor? y, float alpha, int mode, bool wide, str? name, Tensor(a!) out) -> ()"

    def __init__(self) -> None:
        super().__init__()
        self.checked = self.planned = 0

    def check(self, x, y, alpha, mode, wide, name, out) -> None:
        self.checked += 1
        if alpha < 0:
            raise ArgumentError(self.op, "alpha", "at least 0", alpha)
        if torch.is_grad_enabled() and x.requires_grad:
            raise ArgumentError(self.op, "x", "a tensor that needs no gradient", x)

    def plan(self, x, y, alpha, mode, wide, name, out) -> Plan | str:
        self.planned += 1
        if x.numel() == 0:
            return NOTHING
        return Plan(TOY, ToyConfig(wide), {"rows": x.shape[0], "stride": -x.stride(0), "extra": "out"})

    def reference(self, *args) -> None:
        raise AssertionError("not reached")


@pytest.fixture(params=["binder", "python"])
def toy(request, monkeypatch: pytest.MonkeyPatch):
    """An operator on either caller, and the stub that it launches."""
    stub = Stub(7)
    kernel = object.__new__(launch.Kernel)
    kernel.title, kernel.params, kernel.kinds, kernel.address = "toy", TOY.params, "ppiidpp", stub.address
    kernel.error_text = lambda code: f"text of {code}"
    kernel.launch = launch.make_launcher(stub.address, kernel.kinds, kernel._fail)
    monkeypatch.setattr(build, "load", lambda template, config, device, op: kernel)
    monkeypatch.setattr(caller, "raw_stream", lambda device: STREAM)
    monkeypatch.setattr(launch, "raw_stream", lambda device: STREAM, raising=False)
    if request.param == "python":
        monkeypatch.setattr(caller, "make", caller.PythonCaller)
    elif binder.module() is None:
        assert not HAS_PYTHON_H
        pytest.skip("no Python.h or no C compiler")
    elif not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this torch publishes no DLPack exchange functions")
    else:
        stub.exchange = exchange = Exchange()  # lives as long as the stub
        tensors = (*caller.PLAIN_TENSORS, torch.is_grad_enabled)
        monkeypatch.setattr(
            caller, "make", lambda kinds, miss: binder.module().caller(kinds, exchange.capsule, *tensors, miss)
        )
    op = ToyOp()
    op.forward_jit(*arguments())  # installs the caller
    op.checked = op.planned = 0
    op._caller.remembered.clear()
    stub.calls.clear()
    return op, stub


def arguments(x=None, **changes):
    x = torch.randn(4, 8) if x is None else x
    args = {"x": x, "y": None, "alpha": 0.5, "mode": 3, "wide": False, "name": "sum", "out": torch.empty(4, 8)}
    return tuple({**args, **changes}.values())


def test_a_launch_gets_addresses_constants_and_floats(toy) -> None:
    op, stub = toy
    args = arguments(y=torch.ones(3))
    op.forward_jit(*args)
    words, device, stream = stub.calls[-1]
    alpha = struct.unpack("<Q", struct.pack("<d", 0.5))[0]
    addresses = [args[0].data_ptr(), args[1].data_ptr()]
    assert words == [*addresses, 4, 2**64 - 8, alpha, args[-1].data_ptr(), 0]
    assert (device, stream) == (-1, STREAM)  # CPU tensors stand in for those of a device


def test_none_is_a_null_pointer_and_views_start_where_they_start(toy) -> None:
    op, stub = toy
    x = torch.randn(9, 8)[4:8]
    op.forward_jit(*arguments(x))
    assert stub.calls[-1][0][:2] == [x.data_ptr(), 0]


def test_a_repeated_signature_is_not_planned_again(toy) -> None:
    op, stub = toy
    for _ in range(3):
        op.forward_jit(*arguments())
    assert (op.checked, op.planned, len(stub.calls)) == (1, 1, 3)


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.randn(5, 8)},
        {"x": torch.randn(8, 4).t()},
        {"x": torch.randn(4, 8, dtype=torch.float64)},
        {"x": torch.randn(33)[1:].view(4, 8)},
        {"x": torch.randn(1, 4, 8)},
        {"y": torch.randn(1)},
        {"alpha": 0.25},
        {"mode": 4},
        {"mode": -3},
        {"mode": True},
        {"mode": None},
        {"wide": True},
        {"name": "max"},
        {"name": None},
        {"name": "a name of more than sixteen characters"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_may_matter_is_in_the_signature(toy, change) -> None:
    op, stub = toy
    op.forward_jit(*arguments())
    op.forward_jit(*arguments(**change))
    assert op.planned == 2
    assert len(stub.calls) == 2


def test_one_tensor_twice_is_another_call_than_two_tensors(toy) -> None:
    op, stub = toy
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    op.forward_jit(*arguments(x, y=y))
    op.forward_jit(*arguments(y, y=x))
    assert op.planned == 1
    op.forward_jit(*arguments(x, y=x))
    op.forward_jit(*arguments(y, y=y))
    assert op.planned == 2
    op.forward_jit(*arguments(x, y=y, out=x))
    op.forward_jit(*arguments(x, y=y, out=y))
    assert op.planned == 4
    assert len(stub.calls) == 6


def test_a_bad_float_is_refused_even_when_the_shapes_are_known(toy) -> None:
    op, stub = toy
    op.forward_jit(*arguments())
    with pytest.raises(ArgumentError, match="alpha"):
        op.forward_jit(*arguments(alpha=-1.0))
    assert len(stub.calls) == 1


def test_a_parameter_shares_the_plan_of_a_tensor_and_a_followed_one_is_refused(toy) -> None:
    op, stub = toy
    x = torch.nn.Parameter(torch.randn(4, 8))
    with torch.no_grad():
        op.forward_jit(*arguments())
        op.forward_jit(*arguments(x))
    assert op.planned == 1
    with pytest.raises(ArgumentError, match="gradient"):
        op.forward_jit(*arguments(x))
    assert len(stub.calls) == 2


@pytest.mark.parametrize("kind", ["sparse", "nested"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_tensor_without_plain_memory_goes_the_slow_way(toy, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch raises for it where the signature is made, and that must not be all that the caller of an operator sees."""
    op, stub = toy
    y = torch.eye(4, 8).to_sparse() if kind == "sparse" else torch.nested.as_nested_tensor([torch.randn(8)] * 4)

    def check(*args) -> None:
        if args[1] is not None:
            raise ArgumentError(op.op, "y", "a dense tensor", kind)

    monkeypatch.setattr(op, "check", check)
    with pytest.raises(ArgumentError, match="a dense tensor"):
        op.forward_jit(*arguments(y=y))
    op.forward_jit(*arguments())
    assert len(stub.calls) == 1


def test_a_subclass_without_rules_of_its_own_runs(toy) -> None:
    class Tagged(torch.Tensor):
        pass

    op, stub = toy
    x = torch.randn(4, 8).as_subclass(Tagged)
    op.forward_jit(*arguments(x))
    assert stub.calls[-1][0][0] == x.data_ptr()
    assert not op._caller.remembered


def test_an_empty_input_launches_nothing(toy) -> None:
    op, stub = toy
    op.forward_jit(*arguments(torch.empty(0, 8)))
    assert not stub.calls


def test_an_int_passes_for_a_float(toy) -> None:
    op, stub = toy
    op.forward_jit(*arguments(alpha=2))
    assert struct.unpack("<d", struct.pack("<Q", stub.calls[-1][0][4]))[0] == 2.0


def test_a_failed_launch_names_the_cuda_error(toy) -> None:
    op, stub = toy
    stub.code = 98
    with pytest.raises(LaunchError, match=r"text of 98.*98"):
        op.forward_jit(*arguments())


def test_a_wrong_number_of_arguments(toy) -> None:
    op, _ = toy
    with pytest.raises((TypeError, ValueError)):
        op.forward_jit(*arguments()[:-1])


def test_the_table_is_bounded(toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit_op, "MAX_PLANS", 5)
    op, stub = toy
    for mode in range(23):
        op.forward_jit(*arguments(mode=mode))
    assert len(op._caller.remembered) <= 5
    assert len(stub.calls) == 23


def test_references_are_not_leaked(toy) -> None:
    import gc
    import sys

    op, _ = toy
    args = arguments(alpha=float("0.625"), mode=12345678)
    kept = [args[0], args[2], args[3], args[-1]]  # the others are shared objects such as None
    op.forward_jit(*args)
    counts = [sys.getrefcount(value) for value in kept]
    for _ in range(200):
        op.forward_jit(*args)
    gc.collect()
    assert max(now - before for now, before in zip(map(sys.getrefcount, kept), counts, strict=True)) < 10


def test_header_travels_with_the_package() -> None:
    assert Path(binder.HEADER).is_file()
    assert HAS_PYTHON_H is False or binder.module() is not None


class TestFast:
    """`fast` must do what a call of the operator does, whatever has been chosen or forced."""

    @pytest.fixture
    def runs(self, toy, monkeypatch: pytest.MonkeyPatch):
        op, stub = toy
        native: list[tuple] = []
        monkeypatch.setattr(op, "reference", lambda *args: native.append(args))
        op._forget()
        return op, stub, native

    def use_jit(self, op: ToyOp, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let automatic choice find the JIT backend good for CPU tensors."""
        everywhere = {KernelBackend.JIT: frozenset()}
        monkeypatch.setattr(type(op), "capabilities", everywhere)
        op._forget()

    def test_the_caller_takes_over_and_is_left_again(self, runs, monkeypatch) -> None:
        op, stub, native = runs
        self.use_jit(op, monkeypatch)
        for _ in range(4):
            op.fast(*arguments())
        assert op.fast is op._caller
        assert (len(stub.calls), len(native)) == (4, 0)
        with use_backend("torch"):
            op.fast(*arguments())
            assert (len(stub.calls), len(native)) == (4, 1)
            op(*arguments(), backend="jit")
            assert (len(stub.calls), len(native)) == (5, 1)
        op.fast(*arguments())
        assert (len(stub.calls), len(native)) == (6, 1)

    def test_a_trace_sees_every_call(self, runs, monkeypatch) -> None:
        op, _, _ = runs
        self.use_jit(op, monkeypatch)
        for _ in range(4):
            op.fast(*arguments())
        trace.enable_fused_op_trace()
        try:
            for _ in range(3):
                op.fast(*arguments())
            assert [record.count for record in trace.get_fused_op_trace().records] == [3]
        finally:
            trace.disable_fused_op_trace()
            trace.clear_fused_op_trace()

    def test_another_device_goes_where_it_belongs(self, runs, monkeypatch) -> None:
        op, stub, native = runs
        self.use_jit(op, monkeypatch)
        for _ in range(3):
            op.fast(*arguments())
        monkeypatch.setitem(op._decisions, -1, op.forward_native)
        op.fast(*arguments(mode=77))
        assert (len(stub.calls), len(native)) == (3, 1)


def test_each_tensor_has_an_alignment_of_its_own(toy) -> None:
    """A plan for a misaligned `x` must not serve a call whose `out` is misaligned in its place."""
    op, _ = toy
    moved = torch.randn(34)[2:].view(4, 8)
    op.forward_jit(*arguments(moved))
    op.forward_jit(*arguments(out=moved))
    assert op.planned == 2

    def test_the_warning_of_a_forced_backend_points_at_the_call(self, runs) -> None:
        op, _, _ = runs
        with use_backend("flashinfer"), pytest.warns(RuntimeWarning, match="forced backend flashinfer") as caught:
            op.fast(*arguments())
        assert Path(caught[0].filename) == Path(__file__)
