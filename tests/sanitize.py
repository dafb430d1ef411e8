"""Cases of an operator under compute-sanitizer: each is run by the jit backend and checked against the reference.

    python tests/sanitize.py attention.decode "1x8 fp8 1x32K" "1x8 bf16 1x2K" --tools memcheck racecheck

Prints what each tool found; the exit status is 1 if one found anything or a result was wrong. Compile beforehand (`hpcjit
prewarm`), or the sanitizer follows nvcc too. A case under racecheck takes some seconds, large ones minutes.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys

TOOLS = ("memcheck", "racecheck", "synccheck")


def run_cases(op_name: str, wanted: list[str]) -> bool:
    """In the process that the sanitizer watches. Whether all results are right."""
    import torch

    from hpcjit import numerics
    from hpcjit.cases import cases_of
    from hpcjit.replay import operator

    op, right = operator(op_name), True
    kinds = [case for kind in ("bench", "demo") for case in cases_of(op_name, kind)]
    found = {case.name: case for case in kinds if not wanted or case.name in wanted}
    unknown = set(wanted) - set(found)
    if unknown:
        raise SystemExit(f"no case of {op_name} is called {', '.join(sorted(unknown))}")
    with torch.no_grad():
        for name, case in found.items():
            args = case.args(torch.device("cuda"))
            deviation = numerics.worst(numerics.check(op, args, lambda *a: op(*a, backend="jit")))
            right &= deviation.ok
            print(f"{name}: {'right' if deviation.ok else deviation}", flush=True)
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op")
    parser.add_argument("cases", nargs="*", help="names of bench or demo cases; all of them if none is given")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        return 0 if run_cases(options.op, options.cases) else 1
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        parser.error("compute-sanitizer is not on PATH; it comes with the CUDA toolkit")
    failed = False
    for tool in options.tools:
        print(f"== {tool}", flush=True)
        child = [sys.executable, __file__, "--inside", options.op, *options.cases]
        failed |= subprocess.run([sanitizer, "--tool", tool, "--error-exitcode", "1", *child]).returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
