"""Memory that the launches on a stream share, on a GPU: `ticket.cuh` gives a wrong sum unless its counters start at zero."""

from __future__ import annotations

import threading

import pytest
import torch
from test_workspace import TICKET, TicketConfig, TicketOp

from hpcjit import build, launch, workspace
from hpcjit.fused_op import define
from hpcjit.spec import KernelBackend

LONG = 20_000_000  # clock cycles, about 10 ms: launches of two streams overlap


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_the_kernel_compiles(arch: str) -> None:
    assert build.compile_only(TICKET, TicketConfig(), arch).manifest["spill_bytes"] == 0


@pytest.fixture
def op():
    made = TicketOp()
    define(made)
    run(made, outputs(1)[0], 1)  # compiled before any capture
    workspace.reset()
    yield made
    torch.cuda.synchronize()
    workspace.reset()


def outputs(count: int, device: str = "cuda") -> list[torch.Tensor]:
    return list(torch.full((count, 1), float("nan"), device=device))


def run(op: TicketOp, out: torch.Tensor, blocks: int = 50, num_counters: int = 1, delay: int = 0) -> None:
    op.forward_jit(out, blocks, num_counters, delay, out)


def total(blocks: int) -> float:
    return blocks * (blocks + 1) / 2


def captured(op: TicketOp, out: torch.Tensor, repeats: int = 1, delay: int = 0, **options) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        for _ in range(repeats):
            run(op, out, delay=delay)
    return graph


@pytest.mark.gpu
class TestOnAGpu:
    def test_repeated_launches(self, op) -> None:
        outs = outputs(300)
        for i, out in enumerate(outs):
            run(op, out, 1 + i % 60)
        assert torch.cat(outs).tolist() == [total(1 + i % 60) for i in range(300)]
        assert len(workspace.sizes()) == 1

    def test_two_streams_at_once(self, op) -> None:
        outs, streams = outputs(40), [torch.cuda.Stream() for _ in range(2)]
        torch.cuda.synchronize()
        for i, out in enumerate(outs):
            with torch.cuda.stream(streams[i % 2]):
                run(op, out, 50, delay=LONG // 10)
        torch.cuda.synchronize()
        assert torch.cat(outs).tolist() == [total(50)] * 40
        assert len(workspace.sizes()) == 2

    def test_growth_while_launches_are_in_flight(self, op) -> None:
        """What is allocated after growth may get the old block, and must not disturb launches that still use it."""
        outs = outputs(12)
        for i, out in enumerate(outs):
            run(op, out, 500 << (i // 3), num_counters=500 << (i // 3), delay=LONG)
            junk = [torch.full((size,), 255, dtype=torch.uint8, device="cuda") for size in (4096, 8192, 16384)]
            del junk
        assert torch.cat(outs).tolist() == [total(500 << (i // 3)) for i in range(12)]

    def test_reset_while_launches_are_in_flight(self, op) -> None:
        outs = outputs(6)
        for out in outs:
            run(op, out, delay=LONG)
            workspace.reset()
            junk = torch.full((4096,), 255, dtype=torch.uint8, device="cuda")
            del junk
        assert torch.cat(outs).tolist() == [total(50)] * 6

    def test_reset_repairs_counters(self, op) -> None:
        (out,) = outputs(1)
        run(op, out)
        (block,) = workspace._streams[0].values()
        block[5].fill_(3)
        workspace.reset(torch.device("cuda"))
        run(op, out.fill_(0))
        assert out.item() == total(50)

    def test_threads(self, op) -> None:
        """Each thread has its own stream; they grow and replace their blocks at the same time."""
        outs = [outputs(50) for _ in range(6)]
        errors: list[Exception] = []

        def work(mine: list[torch.Tensor]) -> None:
            try:
                with torch.cuda.stream(torch.cuda.Stream()):
                    for i, out in enumerate(mine):
                        run(op, out, 10 * (i + 1), num_counters=100 * (i + 1))
            except Exception as error:
                errors.append(error)

        torch.cuda.synchronize()
        threads = [threading.Thread(target=work, args=(mine,)) for mine in outs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.cuda.synchronize()
        assert not errors
        for mine in outs:
            assert torch.cat(mine).tolist() == [total(10 * (i + 1)) for i in range(50)]

    def test_threads_on_one_stream(self, op) -> None:
        outs = [outputs(50) for _ in range(4)]
        barrier = threading.Barrier(4)

        def work(mine: list[torch.Tensor]) -> None:
            barrier.wait()
            for i, out in enumerate(mine):
                run(op, out, 10 * (i + 1), num_counters=100 * (i + 1))

        threads = [threading.Thread(target=work, args=(mine,)) for mine in outs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for mine in outs:
            assert torch.cat(mine).tolist() == [total(10 * (i + 1)) for i in range(50)]

    def test_second_device(self, op) -> None:
        if torch.cuda.device_count() < 2:
            pytest.skip("one GPU")
        outs = [*outputs(1), *outputs(1, "cuda:1")]
        for out in outs:
            run(op, out)
        assert [out.item() for out in outs] == [total(50)] * 2
        assert {device for device, _, _ in workspace.sizes()} == {0, 1}


@pytest.mark.gpu
class TestGraphs:
    def test_number_of_a_capture(self, op) -> None:
        numbers = []
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            numbers.append(workspace.capture_id(stream.cuda_stream))
        for _ in range(2):
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
                numbers.append(workspace.capture_id(stream.cuda_stream))
                torch.zeros(1, device="cuda")
        assert numbers[0] == 0 == workspace.capture_id(stream.cuda_stream)
        assert len({*numbers, workspace.capture_id(launch.raw_stream(0))}) == 3
        assert workspace.capture_query_address()

    def test_number_in_a_new_thread(self, op) -> None:
        numbers = []
        stream = torch.cuda.Stream()

        def ask() -> None:
            with torch.cuda.stream(stream):
                numbers.append(workspace.capture_id(launch.raw_stream(0)))

        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="relaxed"):
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
            numbers.append(workspace.capture_id(stream.cuda_stream))
            torch.zeros(1, device="cuda")
        assert numbers[0] == numbers[1] != 0

    def test_replays(self, op) -> None:
        (out,) = outputs(1)
        graph = captured(op, out, repeats=5)
        for _ in range(100):
            out.fill_(float("nan"))
            graph.replay()
            assert out.item() == total(50)

    def test_every_replay_starts_with_zero_counters(self, op) -> None:
        """Also after a replay that was cut off, or where another graph of the pool has written."""
        (out,) = outputs(1)
        graph = captured(op, out)
        ((_, block),) = workspace._captures[0].values()
        for value in (1, 255):
            block[5].fill_(value)
            out.fill_(0)
            graph.replay()
            assert out.item() == total(50)

    def test_graphs_of_one_capture_stream_share_nothing(self, op) -> None:
        """Both replayed at once on two streams, with eager launches on a third."""
        outs, streams = outputs(3), [torch.cuda.Stream() for _ in range(2)]
        graphs = [captured(op, out, repeats=10, delay=LONG // 50) for out in outs[:2]]
        torch.cuda.synchronize()
        for _ in range(20):
            for graph, stream in zip(graphs, streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
            run(op, outs[2], delay=LONG // 10)
            torch.cuda.synchronize()
            assert torch.cat(outs).tolist() == [total(50)] * 3
            for out in outs:
                out.fill_(0)
            torch.cuda.synchronize()

    def test_graphs_of_one_pool(self, op) -> None:
        """The block of the first graph is freed when the second is captured, which may then use the memory itself."""
        outs, pool = outputs(2), torch.cuda.graph_pool_handle()
        first = captured(op, outs[0], pool=pool)
        second = torch.cuda.CUDAGraph()
        with torch.cuda.graph(second, pool=pool):
            run(op, outs[1])
            junk = [torch.full((4096,), 255, dtype=torch.uint8, device="cuda") for _ in range(8)]
        for _ in range(10):
            first.replay()
            second.replay()
            assert torch.cat(outs).tolist() == [total(50)] * 2
        del junk

    def test_branches_of_a_capture(self, op) -> None:
        outs, side = outputs(2), torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            main = torch.cuda.current_stream()
            side.wait_stream(main)
            run(op, outs[0], delay=LONG)
            with torch.cuda.stream(side):
                run(op, outs[1], delay=LONG)
            main.wait_stream(side)
        for _ in range(5):
            graph.replay()
            assert torch.cat(outs).tolist() == [total(50)] * 2

    def test_growth_within_a_capture(self, op) -> None:
        outs = outputs(4)
        run(op, outs[0], 9000)  # kernels are loaded; the stream of the capture still has nothing
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i, out in enumerate(outs):
                run(op, out, 500 << i, num_counters=500 << i, delay=LONG // 10)
        for _ in range(3):
            graph.replay()
            assert torch.cat(outs).tolist() == [total(500 << i) for i in range(4)]

    def test_a_failed_capture_leaves_eager_launches_alone(self, op) -> None:
        def stop() -> None:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                run(op, out)
                raise RuntimeError("stop")

        (out,) = outputs(1)
        with pytest.raises(RuntimeError, match="stop"):
            stop()
        run(op, out)
        assert out.item() == total(50)
        captured(op, out.fill_(0)).replay()
        assert out.item() == total(50)

    @pytest.mark.slow
    def test_graph_trees_of_torch_compile(self, op) -> None:
        """They refuse memory of their pool that outlives a call, in warm-up as in recording."""

        def model(x: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(x)
            torch.ops.hpcjit.elementwise_probe_ticket(x, 50, 1, 0, out)
            return out * 2

        assert op.auto_selected_backend(0) is KernelBackend.JIT
        compiled = torch.compile(model, mode="reduce-overhead")
        x = torch.zeros(1, device="cuda")
        for _ in range(6):
            assert compiled(x).item() == 2 * total(50)
        torch.compiler.reset()
