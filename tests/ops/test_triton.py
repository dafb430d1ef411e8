"""Triton baselines: right by the numerics rule on the grid, compiled for Hopper, refused where they cover less."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from op_grid import FP8, Entry
from op_tools import operator, same_bits, tensors
from triton_interpreted import CALLS, REFUSED, SMALL, covered, wrong

from hpcjit import numerics
from hpcjit.cases import Maker, cases_of
from hpcjit.errors import ArgumentError, BackendError
from hpcjit.fused_op import use_backend
from hpcjit.ops.moe import topk_softmax
from hpcjit.registry import all_specs
from hpcjit.spec import DeviceType, KernelBackend, PlatformInfo

pytest.importorskip("triton")

OPS = [spec.op for spec in all_specs() if spec.backend is KernelBackend.TRITON]
HOPPER = PlatformInfo(DeviceType.CUDA, 9, 0)

calls = pytest.mark.parametrize("entry", CALLS, ids=lambda entry: entry.id)
every_op = pytest.mark.parametrize("op", OPS)


@pytest.fixture(scope="session", autouse=True)
def built() -> None:
    """None of our own kernels runs here, so none is built."""


@pytest.mark.gpu
@calls
class TestOnGpu:
    def test_rule(self, entry: Entry):
        assert not wrong(operator(entry.op), entry.make(Maker("cuda")))

    def test_bits_repeat(self, entry: Entry):
        op, args = operator(entry.op), entry.make(Maker("cuda"))
        first, second = numerics.copy_args(args), numerics.copy_args(args)
        op.forward_triton(*first)
        op.forward_triton(*second)
        for a, b in zip(tensors(first), tensors(second), strict=True):
            assert same_bits(a, b)


@pytest.mark.gpu
@every_op
def test_replays(op):
    """A captured call reads what its inputs hold at replay."""
    owner, case = operator(op), cases_of(op, "demo")[0]
    args, fresh = case.args("cuda"), case.args("cuda", 1)
    owner.forward_triton(*numerics.copy_args(args))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        owner.forward_triton(*args)
    for t, new in zip(tensors(args), tensors(fresh), strict=True):
        t.copy_(new)
    owner.forward_triton(*fresh)
    graph.replay()
    for t, new in zip(tensors(args), tensors(fresh), strict=True):
        assert same_bits(t, new)


@pytest.fixture(scope="module")
def interpreted() -> dict[str, list[str]]:
    program = Path(__file__).with_name("triton_interpreted.py")
    path = os.pathsep.join([str(program.parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
class TestInterpreted:
    @pytest.mark.parametrize("entry", SMALL, ids=lambda entry: entry.id)
    def test_rule(self, entry: Entry, interpreted):
        assert interpreted[entry.id] == []

    @pytest.mark.parametrize("entry", REFUSED, ids=lambda entry: entry.id)
    def test_refused(self, entry: Entry, interpreted):
        (reason,) = interpreted[entry.id]
        assert reason.startswith(f"refused: {entry.op}: backend triton cannot run this call: it ")


@pytest.mark.slow
@every_op
def test_compiles_for_hopper(op, monkeypatch, tmp_path):
    """What the benchmark cases would launch, compiled; needs no GPU."""
    from triton.runtime.jit import JITFunction

    launched = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, **options: launched.append((kernel, args, options)))
    for case in cases_of(op):
        args = case.args("meta")
        if covered(operator(op), args):
            operator(op).forward_triton(*args)
    binaries = {}
    for kernel, args, options in launched:
        signature, constants = compile_time(kernel, args, options)
        key = (kernel, *signature.items(), *constants.items())
        binaries[key] = binaries.get(key) or compile_for_hopper(kernel, signature, constants, options["num_warps"])
    assert binaries
    assert all(".target sm_90" in binary.asm["ptx"] and binary.asm["cubin"] for binary in binaries.values())


def compile_time(kernel, args, options):
    """The types of a launch's arguments, and the values that are compiled in."""
    from triton.runtime.jit import mangle_type

    values = dict(zip(kernel.arg_names, args, strict=False))
    values |= {name: options[name] for name in kernel.arg_names if name in options}
    constants = {p.name: values[p.name] for p in kernel.params if p.is_constexpr or values[p.name] is None}
    signature = {name: "constexpr" if name in constants else mangle_type(values[name]) for name in kernel.arg_names}
    return signature, constants


def compile_for_hopper(kernel, signature, constants, num_warps):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(kernel, signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})


class TestSelection:
    def test_never_before_ours(self):
        for op in OPS:
            assert operator(op).auto_selected_backend(HOPPER) is KernelBackend.JIT

    @every_op
    def test_needs_its_package(self, op, monkeypatch):
        monkeypatch.setitem(sys.modules, "triton", None)
        (spec,) = [spec for spec in all_specs() if (spec.op, spec.backend) == (op, KernelBackend.TRITON)]
        assert spec.why_not(HOPPER) == "needs the package 'triton', which is not installed"

    @every_op
    def test_float8_needs_ada(self, op):
        float8 = any(t.dtype == FP8 for case in cases_of(op) for t in tensors(case.args("meta")))
        ampere = PlatformInfo(DeviceType.CUDA, 8, 0)
        assert (KernelBackend.TRITON in operator(op).available_backends(ampere)) is not float8

    @every_op
    def test_checks_its_arguments_first(self, op):
        args = [x.to(torch.int8) if isinstance(x, torch.Tensor) else x for x in cases_of(op, "demo")[0].args("cpu")]
        with pytest.raises(ArgumentError):
            operator(op).forward_triton(*args)

    def test_rows_that_no_program_holds(self):
        m = Maker("meta")
        x, weight = m.normal(2, 2**17 + 1), m.normal(2**17 + 1)
        with pytest.raises(
            BackendError, match=r"rmsnorm: backend triton cannot run this call: it takes rows of at most"
        ):
            operator("layernorm.rmsnorm").forward_triton(x, weight, 1e-6, x)

    @pytest.mark.gpu
    def test_a_forced_backend_says_what_it_cannot_do(self):
        logits = Maker("cuda").normal(4, 16, dtype=torch.float32)
        with use_backend("triton"):
            topk_softmax(logits, 2)
            with pytest.raises(BackendError, match="no softcap"):
                topk_softmax(logits, 2, softcap=30.0)
