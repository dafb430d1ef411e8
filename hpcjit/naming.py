"""Names as people type them on the command line."""

from __future__ import annotations

from hpcjit.errors import UnknownOpError
from hpcjit.registry import ops, registry
from hpcjit.spec import did_you_mean


def resolve_op(name: str) -> str:
    """The full name of an operator that may be given without its group.

    Raises:
        UnknownOpError: no such operator; suggests the closest name.
    """
    if "." not in name:
        matches = [op for op in ops() if op.partition(".")[2] == name]
        if len(matches) == 1:
            return matches[0]
        close = did_you_mean(name, [op.partition(".")[2] for op in ops()])
        raise UnknownOpError(f"unknown operator '{name}'{close}")
    registry.specs(name)
    return name
