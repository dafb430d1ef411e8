"""Plots of benchmark rows: which panels there are, and that files are drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcjit.bench import plots, runner
from hpcjit.bench.runner import Row


def test_a_file_per_operator(tmp_path: Path):
    pytest.importorskip("matplotlib")
    rows = [Row("layernorm.rmsnorm", f"{t}x64", b, cold_us=t, floor_us=t / 2) for t in (1, 2) for b in ("jit", "torch")]
    rows.append(Row("moe.x", "1x64", "jit", cold_us=1.0))
    assert plots.draw(rows, tmp_path) == [tmp_path / "layernorm.rmsnorm.png"]
    assert (tmp_path / "layernorm.rmsnorm.png").read_bytes().startswith(b"\x89PNG")


def test_panels_are_the_sizes_after_the_tokens():
    rows = [Row("a.b", f"{t}x{n}", "jit", cold_us=1.0) for n in (64, 128) for t in (8, 2)] + [Row("a.b", "odd", "jit")]
    assert {name: [t for t, _ in panel["jit"]] for name, panel in plots.panels(rows).items()} == {
        "64": [2, 8],
        "128": [2, 8],
    }


def test_panels_where_the_tokens_do_not_lead():
    names = [f"N=64 K=128 M={t} fast" for t in (16, 2)] + [f"dsv3 tp8 {t} bf16" for t in (1, 4)]
    rows = [Row("a.b", name, "jit", cold_us=1.0) for name in names]
    found = plots.panels(rows)
    assert {name: [t for t, _ in panel["jit"]] for name, panel in found.items()} == {
        "N=64 K=128 fast": [2, 16],
        "dsv3 tp8 bf16": [1, 4],
    }


def test_mixes_get_a_panel_per_heads_and_dtype():
    names = ("1x8 fp8 64x4K", "1x8 fp8 1x64K+7x4K", "1x8 fp8 64x4K q2", "1x12 fp8 64x4K", "8x128", "1x8 fp8", "odd")
    rows = [Row("a.b", name, b, cold_us=1.0) for name in names for b in ("jit", "triton")]
    rows.append(Row("a.b", "1x8 fp8 1x2K", "jit", error="failed"))
    found = plots.mix_panels(rows)
    assert {name: list(mixes) for name, mixes in found.items()} == {"1x8 fp8": ["64x4K", "1x64K+7x4K", "64x4K q2"]}
    assert [row.backend for row in found["1x8 fp8"]["64x4K"]] == ["jit", "triton"]


def test_decode_cases_are_drawn_by_mix(tmp_path: Path):
    pytest.importorskip("matplotlib")
    cases = runner.choose_cases(["attention.decode"], [])
    rows = [
        Row(case.op, case.name, b, cold_us=us, floor_us=floor)
        for i, case in enumerate(cases)
        for b, us, floor in (("jit", 2.0 + i, 1.0), ("flash_attn", 3.0 + i, None))
    ]
    assert list(plots.mix_panels(rows)) == ["1x8 fp8", "1x8 bf16", "8x64 fp8", "8x64 bf16"]
    assert plots.draw(rows, tmp_path) == [tmp_path / "attention.decode.png"]
    figure = plots._figure(rows)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels[:3] == ["64x512", "64x4K", "32x128+32x4K"]
    assert {text.get_text() for text in figure.legends[0].get_texts()} == {"hpcjit", "flash_attn", "floor"}
