"""Set-up of the operator tests: devices, and one parallel build of every kernel that the GPU tests run."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from op_grid import GRID
from op_tools import DEMOS, operator

from hpcjit import build, toolchain
from hpcjit.cases import Maker


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def m(device: torch.device) -> Maker:
    return Maker(device)


@pytest.fixture(scope="session", autouse=True)
def built(request: pytest.FixtureRequest, session_cache: None) -> None:
    """Compile the kernels of the grid and of the demo cases, as many at once as there are cores."""
    users = [item for item in request.session.items if item.path.name == "test_every_op.py"]
    if not torch.cuda.is_available() or not any(item.get_closest_marker("gpu") for item in users):
        return
    wanted = {}
    calls = [(entry.op, entry.make(Maker("meta"))) for entry in GRID]
    calls += [(case.op, case.args("meta")) for case in DEMOS]
    for op, args in calls:
        plan = operator(op).plan(*args)
        if not isinstance(plan, str):
            wanted[plan.template, plan.config] = None
    arch = toolchain.arch_of_device(0)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for future in [pool.submit(build.compile_only, template, config, arch) for template, config in wanted]:
            future.result()
