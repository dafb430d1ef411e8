"""The cache on disk: damage, many processes, killed builders, locks, layers, listing."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import time
import warnings
from pathlib import Path

import pytest
from scale_template import ARCH, SCALE, ScaleConfig, entry_of, load, output, python, real_nvcc

from hpcjit import build, cache, launch, locking
from hpcjit.cache import MANIFEST, Selection
from hpcjit.folders import CacheWarning

pytestmark = pytest.mark.skipif(real_nvcc() is None, reason="no nvcc on this machine")

LOAD = "k = build.load(SCALE, ScaleConfig(), arch=ARCH)\nprint(k.error_text(2))\n"


# --- damage ---------------------------------------------------------------------------------------------------------


def load_twice() -> launch.Kernel:
    kernel = load()
    build.forget()
    load()
    return kernel


def rewrite(binary: Path, content: bytes) -> None:
    """Another file in the binary's place: this process has the old one mapped, and would feel a write into it."""
    binary.unlink()
    binary.write_bytes(content)
    binary.chmod(0o700)


def truncate(entry: cache.Entry) -> None:
    rewrite(entry.binary, entry.binary.read_bytes()[:-100])


def flip_a_bit(entry: cache.Entry) -> None:
    content = bytearray(entry.binary.read_bytes())
    content[len(content) // 2] ^= 1
    rewrite(entry.binary, bytes(content))


def zero(entry: cache.Entry) -> None:
    rewrite(entry.binary, bytes(entry.size))


def lose_the_binary(entry: cache.Entry) -> None:
    entry.binary.unlink()


def lose_the_manifest(entry: cache.Entry) -> None:
    (entry.path / MANIFEST).unlink()


def garble_the_manifest(entry: cache.Entry) -> None:
    (entry.path / MANIFEST).write_text('{"format": 1, "op": 7}')


def swap_in_another_kernel(entry: cache.Entry) -> None:
    other = next(e for e in cache.entries(root=entry.path.parents[2]) if e.key != entry.key)
    rewrite(entry.binary, other.binary.read_bytes())


def swap_in_another_arch(entry: cache.Entry) -> None:
    facts = json.loads((entry.path / MANIFEST).read_text())
    (entry.path / MANIFEST).write_text(json.dumps(facts | {"arch": "sm_80"}))


@pytest.mark.parametrize(
    "damage",
    [truncate, flip_a_bit, zero, lose_the_binary, lose_the_manifest, garble_the_manifest, swap_in_another_kernel,
     swap_in_another_arch],
)  # fmt: skip
def test_damage_is_detected_and_rebuilt_with_one_warning(stocked, toolkit, damage):
    victim, bystander = entry_of(stocked), entry_of(stocked, offset=1)
    before = bystander.binary.read_bytes()
    damage(victim)
    with pytest.warns(CacheWarning, match="does not use a cached kernel") as caught:
        kernel = load_twice()
    assert len(caught) == 1
    assert kernel.error_text(2) == "out of memory"
    assert toolkit.compiles == 1
    cache.read_entry(victim.path).verify()
    assert bystander.binary.read_bytes() == before


def test_entry_in_use_is_replaced_without_harm(stocked, toolkit):
    """The first process keeps the pages of the old file when the entry is rebuilt under it."""
    code = LOAD + "sys.stdout.flush(); sys.stdin.readline(); print(k.error_text(2))"
    user = python(code, stdin=subprocess.PIPE)
    assert user.stdout.readline() == "out of memory\n"
    lose_the_manifest(entry_of(stocked))
    with pytest.warns(CacheWarning):
        load()
    out, err = user.communicate("\n", timeout=60)
    assert (out, user.returncode) == ("out of memory\n", 0), err
    assert toolkit.compiles == 1


def test_times_of_files_do_not_matter(stocked, toolkit):
    for path in stocked.rglob("*"):
        os.utime(path, (0, 0))
    load()
    assert toolkit.compiles == 0


def test_use_is_noted(stocked):
    entry = entry_of(stocked)
    os.utime(entry.path / MANIFEST, (0, 0))
    load()
    assert time.time() - entry_of(stocked).last_used < 60


# --- many processes, killed processes -------------------------------------------------------------------------------


@pytest.mark.slow
def test_sixteen_processes_compile_once(fresh, toolkit):
    env = {"HPCJIT_CUDA_HOME": str(toolkit.home)}
    processes = [python(LOAD, **env) for _ in range(16)]
    assert [output(process, timeout=180) for process in processes] == ["out of memory"] * 16
    assert toolkit.compiles == 1
    assert len(cache.entries(root=fresh)) == 1


@pytest.mark.slow
def test_killed_builder_leaves_nothing_that_counts(fresh, toolkit, monkeypatch):
    toolkit.behave("sleep 30")
    builder = python(LOAD, HPCJIT_CUDA_HOME=str(toolkit.home))
    wait_for(lambda: toolkit.compiles == 1)
    compilers = descendants(builder.pid)
    assert compilers
    builder.send_signal(signal.SIGKILL)
    builder.wait()
    toolkit.behave("")
    started = time.monotonic()
    monkeypatch.setenv("HPCJIT_CUDA_HOME", str(toolkit.home))
    assert load().error_text(2) == "out of memory"
    assert time.monotonic() - started < 20
    if shutil.which("setpriv"):
        wait_for(lambda: not any(alive(pid) for pid in compilers))


def wait_for(condition, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def descendants(pid: int) -> list[int]:
    found, parents = [pid], {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    for parent in found:
        found += [child for child, its_parent in parents.items() if its_parent == parent]
    return found[1:]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_leftovers_of_killed_builds_are_swept(stocked):
    old, young = stocked / "staging" / "1-old", stocked / "staging" / "2-young"
    for folder in (old, young):
        folder.mkdir(parents=True)
        (folder / "junk").touch()
    os.utime(old, (0, 0))
    shutil.rmtree(cache.new_staging(stocked))
    assert not old.exists()
    assert young.exists()


def test_waiting_names_the_holder_and_ends(fresh, monkeypatch, capfd):
    """A holder that is stopped and never returns: the waiter says who it is and then builds on its own."""
    monkeypatch.setattr(locking, "WAIT_LIMIT_S", 0.6)
    monkeypatch.setattr(locking, "FIRST_MESSAGE_S", 0.2)
    monkeypatch.setattr(locking, "MESSAGE_EVERY_S", 60.0)
    code = (
        f"from hpcjit import locking\nfrom pathlib import Path\nwith locking.held(Path({str(fresh)!r}), KEY, 'x'):\n"
        "    print('held', flush=True); time.sleep(60)"
    )
    fresh.mkdir(mode=0o700)
    key = build._request(SCALE, ScaleConfig(), ARCH).wanted.key
    holder = python(f"KEY = {key!r}\n" + code)
    assert holder.stdout.readline() == "held\n"
    holder.send_signal(signal.SIGSTOP)
    try:
        assert load().error_text(2) == "out of memory"
    finally:
        holder.kill()
        holder.wait()
    said = capfd.readouterr().err
    assert f"compiled by process {holder.pid} on {socket.gethostname()}; lock {fresh}/locks/" in said
    assert "gave up waiting for test.scale" in said


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS])
def test_file_system_without_locks(fresh, monkeypatch, code):
    import fcntl

    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert load().error_text(2) == "out of memory"
    assert len(cache.entries(root=fresh)) == 1


def test_lost_race_keeps_the_winner(stocked, tmp_path):
    winner = entry_of(stocked)
    staged = cache.new_staging(stocked) / "entry"
    shutil.copytree(winner.path, staged)
    assert cache.publish(staged, winner.path).path == winner.path


def test_rename_that_keeps_failing_still_gives_a_kernel(fresh, monkeypatch):
    real = os.rename

    def rename(source, target):
        if Path(source).name == "entry":
            raise OSError(errno.EEXIST, "exists, says the server")
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    kernel = load()
    assert kernel.error_text(2) == "out of memory"
    assert kernel.path.exists()


def test_temporary_folder_on_another_file_system(fresh, monkeypatch):
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no second file system")
    monkeypatch.setenv("TMPDIR", "/dev/shm")
    assert fresh in load().path.parents


# --- layers ---------------------------------------------------------------------------------------------------------


def test_layer_is_searched_first_and_never_written(fresh, stock, toolkit, monkeypatch, tmp_path):
    layer = tmp_path / "layer"
    shutil.copytree(stock, layer)
    before = {path: path.stat().st_mtime_ns for path in layer.rglob("*")}
    monkeypatch.setenv("HPCJIT_CUDA_HOME", str(toolkit.home))
    monkeypatch.setenv("HPCJIT_CACHE_PATH", f"/nonexistent:{layer}")
    assert layer in load().path.parents
    assert toolkit.compiles == 0
    assert fresh in load(offset=5).path.parents
    assert {path: path.stat().st_mtime_ns for path in layer.rglob("*")} == before


def test_entry_of_another_compiler_serves_a_machine_without_one(stocked, monkeypatch, tmp_path):
    monkeypatch.setenv("HPCJIT_CUDA_HOME", "/nonexistent")
    newer = entry_of(stocked)
    facts = newer.manifest | {"key": "f" * 64, "created": time.time() + 100}
    other = newer.path.with_name(newer.path.name[:-12] + "f" * 12)
    shutil.copytree(newer.path, other)
    (other / MANIFEST).write_text(json.dumps(facts))
    assert load().path.parent == other  # the newest of the valid ones
    flip_a_bit(cache.read_entry(other))
    build.forget()
    with pytest.warns(CacheWarning):
        assert load().path.parent == newer.path


def test_layer_of_a_group_that_may_not_read_it(fresh, stock, toolkit, monkeypatch, tmp_path):
    """Baked by root with private folders: one sentence says what its owner has to do."""
    layer = Path(shutil.copytree(stock, tmp_path / "layer"))
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != layer and real(path, mode))
    monkeypatch.setenv("HPCJIT_CACHE_PATH", str(layer))
    with pytest.warns(CacheWarning, match=f"cannot read the kernel cache {layer}; .*chmod -R a\\+rX") as caught:
        assert fresh in load().path.parents
    assert len(caught) == 1


def test_require_warm_takes_an_entry_of_another_compiler_in_silence(stocked, toolkit, monkeypatch):
    """And is not disturbed by entries of older code beside it."""
    entry = entry_of(stocked)
    for name, change in (("e" * 12, {"key": "e" * 64}), ("d" * 12, {"key": "d" * 64, "source_key": "d" * 64})):
        copy = Path(shutil.copytree(entry.path, entry.path.with_name(entry.path.name[:-12] + name)))
        (copy / MANIFEST).write_text(json.dumps(entry.manifest | change))
    shutil.rmtree(entry.path)
    monkeypatch.setenv("HPCJIT_REQUIRE_WARM", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load().path.parent.name.endswith("e" * 12)
    assert toolkit.compiles == 0


# --- listing and removing -------------------------------------------------------------------------------------------


def test_list_and_remove(stocked):
    assert {(e.op, e.arch, e.config) for e in cache.entries()} == {
        ("test.scale", ARCH, "threads=256, offset=0"),
        ("test.scale", ARCH, "threads=256, offset=1"),
    }
    assert cache.entries(Selection(op="other.*")) == []
    assert cache.remove(Selection(unused_for_s=3600)) == []
    victim = entry_of(stocked, offset=1)
    assert [e.key for e in cache.remove(Selection(key=victim.key[:8]))] == [victim.key]
    assert not victim.path.exists()
    assert len(cache.entries()) == 1
    cache.remove()
    assert cache.entries() == []
