"""Measuring configurations: what is tried, what is kept, where, and the command."""

from __future__ import annotations

import json

import pytest
import torch

from hpcjit import folders, tune
from hpcjit.bench import tuning
from hpcjit.bench.tuning import Choice, Finding
from hpcjit.cases import cases_of
from hpcjit.cli import main
from hpcjit.jit_op import Plan
from hpcjit.ops.gemm import _router_plan
from hpcjit.ops.gemm._router_gemm import router_gemm_op
from hpcjit.ops.gemm._router_stream import ROUTER_STREAM, RouterStreamConfig
from hpcjit.ops.gemm._router_tile import ROUTER_TILE

META = torch.device("meta")
PLAN = Plan(ROUTER_STREAM, RouterStreamConfig())


@pytest.fixture
def tables(fresh, tmp_path, monkeypatch):
    """A package folder and a user's own, both empty; returns them."""
    package = tmp_path / "package"
    package.mkdir()
    monkeypatch.setattr(tune, "FOLDER", package)
    tune.forget()
    yield package, fresh / "tuned"
    monkeypatch.undo()
    tune.forget()


def put(folder, shapes, device="NVIDIA H200", sms=132):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "t.json").write_text(json.dumps({device: {"sm_count": sms, "shapes": shapes}}))
    tune.forget()


class TestTables:
    def test_own_sizes_come_first(self, tables):
        package, own = tables
        put(package, {"a": [[1, {"x": 1}], [16, {"x": 2}]], "b": [[1, {"x": 5}]]})
        put(own, {"a": [[16, {"x": 3}], [64, {"x": 4}]]})
        found = [tune.lookup("t", META, "a", size) for size in (1, 16, 63, 64)]
        assert found == [{"x": 1}, {"x": 3}, {"x": 3}, {"x": 4}]
        assert tune.lookup("t", META, "b", 1) == {"x": 5}

    def test_an_own_device(self, tables):
        package, own = tables
        put(package, {"a": [[1, {"x": 1}]]})
        put(own, {"a": [[1, {"x": 2}]]}, "NVIDIA H20", 78)
        assert tune.lookup("t", META, "a", 1) == {"x": 1}
        assert set(tune.table("t")) == {"NVIDIA H200", "NVIDIA H20"}

    @pytest.mark.parametrize("text", ["{", "[]", '{"d": {"sm_count": 1, "shapes": {"a": []}}}'])
    def test_a_broken_own_file_is_passed_over(self, tables, text):
        package, own = tables
        put(package, {"a": [[1, {"x": 1}]]})
        own.mkdir(parents=True)
        (own / "t.json").write_text(text)
        with pytest.warns(folders.CacheWarning, match=r"t\.json is not a table"):
            assert tune.lookup("t", META, "a", 1) == {"x": 1}

    def test_what_others_can_write_is_passed_over(self, tables):
        package, own = tables
        put(package, {"a": [[1, {"x": 1}]]})
        put(own, {"a": [[1, {"x": 2}]]})
        (own / "t.json").chmod(0o666)
        tune.forget()
        with pytest.warns(folders.CacheWarning, match="can be written by others"):
            assert tune.lookup("t", META, "a", 1) == {"x": 1}

    def test_another_device_of_the_same_size_keeps_the_rest(self, tables, monkeypatch):
        """One own entry of an H100 must not hide what is known of the H200."""
        package, own = tables
        put(package, {"a": [[1, {"x": 1}], [8, {"x": 2}]], "b": [[1, {"x": 5}]]})
        put(own, {"a": [[8, {"x": 3}]]}, "NVIDIA H100", 132)

        class Properties:
            name, multi_processor_count = "NVIDIA H100", 132

        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
        device = torch.device("cuda", 0)
        assert [tune.lookup("t", device, "a", size) for size in (1, 8)] == [{"x": 1}, {"x": 3}]
        assert tune.lookup("t", device, "b", 1) == {"x": 5}

    def test_without_a_folder_for_it(self, tables, monkeypatch):
        put(tables[0], {"a": [[1, {"x": 1}]]})
        monkeypatch.setattr(folders, "usable_root", lambda: None)
        assert tune.own_path("t") is None
        assert tune.lookup("t", META, "a", 1) == {"x": 1}


def choice(us: float | None, error: str = "", **values) -> Choice:
    return Choice(values, PLAN, us, error)


class TestEntries:
    def test_the_fastest_of_each_size(self):
        findings = [
            Finding("b", "s", 16, [choice(2.0, x=2), choice(3.0, x=1)]),
            Finding("a", "s", 1, [choice(1.0, x=1), choice(2.0, x=2)]),
        ]
        assert tuning.entries(findings) == {"s": [(1, {"x": 1}), (16, {"x": 2})]}

    def test_neighbours_share_what_is_as_fast(self):
        findings = [
            Finding("a", "s", 1, [choice(1.0, x=1)]),
            Finding("b", "s", 16, [choice(2.0, x=2), choice(2.01, x=1)]),
            Finding("c", "s", 32, [choice(2.0, x=2), choice(2.03, x=1)]),
        ]
        assert tuning.entries(findings) == {"s": [(1, {"x": 1}), (16, {"x": 1}), (32, {"x": 2})]}

    def test_what_failed_has_no_entry(self):
        assert tuning.entries([Finding("a", "s", 1, [choice(None, "wrong", x=1)])]) == {}

    def test_a_size_that_came_twice(self):
        findings = [Finding("a", "s", 1, [choice(1.0, x=1)]), Finding("b", "s", 1, [choice(1.0, x=2)])]
        assert tuning.entries(findings) == {"s": [(1, {"x": 1})]}, "of a trace the most frequent call comes first"


class TestWrite:
    @pytest.fixture(autouse=True)
    def device(self, monkeypatch):
        class Properties:
            name, multi_processor_count = "NVIDIA H200", 132

        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)

    def test_adds_to_what_is_there(self, tables):
        path = tables[1] / "t.json"
        device = torch.device("cuda", 0)
        tuning.write(path, {"a": [(1, {"x": 1}), (8, {"x": 2})]}, device)
        assert tune.lookup("t", device, "a", 9) == {"x": 2}
        tuning.write(path, {"a": [(8, {"x": 3})], "b": [(1, {"x": 4})]}, device)
        assert [tune.lookup("t", device, "a", size) for size in (1, 8)] == [{"x": 1}, {"x": 3}]
        assert tune.lookup("t", device, "b", 1) == {"x": 4}
        assert {entry.name for entry in path.parent.iterdir()} <= {"t.json", ".t.json.lock"}

    def test_refuses_to_replace_what_is_no_table(self, tables):
        path = tables[1] / "t.json"
        path.parent.mkdir(parents=True)
        path.write_text("{}{")
        with pytest.raises(ValueError, match="is not a table"):
            tuning.write(path, {"a": [(1, {"x": 1})]}, torch.device("cuda", 0))
        assert path.read_text() == "{}{"


class TestRouterGemm:
    @pytest.mark.parametrize("name", ["N=192 K=4096 M=64", "N=768 K=6144 M=1 fast", "N=256 K=7168 M=8192"])
    def test_alternatives(self, name):
        (case,) = [found for found in cases_of("gemm.router_gemm") if found.name == name]
        finding = tuning.alternatives(router_gemm_op, case)
        mode = "fast" if name.endswith("fast") else "accurate"
        assert finding.shape == name.split(" M=")[0] + f" {mode}"
        kinds = {choice.plan.template for choice in finding.choices}
        assert kinds == ({ROUTER_TILE} if finding.size > 128 else {ROUTER_TILE, ROUTER_STREAM})
        assert len({repr(choice.values) for choice in finding.choices}) == len(finding.choices) >= 8

    def test_an_entry_leads_back_to_its_plan(self, tables, monkeypatch):
        (case,) = [found for found in cases_of("gemm.router_gemm") if found.name == "N=192 K=4096 M=64"]
        args = case.args("meta")
        for found in tuning.alternatives(router_gemm_op, case).choices:
            monkeypatch.setattr(tune, "lookup", lambda *where, found=found: found.values)
            plan = router_gemm_op.plan(*args)
            assert (plan.template, plan.config) == (found.plan.template, found.plan.config)

    @pytest.mark.parametrize(
        "values",
        [
            {"splits": 8},
            {"kernel": "tile"},
            {"kernel": "other"},
            {"kernel": "tile", "tokens": 64, "groups": 1, "slots": 0, "splits": 8, "share": 1, "blocks_per_sm": 1},
            {"kernel": "tile", "tokens": "x", "groups": 1, "slots": 1, "splits": 8, "share": 1, "blocks_per_sm": 1},
            {"kernel": "stream", "row_tiles": 1, "token_tiles": 1, "warps": None, "splits": 8, "depth": 1},
            {"kernel": "stream", "row_tiles": 1, "token_tiles": 1, "warps": 999, "splits": 8, "depth": 1},
            {"kernel": "stream", "row_tiles": True, "token_tiles": 1, "warps": 8, "splits": 8, "depth": 1},
            {"kernel": "stream", "row_tiles": 1, "token_tiles": 1, "warps": 8, "splits": 8, "depth": 1, "pdl": 0},
        ],
        ids=str,
    )
    def test_values_that_make_no_sense_are_passed_over(self, monkeypatch, values):
        (case,) = [found for found in cases_of("gemm.router_gemm") if found.name == "N=192 K=4096 M=64"]
        monkeypatch.setattr(tune, "lookup", lambda *where: None)
        ruled = router_gemm_op.plan(*case.args("meta"))
        monkeypatch.setattr(tune, "lookup", lambda *where: values)
        with pytest.warns(folders.CacheWarning, match="is not used"):
            assert router_gemm_op.plan(*case.args("meta")) == ruled

    def test_other_activations_are_another_shape(self):
        (case,) = [found for found in cases_of("gemm.router_gemm") if found.name == "N=192 K=4096 M=64"]
        x, *others = case.args("meta")
        assert router_gemm_op.tuned_shape(x, *others) == ("N=192 K=4096 accurate", 64)
        assert router_gemm_op.tuned_shape(x.half(), *others) == ("N=192 K=4096 accurate fp16", 64)

    def test_nothing_to_compute_has_no_alternatives(self):
        x, weight, mode, out = cases_of("gemm.router_gemm")[0].args("meta")
        assert not list(router_gemm_op.alternatives(x[:0], weight, mode, out[:0]))


class TestCommand:
    def test_list(self, tables, capsys):
        assert main(["tune", "router_gemm", "--case", "N=192 K=4096 M=64", "--list", "--json"]) == 0
        (first,) = json.loads(capsys.readouterr().out)
        assert (first["shape"], first["size"]) == ("N=192 K=4096 accurate", 64)
        assert {"kernel", "splits"} <= set(first["choices"][0]["values"])

    def test_an_operator_without_a_table(self, capsys):
        assert main(["tune", "rmsnorm", "--list"]) == 2
        assert "gemm.router_gemm" in capsys.readouterr().err

    def test_an_unknown_case(self, capsys):
        assert main(["tune", "router_gemm", "--list", "--case", "nothing like it"]) == 2
        assert "nothing like it" in capsys.readouterr().err

    def test_bad_limit(self, capsys):
        assert main(["tune", "router_gemm", "--list", "--time-limit", "0"]) == 2
        assert "--time-limit" in capsys.readouterr().err

    def test_a_case_beside_a_trace(self, tmp_path, capsys):
        assert main(["tune", "router_gemm", "--list", "--case", "M=1", "--from", str(tmp_path / "t.jsonl")]) == 2
        assert "--from" in capsys.readouterr().err

    @pytest.mark.parametrize("kind", ["broken", "folder", "under a file"])
    def test_a_bad_output_is_found_before_anything_runs(self, kind, tmp_path, monkeypatch, capsys):
        (tmp_path / "broken.json").write_text("{")
        out = {"broken": tmp_path / "broken.json", "folder": tmp_path, "under a file": tmp_path / "broken.json" / "x"}
        monkeypatch.setattr("hpcjit.cli.tune._device", lambda index: torch.device("cuda", index))
        monkeypatch.setattr(tuning, "compile_all", lambda *where: pytest.fail("something was compiled"))
        assert main(["tune", "router_gemm", "--case", "N=192 K=4096 M=64", "--out", str(out[kind])]) == 2
        assert str(tmp_path) in capsys.readouterr().err
        assert (tmp_path / "broken.json").read_text() == "{"

    def test_what_was_found_is_shown_when_it_cannot_be_kept(self, tmp_path, monkeypatch, capsys):
        def found(op, case, finding, device, stop):
            finding.choices[0].us = 1.0

        def full(*where):
            raise OSError(28, "No space left on device", "table")

        monkeypatch.setattr("hpcjit.cli.tune._device", lambda index: torch.device("cuda", index))
        monkeypatch.setattr("hpcjit.toolchain.arch_of_device", lambda index=None: "sm_90a")
        for name, stand_in in (("compile_all", lambda *where: None), ("measure", found), ("write", full)):
            monkeypatch.setattr(tuning, name, stand_in)
        assert main(["tune", "router_gemm", "--case", "N=192 K=4096 M=64", "--out", str(tmp_path / "t.json")]) == 2
        said = capsys.readouterr()
        assert "1.00" in said.out
        assert "No space left" in said.err

    def test_without_a_device(self, monkeypatch, capsys):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert main(["tune", "router_gemm", "--case", "N=192 K=4096 M=64"]) == 2
        assert "--list" in capsys.readouterr().err

    @pytest.mark.gpu
    def test_what_is_found_is_used(self, tables, capsys):
        case = "N=96 K=512 M=5"
        assert main(["tune", "router_gemm", "--case", case, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert all(finding["choices"][0]["us"] > 0 for finding in found)
        device = torch.device("cuda", torch.cuda.current_device())
        for finding in found:
            assert tune.lookup(_router_plan.TABLE, device, finding["shape"], finding["size"])
