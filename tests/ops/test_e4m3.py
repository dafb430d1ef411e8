"""Rounding to e4m3 in device code: the fallback of old GPUs on the host, the hardware's through an operator."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from hpcjit import build
from hpcjit.ops.quantization import per_tensor_quant_fp8

SHIM = """
#include <cstdint>
#include <cstring>
#define __device__
#define __forceinline__ inline
static uint32_t __float_as_uint(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
static float __uint_as_float(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }
%s
extern "C" void round_all(const float* x, uint8_t* y, long n) { for (long i = 0; i < n; ++i) y[i] = round_e4m3(x[i]); }
"""


def floats() -> torch.Tensor:
    """Every sign, exponent and upper 7 bits of significand, with lower bits around each tie."""
    upper = torch.arange(2**16, dtype=torch.int64) << 16
    lower = torch.tensor([0, 1, 2, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])
    patterns = (upper[:, None] | lower).flatten()
    return torch.where(patterns >= 2**31, patterns - 2**32, patterns).to(torch.int32).view(torch.float32)


def expected(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn)


def test_without_hardware(tmp_path: Path):
    """`round_e4m3` as the host compiles it agrees with torch for a value next to every tie and boundary."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no host compiler")
    text = (build.PACKAGE / "include/hpcjit/types.cuh").read_text()
    function = re.search(r"__device__ __forceinline__ uint8_t round_e4m3.*?\n}\n", text, re.DOTALL)
    assert function
    source, library = tmp_path / "round.cpp", tmp_path / "round.so"
    source.write_text(SHIM % function.group(0))
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", source, "-o", library], check=True)
    x = floats()
    codes = torch.empty(x.numel(), dtype=torch.uint8)
    ctypes.CDLL(str(library)).round_all(
        ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(codes.data_ptr()), ctypes.c_long(x.numel())
    )
    nan = x.isnan()
    assert torch.equal(codes[~nan], expected(x).view(torch.uint8)[~nan])
    assert (codes[nan] == 0x7F).all()


@pytest.mark.gpu
def test_with_hardware():
    """A scale of 1 makes quantisation the conversion alone."""
    x = floats().cuda().view(1, -1)
    out, _ = per_tensor_quant_fp8(x, torch.ones(1, device="cuda"))
    nan = x.isnan()
    assert torch.equal(out.view(torch.uint8)[~nan], expected(x).view(torch.uint8)[~nan])
    assert out.float()[nan].isnan().all()
