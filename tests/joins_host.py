"""Who passes what on to whom in the decode kernel: `Group`, `Others`, `Slots` and `join_blocks` of `decode_join.cuh`."""

from __future__ import annotations

import re
from typing import NamedTuple

from hpcjit import build

_SOURCE = (build.PACKAGE / "csrc/attention/decode_join.cuh").read_text()
FAN, JOINERS = map(int, re.findall(r"\bk(?:Fan|Joiners) = (\d+)", _SOURCE))


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
        begin = index * FAN
        size = min(FAN, splits - begin)
        return cls(begin, size, max(1, min(JOINERS, size - (begin + size == splits))))

    def joiner_of(self, n: int) -> int:
        """The split that joins row n."""
        return self.begin + (n // 4 % 2 & (self.joiners - 1))


class Step(NamedTuple):
    """What a block does with a row of its share: "read" of slots of these splits, "pass" to its own, "write" of a result."""

    kind: str
    splits: tuple[int, ...] = ()


def steps(share: Share, n: int) -> list[Step]:
    """Row n of a share, dynamic and static schedule."""
    if share.splits == 1:
        return [Step("write")]
    group, groups = Group.of(share.splits, share.split // FAN), -(-share.splits // FAN)
    if share.split != group.joiner_of(n):
        return [Step("pass")]
    found = [Step("read", others(group.size - 1, group.begin, 1, group.joiner_of(n) - group.begin, 0))]
    if group.begin > 0:
        return [*found, Step("pass")]
    if groups > 1:
        usual, last = (Group.of(share.splits, index).joiner_of(n) - index * FAN for index in (1, groups - 1))
        found.append(Step("read", others(groups - 1, FAN + usual, FAN, groups, last - usual)))
    return [*found, Step("write")]


def invariant_steps(share: Share) -> list[Step]:
    if share.splits == 1:
        return [Step("write")]
    joined = [Step("read", others(share.splits, 0, 1, share.splits, 0)), Step("write")] if share.joins else []
    return [Step("pass"), *joined]


def others(count: int, first: int, step: int, skip: int, last: int) -> tuple[int, ...]:
    """As Others::split of 0 to count - 1."""
    return tuple(first + i * step + (i >= skip) + (last if i == count - 1 else 0) for i in range(count))
