"""What the tests of build, cache and launch share: a tiny template, a toolkit that counts, other processes."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpcjit import build, cache, launch, toolchain
from hpcjit.build import Config, Template
from hpcjit.errors import ToolchainError

DATA = Path(__file__).parent / "data"
REPOSITORY = Path(__file__).parent.parent
ARCH = "sm_90a"


@dataclass(frozen=True)
class ScaleConfig(Config):
    threads: int = 256
    offset: int = 0


def scale_template(include: Path = DATA, flags: tuple[str, ...] = (), header: str = "scale.cuh") -> Template:
    return Template(
        op="test.scale",
        header=header,
        entry="scale_test::Scale",
        config=ScaleConfig,
        params=("input", "output", "count", "scale"),
        include=(include,),
        flags=flags,
    )


SCALE = scale_template()
LOAD = "k = build.load(SCALE, ScaleConfig(), arch=ARCH)\nprint(k.error_text(2))\n"  # for a process of its own


@functools.cache
def real_nvcc() -> toolchain.Nvcc | None:
    """The nvcc of this machine; first called before any test hides it."""
    try:
        return toolchain.find_nvcc()
    except ToolchainError:
        return None


class Toolkit:
    """A CUDA_HOME made of links to the real one, with a script in place of nvcc."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.log = home / "compiles.log"
        real = real_nvcc()
        if real is None:
            pytest.skip("no nvcc on this machine")
        self.cudart = Path(real.cudart)
        self.real = Path(real.path)
        (home / "bin").mkdir(parents=True)
        for name in ("include", "lib64", "lib", "nvvm", "targets"):
            if (Path(real.home) / name).exists():
                (home / name).symlink_to(Path(real.home) / name)
        if not (home / "lib64").exists() and not (home / "lib").exists():
            (home / "lib64").symlink_to(Path(real.cudart).parent)
        self.behave("")

    def behave(self, script: str) -> None:
        """Replace nvcc by one that logs a compile, runs `script`, and then the real compiler."""
        nvcc = self.home / "bin" / "nvcc"
        nvcc.write_text(
            f'#!/bin/sh\ncase "$*" in *" -c "*) echo compile >>"{self.log}"\n{script}\n;; esac\nexec "{self.real}" "$@"\n'
        )
        nvcc.chmod(0o755)

    @property
    def compiles(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


def pip_layout(site: Path) -> Toolkit:
    """nvidia/cu13 as pip installs it: lib/, and in it only the versioned runtime library."""
    toolkit = Toolkit(site / "nvidia" / "cu13")
    for name in ("lib64", "lib", "targets"):
        (toolkit.home / name).unlink(missing_ok=True)
    (toolkit.home / "lib").mkdir()
    (toolkit.home / "lib" / toolkit.cudart.name).symlink_to(toolkit.cudart)
    return toolkit


def python(
    code: str, package: Path = REPOSITORY, stderr: int = subprocess.PIPE, stdin: int | None = None, **env: str | None
) -> subprocess.Popen:
    """Start `code` in a new Python with the template at hand; a variable of value None is removed."""
    prelude = "from hpcjit import build, cache\nfrom scale_template import *\nimport sys, os, time\n"
    path = os.pathsep.join([str(package), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    merged = {**os.environ, "PYTHONPATH": path, **env}
    return subprocess.Popen(
        [sys.executable, "-c", prelude + code],
        env={name: value for name, value in merged.items() if value is not None},
        cwd=package,
        stdout=subprocess.PIPE,
        stdin=stdin,
        stderr=stderr,
        text=True,
    )


def output(process: subprocess.Popen, timeout: float = 120) -> str:
    """What a process printed; fails with its stderr when it did not end well."""
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == 0, err
    return out.strip()


def load(**config) -> launch.Kernel:
    """The scale kernel for sm_90a."""
    return build.load(SCALE, ScaleConfig(**config), arch=ARCH)


def entry_of(root: Path, offset: int = 0) -> cache.Entry:
    """The entry of one of the kernels in the stock."""
    return next(e for e in cache.entries(root=root) if e.manifest["config"]["offset"] == offset)
