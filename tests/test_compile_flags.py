"""What nvcc is asked beside the flags of a job: things that leave the code as it is."""

from __future__ import annotations

import dataclasses

import pytest

from hpcjit import build, compiler
from hpcjit.ops.moe._fused_moe_plan import FUSED_MOE, FusedMoeConfig
from hpcjit.toolchain import Compiler, Nvcc, Toolchain

JOB = compiler.Job("title", "name", "source", "sm_90a", ("-O1",), ())


def tools(version: str) -> Toolchain:
    return Toolchain(Nvcc("nvcc", "home", version, "cudart"), Compiler("g++", "12"))


@pytest.mark.parametrize(
    ("version", "release"),
    [("13.0.88 (cuda_13.0.r13.0)", (13, 0)), ("12.6.85", (12, 6)), ("12.10", (12, 10)), ("12", (12, 0))],
)
def test_release(version: str, release: tuple[int, int]):
    assert tools(version).nvcc.release == release
    assert tools(version).nvcc.cuda_major == release[0]


@pytest.mark.parametrize(
    ("version", "threads", "asked"),
    [("13.0.88", 4, True), ("13.0.88", 1, False), ("12.4.1", 2, True), ("12.3.107", 4, False), ("12.0.1", 4, False)],
)
def test_kernels_are_optimised_side_by_side_by_an_nvcc_that_can(version: str, threads: int, asked: bool):
    flags = compiler._flags(dataclasses.replace(JOB, threads=threads), tools(version))
    assert (f"--split-compile={threads}" in flags) == asked
    assert any("split-compile" in flag for flag in flags) == asked


def test_that_changes_no_key():
    """The binary is the same, so one from a machine that did otherwise is as good."""
    alone = dataclasses.replace(FUSED_MOE, threads=1)
    assert FUSED_MOE.threads > 1
    first, second = (build._request(template, FusedMoeConfig(), "sm_90a") for template in (FUSED_MOE, alone))
    assert first.wanted.source_key == second.wanted.source_key
    assert first.wanted.key == second.wanted.key
    assert (first.job.threads, second.job.threads) == (FUSED_MOE.threads, 1)
