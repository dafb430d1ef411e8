"""Host cost of one launch through each binding, on a launch function that does nothing.

    python -m hpcjit.bench.launch_overhead [--json]

No GPU is needed: the function is compiled from three lines of C, takes the launch ABI's arguments and returns 0. What is
left is the binding itself: argument conversion, packing and the call.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable
from pathlib import Path

from hpcjit import binder, launch

STUB = (
    "int stub(const void* params, int device, void* stream) { (void)params; (void)device; (void)stream; return 0; }\n"
)
# What fused_add_rmsnorm passes: four pointers, five integers, one double.
KINDS = "ppppiiiiid"
SLOTS = (0x7F0000000000, 0x7F0000100000, 0x7F0000200000, 0x7F0000300000, 2048, 4096, 4096, 4096, 4096, 1e-6)


def stub_address(folder: Path) -> tuple[int, object]:
    """Compile the stub; returns its address and what keeps it loaded."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise SystemExit("launch_overhead needs a C compiler for its stub")
    (folder / "stub.c").write_text(STUB)
    subprocess.run([compiler, "-O2", "-fPIC", "-shared", "stub.c", "-o", "stub.so"], cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "stub.so"))
    return ctypes.cast(library.stub, ctypes.c_void_p).value or 0, library


def refuse(code: int, arguments: tuple[object, ...]) -> None:
    """The error handler; a stub never calls it."""
    raise RuntimeError(f"{code}: {arguments}")


def bindings(address: int) -> dict[str, Callable[[], object]]:
    """One call per way to reach the launch function, each from Python values to the function and back."""
    calls: dict[str, Callable[[], object]] = {}
    fast = binder.module()
    if fast:
        launcher = fast.make(address, KINDS, refuse)
        calls["binder (Python.h, vectorcall)"] = lambda: launcher(0, 0, *SLOTS)
    packed = launch.ctypes_launcher(address, KINDS, refuse)
    calls["ctypes, slots packed by struct (the fallback)"] = lambda: packed(0, 0, *SLOTS)
    calls["ctypes, one argument per slot"] = _ctypes_per_slot(address)
    calls["ctypes, structure filled field by field"] = _ctypes_structure(address)
    calls |= _cffi(address)
    return calls


def _ctypes_per_slot(address: int) -> Callable[[], object]:
    kinds = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "d": ctypes.c_double}
    # The stub ignores what it gets, so a signature with more arguments measures their conversion.
    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, *(kinds[kind] for kind in KINDS))(address)
    return lambda: function(0, 0, *SLOTS)


def _ctypes_structure(address: int) -> Callable[[], object]:
    kinds = {"p": ctypes.c_uint64, "i": ctypes.c_int64, "d": ctypes.c_double}
    fields = [(f"f{i}", kinds[kind]) for i, kind in enumerate(KINDS)]
    params = type("Params", (ctypes.Structure,), {"_fields_": fields})
    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(params), ctypes.c_int, ctypes.c_void_p)(address)
    return lambda: function(params(*SLOTS), 0, 0)


def _cffi(address: int) -> dict[str, Callable[[], object]]:
    try:
        import cffi
    except ImportError:
        return {}
    ffi = cffi.FFI()
    function = ffi.cast("int(*)(char*, int, void*)", address)
    pack, null = struct.Struct("=" + KINDS.translate(str.maketrans("pid", "Qqd"))).pack, ffi.NULL
    return {"cffi (ABI mode), slots packed by struct": lambda: function(pack(*SLOTS), 0, null)}


def measure(call: Callable[[], object], repeats: int = 15, seconds: float = 0.05) -> tuple[float, float]:
    """Median and fastest time of one call in microseconds."""
    timer = timeit.Timer(call)
    loops = max(1, int(seconds / max(timer.timeit(200) / 200, 1e-9)))
    times = [timer.timeit(loops) / loops * 1e6 for _ in range(repeats)]
    return statistics.median(times), min(times)


def cpu_model() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def main(arguments: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        address, _library = stub_address(Path(folder))
        empty, _ = measure(lambda: None)
        rows = {name: measure(call) for name, call in bindings(address).items()}
    facts = {"cpu": cpu_model(), "python": platform.python_version(), "slots": KINDS, "empty_call_us": round(empty, 3)}
    if not options.json:
        print(f"{facts['cpu']}, Python {facts['python']}; slots {KINDS}; an empty Python call takes {empty:.3f} us")
    for name, (median, fastest) in rows.items():
        if options.json:
            print(json.dumps({"binding": name, "median_us": round(median, 3), "min_us": round(fastest, 3), **facts}))
        else:
            print(f"{median:8.3f} us  (min {fastest:.3f})  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
