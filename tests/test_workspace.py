"""Memory that the launches on a stream share: on simulated streams and captures, and on a GPU with a kernel that uses it."""

from __future__ import annotations

import ctypes
import gc
import sys
import types
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from test_caller import Exchange
from test_launch import Stub

from hpcjit import binder, build, caller, launch, workspace
from hpcjit.errors import LaunchError
from hpcjit.jit_op import JitOp, Plan
from hpcjit.spec import KernelBackend

CPU = -1  # the device index of the CPU tensors that stand in for those of a GPU
MAIN, SIDE = 0x100, 0x200
QUERY = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 6)


@dataclass(frozen=True)
class TicketConfig(build.Config):
    pass


TICKET = build.Template(
    op="elementwise.probe_ticket",
    header="ticket.cuh",
    entry="ticket_test::Ticket",
    config=TicketConfig,
    params=("out", "workspace", "counters", "num_counters", "blocks", "delay"),
    include=(Path(__file__).parent / "data",),
)


class TicketOp(JitOp):
    """out = 1 + 2 + ... + blocks."""

    op = "elementwise.probe_ticket"
    schema = "(Tensor x, int blocks, int num_counters, int delay, Tensor(a!) out) -> ()"
    capabilities: ClassVar = {KernelBackend.JIT: frozenset()}

    def check(self, x, blocks, num_counters, delay, out) -> None:
        pass

    def plan(self, x, blocks, num_counters, delay, out) -> Plan:
        values = {"num_counters": num_counters, "blocks": blocks, "delay": delay}
        return Plan(TICKET, TicketConfig(), values, workspace_bytes=4 * blocks, counter_bytes=4 * num_counters)

    def reference(self, x, blocks, num_counters, delay, out) -> None:
        out.fill_(blocks * (blocks + 1) / 2)


class Simulation:
    """The streams and captures of a device, with memory of the CPU."""

    def __init__(self) -> None:
        self.stream = MAIN
        self.captures: dict[int, int] = {}
        self.allocated: list[tuple[int, bool]] = []  # size, zeroed
        self.memory: list[weakref.ref] = []
        self.queries = 0
        self.query = QUERY(self._query)

    def _query(self, stream: int, status: int, number: int, *nothing: None) -> int:
        self.queries += 1
        assert not any(nothing)
        ctypes.c_int.from_address(status).value = int(stream in self.captures)
        ctypes.c_uint64.from_address(number).value = self.captures.get(stream, 0)
        return 0

    def allocate(self, device: int, size: int, *, zeroed: bool) -> tuple[torch.Tensor, int]:
        assert device == CPU
        memory = torch.zeros(size, dtype=torch.uint8) if zeroed else torch.full((size,), 255, dtype=torch.uint8)
        self.allocated.append((size, zeroed))
        self.memory.append(weakref.ref(memory))
        return memory, memory.data_ptr()

    def held(self) -> int:
        gc.collect()
        return sum(memory() is not None for memory in self.memory)


class OtherStream(Exchange):
    """torch's exchange table with the simulated current stream."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        super().__init__()

    def _stream(self, device_type: int, device: int, out) -> int:
        out[0] = self.simulation.stream
        return 0


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> Simulation:
    found = Simulation()
    monkeypatch.setattr(workspace, "_streams", {})
    monkeypatch.setattr(workspace, "_captures", {})
    monkeypatch.setattr(workspace, "allocate", found.allocate)
    monkeypatch.setattr(workspace, "capture_query", lambda: found.query)
    monkeypatch.setattr(caller, "raw_stream", lambda device: found.stream)
    monkeypatch.setattr(launch, "raw_stream", lambda device: found.stream, raising=False)
    return found


@pytest.fixture(params=["binder", "binder without driver", "python"])
def op(request, simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> TicketOp:
    """The operator on either caller; `op.stub` notes its launches."""
    stub = Stub(len(TICKET.params))
    kernel = object.__new__(launch.Kernel)
    kernel.title, kernel.params, kernel.kinds, kernel.address = "ticket", TICKET.params, "pppiii", stub.address
    kernel.error_text = lambda code: f"text of {code}"
    kernel.launch = launch.make_launcher(stub.address, kernel.kinds, kernel._fail)
    monkeypatch.setattr(build, "load", lambda template, config, device, op: kernel)
    if request.param == "python":
        monkeypatch.setattr(caller, "make", caller.PythonCaller)
    elif binder.module() is None or not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("no caller in C here")
    else:
        stub.exchange = OtherStream(simulation)  # lives as long as the stub
        tensors = (*caller.PLAIN_TENSORS, torch.is_grad_enabled)
        monkeypatch.setattr(
            caller, "make", lambda kinds, miss: binder.module().caller(kinds, stub.exchange.capsule, *tensors, miss)
        )
    if request.param == "binder without driver":
        monkeypatch.setattr(workspace, "capture_query_address", lambda: 0)
    made = TicketOp()
    made.stub = stub
    return made


X = torch.zeros(1)


def run(op: TicketOp, blocks: int = 10, num_counters: int = 1, x: torch.Tensor = X) -> tuple[int, int]:
    """A call, and the addresses of scratch and counters that the launch got."""
    op.forward_jit(x, blocks, num_counters, 0, X)
    words, _, _ = op.stub.calls[-1]
    assert words[3:] == [num_counters, blocks, 0]
    return words[1], words[2]


def test_a_stream_has_one_block_and_keeps_it(op, simulation) -> None:
    first = run(op)
    assert first == run(op) == run(op, blocks=20) == run(op, num_counters=30)
    assert first[0] != first[1]
    assert simulation.allocated == [(4096, False), (4096, True)]
    assert workspace.sizes() == {(CPU, MAIN, False): (4096, 4096)}


def test_streams_share_nothing(op, simulation) -> None:
    first = run(op)
    simulation.stream = SIDE
    second = run(op)
    assert not set(first) & set(second)
    simulation.stream = MAIN
    assert run(op) == first
    simulation.stream = SIDE
    assert run(op) == second
    assert [stream for _, _, stream in op.stub.calls] == [MAIN, SIDE, MAIN, SIDE]


def test_operators_share_a_stream_s_block(op, simulation) -> None:
    other = TicketOp()
    other.stub = op.stub
    assert run(op) == run(other)


def test_growth_replaces_only_what_is_too_small(op, simulation) -> None:
    scratch, counters = run(op)
    larger, same = run(op, blocks=1025)
    assert same == counters
    assert run(op) == (larger, counters) != (scratch, counters), "what is too large is no reason for another"
    still, more = run(op, num_counters=2000)
    assert still == larger
    assert more != counters
    assert simulation.allocated == [(4096, False), (4096, True), (8192, False), (8192, True)]
    assert simulation.held() == 2
    run(op, blocks=2**18 + 1)
    assert simulation.allocated[-1] == (2 << 20, False), "from 1 MiB on its multiples"


def test_a_capture_has_its_own(op, simulation) -> None:
    eager = run(op)
    simulation.captures[MAIN] = 71
    captured = run(op)
    assert not set(captured) & set(eager)
    assert run(op) == captured
    assert simulation.allocated[2:] == [(4096, False), (4096, True)], "zeroed within the capture, once"
    simulation.captures.clear()
    assert run(op) == eager
    assert workspace.sizes() == dict.fromkeys([(CPU, MAIN, False), (CPU, MAIN, True)], (4096, 4096))


def test_captures_share_nothing_and_only_the_latest_is_held(op, simulation) -> None:
    found = []
    for number in range(71, 75):
        simulation.captures[MAIN] = number
        found.append(run(op))
    assert len(simulation.allocated) == 8
    assert simulation.held() == 2
    simulation.captures[SIDE] = 74  # a branch of the last one
    simulation.stream = SIDE
    assert not set(run(op)) & set(found[-1])
    assert simulation.held() == 4


def test_growth_within_a_capture(op, simulation) -> None:
    simulation.captures[MAIN] = 71
    _, counters = run(op)
    larger, same = run(op, blocks=5000)
    assert same == counters
    assert run(op) == (larger, counters)


def test_memory_is_held_until_the_launch_even_if_nothing_keeps_it(op, simulation, monkeypatch) -> None:
    """torch.compile's graph trees refuse memory in their pool that outlives a call: it lives as long as the launch."""
    manager = types.SimpleNamespace(stream=types.SimpleNamespace(cuda_stream=MAIN))
    trees = types.SimpleNamespace(get_manager=lambda device, create_if_none_exists: manager)
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees)
    alive = []
    note = op.stub._note
    monkeypatch.setattr(op.stub, "_note", lambda *args: (alive.append(simulation.held()), note(*args))[1])
    run(op)
    run(op)
    assert alive == [2, 2]
    assert simulation.held() == 0
    assert not workspace.sizes()
    simulation.stream = SIDE
    run(op)
    assert simulation.held() == 2, "another stream is not theirs"


@pytest.mark.parametrize("error", [AssertionError, RuntimeError])
def test_threads_without_graph_trees(op, simulation, monkeypatch, error) -> None:
    def get_manager(device: int, create_if_none_exists: bool):
        raise error

    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", types.SimpleNamespace(get_manager=get_manager))
    assert run(op) == run(op)


def test_the_number_of_streams_is_bounded(op, simulation, monkeypatch) -> None:
    monkeypatch.setattr(workspace, "MAX_STREAMS", 4)
    for stream in range(1, 24):
        simulation.stream = stream
        run(op)
        simulation.captures[stream] = stream
        run(op)
        simulation.captures.clear()
    assert simulation.held() == 2 * 2 * 4
    assert {stream for _, stream, _ in workspace.sizes()} == {20, 21, 22, 23}


@pytest.mark.parametrize("device", [None, CPU])
def test_reset_gives_new_counters(op, simulation, device) -> None:
    run(op)
    workspace.reset(device)
    assert simulation.held() == 0
    run(op)
    assert simulation.allocated[2:] == [(4096, False), (4096, True)]


def test_reset_of_another_device_leaves_it(op, simulation) -> None:
    before = run(op)
    workspace.reset(3)
    workspace.reset("cuda:3")
    assert run(op) == before
    assert len(simulation.allocated) == 2


def test_no_memory_is_an_error_and_nothing_is_launched(op, simulation, monkeypatch) -> None:
    def exhausted(device: int, size: int, *, zeroed: bool):
        raise torch.OutOfMemoryError("none left")

    run(op)
    launches = len(op.stub.calls)
    monkeypatch.setattr(workspace, "allocate", exhausted)
    with pytest.raises(torch.OutOfMemoryError):
        run(op, blocks=5000)
    assert len(op.stub.calls) == launches
    run(op)


def test_a_failed_launch_is_an_error(op, simulation) -> None:
    op.stub.code = 98
    with pytest.raises(LaunchError, match="text of 98"):
        run(op)
    op.stub.code = 0
    run(op)


def test_calls_without_a_signature_get_it_too(op, simulation) -> None:
    class Tagged(torch.Tensor):
        pass

    assert run(op) == run(op, x=X.as_subclass(Tagged))


def test_a_plan_without_needs_gets_null(op, simulation, monkeypatch) -> None:
    values = {"num_counters": 1, "blocks": 10, "delay": 0}
    monkeypatch.setattr(TicketOp, "plan", lambda self, *args: Plan(TICKET, TicketConfig(), values))
    assert run(op) == (0, 0)
    assert not workspace.sizes()


def test_a_plan_that_needs_counters_only(op, simulation, monkeypatch) -> None:
    values = {"num_counters": 1, "blocks": 10, "delay": 0}
    monkeypatch.setattr(TicketOp, "plan", lambda self, *args: Plan(TICKET, TicketConfig(), values, counter_bytes=4))
    run(op)
    assert workspace.sizes() == {(CPU, MAIN, False): (0, 4096)}


def test_debug_mode_gets_it_too(op, simulation, monkeypatch) -> None:
    before = run(op)
    monkeypatch.setenv("HPCJIT_DEBUG", "1")
    op._forget()
    assert run(op) == before


def test_references_are_not_leaked(op, simulation) -> None:
    run(op)
    block = workspace._streams[CPU][MAIN]
    count = sys.getrefcount(block)
    for _ in range(200):
        run(op)
    assert sys.getrefcount(block) == count


def test_a_known_stream_costs_one_query_and_no_python(simulation, op, request, monkeypatch) -> None:
    if request.node.callspec.params["op"] != "binder":
        pytest.skip("about the caller in C")
    run(op)
    simulation.queries = 0
    monkeypatch.setattr(workspace.Need, "_known", None)  # any use would fail
    run(op)
    assert simulation.queries == 1


def test_sources_are_checked() -> None:
    if binder.module() is None:
        pytest.skip("no binder here")
    slots = ((3, 0, 0),)
    with pytest.raises(ValueError, match="source 3"):
        binder.module().bound(1, 0, None, None, slots)
    binder.module().bound(1, 0, None, None, slots, ({}, print, 0, 16, 0))
    with pytest.raises(ValueError, match="source 3"):
        binder.module().bound(1, 0, None, None, ((3, 2, 0),), ({}, print, 0, 16, 0))


class TestCaptureNumber:
    def answer(self, monkeypatch, *answers: tuple[int, int, int], capturing: bool = False) -> list:
        left = list(answers)

        def query(stream, status, number, *nothing) -> int:
            code, ctypes.c_int.from_address(status).value, ctypes.c_uint64.from_address(number).value = left.pop(0)
            return code

        monkeypatch.setattr(workspace, "capture_query", lambda: query)
        monkeypatch.setattr(launch, "capturing", lambda: capturing)
        return left

    def test_outside_of_any(self, monkeypatch) -> None:
        self.answer(monkeypatch, (0, 0, 9))
        assert workspace.capture_id(MAIN) == 0

    @pytest.mark.parametrize("status", [1, 2])
    def test_active_or_invalidated(self, monkeypatch, status) -> None:
        self.answer(monkeypatch, (0, status, 9))
        assert workspace.capture_id(MAIN) == 9

    def test_an_error_outside_of_any_is_none(self, monkeypatch) -> None:
        """The driver refuses the legacy stream beside a capture, and a thread without a context."""
        self.answer(monkeypatch, (906, 1, 9))
        assert workspace.capture_id(0) == 0

    def test_a_thread_without_a_context_asks_again(self, monkeypatch) -> None:
        left = self.answer(monkeypatch, (201, 0, 0), (0, 1, 9), capturing=True)
        assert workspace.capture_id(MAIN) == 9
        assert not left

    def test_a_capture_that_cannot_be_named_is_an_error(self, monkeypatch) -> None:
        self.answer(monkeypatch, (201, 0, 0), (201, 0, 0), capturing=True)
        with pytest.raises(LaunchError, match="201"):
            workspace.capture_id(MAIN)

    def test_without_a_driver(self, monkeypatch) -> None:
        monkeypatch.setattr(workspace, "capture_query", lambda: None)
        assert workspace.capture_id(MAIN) == 0
        assert workspace.capture_query_address() == 0
