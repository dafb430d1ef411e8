"""Config and template to source, and what the cache key depends on. Nothing is compiled here."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from scale_template import ARCH, DATA, SCALE, ScaleConfig, output, python, scale_template

from hpcjit import build, compiler, headers, toolchain
from hpcjit.build import Config, Template

pytestmark = pytest.mark.usefixtures("fresh")


@dataclass(frozen=True)
class EveryKind(Config):
    input_t: str = "bf16"
    head_dim: int = 128
    num_bytes: int = 2**40
    has_bias: bool = True
    is_causal: bool = False
    scale: float = 0.5
    tiny: float = 1e-06


EVERY_KIND = Template("test.kinds", "x.cuh", "a::B", EveryKind, ("x",))


def keys(template=SCALE, config=None, arch=ARCH) -> tuple[str, str | None]:
    wanted = build._request(template, config or ScaleConfig(), arch).wanted
    return wanted.source_key, wanted.key


# --- source ---------------------------------------------------------------------------------------------------------


def test_source_is_what_the_design_says():
    assert build.source(EVERY_KIND, EveryKind()) == (
        '#include "hpcjit/export.cuh"\n'
        '#include "x.cuh"\n'
        "struct Config {\n"
        "  using input_t = hpcjit::bf16;\n"
        "  static constexpr int kHeadDim = 128;\n"
        "  static constexpr long long kNumBytes = 1099511627776;\n"
        "  static constexpr bool kHasBias = true;\n"
        "  static constexpr bool kIsCausal = false;\n"
        "  static constexpr float kScale = 0.5f;\n"
        "  static constexpr float kTiny = 1e-06f;\n"
        "};\n"
        "HPCJIT_EXPORT(a::B<Config>, 1)\n"
    )


def test_config_prints_on_one_line():
    assert str(EveryKind()) == "bf16, head_dim=128, num_bytes=1099511627776, has_bias, scale=0.5, tiny=1e-06"


@pytest.mark.parametrize(
    "change",
    [
        {"input_t": "half"},
        {"input_t": "int; evil"},
        {"scale": float("nan")},
        {"scale": float("inf")},
        {"head_dim": None},
    ],
)
def test_values_that_are_no_constants_are_refused(change):
    with pytest.raises(TypeError, match=rf"EveryKind\.{next(iter(change))}"):
        build.source(EVERY_KIND, replace(EveryKind(), **change))


def test_config_of_another_template_is_refused():
    with pytest.raises(TypeError, match=r"test\.scale takes a ScaleConfig, got EveryKind"):
        build.source(SCALE, EveryKind())


@pytest.mark.parametrize("params", [(), tuple(f"p{i}" for i in range(65)), ("a", "a")])
def test_template_params_are_checked(params):
    with pytest.raises(ValueError, match="params must be"):
        Template("test.x", "x.cuh", "a::B", ScaleConfig, params)


@pytest.mark.parametrize("op", ["noop", "../x.y", "A.b", "a.b.c"])
def test_template_op_is_checked(op):
    with pytest.raises(ValueError, match=r"group\.name"):
        Template(op, "x.cuh", "a::B", ScaleConfig, ("x",))


# --- the key changes ------------------------------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path) -> Path:
    return Path(shutil.copytree(DATA, tmp_path / "copy"))


def test_key_changes_with_a_parameter_arch_flags_and_debug(monkeypatch):
    seen = [
        keys(),
        keys(config=ScaleConfig(threads=128)),
        keys(arch="sm_100a"),
        keys(scale_template(flags=("-DX=1",))),
        keys(replace(SCALE, entry="scale_test::Other")),
        keys(replace(SCALE, params=("a", "b", "c", "d"))),
    ]
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-G")
    seen.append(keys())
    monkeypatch.delenv("NVCC_APPEND_FLAGS")
    monkeypatch.setenv("HPCJIT_DEBUG", "1")
    seen.append(keys())
    assert len({source_key for source_key, _ in seen}) == len(seen)
    assert len({key for _, key in seen}) == len(seen)


def test_only_the_package_s_own_templates_do_without_part_of_the_standard_library():
    own, outside = (build._request(t, c(), ARCH).job.flags for t, c in ((EVERY_KIND, EveryKind), (SCALE, ScaleConfig)))
    assert set(own) - set(outside) == set(compiler.LEAN_FLAGS)
    assert set(outside) <= set(own)


@pytest.mark.parametrize("header", ["scale.cuh", "scale_detail.cuh"])
def test_key_changes_with_any_included_header(copy, header):
    """The second one is only included by the first. An old mtime and an equal size hide nothing."""
    template = scale_template(copy)
    before, path = keys(template), copy / header
    times = os.stat(path)
    text = path.read_text()
    path.write_text(text.replace("scale_test", "scale_tesd", 1))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert keys(template)[0] != before[0]
    path.write_text(text)
    assert keys(template) == before


def test_key_covers_the_package_s_own_headers():
    names = headers.reachable(build.source(SCALE, ScaleConfig()), (DATA, build.PACKAGE / "include"))
    assert names == ["hpcjit/export.cuh", "scale.cuh", "scale_detail.cuh"]


def test_headers_behind_conditions_and_computed_names_count(tmp_path):
    (tmp_path / "a.cuh").write_text("#if 0\n#  include <deep/b.cuh>\n#endif\n")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.cuh").write_text('#include "c.cuh"\n')
    (tmp_path / "deep" / "c.cuh").write_text("")
    (tmp_path / "z.cuh").write_text("")
    assert headers.reachable('#include "a.cuh"\n', [tmp_path]) == ["a.cuh", "deep/b.cuh", "deep/c.cuh"]
    (tmp_path / "a.cuh").write_text("#include CHOSEN_ELSEWHERE\n")
    assert headers.reachable('#include "a.cuh"\n', [tmp_path]) == ["a.cuh", "deep/b.cuh", "deep/c.cuh", "z.cuh"]


def test_key_changes_with_nvcc_but_source_key_does_not(monkeypatch, toolkit):
    monkeypatch.setenv("HPCJIT_CUDA_HOME", str(toolkit.home))
    before = keys()
    nvcc = toolkit.home / "bin" / "nvcc"
    nvcc.write_text(f'#!/bin/sh\n"{toolkit.real}" "$@" | sed "s/compiler\\.[0-9_]*/compiler.other/"\n')
    after = keys()
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_key_changes_with_the_host_compiler(monkeypatch, tmp_path):
    before = keys()
    compiler = tmp_path / "my-cc"
    compiler.write_text("#!/bin/sh\necho 'my-cc 99.0'\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    after = keys()
    assert after[0] == before[0]
    assert after[1] != before[1]


# --- and does not change --------------------------------------------------------------------------------------------


def test_key_does_not_change_with_mtime_or_place(copy, tmp_path):
    before = keys()
    for file in copy.iterdir():
        os.utime(file, (0, 0))
    assert keys(scale_template(copy)) == before
    moved = Path(shutil.move(copy, tmp_path / "völlig anders"))
    assert keys(scale_template(moved)) == before


def test_key_does_not_change_with_the_place_of_the_package(tmp_path):
    shutil.copytree(build.PACKAGE, tmp_path / "hpcjit", ignore=shutil.ignore_patterns("__pycache__"))
    code = "r = build._request(SCALE, ScaleConfig(), ARCH).wanted\nprint(r.source_key, r.key)\nprint(build.__file__)"
    elsewhere = output(python(code, package=tmp_path)).splitlines()
    assert elsewhere[1].startswith(str(tmp_path))
    assert tuple(elsewhere[0].split()) == keys()


@pytest.mark.parametrize("seed", ["0", "1"])
def test_key_is_the_same_in_another_process(seed):
    code = "r = build._request(SCALE, ScaleConfig(), ARCH).wanted\nprint(r.source_key, r.key)"
    assert tuple(output(python(code, PYTHONHASHSEED=seed)).split()) == keys()


def test_key_has_no_torch_or_python_in_it(monkeypatch):
    before = keys()
    monkeypatch.setattr("platform.python_version", lambda: "3.99.0")
    monkeypatch.setattr("torch.__version__", "9.9.9")
    assert keys() == before


# --- the big header library -----------------------------------------------------------------------------------------


@pytest.fixture
def library(tmp_path, monkeypatch) -> Path:
    """A stand-in for the CuTe headers."""
    root = tmp_path / "library"
    (root / "cute").mkdir(parents=True)
    (root / "cutlass").mkdir()
    (root / "cute" / "layout.hpp").write_text("#include <cute/util.hpp>\n#include COMPUTED\n")
    (root / "cute" / "util.hpp").write_text("// one\n")
    (root / "cute" / "unrelated.hpp").write_text("// one\n")
    monkeypatch.setattr(toolchain, "find_cutlass_include", lambda: root)
    return root


def test_library_headers_count_when_they_are_reached(library, tmp_path):
    (tmp_path / "t.cuh").write_text("#include <cute/layout.hpp>\n")
    template = replace(SCALE, header="t.cuh", include=(tmp_path,), cutlass=True)
    before = keys(template)
    (library / "cute" / "unrelated.hpp").write_text("// two\n")
    assert keys(template) == before
    (library / "cute" / "util.hpp").write_text("// two\n")
    assert keys(template) != before


def test_library_digest_is_remembered_across_processes(library, tmp_path, monkeypatch, fresh):
    (tmp_path / "t.cuh").write_text("#include <cute/layout.hpp>\n")
    template = replace(SCALE, header="t.cuh", include=(tmp_path,), cutlass=True)
    before = keys(template)
    memo = json.loads((fresh / "headers.json").read_text())
    assert set(next(iter(memo.values()))["files"]) == {"cute/layout.hpp", "cute/util.hpp"}
    scanned = []
    real = headers._scan
    monkeypatch.setattr(headers, "_scan", lambda path: scanned.append(path) or real(path))
    assert keys(template) == before
    assert not [path for path in scanned if str(library) in path]


def test_real_cute_headers_have_a_digest(tmp_path):
    (tmp_path / "t.cuh").write_text("#include <cute/tensor.hpp>\n")
    template = replace(SCALE, header="t.cuh", include=(tmp_path,), cutlass=True)
    assert keys(template) == keys(template)
    assert keys(template)[0] != keys(replace(template, cutlass=False))[0]
