"""Tables of measured configurations: form, look-up, devices."""

from __future__ import annotations

import json

import pytest
import torch

from hpcjit import tune

META = torch.device("meta")
GOOD = {
    "NVIDIA H200": {"sm_count": 132, "shapes": {"a": [[1, {"x": 1}], [16, {"x": 2}], [100, {"x": 3}]]}},
    "NVIDIA H20": {"sm_count": 78, "shapes": {"a": [[8, {"x": 9}]]}},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tune, "FOLDER", tmp_path)
    tune.forget()
    yield tmp_path
    monkeypatch.undo()
    tune.forget()


@pytest.fixture
def good(folder):
    (folder / "t.json").write_text(json.dumps(GOOD))


@pytest.mark.parametrize(("size", "x"), [(1, 1), (2, 1), (15, 1), (16, 2), (99, 2), (100, 3), (10**9, 3)])
def test_the_largest_size_below_counts(good, size, x):
    assert tune.lookup("t", META, "a", size) == {"x": x}


def test_nothing_below_the_first_size(good):
    assert tune.lookup("t", META, "a", 0) is None


def test_unknown_shape_and_table(good):
    assert tune.lookup("t", META, "b", 5) is None
    assert tune.lookup("u", META, "a", 5) is None


class TestDevices:
    @staticmethod
    def on(monkeypatch, name: str, sms: int):
        class Properties:
            multi_processor_count = sms

        Properties.name = name
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
        return tune.lookup("t", torch.device("cuda", 0), "a", 20)

    def test_by_name(self, good, monkeypatch):
        assert self.on(monkeypatch, "NVIDIA H20", 78) == {"x": 9}

    def test_by_multiprocessors(self, good, monkeypatch):
        assert self.on(monkeypatch, "NVIDIA H100", 132) == {"x": 2}

    def test_unknown(self, good, monkeypatch):
        assert self.on(monkeypatch, "NVIDIA B200", 148) is None


@pytest.mark.parametrize(
    "bad",
    [
        [],
        {"d": {"shapes": {}}},
        {"d": {"sm_count": "132", "shapes": {}}},
        {"d": {"sm_count": True, "shapes": {}}},
        {"d": {"sm_count": 132, "shapes": {"a": [["1", {}]]}}},
        {"d": {"sm_count": 132, "shapes": {"a": [[None, {}]]}}},
        {"d": {"sm_count": 132, "shapes": {"a": [[-1, {}]]}}},
        {"d": {"sm_count": 132, "shapes": {"a": []}}},
        {"d": {"sm_count": 132, "shapes": {"a": [[16, {}], [1, {}]]}}},
        {"d": {"sm_count": 132, "shapes": {"a": [[1, {}], [1, {}]]}}},
        {"d": {"sm_count": 132, "shapes": {"a": [[1, 5]]}}},
        {"d": {"sm_count": 132, "shapes": {"a": {"1": {}}}}},
    ],
    ids=str,
)
def test_what_is_no_table_is_refused(folder, bad):
    (folder / "t.json").write_text(json.dumps(bad))
    with pytest.raises(ValueError, match=r"t\.json is not a table"):
        tune.lookup("t", META, "a", 5)


def test_tables_of_the_package():
    for path in tune.FOLDER.glob("*.json"):
        tune.check(json.loads(path.read_text()), str(path))
