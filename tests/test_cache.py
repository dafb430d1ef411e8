"""The cache on disk: damage, trust, full and read-only disks, many processes, killed builders, bundles."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import tarfile
import time
import warnings
from pathlib import Path

import pytest
from scale_template import ARCH, SCALE, ScaleConfig, output, python, real_nvcc

from hpcjit import build, bundle, cache, folders, launch, locking
from hpcjit.cache import MANIFEST, Selection
from hpcjit.errors import CacheError
from hpcjit.folders import CacheWarning

pytestmark = pytest.mark.skipif(real_nvcc() is None, reason="no nvcc on this machine")

LOAD = "k = build.load(SCALE, ScaleConfig(), arch=ARCH)\nprint(k.error_text(2))\n"


def load(**config) -> launch.Kernel:
    return build.load(SCALE, ScaleConfig(**config), arch=ARCH)


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> Path:
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


def entry_of(root: Path, offset: int = 0) -> cache.Entry:
    return next(e for e in cache.entries(root=root) if e.manifest["config"]["offset"] == offset)


# --- damage ---------------------------------------------------------------------------------------------------------


def load_twice() -> launch.Kernel:
    kernel = load()
    build.forget()
    load()
    return kernel


def truncate(entry: cache.Entry) -> None:
    entry.binary.write_bytes(entry.binary.read_bytes()[:-100])


def flip_a_bit(entry: cache.Entry) -> None:
    content = bytearray(entry.binary.read_bytes())
    content[len(content) // 2] ^= 1
    entry.binary.write_bytes(content)


def zero(entry: cache.Entry) -> None:
    entry.binary.write_bytes(bytes(entry.size))


def lose_the_binary(entry: cache.Entry) -> None:
    entry.binary.unlink()


def lose_the_manifest(entry: cache.Entry) -> None:
    (entry.path / MANIFEST).unlink()


def garble_the_manifest(entry: cache.Entry) -> None:
    (entry.path / MANIFEST).write_text('{"format": 1, "op": 7}')


def swap_in_another_kernel(entry: cache.Entry) -> None:
    other = next(e for e in cache.entries(root=entry.path.parents[2]) if e.key != entry.key)
    shutil.copy(other.binary, entry.binary)


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
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != fresh and real(path, mode))
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


# --- bundles --------------------------------------------------------------------------------------------------------


@pytest.fixture
def packed(stocked, tmp_path) -> Path:
    bundle.export_bundle(tmp_path / "kernels.tar.gz")
    shutil.rmtree(stocked)
    return tmp_path / "kernels.tar.gz"


def test_bundle_round_trip_without_a_compiler(packed, fresh, monkeypatch):
    assert len(bundle.import_bundle(packed)) == 2
    monkeypatch.setenv("HPCJIT_CUDA_HOME", "/nonexistent")
    assert load().error_text(2) == "out of memory"
    assert load(offset=1).path.stat().st_mode & 0o777 == 0o700
    assert len(bundle.import_bundle(packed)) == 2  # again: what is there stays


def test_bundle_takes_a_selection(stocked, tmp_path):
    chosen = bundle.export_bundle(tmp_path / "one.tar.gz", Selection(key=entry_of(stocked).key[:10]))
    assert [e.config for e in chosen] == ["threads=256, offset=0"]
    with pytest.raises(CacheError, match="nothing to export"):
        bundle.export_bundle(tmp_path / "none.tar.gz", Selection(op="other.*"))
    assert not (tmp_path / "none.tar.gz").exists()


def test_damaged_entry_is_not_exported(stocked, tmp_path):
    truncate(entry_of(stocked))
    with pytest.raises(CacheError, match="its manifest says"):
        bundle.export_bundle(tmp_path / "x.tar.gz")
    assert list(tmp_path.glob("*x.tar.gz*")) == []


def repack(path: Path, change) -> None:
    """Rewrite a bundle after `change(members)` on its list of (TarInfo, content)."""
    with tarfile.open(path) as archive:
        members = [(member, archive.extractfile(member).read()) for member in archive]
    change(members)
    with tarfile.open(path, "w:gz") as archive:
        for member, content in members:
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def extra(name: str, **facts):
    def change(members):
        member = tarfile.TarInfo(name)
        for key, value in facts.items():
            setattr(member, key, value)
        members.append((member, b"" if facts else b"x"))

    return change


def listed(name: str):
    def change(members):
        index = json.loads(members[0][1])
        index["files"][name] = {"bytes": 1, "sha256": "0"}
        members[0] = (members[0][0], json.dumps(index).encode())
        extra(name)(members)

    return change


def grow(members):
    members[1] = (members[1][0], members[1][1] + b"x")


def flip(members):
    content = bytearray(members[1][1])
    content[100] ^= 1
    members[1] = (members[1][0], bytes(content))


def drop(members):
    members.pop()


def double(members):
    members.append(members[1])


def rename_consistently(members):
    """An entry under another entry's name, with an index that agrees."""
    index = json.loads(members[0][1])
    old = members[1][0].name.rpartition("/")[0]
    new = old[:-12] + "0" * 12
    for member, _ in members[1:]:
        member.name = member.name.replace(old, new)
    index["files"] = {name.replace(old, new): facts for name, facts in index["files"].items()}
    members[0] = (members[0][0], json.dumps(index).encode())


def no_index(members):
    members.pop(0)


def other_format(members):
    members[0] = (members[0][0], b'{"format": 99, "files": {}}')


@pytest.mark.parametrize(
    "change",
    [
        extra("sm_90a/test.scale/new-000000000000/kernel.so"),
        extra("../escaped"),
        extra("/absolute"),
        extra("sm_90a/link", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        extra("sm_90a/hard", type=tarfile.LNKTYPE, linkname="bundle.json"),
        extra("sm_90a/device", type=tarfile.CHRTYPE),
        listed("../../escaped"),
        listed("/absolute"),
        listed("sm_90a/test.scale/../../../escaped/kernel.so"),
        listed("sm_90a/test.scale/x-000000000000/run.sh"),
        listed("sm_90a/test.scale/x-000000000000/kernel.so"),
        grow,
        flip,
        drop,
        double,
        rename_consistently,
        no_index,
        other_format,
    ],
)
def test_bad_bundle_changes_nothing(packed, fresh, tmp_path, change):
    fresh.mkdir(mode=0o700)
    outside = set(tmp_path.iterdir())
    repack(packed, change)
    with pytest.raises(CacheError, match="was not imported"):
        bundle.import_bundle(packed)
    assert cache.entries() == []
    assert list((fresh / "staging").iterdir()) == []
    assert set(tmp_path.iterdir()) == outside


@pytest.mark.parametrize("content", [b"", b"not a tar", b"\x1f\x8b\x08half a gzip"])
def test_file_that_is_no_bundle(fresh, tmp_path, content):
    path = tmp_path / "x.tar.gz"
    path.write_bytes(content)
    with pytest.raises(CacheError, match=r"x\.tar\.gz"):
        bundle.import_bundle(path)
    with pytest.raises(CacheError, match=r"missing\.tar\.gz"):
        bundle.import_bundle(tmp_path / "missing.tar.gz")


def test_truncated_bundle(packed, fresh):
    packed.write_bytes(packed.read_bytes()[:-2000])
    with pytest.raises(CacheError, match="was not imported"):
        bundle.import_bundle(packed)
    assert cache.entries() == []
