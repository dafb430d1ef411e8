"""Sweeps over configs: the combinations, bad input, and a table without a GPU."""

from __future__ import annotations

import json

import pytest
import torch

from hpcjit.bench import sweep
from hpcjit.errors import ArgumentError
from hpcjit.ops.layernorm._norm_plan import NormConfig

CASE = "2048x4096"


def test_every_combination_once_and_the_own_config_first():
    own = NormConfig(threads=256, row_threads=256, trigger=1)
    found = sweep.variants(own, {"threads": [128, 256], "trigger": [0, 1]}, {"row_threads": "threads"})
    assert found[0] == own
    assert len(found) == 4
    assert {(c.threads, c.row_threads, c.trigger) for c in found} == {
        (threads, threads, trigger) for threads in (128, 256) for trigger in (0, 1)
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("threads=128,256", ("threads", [128, 256])),
        ("exact=true, False", ("exact", [True, False])),
        ("input_t=bf16", ("input_t", ["bf16"])),
        ("threads/exact=128/true,256/false", ("threads/exact", [(128, True), (256, False)])),
    ],
)
def test_choices(text, expected):
    assert sweep.parse_choice(text) == expected


@pytest.mark.parametrize("text", ["threads", "=3", "threads="])
def test_a_choice_without_values_is_refused(text):
    with pytest.raises(ArgumentError, match="FIELD=VALUE"):
        sweep.parse_choice(text)


def test_fields_that_change_together():
    own = NormConfig(threads=256, vecs_per_thread=2)
    name, values = sweep.parse_choice("threads/vecs_per_thread=256/2,512/1")
    found = sweep.variants(own, {name: values, "trigger": [0, 1]}, {})
    assert {(c.threads, c.vecs_per_thread, c.trigger) for c in found} == {
        (256, 2, 0),
        (256, 2, 1),
        (512, 1, 0),
        (512, 1, 1),
    }
    with pytest.raises(ArgumentError, match="2 values between commas"):
        sweep.parse_choice("threads/vecs_per_thread=256/2,512")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["rmsnorm", "--case", CASE, "--set", "treads=1"], "treads"),
        (["rmsnorm", "--case", CASE, "--tie", "threads=nothing"], "nothing"),
        (["rmsnorm", "--case", "3x3"], "3x3"),
        (["rmsnrm", "--case", CASE], "rmsnorm"),
    ],
)
def test_bad_input_is_named(arguments, named, capsys):
    assert sweep.main(arguments) == 2
    captured = capsys.readouterr()
    assert named in captured.err
    assert not captured.out


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the table holds times")
def test_without_a_gpu_the_table_shows_registers_and_what_does_not_compile(capsys):
    assert sweep.main(["rmsnorm", "--case", CASE, "--set", "trigger=1,2", "--set", "vec=8,3", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["own"] for row in rows].count(True) == 1
    good = [row for row in rows if "vec=8" in row["config"]]
    bad = [row for row in rows if "vec=3" in row["config"]]
    assert all(row["registers"] and row["spills"] == 0 and not row["error"] for row in good)
    assert len(bad) == 2
    assert all("compiler failed" in row["error"] for row in bad)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the tables hold times")
def test_a_plan_holds_command_lines(tmp_path, capsys):
    plan, out = tmp_path / "plan.txt", tmp_path / "out.jsonl"
    plan.write_text(
        f"# two operators\n\nrmsnorm --case {CASE} --set trigger=0,1  # a comment\n"
        f"silu_and_mul --case 2048x8192 --finals 1\n"
    )
    assert sweep.main(["--plan", str(plan), "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["op"] for row in rows] == ["layernorm.rmsnorm"] * 2 + ["activation.silu_and_mul"]
    assert "layernorm.rmsnorm 2048x4096\n" in capsys.readouterr().out


def test_a_plan_that_is_not_there_is_named(tmp_path, capsys):
    assert sweep.main(["--plan", str(tmp_path / "none.txt")]) == 2
    assert "none.txt" in capsys.readouterr().err


@pytest.mark.gpu
def test_finals_time_the_own_config_and_backends_too(capsys):
    arguments = ["rmsnorm", "--case", CASE, "--set", "trigger=0,1,2", "--finals", "1", "--backend", "torch", "--json"]
    assert sweep.main(arguments) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    finals = [row for row in rows if row["final_us"]]
    assert any(row["own"] for row in finals)
    assert any(row["config"] == "backend torch" for row in finals)
    assert min(rows, key=lambda row: row["us"])["final_us"]


@pytest.mark.gpu
def test_on_a_gpu_each_is_checked_and_timed(capsys):
    arguments = ["rmsnorm", "--case", CASE, "--set", "trigger=1,2", "--set", "vecs_per_thread=2,1", "--json"]
    assert sweep.main(arguments) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(row["us"] > 0 for row in rows)
    assert {row["ok"] for row in rows if "vecs_per_thread=2" in row["config"]} == {True}
    assert {row["ok"] for row in rows if "vecs_per_thread=1" in row["config"]} == {False}, "half of each row is missing"
