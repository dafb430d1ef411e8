"""Shared set-up: one cache for the session, GPU tests only where there is a GPU."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from scale_template import Toolkit, load, real_nvcc

from hpcjit import build, folders


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory: pytest.TempPathFactory):
    """Compiled kernels are shared by the tests of a session (and its xdist workers), never with the user's cache."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "kernel-cache"
    os.environ.setdefault("HPCJIT_CACHE_DIR", str(shared))
    real_nvcc()


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """An empty cache of this test alone, with nothing remembered in memory; returns its folder."""
    cache_dir = tmp_path / "cache"
    monkeypatch.setenv("HPCJIT_CACHE_DIR", str(cache_dir))
    for name in ("HPCJIT_CACHE_PATH", "HPCJIT_REQUIRE_WARM", "HPCJIT_DEBUG", "HPCJIT_ARCH", "HPCJIT_CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(folders, "_warned", set())
    monkeypatch.setattr(folders, "_checked", {})
    monkeypatch.setattr(folders, "_private", {})
    build.forget()
    yield cache_dir
    for private in folders._private.values():
        shutil.rmtree(private, ignore_errors=True)
    build.forget()


@pytest.fixture
def toolkit(tmp_path: Path) -> Toolkit:
    """A toolkit folder whose nvcc writes a line to a log for every compile and then runs the real one."""
    return Toolkit(tmp_path / "toolkit")


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with two finished kernels, copied by the tests that damage or move it."""
    root = tmp_path_factory.mktemp("stock") / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPCJIT_CACHE_DIR", str(root))
        build.forget()
        load()
        load(offset=1)
        build.forget()
    return root


@pytest.fixture
def stocked(fresh, stock, toolkit, monkeypatch) -> Path:
    """A private copy of the stock, and a compiler that counts."""
    shutil.copytree(stock, fresh)
    monkeypatch.setenv("HPCJIT_CUDA_HOME", str(toolkit.home))
    return fresh
