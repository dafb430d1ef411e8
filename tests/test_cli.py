"""The command line without a GPU: doctor, ops, demo, cache, trace, and what every command has in common."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hpcjit import __version__, build, demo, folders, numerics, settings, trace
from hpcjit.cli import COMMANDS, main
from hpcjit.cli.doctor import examine
from hpcjit.ops.layernorm import rmsnorm
from hpcjit.registry import ops

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without GPU")


def answer(capsys, *arguments: str, code: int = 0):
    assert main([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


class TestCommon:
    def test_without_a_command_help_is_printed(self, capsys):
        assert main([]) == 0
        out = capsys.readouterr().out
        assert all(command in out for command in COMMANDS)

    @pytest.mark.parametrize("command", COMMANDS)
    def test_every_command_explains_itself(self, command: str, capsys):
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        assert stop.value.code == 0
        assert f"hpcjit {command}" in capsys.readouterr().out

    @pytest.mark.parametrize("arguments", [["nope"], ["ops", "nope"], ["cache"], ["trace"], ["bench", "--l2", "warm"]])
    def test_wrong_usage_is_exit_code_2_on_stderr(self, arguments: list[str], capsys):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
        captured = capsys.readouterr()
        assert captured.err
        assert not captured.out

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            (["ops", "list", "rmsnorm"], "takes no operator"),
            (["ops", "show"], "needs an operator"),
            (["trace", "show"], "required: FILE\n"),
        ],
    )
    def test_wrong_usage_says_what_is_wrong(self, arguments: list[str], named: str, capsys):
        with pytest.raises(SystemExit):
            main(arguments)
        assert named in capsys.readouterr().err

    def test_interrupted_while_a_command_is_imported(self, monkeypatch, capsys):
        def interrupt(name: str) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("hpcjit.cli.importlib.import_module", interrupt)
        assert main(["doctor"]) == 130
        assert capsys.readouterr().err == "hpcjit: interrupted\n"

    def test_version(self, capsys):
        with pytest.raises(SystemExit):
            main(["--version"])
        assert __version__ in capsys.readouterr().out

    def test_as_a_module_with_a_closed_pipe(self):
        command = f"set -o pipefail; {sys.executable} -m hpcjit ops --json | head -c 1"
        root = Path(__file__).parent.parent
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, cwd=root)
        assert done.stdout == "["
        assert "Traceback" not in done.stderr
        assert "Exception" not in done.stderr


class TestDoctor:
    def test_every_line_has_a_verdict_and_every_variable_a_line(self, capsys, fresh: Path):
        findings = answer(capsys, "doctor")
        topics = {finding["topic"]: finding for finding in findings}
        assert set(settings.VARIABLES) <= set(topics)
        assert {"torch", "nvcc", "host compiler", "ninja", "CuTe headers", "cache"} <= set(topics)
        assert {finding["verdict"] for finding in findings} <= {"ok", "warn"}
        assert str(fresh) in topics["cache"]["text"]

    @NO_GPU
    def test_no_gpu_is_a_warning(self, capsys, fresh: Path):
        (gpu,) = [finding for finding in answer(capsys, "doctor") if finding["topic"] == "GPU"]
        assert gpu["verdict"] == "warn"
        assert "sm_90a" in gpu["remedy"]

    def test_a_missing_compiler_fails_with_a_remedy(self, capsys, fresh: Path, monkeypatch, tmp_path: Path):
        monkeypatch.setenv("HPCJIT_CUDA_HOME", str(tmp_path))
        (nvcc,) = [f for f in answer(capsys, "doctor", code=1) if f["topic"] == "nvcc"]
        assert nvcc["verdict"] == "fail"
        assert "hpcjit[nvcc]" in nvcc["remedy"]
        assert main(["doctor"]) == 1
        assert "1 failures" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("name", "value"), [("HPCJIT_ARCH", "hopper"), ("HPCJIT_BACKEND", "cudnn"), ("HPCJIT_VERBOSE", "loud")]
    )
    def test_a_bad_variable_is_a_warning(self, name: str, value: str, capsys, fresh: Path, monkeypatch):
        monkeypatch.setenv(name, value)
        (finding,) = [f for f in examine() if f.topic == name]
        assert finding.verdict == "warn"
        assert finding.remedy

    def test_a_cache_that_others_can_write_is_a_warning(self, capsys, fresh: Path):
        fresh.mkdir(parents=True)
        fresh.chmod(0o777)
        (folder,) = [f for f in answer(capsys, "doctor") if f["topic"] == "cache"]
        assert folder["verdict"] == "warn"
        assert "chmod" in folder["remedy"]

    def test_a_missing_layer_is_a_warning(self, capsys, fresh: Path, monkeypatch, tmp_path: Path):
        monkeypatch.setenv("HPCJIT_CACHE_PATH", str(tmp_path / "none"))
        (layer,) = [f for f in answer(capsys, "doctor") if f["topic"] == "cache layer"]
        assert layer["verdict"] == "warn"


class TestOps:
    def test_list(self, capsys):
        rows = answer(capsys, "ops")
        assert [row["op"] for row in rows] == ops()
        assert all("jit" in row["backends"] and row["summary"] for row in rows)
        assert main(["ops"]) == 0
        text = capsys.readouterr().out
        assert f"{len(rows)} operators" in text
        assert all(row["op"] in text and " torch_compile " in text for row in rows)

    @NO_GPU
    def test_show_says_why_not(self, capsys):
        facts = answer(capsys, "ops", "show", "rmsnorm")
        assert facts["op"] == "layernorm.rmsnorm"
        jit = next(backend for backend in facts["backends"] if backend["backend"] == "jit")
        assert jit["why_not"] == "needs cuda SM >= 8.0, this is cpu"
        assert facts["doc"]
        assert facts["cases"]
        assert main(["ops", "show", "rmsnorm"]) == 0
        assert "needs cuda SM >= 8.0" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("name", "hint"),
        [("rmsnrm", "'rmsnorm'"), ("layernorm.rmsnrm", "'layernorm.rmsnorm'"), ("nope.nope", "unknown")],
    )
    def test_an_unknown_operator(self, name: str, hint: str, capsys):
        assert main(["ops", "show", name]) == 2
        assert hint in capsys.readouterr().err


class TestDemo:
    @NO_GPU
    def test_cross_compiles_and_checks(self, fresh: Path, capsys):
        facts = answer(capsys, "demo", "rmsnorm")
        (row,) = facts["operators"]
        assert row["op"] == "layernorm.rmsnorm"
        assert row["ok"]
        assert not row["cached"]
        assert row["build_s"] > 0
        assert 0 < row["err"] <= row["bound"]
        assert facts["arch"] == "sm_90a"
        assert answer(capsys, "demo", "rmsnorm")["operators"][0]["cached"]

    def test_every_operator_takes_part_once(self):
        assert sorted(case.op for case in demo.chosen_cases()) == ops()

    @NO_GPU
    def test_without_nvcc_references_run_and_the_remedy_is_said(self, fresh: Path, monkeypatch, tmp_path: Path, capsys):
        monkeypatch.setenv("HPCJIT_CUDA_HOME", str(tmp_path))
        assert main(["demo"]) == 0
        out = capsys.readouterr().out
        assert f"{len(ops())} of {len(ops())} operators run as references and checked" in out
        assert "hpcjit[nvcc]" in out

    @NO_GPU
    def test_a_broken_bound_is_exit_code_1(self, fresh: Path, monkeypatch, capsys):
        wrong = [numerics.Deviation("out", 1.0, 0.5)]
        monkeypatch.setattr(numerics, "check", lambda *args: wrong)
        assert main(["demo", "rmsnorm"]) == 1
        assert "wrong" in capsys.readouterr().out

    def test_an_empty_cache_leaves_the_variable_alone(self, fresh: Path):
        before = os.environ["HPCJIT_CACHE_DIR"]
        with demo.empty_cache():
            inside = Path(os.environ["HPCJIT_CACHE_DIR"])
            assert inside != Path(before)
        assert os.environ["HPCJIT_CACHE_DIR"] == before
        assert not inside.exists()

    def test_bad_input(self, capsys):
        assert main(["demo", "--jobs", "0"]) == 2
        assert "'--jobs' must be at least 1, got 0" in capsys.readouterr().err
        assert main(["demo", "rmsnrm"]) == 2
        assert "did you mean 'rmsnorm'" in capsys.readouterr().err


@pytest.fixture
def warm(fresh: Path, capsys) -> Path:
    """A cache with one kernel."""
    assert main(["prewarm", "rmsnorm", "--shapes", "32x256", "--arch", "sm_90a"]) == 0
    capsys.readouterr()
    return fresh


class TestCache:
    def test_list_show_verify(self, warm: Path, capsys):
        (entry,) = answer(capsys, "cache", "ls")
        assert entry["op"] == "layernorm.norm"
        (shown,) = answer(capsys, "cache", "show", entry["key"][:8])
        assert shown["registers"] > 0
        assert "nvcc" in shown["command"]
        assert answer(capsys, "cache", "verify") == {"checked": 1, "bad": []}
        for arguments in (["ls"], ["show", entry["key"]], ["verify"], ["path"]):
            assert main(["cache", *arguments]) == 0
        assert str(warm) in capsys.readouterr().out

    def test_a_damaged_binary_is_found(self, warm: Path, capsys):
        binary = next(warm.rglob("kernel.so"))
        content = binary.read_bytes()
        binary.unlink()  # this process has it mapped, and would feel a write into it
        binary.write_bytes(content[:-1])
        binary.chmod(0o700)
        assert main(["cache", "verify"]) == 1
        captured = capsys.readouterr()
        assert "1 bad" in captured.out
        assert str(binary) in captured.err

    def test_selections(self, warm: Path, capsys):
        assert len(answer(capsys, "cache", "ls", "--op", "layernorm.*", "--arch", "sm_90*")) == 1
        assert not answer(capsys, "cache", "ls", "--op", "moe.*")
        assert not answer(capsys, "cache", "ls", "--unused-for", "1d")

    def test_cleaning_needs_a_selection(self, warm: Path, capsys):
        assert main(["cache", "clean"]) == 2
        assert "--all" in capsys.readouterr().err
        assert not answer(capsys, "cache", "clean", "--unused-for", "1d")
        assert len(answer(capsys, "cache", "clean", "--all")) == 1
        assert not list(warm.rglob("kernel.so"))

    def test_to_another_machine(self, warm: Path, capsys, monkeypatch, tmp_path: Path):
        bundle = tmp_path / "kernels.tar.gz"
        assert len(answer(capsys, "cache", "export", str(bundle))) == 1
        monkeypatch.setenv("HPCJIT_CACHE_DIR", str(tmp_path / "other"))
        assert main(["cache", "import", str(bundle)]) == 0
        assert "imported 1 kernels" in capsys.readouterr().out
        assert len(answer(capsys, "cache", "ls")) == 1

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            (["show", "zzz"], "zzz"),
            (["import", "missing.tar.gz"], "missing.tar.gz"),
            (["export", "/proc/nowhere/x.tar.gz"], "bundle /proc/nowhere/x.tar.gz cannot be written"),
            (["ls", "--unused-for", "soon"], "--unused-for"),
        ],
    )
    def test_bad_input(self, warm: Path, arguments: list[str], named: str, capsys):
        assert main(["cache", *arguments]) == 2
        captured = capsys.readouterr()
        assert named in captured.err
        assert not captured.out

    def test_a_malformed_bundle_changes_nothing(self, warm: Path, tmp_path: Path, capsys):
        (tmp_path / "bad.tar.gz").write_bytes(b"no archive")
        before = sorted(warm.rglob("*"))
        assert main(["cache", "import", str(tmp_path / "bad.tar.gz")]) == 2
        assert "not a readable bundle" in capsys.readouterr().err
        assert [path for path in sorted(warm.rglob("*")) if path.is_file()] == [p for p in before if p.is_file()]


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "calls.jsonl"
    trace.enable_fused_op_trace()
    try:
        for tokens in (2, 2, 3):
            rmsnorm(torch.ones(tokens, 64), torch.ones(64))
        trace.save(path)
    finally:
        trace.disable_fused_op_trace()
    return path


class TestTrace:
    def test_show(self, recorded: Path, capsys):
        first, second = answer(capsys, "trace", "show", str(recorded))
        assert (first["count"], second["count"]) == (2, 1)
        assert first["tensors"]["input"] == "float32[2, 64]"
        assert main(["trace", "show", str(recorded)]) == 0
        assert "2 signatures, 3 calls" in capsys.readouterr().out

    def test_summary(self, recorded: Path, capsys):
        assert answer(capsys, "trace", "summary", str(recorded)) == [
            {"op": "layernorm.rmsnorm", "backend": "torch", "calls": 3, "signatures": 2}
        ]

    def test_one_operator(self, recorded: Path, capsys):
        assert len(answer(capsys, "trace", "show", str(recorded), "rmsnorm")) == 2
        assert not answer(capsys, "trace", "show", str(recorded), "silu_and_mul")

    def test_a_damaged_file(self, recorded: Path, capsys):
        recorded.write_bytes(recorded.read_bytes()[:-20])
        assert main(["trace", "show", str(recorded)]) == 2
        captured = capsys.readouterr()
        assert f"{recorded}: line 3" in captured.err
        assert not captured.out

    def test_a_missing_file(self, capsys):
        assert main(["trace", "show", "missing.jsonl"]) == 2
        assert "missing.jsonl" in capsys.readouterr().err


def test_the_demo_also_compiles_where_nothing_can_be_kept(monkeypatch, tmp_path):
    """A cache folder that cannot be made costs one warning; kernels are then built for this process alone."""
    monkeypatch.setenv("HPCJIT_CACHE_DIR", "/proc/nowhere")
    monkeypatch.setattr(folders, "_private", {})
    build.forget()
    here = demo.Machine(torch.device("cpu"), "sm_90a", "nvcc")
    (case,) = demo.chosen_cases(["moe.topk_softmax"])
    (result,) = demo.run(here, [case])
    assert not result.error
    assert result.build_s > 0
    for private in folders._private.values():
        shutil.rmtree(private, ignore_errors=True)
    build.forget()
