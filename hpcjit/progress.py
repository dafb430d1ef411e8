"""Says that a compile is going on: a live line in a terminal or notebook, one plain line after a while elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from hpcjit import settings

QUIET_FOR_S = 2.0

_silenced = 0


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """No messages inside: for callers that show progress of their own."""
    global _silenced
    _silenced += 1
    try:
        yield
    finally:
        _silenced -= 1


@contextlib.contextmanager
def compiling(title: str, place: str) -> Iterator[None]:
    """Announce the compile of `title` into the folder `place` for as long as the block runs."""
    if _silenced or sys.stderr is None or not settings.read().verbose:
        yield
    elif sys.stderr.isatty() or "ipykernel" in sys.modules:
        with _live(title):
            yield
    else:
        with _plain(title, place):
            yield


@contextlib.contextmanager
def _plain(title: str, place: str) -> Iterator[None]:
    # stderr may be a log file or a pipe: one line, and only for compiles that look like a hang.
    timer = threading.Timer(QUIET_FOR_S, lambda: _say(f"hpcjit: compiling {title} into {place} ..."))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@dataclass
class _Line:
    title: str
    started: float

    def __rich__(self) -> str:
        from rich.markup import escape

        return f"compiling {escape(self.title)} ... {time.perf_counter() - self.started:.1f} s"


_live_line = threading.Lock()  # a terminal has room for one; compiles beside it only report their end


@contextlib.contextmanager
def _live(title: str) -> Iterator[None]:
    from rich.console import Console

    line, console, guard = _Line(title, time.perf_counter()), Console(stderr=True), _live_line
    with contextlib.ExitStack() as stack:
        if guard.acquire(blocking=False):
            stack.callback(guard.release)
            stack.enter_context(console.status(line))
        yield
    console.print(f"compiled {title} in {time.perf_counter() - line.started:.1f} s", markup=False, highlight=False)


def show_log(log: str) -> None:
    """The compiler's output, for HPCJIT_VERBOSE=2."""
    if settings.read().verbose >= 2:
        _say(log.rstrip())


def _say(message: str) -> None:
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # a closed pipe must not fail the compile
            print(message, file=sys.stderr, flush=True)


def _reset_after_fork() -> None:
    global _silenced, _live_line
    _silenced, _live_line = 0, threading.Lock()


os.register_at_fork(after_in_child=_reset_after_fork)
