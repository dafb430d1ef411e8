"""Time from "I want this kernel" to "it can be launched", each in new processes: compiled, and from a warm cache.

    python -m hpcjit.bench.start_up [--compiles N] [--runs N] [--json]

Uses a template of its own (an element-wise kernel without any further header), an empty cache folder that is removed
afterwards, and needs nvcc but no GPU. Imports are not counted: a process that calls an operator has them already.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from hpcjit.bench.launch_overhead import cpu_model

HEADER = """#pragma once
#include <cstdint>
namespace start_up {
template <class Config>
__global__ void scale(const float* input, float* output, int64_t count, float factor) {
  int64_t i = int64_t(blockIdx.x) * Config::kThreads + threadIdx.x;
  if (i < count) output[i] = input[i] * factor;
}
template <class Config>
struct Scale {
  struct Params {
    const float* input;
    float* output;
    int64_t count;
    double factor;
  };
  static cudaError_t prepare() { return cudaSuccess; }
  static cudaError_t launch(const Params& p, cudaStream_t stream) {
    const unsigned blocks = unsigned((p.count + Config::kThreads - 1) / Config::kThreads);
    scale<Config><<<blocks, Config::kThreads, 0, stream>>>(p.input, p.output, p.count, float(p.factor));
    return cudaGetLastError();
  }
};
}  // namespace start_up
"""

CHILD = """
import sys, time
from dataclasses import dataclass
from pathlib import Path
from hpcjit import build, compiler
import filelock, torch.utils.cpp_extension

@dataclass(frozen=True)
class ScaleConfig(build.Config):
    threads: int = 256

template = build.Template("bench.scale", "scale.cuh", "start_up::Scale", ScaleConfig,
                          ("input", "output", "count", "factor"), include=(Path(sys.argv[1]),),
                          flags=compiler.LEAN_FLAGS)  # as for the package's own templates
started = time.perf_counter()
kernel = build.load(template, ScaleConfig(), arch="sm_90a")
print(time.perf_counter() - started)
"""
WARM_CHILD = CHILD.replace("import filelock, torch.utils.cpp_extension\n", "")


def seconds(script: str, folder: Path) -> float:
    """Run one child process against the cache in `folder`."""
    env = {**os.environ, "HPCJIT_CACHE_DIR": str(folder / "cache"), "HPCJIT_VERBOSE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)], env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return float(done.stdout)


def main(arguments: list[str] | None = None) -> int:
    """Print the two times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--compiles", type=int, default=5, help="processes with an empty cache")
    parser.add_argument("--runs", type=int, default=15, help="warm processes")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "scale.cuh").write_text(HEADER)
        compiles = []
        for _ in range(options.compiles):
            shutil.rmtree(folder / "cache", ignore_errors=True)
            compiles.append(seconds(CHILD, folder))
        warm = [seconds(WARM_CHILD, folder) * 1e3 for _ in range(options.runs)]
    facts = {
        "first_call_s": round(statistics.median(compiles), 3),
        "first_call_min_s": round(min(compiles), 3),
        "warm_open_ms": round(statistics.median(warm), 2),
        "warm_open_min_ms": round(min(warm), 2),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    if options.json:
        print(json.dumps(facts))
    else:
        print(f"{facts['cpu']}, {facts['cores']} cores, Python {facts['python']}")
        print(
            f"{facts['first_call_s']:8.2f} s   first call: compile, publish, load (min {facts['first_call_min_s']:.2f})"
        )
        print(
            f"{facts['warm_open_ms']:8.2f} ms  new process, warm cache: key, verify, open (min {facts['warm_open_min_ms']})"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
