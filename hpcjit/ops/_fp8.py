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
