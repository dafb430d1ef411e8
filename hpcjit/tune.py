"""Measured configuration tables: which constants of a kernel were fastest, per device and shape, kept as data.

A table is a JSON file of the package, `tuned/<name>.json`:

    {"NVIDIA H200": {"sm_count": 132,
                     "shapes": {"N=192 K=4096 fast": [[1, {"kernel": "stream", "splits": 8}], [17, {...}]]}}}

Each shape has measured sizes in ascending order (numbers of tokens, as a rule) with the values found there. What was
measured at a size holds up to the next. A shape or a device without an entry gets nothing, and the operator's own rule
decides. A device counts as measured under its name, or as one with equally many multiprocessors: what is fastest depends
on little else within an architecture.

`hpcjit tune` measures on the device that is there and keeps what it finds in a table of the same form under `tuned/` in the
kernel cache. Its sizes come before those of the package.
"""

from __future__ import annotations

import json
import warnings
from bisect import bisect_right
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from hpcjit import folders
from hpcjit.errors import FormatError, HpcjitError

FOLDER = Path(__file__).parent / "tuned"
HOPPER_SMS = 132  # of a device that is not there: prewarming plans for an H100 or H200

Value = int | float | bool | str
Values = Mapping[str, Value]
Entries = list[tuple[int, dict[str, Any]]]


@cache
def table(name: str) -> dict[str, Any]:
    """The package's table with the user's own entries in it; empty if there is neither.

    Raises:
        FormatError: the package's file is not a table. A user's file that is none, or that others can write, is passed over
            with a warning.
    """
    found = read(FOLDER / f"{name}.json")
    own = own_path(name)
    try:
        if own is None or not own.exists():
            return found
        folders.check_trust(own)
        return merged(found, read(own))
    except (OSError, HpcjitError) as error:
        warnings.warn(f"measured configurations are not used: {error}", folders.CacheWarning, stacklevel=2)
        return found


def own_path(name: str) -> Path | None:
    """Where the user's own entries are kept; None without a cache folder that can be trusted."""
    root = folders.usable_root()
    return root / "tuned" / f"{name}.json" if root else None


def read(path: Path) -> dict[str, Any]:
    """The table in a file; empty if there is none.

    Raises:
        FormatError: the file is not a table.
    """
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is not a table of measured configurations: {error}") from None
    check(found, str(path))
    return found  # type: ignore[no-any-return]


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Both tables in one; where both have a size of a shape, the values of `new`."""
    devices = dict(old)
    for device, found in new.items():
        shapes = dict(devices.get(device, found)["shapes"])
        for shape, entries in found["shapes"].items():
            both = dict(shapes.get(shape, [])) | dict(entries)
            shapes[shape] = [[size, both[size]] for size in sorted(both)]
        devices[device] = {"sm_count": found["sm_count"], "shapes": shapes}
    return devices


def check(found: Any, source: str) -> None:
    """Raise FormatError unless `found` has the form of a table. What values mean only their operator knows."""
    try:
        for device in found.values():
            if not _is_count(device["sm_count"]):
                raise TypeError("sm_count is no number of multiprocessors")
            for shape, entries in device["shapes"].items():
                sizes = [size for size, values in entries if _is_count(size) and isinstance(values, dict)]
                if len(sizes) != len(entries) or not sizes or sizes != sorted(set(sizes)):
                    raise TypeError(f"{shape}: sizes must ascend, each with its values")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{source} is not a table of measured configurations: {error!r}") from None


def _is_count(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= 0


def sm_count(device: torch.device) -> int:
    """Multiprocessors of a device; those of an H200 where there is no device, as for meta tensors."""
    if device.type != "cuda":
        return HOPPER_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def lookup(name: str, device: torch.device, shape: str, size: int) -> Values | None:
    """What was measured for `shape` at the largest size up to `size`, or None."""
    entries = _entries(name, *_identity(device)).get(shape)
    if not entries:
        return None
    place = bisect_right([measured for measured, _ in entries], size)
    return entries[place - 1][1] if place else None


def _identity(device: torch.device) -> tuple[str, int]:
    if device.type != "cuda":
        return "", HOPPER_SMS
    return torch.cuda.get_device_properties(device).name, sm_count(device)


@cache
def _entries(name: str, device_name: str, sms: int) -> Mapping[str, Entries]:
    """The shapes of a device: its own sizes before those of others with as many multiprocessors."""
    devices = table(name)
    alike = [found["shapes"] for found in devices.values() if found["sm_count"] == sms]
    shapes: dict[str, Entries] = {}
    for found in [*alike, devices.get(device_name, {"shapes": {}})["shapes"]]:
        for shape, entries in found.items():
            shapes[shape] = sorted((dict(shapes.get(shape, [])) | dict(entries)).items())
    return shapes


def forget() -> None:
    """Read the files again at the next look-up."""
    table.cache_clear()
    _entries.cache_clear()
