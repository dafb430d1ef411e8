"""Timing of operator calls: on the device inside CUDA graphs, on the host in bursts.

Cold: a graph that runs the call over rotating copies of its arguments, together several times larger than L2, so that every
call reads from memory. Of a case whose calls touch part of a large argument (`Case.turns`) they are calls that touch other
parts each, as many as together touch several times L2. Small arguments stop at `MAX_COPIES` copies, which may then fit in
L2: `Sample.copies` says how many there were. Hot: a graph that repeats the call on one copy. A graph holds about
`GRAPH_SPAN_US` of work, so that starting it is lost in its time; it first runs for `WARM_UP_S`, until the clocks have risen,
and is then replayed `REPLAYS` times, each between two events. Replays feed in-place operators their own results;
normalisation and the like stay bounded under that, which a new in-place operator must also do to be timed here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hpcjit import numerics
from hpcjit.cases import Case, Maker

MAX_COPIES = 200
L2_ROUNDS = 8  # how many times over the cold copies exceed L2
REPLAYS = 25
GRAPH_SPAN_US = 2000.0
MAX_NODES = 1000
WARM_UP_S = 0.03
BURST = 64  # eager calls between two synchronisations, well below the depth of the launch queue
HOST_CALLS = 2048
HOST_SPAN_S = 1.0

Call = Callable[..., Any]
Args = tuple[Any, ...]


@dataclass(frozen=True)
class Sample:
    """Microseconds of one call: median, 20th and 80th percentile over replays; and the copies that were rotated."""

    us: float
    p20: float
    p80: float
    copies: int = 1
    timer: str = "graph"


def l2_bytes(device: torch.device) -> int:
    """Size of the device's L2 cache."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def bytes_of(args: Args) -> int:
    """Bytes of all tensors among the arguments."""
    return sum(value.nbytes for value in args if isinstance(value, torch.Tensor))


def cold(
    call: Call,
    args: Args,
    device: torch.device,
    or_eager: bool = False,
    replays: int = REPLAYS,
    case: Case | None = None,
) -> Sample:
    """Time `call` on inputs that are not in L2. With `or_eager` a call that no graph can hold is timed with its host part.

    `case` is the one whose arguments `args` are, if there is one.
    """
    if device.type != "cuda":
        return _wall_clock(call, numerics.copy_args(args))
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    rotating = rotation(args, L2_ROUNDS * l2_bytes(device), int(0.8 * free), case)
    return _on_device(call, rotating, device, or_eager, replays)


def rotation(args: Args, touch: int, room: int, case: Case | None = None) -> list[Args]:
    """Calls that together touch more than `touch` bytes, made of copies of `args` that take no more than `room` bytes.

    Where a case has turns each copy takes its own, one copy after the other: what two calls in a row touch is apart, and an
    expert's weights, for example, come back only when those of the others of both copies have passed.
    """
    size = max(bytes_of(args), 1)
    copies = max(1, min(max(touch // size + 1, 2), MAX_COPIES, room // size))
    bases = [numerics.copy_args(args) for _ in range(copies)]
    if case is None or case.turns is None:
        return bases
    device = next(value.device for value in args if isinstance(value, torch.Tensor))
    turns = [case.turns(base, Maker(device, seed)) for seed, base in enumerate(bases)]
    calls = min(touch // max(case.bytes, 1) + 1, MAX_COPIES)
    return [next(turn) for _ in range(-(-calls // copies)) for turn in turns]


def hot(call: Call, args: Args, device: torch.device, or_eager: bool = False) -> Sample:
    """Time `call` repeated on one copy of its inputs."""
    own = numerics.copy_args(args)
    if device.type != "cuda":
        return _wall_clock(call, own)
    return _on_device(call, [own], device, or_eager, REPLAYS)


def _on_device(call: Call, rotating: Sequence[Args], device: torch.device, or_eager: bool, replays: int) -> Sample:
    for args in rotating:  # compiles, and fills what the first call fills; a peer may plan for each copy
        call(*args)
    eager_us = span_us(lambda: [call(*args) for args in rotating[:8]], device) / len(rotating[:8])
    rounds = GRAPH_SPAN_US / max(eager_us, 0.1) / len(rotating)
    repeats = max(1, min(round(rounds), MAX_NODES // len(rotating)))

    def body() -> None:
        for _ in range(repeats):
            for args in rotating:
                call(*args)

    run: Callable[[], Any] = body
    kind = "eager"
    try:
        graph = capture(body, device, lambda: call(*rotating[0]))
        run, kind = graph.replay, "graph"
    except RuntimeError:
        if not or_eager:
            raise
        torch.cuda.synchronize(device)
    until = time.perf_counter() + WARM_UP_S
    while time.perf_counter() < until:
        run()
        torch.cuda.synchronize(device)
    calls = len(rotating) * repeats
    times = [span_us(run, device) / calls for _ in range(replays)]
    return _sample(times, len(rotating), kind)


def capture(body: Callable[[], Any], device: torch.device, warm_up: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Capture `body` into a graph after running `warm_up` a few times on a side stream, as capture requires."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            warm_up()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            body()
    except RuntimeError:
        # torch's default generator would go on believing that it is being captured; a copy of its state does not.
        generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
        generator.graphsafe_set_state(generator.clone_state())
        raise
    return graph


def span_us(run: Callable[[], Any], device: torch.device) -> float:
    """Microseconds on the device between events before and after `run`."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record(torch.cuda.current_stream(device))
    run()
    end.record(torch.cuda.current_stream(device))
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def _wall_clock(call: Call, args: Args) -> Sample:
    call(*args)
    times = []
    for _ in range(REPLAYS):
        start = time.perf_counter()
        call(*args)
        times.append((time.perf_counter() - start) * 1e6)
    return _sample(times, 1, "host")


def _sample(times: Sequence[float], copies: int, kind: str) -> Sample:
    fifths = statistics.quantiles(times, n=5)
    return Sample(statistics.median(times), fifths[0], fifths[3], copies, kind)


def host_us(call: Callable[[], Any], device: torch.device) -> float:
    """Host time of one eager call: the median over bursts, each short enough never to wait for the launch queue."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda *_: None
    times: list[float] = []
    stop = time.perf_counter() + HOST_SPAN_S
    while len(times) * BURST < HOST_CALLS and (len(times) < 3 or time.perf_counter() < stop):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(BURST):
            call()
        times.append((time.perf_counter() - start) * 1e6 / BURST)
    synchronize(device)
    return statistics.median(times)
