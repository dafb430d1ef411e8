"""What the compiler's output becomes: facts in the manifest, and what a user sees of a compile."""

from __future__ import annotations

import contextlib
import os

import pytest
from scale_template import LOAD, load, python, real_nvcc

from hpcjit import build, cache, compiler, progress

pytestmark = pytest.mark.skipif(real_nvcc() is None, reason="no nvcc on this machine")


# --- what ptxas says --------------------------------------------------------------------------------------------------


def test_a_function_that_is_called_does_not_hide_what_the_kernel_spills():
    log = """ptxas info    : Compiling entry function 'kernel' for 'sm_90a'
ptxas info    : Function properties for kernel
    48 bytes stack frame, 64 bytes spill stores, 80 bytes spill loads
ptxas info    : Used 255 registers, used 16 barriers, 48 bytes cumulative stack size
ptxas info    : Function properties for report
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""
    expected = {"name": "kernel", "registers": 255, "shared_bytes": 0, "spill_bytes": 144, "stack_bytes": 48}
    assert compiler.resources(log) == [{**expected, "serialized": False}]


def test_products_that_wait_for_each_other_are_noticed():
    log = """ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient register resources for the wgmma pipeline in the function 'second'
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 46 registers, used 16 barriers
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Used 48 registers, used 16 barriers
"""  # noqa: E501
    assert [(kernel["name"], kernel["serialized"]) for kernel in compiler.resources(log)] == [
        ("first", False),
        ("second", True),
    ]


# --- what the user sees -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("verbose", "quiet_for", "lines"), [("1", 0.0, 1), ("1", 60.0, 0), ("0", 0.0, 0)])
def test_one_line_when_a_compile_takes_long(fresh, monkeypatch, capfd, verbose, quiet_for, lines):
    monkeypatch.setenv("HPCJIT_VERBOSE", verbose)
    monkeypatch.setattr(progress, "QUIET_FOR_S", quiet_for)
    load()
    said = [line for line in capfd.readouterr().err.splitlines() if "hpcjit" in line]
    assert len(said) == lines
    if said:
        assert said == [f"hpcjit: compiling test.scale [threads=256, offset=0] for sm_90a into {fresh} ..."]


def test_compiler_output_with_verbose_2(fresh, monkeypatch, capfd):
    monkeypatch.setenv("HPCJIT_VERBOSE", "2")
    load()
    assert "ptxas info" in capfd.readouterr().err


def test_terminal_shows_a_live_line(fresh):
    import pty

    primary, secondary = pty.openpty()
    process = python(LOAD, stderr=secondary, TERM="xterm", COLUMNS="120")
    os.close(secondary)
    seen = b""
    with contextlib.suppress(OSError):  # the terminal closes with the process
        while part := os.read(primary, 4096):
            seen += part
    process.wait(60)
    text = seen.decode(errors="replace")
    assert "compiling test.scale [threads=256, offset=0] for sm_90a ... " in text
    assert "compiled test.scale [threads=256, offset=0] for sm_90a in " in text


def test_debug_builds_are_separate_and_say_so(fresh, monkeypatch):
    plain = load()
    monkeypatch.setenv("HPCJIT_DEBUG", "1")
    build.forget()
    debug = load()
    assert debug.path != plain.path
    assert "-lineinfo" in cache.read_entry(debug.path.parent).manifest["command"]
    assert "-lineinfo" not in cache.read_entry(plain.path.parent).manifest["command"]
