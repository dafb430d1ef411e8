"""The examples run: without a GPU as a command, with one also what they time."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parent.parent / "examples"
DECODE = FOLDER / "decode_attention.py"
MOE = FOLDER / "moe_parallel.py"
PNG = b"\x89PNG"


def example(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_tested():
    assert sorted(path.name for path in FOLDER.glob("*.py")) == [DECODE.name, MOE.name]


class TestDecodeAttention:
    def test_on_a_cpu_it_checks_and_draws(self, tmp_path: Path):
        pytest.importorskip("matplotlib")
        picture = tmp_path / "s.png"
        options = ["--mix", "1x2K+3x100", "--dtype", "fp8", "--heads", "2x4", "--out", str(picture)]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(FOLDER.parent)}
        done = subprocess.run(
            [sys.executable, str(DECODE), *options], capture_output=True, text=True, env=environment, timeout=300
        )
        assert done.returncode == 0, done.stderr
        assert "2x4 fp8 1x2K+3x100 on the CPU (reference)" in done.stdout
        assert ": ok" in done.stdout
        assert f"{picture}: max/mean dynamic " in done.stdout
        assert picture.read_bytes().startswith(PNG)

    @pytest.mark.gpu
    def test_on_a_gpu_it_times_both_schedules(self, tmp_path: Path, capsys):
        assert example(DECODE).main(["--mix", "1x2K+3x100", "--out", str(tmp_path / "s.png")]) == 0
        lines = capsys.readouterr().out.splitlines()
        for name in ("hpcjit, dynamic", "hpcjit, static"):
            assert any(line.startswith(name) and line.endswith("TB/s") for line in lines)

    def test_a_cta_starts_where_one_ends_first(self):
        module = example(DECODE)
        pieces = [module.Piece(worker, worker, 0, 0, tiles) for worker, tiles in enumerate((5, 1, 2, 1))]
        assert module.place(pieces, 4, 4) == [0, 1, 2, 3]
        assert module.place(pieces, 4, 2) == [0, 0, 1, 0]

    @pytest.mark.parametrize(
        ("options", "named"),
        [
            (["--mix", "4K"], "a mix is requests x length"),
            (["--mix", "3x0"], "a live token"),
            (["--heads", "8"], "KV heads x query heads"),
            (["--heads", "1x64"], "1 to 16 query heads"),
            (["--page-size", "0"], "a page must have a slot"),
            (["--head-dim", "72"], "head_dim"),
        ],
    )
    def test_bad_input(self, options: list[str], named: str, tmp_path: Path, capsys):
        with pytest.raises(SystemExit):
            example(DECODE).main([*options, "--out", str(tmp_path / "s.png")])
        assert named in capsys.readouterr().err


class TestMoeParallel:
    @pytest.mark.parametrize(
        ("mode", "quant", "tokens", "inner"),
        [
            ("ep", "fp8_tensor", "9", "256"),
            ("tp", "fp8_block", "9", "256"),
            ("tp", "fp8_channel", "9", "384"),
            ("tp", "bf16", "0", "16"),
        ],
    )
    def test_two_ranks_add_up_to_the_whole(self, mode: str, quant: str, tokens: str, inner: str):
        """With gloo, on CPUs."""
        options = ["--mode", mode, "--quant", quant, "--tokens", tokens, "--inner", inner]
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": str(FOLDER.parent),
            "OMP_NUM_THREADS": "1",
        }
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = subprocess.run(
            [*launcher, str(MOE), *options], capture_output=True, text=True, env=environment, timeout=300
        )
        assert done.returncode == 0, done.stderr
        assert f"{mode} on 2 ranks (cpu), {quant}, {tokens} tokens" in done.stdout
        assert done.stdout.rstrip().endswith(": ok")

    def test_inner_sizes_that_cut_a_block(self):
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(FOLDER.parent)}
        done = subprocess.run(
            [sys.executable, str(MOE), "--mode", "tp", "--inner", "192"],
            capture_output=True,
            text=True,
            env=environment,
            timeout=300,
        )
        assert done.returncode != 0
        assert "--inner must be a multiple of 128" in done.stderr
