"""The command line: `hpcjit COMMAND`, also `python -m hpcjit`. One module per command, imported when it runs."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

import hpcjit
from hpcjit.errors import HpcjitError

# Exit codes: 0 fine, 1 the command found something wrong, 2 the command could not do what was asked.
OK, CANNOT, INTERRUPTED = 0, 2, 130  # 1 is for what a command found wrong

COMMANDS = {
    "demo": "build and run every operator once, and check the results",
    "doctor": "check GPU, compilers, cache and variables; say what to do",
    "ops": "list operators; show one in detail",
    "prewarm": "compile kernels ahead of time, with or without a GPU",
    "cache": "list, check, clean, export and import compiled kernels",
    "bench": "time operators against other backends and the hardware's ceiling",
    "trace": "show and summarise recorded calls",
    "tune": "measure the configurations of an operator on this device and keep the fastest",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        parser = _parser(arguments)  # imports the command, and with most of them torch
    except KeyboardInterrupt:
        print("hpcjit: interrupted", file=sys.stderr)
        return INTERRUPTED
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return OK
    try:
        code = options.run(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of our output is gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (HpcjitError, OSError) as error:
        print(f"hpcjit {options.command}: {_text(error)}", file=sys.stderr)
        return CANNOT
    except KeyboardInterrupt:
        print(f"hpcjit {options.command}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _text(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hpcjit",
        description="CUDA kernels for LLM inference, compiled at first call and cached.",
        epilog="hpcjit COMMAND --help explains a command.",
    )
    parser.add_argument("--version", action="version", version=f"hpcjit {hpcjit.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    asked = next((word for word in arguments if not word.startswith("-")), None)
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == asked:  # the others are not imported
            importlib.import_module(f"hpcjit.cli.{name}").configure(command)
    return parser
