"""One exception family. Every error names what was wrong, what was expected and what came instead."""

from __future__ import annotations


class HpcjitError(Exception):
    """Base of every error that hpcjit raises on purpose."""


class ArgumentError(HpcjitError, ValueError):
    """A value that an operator cannot take: shape, stride, alignment, device, range."""

    def __init__(self, op: str, argument: str, expected: str, got: object) -> None:
        super().__init__(f"{op}: argument '{argument}' must be {expected}, got {got}")
        self.op = op
        self.argument = argument
        self.expected = expected
        self.got = got


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument of the wrong type or dtype."""


class UnknownOpError(HpcjitError, KeyError):
    """No operator of that name is registered."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0]) if self.args else ""


class BackendError(HpcjitError, ValueError):
    """A backend that does not exist, is not usable here, or cannot be chosen without being named."""


class RegistrationError(HpcjitError, ValueError):
    """A registration that contradicts an earlier one or is malformed."""


class ToolchainError(HpcjitError, RuntimeError):
    """nvcc, ninja, the host compiler or the headers are missing or do not fit together."""


class CompileError(HpcjitError, RuntimeError):
    """The compiler rejected a specialisation; carries the log path and the command to repeat."""


class CacheError(HpcjitError, RuntimeError):
    """A cache folder, entry or bundle that cannot be used or trusted."""


class CaptureError(HpcjitError, RuntimeError):
    """A build or module load would have been needed while a CUDA graph was being captured."""


class LaunchError(HpcjitError, RuntimeError):
    """The CUDA runtime refused a launch; names the operator, its config and the CUDA error."""


class FormatError(HpcjitError, ValueError):
    """A trace, model config or other input file that does not have the expected form."""
