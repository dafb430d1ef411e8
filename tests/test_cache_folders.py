"""Cache folders that cannot be written, are full, or that others can write."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import warnings
from pathlib import Path

import pytest
from scale_template import entry_of, load, output, python, real_nvcc

from hpcjit import cache, folders
from hpcjit.folders import CacheWarning

pytestmark = pytest.mark.skipif(real_nvcc() is None, reason="no nvcc on this machine")


# --- folders that cannot be written ---------------------------------------------------------------------------------


@pytest.fixture
def mount(tmp_path):
    """mount(path, options): a small file system of its own, where the tests may mount."""
    mounted: list[Path] = []

    def do(path: Path, options: str) -> None:
        path.mkdir(exist_ok=True)
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True, check=False
        )
        if done.returncode:
            pytest.skip("mounting is not permitted here")
        if path not in mounted:
            mounted.append(path)

    yield do
    for path in mounted:
        subprocess.run(["umount", "-l", str(path)], check=False)


def test_read_only_warm_cache_is_used_without_a_write_or_a_word(stocked, toolkit, mount, stock):
    mount(stocked, "size=8m,mode=700")
    shutil.copytree(stock, stocked, dirs_exist_ok=True)
    mount(stocked, "remount,ro")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert stocked in load().path.parents
    assert toolkit.compiles == 0


def test_read_only_cache_gives_a_private_build_and_one_warning(fresh, mount):
    mount(fresh, "size=1m,mode=700,ro")
    with pytest.warns(CacheWarning, match="is read-only; set HPCJIT_CACHE_DIR") as caught:
        kernels = [load(), load(offset=1)]
    assert len(caught) == 1
    assert all(fresh not in kernel.path.parents for kernel in kernels)


def test_cache_that_cannot_be_written_without_mounting(fresh, monkeypatch):
    real = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: real(path, mode) and not (Path(path) == fresh and mode & os.W_OK)
    )
    with pytest.warns(CacheWarning, match="is read-only; set HPCJIT_CACHE_DIR") as caught:
        kernels = [load(), load(offset=1)]
    assert len(caught) == 1
    assert all(fresh not in kernel.path.parents for kernel in kernels)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_disk_that_fills_up_while_publishing(fresh, monkeypatch, code):
    real = cache.write_manifest

    def write(folder, manifest):
        if fresh in folder.parents and "test.scale" in manifest["op"]:
            raise OSError(code, os.strerror(code))
        real(folder, manifest)

    monkeypatch.setattr(cache, "write_manifest", write)
    with pytest.warns(CacheWarning, match=f"{os.strerror(code)}; free some space") as caught:
        kernel = load()
    assert len(caught) == 1
    assert fresh not in kernel.path.parents
    assert not cache.entries(root=fresh)
    assert not [p for p in (fresh / "staging").iterdir() if (p / "build").exists()]


def test_full_disk_gives_a_private_build_and_one_warning(fresh, mount):
    mount(fresh, "size=24k,mode=700")
    with pytest.warns(
        CacheWarning, match="No space left on device; free some space, or set HPCJIT_CACHE_DIR"
    ) as caught:
        kernel = load()
    assert len(caught) == 1
    assert fresh not in kernel.path.parents
    assert not cache.entries(root=fresh)


def test_nothing_can_be_written_at_all(fresh, monkeypatch):
    """A limit on the size of files hits every folder: the error says so and nothing is published."""
    code = (
        "import resource\nfrom hpcjit.errors import HpcjitError\nimport torch.utils.cpp_extension\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (12000, 12000))\n"
        "try:\n    build.load(SCALE, ScaleConfig(), arch=ARCH)\nexcept HpcjitError as e:\n    print(type(e).__name__, e)\n"
    )
    said = output(python(code))
    assert said.startswith(("CompileError", "CacheError"))
    assert "too large" in said.lower() or "size limit" in said.lower()
    assert not cache.entries(root=fresh)


def test_noexec_cache(fresh, mount):
    mount(fresh, "size=8m,mode=700,noexec")
    with pytest.warns(CacheWarning, match="failed to map segment"):
        assert fresh not in load().path.parents


def test_missing_home(fresh, monkeypatch):
    monkeypatch.delenv("HPCJIT_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # no HOME and no entry for the user
    with pytest.warns(CacheWarning, match="there is no home folder; set HPCJIT_CACHE_DIR") as caught:
        assert load().error_text(2) == "out of memory"
    assert len(caught) == 1


def test_default_folder_follows_xdg(fresh, monkeypatch, tmp_path):
    monkeypatch.delenv("HPCJIT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert folders.configured_root() == tmp_path / "xdg" / "hpcjit"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert folders.configured_root() == tmp_path / "home" / ".cache" / "hpcjit"


def test_folder_set_after_import_counts(fresh, monkeypatch, tmp_path):
    monkeypatch.setenv("HPCJIT_CACHE_DIR", str(tmp_path / "later"))
    assert folders.usable_root() == tmp_path / "later"


# --- trust ----------------------------------------------------------------------------------------------------------


def test_folders_are_private(fresh):
    entry = load().path.parent
    for folder in (fresh, entry, entry.parent, entry.parent.parent, fresh / "locks", fresh / "staging"):
        assert folder.stat().st_mode & 0o777 == 0o700, folder


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_root_that_others_can_write_is_not_used(stocked, toolkit, mode):
    stocked.chmod(mode)
    with pytest.warns(CacheWarning, match=r"can be written by others \(mode 77\d\).*chmod -R go-w"):
        kernel = load()
    assert stocked not in kernel.path.parents
    assert toolkit.compiles == 1


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_entry_that_others_can_write_is_refused(stocked, toolkit, depth):
    victim = entry_of(stocked).binary
    ([victim, *victim.parents])[depth].chmod(0o777)
    with pytest.warns(CacheWarning, match="can be written by others"):
        load()
    assert toolkit.compiles == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_entry_of_another_user_is_refused(stocked, toolkit):
    os.chown(entry_of(stocked).path, 12345, -1)
    with pytest.warns(CacheWarning, match="belongs to another user"):
        load()
    assert toolkit.compiles == 1
