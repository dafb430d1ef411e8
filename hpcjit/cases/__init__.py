"""Named cases of every operator: inputs, outputs and least traffic. Tests, benchmarks, prewarming and the demo share them.

A case makes the arguments of the operator itself (those of its schema, outputs included and poisoned), so one rule serves
every operator: run a backend on them, run the reference in float64 on the same values, compare what the schema mutates.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from hpcjit.spec import GROUPS

Args = tuple[Any, ...]


class Maker:
    """Makes the tensors of a case on a device, from a seed. Values are drawn, never zeros; outputs are poisoned."""

    def __init__(self, device: torch.device | str, seed: int = 0) -> None:
        self.device = torch.device(device)
        self._generator = None if self.device.type == "meta" else torch.Generator(self.device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16, std: float = 1.0) -> torch.Tensor:
        """Normal values, drawn in float32 and rounded."""
        x = torch.randn(shape, device=self.device, dtype=torch.float32, generator=self._generator)
        return (x * std).to(dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Integers in [low, high)."""
        return torch.randint(low, high, shape, device=self.device, dtype=dtype, generator=self._generator)

    def permutation(self, n: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """The integers below n in random order."""
        if self.device.type == "meta":
            return torch.empty(n, dtype=dtype, device="meta")
        return torch.randperm(n, device=self.device, generator=self._generator).to(dtype)

    def poison(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """An output that no result could be mistaken for: NaN, or a large negative integer."""
        x = torch.empty(shape, device=self.device, dtype=dtype)
        if dtype == torch.float8_e4m3fn:
            return x.view(torch.uint8).fill_(0x7F).view(dtype) if self.device.type != "meta" else x
        return x.fill_(float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min)


Make = Callable[[Maker], Args]
Turns = Callable[[Args, Maker], Iterator[Args]]


@dataclass(frozen=True)
class Case:
    """One shape of one operator.

    `bytes` is the least that must move through memory (each input read once, each output written once), `flops` the least
    arithmetic if that can be the limit. Tags: `demo` marks one small case per operator, `bench` those timed by default.
    `turns`, where a call touches part of a large argument only, makes endless further calls from the arguments of one: they
    share what is large, and each touches `bytes` of it, those that no turn before has touched for longest.
    """

    op: str
    name: str
    make: Make
    bytes: int
    flops: int = 0
    tags: frozenset[str] = frozenset({"bench"})
    turns: Turns | None = None

    def args(self, device: torch.device | str, seed: int = 0) -> Args:
        """Fresh arguments."""
        return self.make(Maker(device, seed))


@cache
def _of_group(group: str) -> tuple[Case, ...]:
    try:
        module = importlib.import_module(f"hpcjit.cases.{group}")
    except ModuleNotFoundError as error:
        if error.name != f"hpcjit.cases.{group}":
            raise
        return ()
    return tuple(module.CASES)


def all_cases(tag: str | None = None) -> Iterator[Case]:
    """Every case, or those with a tag, by group."""
    for group in GROUPS:
        yield from (case for case in _of_group(group) if tag is None or tag in case.tags)


def cases_of(op: str, tag: str | None = None) -> list[Case]:
    """The cases of one operator."""
    return [case for case in _of_group(op.partition(".")[0]) if case.op == op and (tag is None or tag in case.tags)]
