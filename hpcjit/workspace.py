"""Device memory that the launches on a stream share: scratch, and counters that are zero between launches.

A stream has one block of each, made when a plan first asks for it, grown when a plan asks for more, and handed to every later
launch there, of whichever operator. The launches of a stream follow each other, so none needs memory of its own; under
programmatic dependent launch that holds from a kernel's `pdl::wait()` on. The contract of a kernel:

- scratch holds anything at first, and what it leaves there is lost;
- counters are all zero at first, and it leaves them all zero, also where it took less than there is.

Lifetime. A block is allocated, zeroed and freed while its stream is the current one, or freed later from anywhere. torch's
allocator gives freed memory only to later allocations of the stream that it was allocated on, and whatever uses those
comes behind the launches in flight: a block that was replaced, evicted or reset needs no event and no `record_stream` (which
would touch streams that may be gone by then).

Graphs. A capture has blocks of its own, from its graph's pool, and its zero fill is a node of the graph: every replay starts
with zero counters, and graphs replayed at the same time share none. They stay in the graph's pool; only those of the
latest capture of a stream are kept by name, since a capture that ended allocates no more.

Limits. Handles name streams: one that was destroyed with work in flight must not be followed by a new stream of the same
handle before that work is done. A kernel that was aborted leaves its counters as they were: call `reset`.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
from typing import Any

import torch

from hpcjit import launch
from hpcjit.errors import LaunchError

MAX_STREAMS = 64  # per device; the block that was made first goes first, at worst to be made anew

# (scratch address, its bytes, counters address, its bytes, both tensors): what `caller.h` reads is in front.
Block = tuple[int, int, int, int, Any, Any]
NO_BLOCK: Block = (0, 0, 0, 0, None, None)

_streams: dict[int, dict[int, Block]] = {}  # by device and stream; callers in C hold the inner ones
_captures: dict[int, dict[int, tuple[int, Block]]] = {}  # likewise, with the number of the capture
_lock = threading.RLock()


def _reset_lock() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_reset_lock)


class Need:
    """What the launches of one plan need on a device."""

    def __init__(self, device: int, scratch_bytes: int, counter_bytes: int) -> None:
        self.device = device
        self.scratch_bytes = scratch_bytes
        self.counter_bytes = counter_bytes
        self.streams = _streams.setdefault(device, {})

    def provide(self, stream: int) -> Block:
        """Memory for a launch on `stream`, the current stream of the device. Hold the block until it is launched."""
        capture = capture_id(stream)
        block = self._known(stream, capture)
        if self._fits(block):
            return block
        with _lock:
            block = self._known(stream, capture)
            if self._fits(block):
                return block
            block = self._grown(block)
            if not graph_trees_own(self.device, stream):
                self._keep(stream, capture, block)
            return block

    def _known(self, stream: int, capture: int) -> Block:
        if not capture:
            return self.streams.get(stream, NO_BLOCK)
        number, block = _captures.get(self.device, {}).get(stream, (0, NO_BLOCK))
        return block if number == capture else NO_BLOCK

    def _fits(self, block: Block) -> bool:
        return block[1] >= self.scratch_bytes and block[3] >= self.counter_bytes

    def _grown(self, block: Block) -> Block:
        scratch_address, scratch_bytes, counter_address, counter_bytes, scratch, counters = block
        if scratch_bytes < self.scratch_bytes:
            scratch_bytes = _round_up(self.scratch_bytes)
            scratch, scratch_address = allocate(self.device, scratch_bytes, zeroed=False)
        if counter_bytes < self.counter_bytes:
            counter_bytes = _round_up(self.counter_bytes)
            counters, counter_address = allocate(self.device, counter_bytes, zeroed=True)
        return scratch_address, scratch_bytes, counter_address, counter_bytes, scratch, counters

    def _keep(self, stream: int, capture: int, block: Block) -> None:
        table: dict[int, Any] = _captures.setdefault(self.device, {}) if capture else self.streams
        while len(table) >= MAX_STREAMS and stream not in table:
            del table[next(iter(table))]
        table[stream] = (capture, block) if capture else block


def _round_up(size: int) -> int:
    """Powers of two from 4 KiB, so that growth ends soon; from 1 MiB its multiples, so that little is wasted."""
    return max(4096, 1 << (size - 1).bit_length()) if size <= 1 << 20 else -(-size >> 20) << 20


def reset(device: int | torch.device | str | None = None) -> None:
    """Drop the memory of every stream of a device, or of all: each stream's next launch starts with zero counters.

    For use after a kernel was aborted, when its counters may not be zero. Launches in flight keep what they have. A graph
    that is being captured continues with new memory; one that was captured zeroes its counters at each replay anyway.
    """
    with _lock:
        for tables in (_streams, _captures):
            for index, table in tables.items():
                if device is None or index == _index(device):
                    table.clear()  # not replaced: callers hold it


def _index(device: int | torch.device | str) -> int:
    found = device if isinstance(device, int) else torch.device(device).index
    return torch.cuda.current_device() if found is None else found


def sizes() -> dict[tuple[int, int, bool], tuple[int, int]]:
    """Bytes of scratch and of counters that are held, by device, stream and whether they belong to a capture."""
    with _lock:
        held = {(device, stream, False): block for device, table in _streams.items() for stream, block in table.items()}
        for device, table in _captures.items():
            held |= {(device, stream, True): block for stream, (_, block) in table.items()}
    return {key: (block[1], block[3]) for key, block in held.items()}


# --- what is asked of torch and the driver --------------------------------------------------------------------------


def allocate(device: int, size: int, *, zeroed: bool) -> tuple[torch.Tensor, int]:
    """Memory of a device's current stream, and its address."""
    make = torch.zeros if zeroed else torch.empty
    memory = make(size, dtype=torch.uint8, device=f"cuda:{device}")
    return memory, memory.data_ptr()


@functools.cache
def capture_query() -> Any:
    """The driver's `cuStreamGetCaptureInfo_v2`, or None without a driver.

    The runtime's function of this purpose took another argument with CUDA 13; the driver keeps this one in every version.
    """
    try:
        query = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    except (OSError, AttributeError):
        return None
    query.argtypes = [ctypes.c_void_p] * 6
    query.restype = ctypes.c_int
    return query


def capture_query_address() -> int:
    """The address of that function for `caller.h`; 0: there is none, ask `Need.provide`."""
    query = capture_query()
    return (ctypes.cast(query, ctypes.c_void_p).value or 0) if query else 0


def capture_id(stream: int) -> int:
    """The number of the capture that `stream` takes part in, unique in the process; 0 outside of any."""
    query = capture_query()
    if query is None:
        return 0
    status, number = ctypes.c_int(), ctypes.c_uint64()
    arguments = (stream, ctypes.addressof(status), ctypes.addressof(number), None, None, None)
    code = query(*arguments)
    if code and launch.capturing():  # asking through the runtime has made a context current in this thread
        code = query(*arguments)
        if code:
            raise LaunchError(f"which graph is being captured cannot be found out (CUDA error {code})")
    return number.value if status.value and not code else 0


def graph_trees_own(device: int, stream: int) -> bool:
    """Whether `stream` is that of torch.compile's graph trees, which refuse memory in their pool that outlives a call."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return False
    try:
        manager = trees.get_manager(device, create_if_none_exists=False)
    except (AssertionError, RuntimeError):  # how some versions of torch say that this thread has none
        return False
    return manager is not None and manager.stream.cuda_stream == stream
