"""Module attributes that are imported when they are first used (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of `package`, whose attribute `name` lives in submodule `names[name]`.

    Used as `__getattr__, __dir__, __all__ = lazy(__name__, {"rmsnorm": "_rmsnorm"})`. A submodule may not carry the
    name of an attribute: importing it would put the module where the attribute belongs.
    """
    if clash := sorted(set(names) & set(names.values())):
        raise ValueError(f"{package}: {clash} name both an attribute and a submodule")

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        value = getattr(importlib.import_module(f"{package}.{names[name]}"), name)
        setattr(sys.modules[package], name, value)  # the next access finds it without coming here
        return value

    def listing() -> list[str]:
        return sorted({*vars(sys.modules[package]), *names})

    return get, listing, sorted(names)
