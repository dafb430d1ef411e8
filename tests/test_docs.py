"""What the documents promise about the package: commands, operators, variables, files."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from hpcjit import settings
from hpcjit.cli import COMMANDS
from hpcjit.registry import ops

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def table(first_heading: str) -> dict[str, list[str]]:
    """Names in backquotes of a Markdown table: those of each row's first cell -> those of the rest."""
    lines = README.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_heading} |"))
    rows = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        first, rest = line.strip("| ").split("|", 1)
        rows[re.findall(r"`([^`]+)`", first)[0]] = re.findall(r"`([^`]+)`", rest)
    return rows


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 150


def test_every_operator_is_in_the_readme():
    assert sorted(f"{group}.{name}" for group, names in table("group").items() for name in names) == ops()


def test_every_variable_is_in_the_readme():
    assert list(table("variable")) == list(settings.VARIABLES)


def test_commands_in_the_readme_exist():
    used = set(re.findall(r"\bhpcjit ([a-z]+)\b", "\n".join(re.findall(r"```bash\n(.*?)```", README, re.DOTALL))))
    assert {"demo", "prewarm", "cache", "bench"} <= used <= set(COMMANDS)


def test_files_named_in_the_readme_exist():
    for name in re.findall(r"`((?:docs|\.ci)/[\w./-]+)`", README):
        if "benchmarks" not in name:
            assert (ROOT / name).exists(), name


@pytest.mark.parametrize("name", ["install", "test"])
def test_ci_runs_the_commands_of_the_readme(name: str):
    """The function of .ci/run that finds them, run alone."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    function = re.search(r"^readme_command\(\) \{.*?^\}", script, re.DOTALL | re.MULTILINE)
    assert function is not None
    done = subprocess.run(
        ["bash", "-c", f"{function[0]}\nreadme_command {name}"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    (command,) = done.stdout.splitlines()
    assert f"<!-- ci:{name} -->\n```bash\n{command}\n```" in README


def test_names_of_code_in_the_recipe_exist():
    """The worked example follows the code it is about."""
    recipe = (ROOT / "docs" / "adding-an-operator.md").read_text(encoding="utf-8")
    for name in re.findall(r"`((?:hpcjit|tests)/[\w./]+)`", recipe):
        assert (ROOT / name).exists(), name
    code = (ROOT / "hpcjit" / "ops" / "activation" / "_gated.py").read_text(encoding="utf-8")
    for line in (
        "class GatedConfig(Config):",
        "class GatedOp(JitOp):",
        "class SiluAndMulOp(GatedOp):",
        "GATED = Template(",
    ):
        assert line in recipe
        assert line in code
    header = (ROOT / "hpcjit" / "csrc" / "activation" / "gated.cuh").read_text(encoding="utf-8")
    assert all(
        name in header for name in ("struct GatedParams", "gated_kernel", "struct Gated {", "int64_t input_stride")
    )
