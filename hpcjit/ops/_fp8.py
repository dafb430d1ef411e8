"""FP8 e4m3 quantisation as the references do it."""

from __future__ import annotations

import torch

E4M3_MAX = 448.0
SCALE_FLOOR = 1e-10  # least max|x| behind a dynamic scale, so that zeros get a positive scale


def dynamic_scale(x: torch.Tensor, dim: int | tuple[int, ...] = -1, *, keepdim: bool = True) -> torch.Tensor:
    """`max(max|x|, 1e-10) / 448` along `dim`; NaN elements do not count."""
    return (
        torch.nan_to_num(x.abs(), nan=0.0, posinf=torch.inf).amax(dim, keepdim=keepdim).clamp_min(SCALE_FLOOR)
        / E4M3_MAX
    )


def quantize(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`x / scale` rounded to the nearest e4m3, saturating at +-448; NaN stays NaN."""
    return (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def round_up_to_power_of_two(x: torch.Tensor) -> torch.Tensor:
    """The least power of two that is not below `x`, exactly."""
    mantissa, exponent = torch.frexp(x)  # x = mantissa * 2^exponent, mantissa in [0.5, 1)
    return torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).to(exponent.dtype)).where(x.isfinite(), x)


def group_quantize(
    x: torch.Tensor, group_size: int, power_of_two: bool, out: torch.Tensor, scale: torch.Tensor
) -> None:
    """Quantise `x` with a scale for every `group_size` columns, into `out` and `scale`."""
    groups = x.unflatten(-1, (x.shape[-1] // group_size, group_size))
    found = dynamic_scale(groups, keepdim=False)
    scale.copy_(round_up_to_power_of_two(found) if power_of_two else found)
    out.copy_(quantize(groups, scale.to(x.dtype).unsqueeze(-1)).flatten(-2))
