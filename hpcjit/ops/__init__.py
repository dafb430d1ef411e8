"""Every operator, as `hpcjit.ops.<group>.<op>`. Importing this imports no group, no torch and no kernel."""

from __future__ import annotations

import importlib
from typing import Any

from hpcjit.spec import GROUPS

__all__ = list(GROUPS)


def __getattr__(name: str) -> Any:
    if name in GROUPS:
        return importlib.import_module(f"hpcjit.ops.{name}")
    raise AttributeError(f"module 'hpcjit.ops' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *GROUPS})
