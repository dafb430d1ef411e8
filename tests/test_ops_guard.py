"""Every registered operator is whole: table and class agree, and it has a reference, a docstring, a case and a test."""

from __future__ import annotations

import importlib
import inspect
import re
from functools import cache
from pathlib import Path

import pytest
import torch

from hpcjit import registry
from hpcjit.cases import all_cases, cases_of
from hpcjit.fused_op import BaseFusedOp
from hpcjit.spec import GROUPS, KernelBackend, KernelSpec

OPS = registry.ops()
ALWAYS = {KernelBackend.TORCH, KernelBackend.TORCH_COMPILE}


def specs_of(op: str) -> list[KernelSpec]:
    return registry.registry.specs(op)


def fused(op: str) -> BaseFusedOp:
    """The operator object behind `op`; skips the test when the operator has one fixed implementation."""
    owner = specs_of(op)[0].load_owner()
    if not isinstance(owner, BaseFusedOp):
        pytest.skip("a fixed implementation")
    return owner


def public(op: str):
    group, _, name = op.partition(".")
    return getattr(importlib.import_module(f"hpcjit.ops.{group}"), name)


@cache
def sources_of_tests() -> str:
    folder = Path(__file__).parent
    return "\n".join(path.read_text() for path in sorted(folder.rglob("*.py")) if path != Path(__file__))


@pytest.mark.parametrize("op", OPS)
class TestEveryOperator:
    def test_every_target_loads(self, op):
        for spec in specs_of(op):
            assert callable(spec.load()), spec.target

    def test_targets_belong_to_the_operator(self, op):
        for spec in specs_of(op):
            assert spec.target.startswith(f"hpcjit.ops.{spec.group}._"), spec.target
            owner = spec.load_owner()
            if isinstance(owner, BaseFusedOp):
                assert owner.op == op
                assert spec.target.endswith(f".{spec.backend.method}")

    def test_the_table_equals_the_class(self, op):
        found = fused(op)
        table = {spec.backend: spec.capabilities for spec in specs_of(op) if spec.backend not in ALWAYS}
        declared = {backend: caps for backend, caps in found.capabilities.items() if backend not in ALWAYS}
        assert table == declared

    def test_every_declared_backend_is_implemented(self, op):
        found = fused(op)
        for backend in found.capabilities:
            if backend is not KernelBackend.TORCH_COMPILE:
                assert getattr(type(found), backend.method) is not getattr(BaseFusedOp, backend.method), backend

    def test_priority(self, op):
        priority = fused(op).priority
        assert len(set(priority)) == len(priority)
        assert all(isinstance(backend, KernelBackend) for backend in priority)
        assert KernelBackend.TORCH in priority

    def test_backends_share_one_signature(self, op):
        expected = list(fused(op).arguments)
        for spec in specs_of(op):
            parameters = inspect.signature(spec.load()).parameters.values()
            if not any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
                assert [p.name for p in parameters] == expected, spec.backend

    def test_the_torch_operator_takes_the_same_arguments(self, op):
        names = fused(op).arguments  # importing the operator defines it in the torch library
        overload = getattr(torch.ops.hpcjit, op.replace(".", "_")).default
        assert tuple(a.name for a in overload._schema.arguments) == names
        assert any(a.alias_info is not None and a.alias_info.is_write for a in overload._schema.arguments)

    def test_the_public_function_is_documented(self, op):
        function = public(op)
        assert op.partition(".")[2] in importlib.import_module(f"hpcjit.ops.{op.partition('.')[0]}").__all__
        assert function.__name__ == op.partition(".")[2]
        assert len(inspect.getdoc(function) or "") > 80, "say formula, arguments, errors and source"

    def test_it_has_a_case_that_makes_its_arguments(self, op):
        cases = cases_of(op)
        assert cases
        assert len({case.name for case in cases}) == len(cases)
        assert any("demo" in case.tags for case in cases), "the demo needs one small case"
        assert len(cases[0].args("meta")) == len(fused(op).arguments)

    def test_a_test_mentions_it(self, op):
        mentioned = re.search(rf"\b{op.partition('.')[2]}\b", sources_of_tests()) is not None
        assert mentioned, f"no file of tests/ mentions {op}"


def test_every_public_function_is_registered():
    for group in GROUPS:
        names = getattr(importlib.import_module(f"hpcjit.ops.{group}"), "__all__", ())
        functions = [name for name in names if inspect.isfunction(public(f"{group}.{name}"))]
        assert {f"{group}.{name}" for name in functions} <= set(OPS)


def test_every_case_belongs_to_an_operator():
    assert {case.op for case in all_cases()} <= set(OPS)
