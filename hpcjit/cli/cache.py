"""`hpcjit cache`: the compiled kernels on disk."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from hpcjit import bundle, cache, folders
from hpcjit.cache import Entry, Selection
from hpcjit.cli import _show
from hpcjit.errors import ArgumentError, CacheError

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, text, run in ACTIONS:
        action = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        action.set_defaults(run=run)
        if name in ("export", "import"):
            action.add_argument("file", type=Path, metavar="FILE", help="the bundle")
        if name == "show":
            action.add_argument("key", metavar="KEY", help="a key or the beginning of one")
        if name in ("ls", "verify", "clean", "export"):
            _add_selection(action)
        if name == "clean":
            action.add_argument("--all", action="store_true", help="everything, when nothing else is selected")
        if name != "path":
            _show.add_json(action)


def _add_selection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--op", default="*", metavar="PATTERN", help="such as 'layernorm.*'")
    parser.add_argument("--arch", default="*", metavar="PATTERN", help="such as sm_90a")
    parser.add_argument("--key", default="", metavar="PREFIX", help="beginning of the key")
    parser.add_argument("--unused-for", default="0s", metavar="TIME", help="not used for so long, such as 30d or 12h")


def _selection(options: argparse.Namespace) -> Selection:
    match = re.fullmatch(r"(\d{1,6})([smhdw])", options.unused_for)
    if match is None:
        raise ArgumentError("cache", "--unused-for", "a number with s, m, h, d or w, such as 30d", options.unused_for)
    return Selection(options.op, options.arch, options.key, int(match[1]) * _UNITS[match[2]])


def _facts(entry: Entry) -> dict[str, Any]:
    return {
        "key": entry.key,
        "op": entry.op,
        "arch": entry.arch,
        "config": entry.config,
        "bytes": entry.size,
        "last_used": int(entry.last_used),
        "path": str(entry.path),
    }


# --- actions --------------------------------------------------------------------------------------------------------


def _ls(options: argparse.Namespace) -> int:
    found = cache.entries(_selection(options))
    if options.json:
        _show.print_json([_facts(entry) for entry in found])
        return 0
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading, right in (("key", 0), ("template", 0), ("arch", 0), ("config", 0), ("size", 1), ("used", 1)):
        table.add_column(heading, justify="right" if right else "left", no_wrap=heading in ("key", "template", "used"))
    for entry in sorted(found, key=lambda entry: (entry.op, entry.arch, entry.config)):
        config = escape(entry.config)
        table.add_row(entry.key[:12], entry.op, entry.arch, config, _show.size(entry.size), _ago(entry.last_used))
    out = _show.console()
    if found:
        out.print(table)
    out.print(f"{len(found)} kernels, {_show.size(sum(entry.size for entry in found))}, in {_roots()}", soft_wrap=True)
    return 0


def _roots() -> str:
    return ", ".join(map(str, folders.search_roots())) or "no folder"


def _ago(moment: float) -> str:
    seconds = max(time.time() - moment, 0)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return "just now"


def _show_entry(options: argparse.Namespace) -> int:
    found = cache.entries(Selection(key=options.key))
    if not found:
        raise CacheError(f"no kernel has a key that begins with '{options.key}'; 'hpcjit cache ls' lists them")
    if options.json:
        _show.print_json([{**entry.manifest, "path": str(entry.path)} for entry in found])
        return 0
    out = _show.console()
    for entry in found:
        out.print(f"[bold]{entry.op}[/]  {escape(entry.config)}  {entry.arch}", soft_wrap=True)
        for name, value in entry.manifest.items():
            if name not in ("op", "config_text", "arch"):
                text = json.dumps(value) if isinstance(value, dict | list) else str(value)
                out.print(f"  {name:<16} {escape(text)}", soft_wrap=True)
        out.print(f"  {'path':<16} {escape(str(entry.path))}", soft_wrap=True)
    return 0


def _verify(options: argparse.Namespace) -> int:
    selection = _selection(options)
    checked, bad = 0, []
    for folder in cache.entry_folders():
        try:
            entry = cache.read_entry(folder)
            if not selection.matches(entry):
                continue
            checked += 1
            entry.verify()
        except CacheError as problem:
            bad.append((folder, str(problem)))
    if options.json:
        _show.print_json({"checked": checked, "bad": [{"path": str(folder), "problem": text} for folder, text in bad]})
    else:
        for _, text in bad:
            _show.say(f"hpcjit cache verify: {text}")
        print(f"{checked} kernels checked, {len(bad)} bad")
    return 1 if bad else 0


def _clean(options: argparse.Namespace) -> int:
    selection = _selection(options)
    if selection == cache.EVERYTHING and not options.all:
        raise ArgumentError("cache clean", "selection", "--all, or --op, --arch, --key or --unused-for", "none")
    return _report("removed", cache.remove(selection), options.json)


def _export(options: argparse.Namespace) -> int:
    return _report(
        f"exported to {options.file}:", bundle.export_bundle(options.file, _selection(options)), options.json
    )


def _import(options: argparse.Namespace) -> int:
    return _report("imported", bundle.import_bundle(options.file), options.json)


def _report(verb: str, done: Sequence[Entry], as_json: bool) -> int:
    if as_json:
        _show.print_json([_facts(entry) for entry in done])
    else:
        print(f"{verb} {len(done)} kernels, {_show.size(sum(entry.size for entry in done))}")
    return 0


def _path(options: argparse.Namespace) -> int:
    root = folders.configured_root()
    if root is None:
        raise CacheError(folders.root_problem())
    print(root)
    return 0


ACTIONS: tuple[tuple[str, str, Callable[[argparse.Namespace], int]], ...] = (
    ("ls", "list the compiled kernels", _ls),
    ("show", "everything known about the kernels of a key", _show_entry),
    ("verify", "check every kernel against its manifest", _verify),
    ("clean", "remove kernels from the writable folder", _clean),
    ("export", "write kernels into one file", _export),
    ("import", "add the kernels of such a file", _import),
    ("path", "print the writable cache folder", _path),
)
