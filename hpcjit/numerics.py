"""The one rule by which a result counts as right; tests, benchmarks and the demo share it.

    err(result, exact) <= 2 * err(native, exact) + rounding

`exact` is the reference in float64 on the same values, `native` the reference in the operator's own dtypes, `rounding` what
rounding `exact` to the output's dtype alone costs. `err` is the largest `|x - exact| / max(|exact|, rms(exact))`: relative
for large elements, against the tensor's scale for small ones, and infinite where NaN or infinity do not coincide.

For integers `err` is the share of elements that differ, and nothing is lost to rounding. A float8 output is compared after
its scale is applied, if the operator has one; there `exact` has been rounded too, so `rounding` is a whole step, and no
code may be more than one step from that of `exact`.

A float32 output that shows sums of the tensor cores unrounded (`JitOp.tensor_core_sums`) may be off by 2^-22 more: they cut
off what falls below the last bit of the largest product, which a float32 reference does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_CUT_OFF = 2.0**-22

Outputs = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Deviation:
    """How far one output is from the exact result, and how far it may be."""

    output: str
    err: float
    bound: float
    code_steps: int = 0  # float8 only: the largest distance in codes

    @property
    def ok(self) -> bool:
        return self.err <= self.bound and self.code_steps <= 1

    @property
    def load(self) -> float:
        """Share of the bound that is used; above 1 is wrong."""
        if self.code_steps > 1:
            return math.inf
        return self.err / self.bound if self.bound else (math.inf if self.err else 0.0)

    def __str__(self) -> str:
        text = f"{self.output}: err {self.err:.2e}, bound {self.bound:.2e}"
        return f"{text}, {self.code_steps} codes off" if self.code_steps > 1 else text


def worst(deviations: list[Deviation]) -> Deviation:
    """The deviation that uses most of its bound."""
    return max(deviations, key=lambda deviation: deviation.load)


# --- copies of arguments --------------------------------------------------------------------------------------------


def copy_args(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A deep copy of a call's arguments: same strides, same gaps, same 16-byte alignment, same sharing."""
    done: dict[int, torch.Tensor] = {}
    return tuple(_copy(value, done) if isinstance(value, torch.Tensor) else value for value in args)


def _copy(tensor: torch.Tensor, done: dict[int, torch.Tensor]) -> torch.Tensor:
    if id(tensor) in done:
        return done[id(tensor)]
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    span = span if tensor.numel() else 0
    shift = tensor.data_ptr() % 16 // tensor.element_size()
    flat = torch.empty(span + shift, dtype=tensor.dtype, device=tensor.device)[shift:]
    flat.copy_(tensor.as_strided((span,), (1,)))
    done[id(tensor)] = flat.as_strided(tensor.shape, tensor.stride())
    return done[id(tensor)]


def upcast(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies of the arguments in float64; float8 stays as it is, because its values are what they are."""
    return tuple(_double(value) if isinstance(value, torch.Tensor) else value for value in args)


def _double(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point() and tensor.dtype not in FP8:
        return tensor.to(torch.float64, copy=True)
    return tensor.clone()


# --- the rule -------------------------------------------------------------------------------------------------------


def check(op: Any, args: tuple[Any, ...], run: Callable[..., Any]) -> list[Deviation]:
    """Call `run` and the references on copies of `args`, and compare every output of the operator `op` (a JitOp)."""
    actual, native, exact = copy_args(args), copy_args(args), upcast(args)
    run(*actual)
    op.reference(*native)
    op.reference(*exact)
    named = [dict(zip(op.arguments, values, strict=True)) for values in (actual, native, exact)]
    return compare(named[0], named[1], named[2], op.mutated, op.tensor_core_sums)


def compare(
    actual: Mapping[str, Any],
    native: Mapping[str, Any],
    exact: Mapping[str, Any],
    outputs: tuple[str, ...],
    tensor_core_sums: tuple[str, ...] = (),
) -> list[Deviation]:
    """Compare the named outputs among the arguments after a call, by the rule of this module."""
    found = []
    for name in outputs:
        if actual[name] is None or not actual[name].numel():
            continue
        if actual[name].dtype in FP8:
            found.append(_compare_float8(name, actual, native, exact))
        elif actual[name].is_floating_point():
            rounding = error(exact[name].to(actual[name].dtype), exact[name])
            rounding += _CUT_OFF if name in tensor_core_sums else 0
            found.append(
                Deviation(name, error(actual[name], exact[name]), 2 * error(native[name], exact[name]) + rounding)
            )
        else:
            found.append(
                Deviation(name, _differing(actual[name], exact[name]), 2 * _differing(native[name], exact[name]))
            )
    return found


def error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest `|actual - exact| / max(|exact|, rms(exact))`; infinite if NaN or infinity do not coincide."""
    x, y = actual.double(), exact.double()
    finite = y.isfinite()
    if not torch.equal(x.isfinite(), finite) or not _same_specials(x, y, finite):
        return math.inf
    zero = torch.zeros((), dtype=y.dtype, device=y.device)
    y = torch.where(finite, y, zero)
    x = torch.where(finite, x, zero)
    rms = (y.square().sum() / finite.sum().clamp_min(1)).sqrt()
    floor = rms.clamp_min(torch.finfo(torch.float64).tiny)
    return float(((x - y).abs() / torch.maximum(y.abs(), floor)).max())


def _same_specials(x: torch.Tensor, y: torch.Tensor, finite: torch.Tensor) -> bool:
    return bool(finite.all()) or (
        torch.equal(torch.nan_to_num(x[~finite]), torch.nan_to_num(y[~finite])) and torch.equal(x.isnan(), y.isnan())
    )


def _differing(actual: torch.Tensor, exact: torch.Tensor) -> float:
    return float((actual != exact).double().mean())


# --- float8 ---------------------------------------------------------------------------------------------------------


def _compare_float8(
    name: str, actual: Mapping[str, Any], native: Mapping[str, Any], exact: Mapping[str, Any]
) -> Deviation:
    a, n, e = (_dequantised(name, values) for values in (actual, native, exact))
    steps = int((codes(actual[name]) - codes(exact[name])).abs().max())
    return Deviation(name, error(a, e), 2 * error(n, e) + torch.finfo(actual[name].dtype).eps, steps)


def codes(values: torch.Tensor) -> torch.Tensor:
    """Float8 codes as integers in the order of the values; the two zeros are one, and so are all NaN."""
    bits = values.contiguous().view(torch.uint8).short()
    magnitude = torch.where(values.float().isnan(), 0x7F, bits & 0x7F)
    return torch.where((bits >= 0x80) & ~values.float().isnan(), -magnitude, magnitude)


def _dequantised(name: str, values: Mapping[str, Any]) -> torch.Tensor:
    scale = _scale_of(name, values)
    x = values[name].double()
    if scale is None:
        return x
    if scale.ndim == x.ndim and scale.shape[-1] not in (1, x.shape[-1]):
        scale = scale.repeat_interleave(x.shape[-1] // scale.shape[-1], dim=-1)
    return x * scale.double()


def _scale_of(name: str, values: Mapping[str, Any]) -> torch.Tensor | None:
    """The argument that holds the scale of output `name`: named after it, or simply `scale`."""
    for candidate in (f"{name}_scale", f"{name}_scales", "scale", "scales"):
        if isinstance(values.get(candidate), torch.Tensor):
            return values[candidate]
    return None
