"""Who passes what on to whom in the decode kernel: `sched/joins.cuh` compiled for the host, and `join_blocks` around it."""

from __future__ import annotations

import ctypes
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

from host_library import compile_library

SHIM = r"""
#include "hpcjit/sched/joins.cuh"
using namespace hpcjit::sched;

extern "C" void constants(const int*, int* out) { out[0] = kFan, out[1] = kJoiners; }
extern "C" void group(const int* a, int* out) {
  const Group x = group_of(a[0], a[1]);
  out[0] = x.begin, out[1] = x.size, out[2] = x.joiners;
}
extern "C" void joiner(const int* a, int* out) { out[0] = Group{a[0], a[1], a[2]}.joiner_of(a[3]); }
extern "C" void turn(const int* a, int* out) {
  const int split = a[0], splits = a[1], n = a[2], groups = (splits + kFan - 1) / kFan;
  const Turn x = turn_of(group_of(split / kFan, splits), groups, split, n);
  out[0] = x.levels, out[1] = x.passes;
}
extern "C" void others(const int* a, int* out) {
  const int split = a[0], splits = a[1], groups = (splits + kFan - 1) / kFan;
  const Others x = others_of(group_of(split / kFan, splits), group_of(groups - 1, splits), groups, a[2], a[3]);
  out[0] = x.count;
  for (int i = 0; i < x.count; ++i) out[1 + i] = x.split(i);
}
"""
_MOST = 4096  # splits


@cache
def library() -> ctypes.CDLL:
    """Raises ToolchainError where there is no host compiler."""
    with tempfile.TemporaryDirectory() as folder:
        return compile_library(Path(folder), "joins", SHIM)


def _call(name: str, size: int, *values: int) -> list[int]:
    out = (ctypes.c_int * _MOST)()
    getattr(library(), name)((ctypes.c_int * len(values))(*values), out)
    return out[:size]


def constants() -> tuple[int, int]:
    """kFan and kJoiners."""
    fan, joiners = _call("constants", 2)
    return fan, joiners


class Share(NamedTuple):
    """As in decode_params.cuh."""

    split: int
    splits: int
    first: int
    begin: int
    joins: bool = False

    def slot(self, split: int) -> int:
        return self.first + (split or self.begin)


class Group(NamedTuple):
    begin: int
    size: int
    joiners: int

    @classmethod
    def of(cls, splits: int, index: int) -> Group:
        return cls(*_call("group", 3, index, splits))

    def joiner_of(self, n: int) -> int:
        """The split that joins row n."""
        return self.begin + _call("joiner", 1, *self, n)[0]


class Step(NamedTuple):
    """What a block does with a row of its share: "read" of slots of these splits, "pass" to its own, "write" of a result."""

    kind: str
    splits: tuple[int, ...] = ()


@cache
def _steps(split: int, splits: int, n: int) -> list[Step]:
    levels, passes = _call("turn", 2, split, splits, n)
    found = []
    for level in range(levels):
        count, *others = _call("others", _MOST, split, splits, n, level)
        found.append(Step("read", tuple(others[:count])))
    return [*found, Step("pass" if passes else "write")]


def steps(share: Share, n: int) -> list[Step]:
    """Row n of a share, dynamic and static schedule."""
    return [Step("write")] if share.splits == 1 else _steps(share.split, share.splits, n)


def invariant_steps(share: Share) -> list[Step]:
    if share.splits == 1:
        return [Step("write")]
    joined = [Step("read", tuple(range(share.splits))), Step("write")] if share.joins else []
    return [Step("pass"), *joined]
