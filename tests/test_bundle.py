"""Bundles: a round trip without a compiler, and everything that an import must refuse."""

from __future__ import annotations

import io
import json
import re
import shutil
import tarfile
from pathlib import Path

import pytest
from scale_template import entry_of, load, real_nvcc

from hpcjit import bundle, cache
from hpcjit.cache import Selection
from hpcjit.errors import CacheError

pytestmark = pytest.mark.skipif(real_nvcc() is None, reason="no nvcc on this machine")


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
    entry_of(stocked).binary.write_bytes(b"short")
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


@pytest.mark.parametrize("name", [".", "missing/kernels.tar.gz"])
def test_export_to_a_place_that_cannot_be_written(stocked, tmp_path, name, monkeypatch):
    """The message names what was asked for, not the temporary file beside it."""
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())
    with pytest.raises(CacheError, match=rf"^bundle {re.escape(name)} cannot be written: [A-Z]"):
        bundle.export_bundle(Path(name))
    assert set(tmp_path.iterdir()) == before


def test_truncated_bundle(packed, fresh):
    packed.write_bytes(packed.read_bytes()[:-2000])
    with pytest.raises(CacheError, match="was not imported"):
        bundle.import_bundle(packed)
    assert cache.entries() == []
