"""Products of rows that are sorted by expert with the weights of their experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hpcjit import checks, tune
from hpcjit.build import Config, Template
from hpcjit.errors import ArgumentError
from hpcjit.fused_op import define
from hpcjit.jit_op import NOTHING, JitOp, Plan
from hpcjit.ops._tensors import compiling, distinct, overwrites_none, require
from hpcjit.ops.gemm._router_gemm import tf32
from hpcjit.ops.moe import _fused_moe_args, _fused_moe_reference, _ids
from hpcjit.ops.moe._fused_moe_args import BLOCK, MAX_EXPERTS, MAX_PAIRS, MAX_SIZE, QUANT, ceil_div
from hpcjit.ops.moe._fused_moe_space import down_per_sm, row_stride

TILE_ROWS = (16, 32, 64, 128, 192)
_FEATURES = 128  # of an item
_FP32 = (torch.float32,)


@dataclass(frozen=True)
class GroupedGemmConfig(Config):
    weight_t: str = "e4m3"
    partial_t: str = "bf16"
    quant: int = 1
    tokens: int = 16
    per_sm: int = 1
    half_groups: bool = False
    pdl: bool = True


GROUPED_GEMM = Template(
    op="moe.grouped_gemm",
    header="moe/grouped_gemm.cuh",
    entry="hpcjit::moe::GroupedGemm",
    config=GroupedGemmConfig,
    params=(
        *("x", "x_scale", "weight", "weight_scale", "tiles", "num_tiles", "out"),
        *("num_rows", "num_experts", "depth", "features"),
        *("x_stride", "x_scale_row_stride", "x_scale_group_stride", "out_stride"),
        *("blocks", "most_tiles"),
    ),
)


class GroupedGemmArgs(NamedTuple):
    x: torch.Tensor
    weight: torch.Tensor
    tiles: torch.Tensor
    num_tiles: torch.Tensor
    tile_rows: int
    x_scale: torch.Tensor | None
    weight_scale: torch.Tensor | None
    quant: str
    out: torch.Tensor


class GroupedGemmOp(JitOp):
    op = "moe.grouped_gemm"
    schema = (
        "(Tensor x, Tensor weight, Tensor tiles, Tensor num_tiles, int tile_rows, Tensor? x_scale,"
        " Tensor? weight_scale, str quant, Tensor(a!) out) -> ()"
    )

    def check(self, *args: Any) -> None:
        a = GroupedGemmArgs(*args)
        checks.choice(self.op, "quant", a.quant, QUANT)
        checks.choice(self.op, "tile_rows", a.tile_rows, TILE_ROWS)
        self._check_factors(a)
        self._check_tiles(a)
        self._check_scales(a)
        shape = (a.x.shape[0], a.weight.shape[1])
        checks.tensor(self.op, "out", a.out, dtypes=(torch.bfloat16,), shape=shape, like=a.x)
        distinct(self.op, "out", a.out)
        named = {name: value for name, value in a._asdict().items() if isinstance(value, torch.Tensor)}
        overwrites_none(self.op, "out", a.out, {name: value for name, value in named.items() if name != "out"})
        checks.no_grad(self.op, **named)

    def check_values(self, *args: Any) -> None:
        a = GroupedGemmArgs(*args)
        _ids.check_tiles(self.op, a.tiles, a.num_tiles, a.tile_rows, a.weight.shape[0], a.x.shape[0])

    def _check_factors(self, a: GroupedGemmArgs) -> None:
        dtype = (torch.bfloat16 if a.quant == "bf16" else torch.float8_e4m3fn,)
        step = 8 if a.quant == "bf16" else 16
        checks.tensor(self.op, "x", a.x, dtypes=dtype, min_ndim=2)
        if a.x.ndim != 2 or not 0 < a.x.shape[1] <= MAX_SIZE or a.x.shape[1] % step or a.x.shape[0] > MAX_PAIRS:
            expected = f"[num_rows, hidden_size] with a multiple of {step} columns, up to {MAX_SIZE}"
            raise ArgumentError(self.op, "x", expected, checks.describe(a.x))
        checks.tensor(self.op, "weight", a.weight, dtypes=dtype, min_ndim=3, like=a.x)
        shape, hidden = a.weight.shape, a.x.shape[1]
        fits = len(shape) == 3 and 1 <= shape[0] <= MAX_EXPERTS and 0 < shape[1] <= MAX_SIZE and shape[2] == hidden
        if not fits or not a.weight.is_contiguous():
            expected = f"[1 to {MAX_EXPERTS} experts, features, {hidden}], contiguous"
            raise ArgumentError(self.op, "weight", expected, checks.describe(a.weight))
        for name, value in (("x", a.x), ("weight", a.weight)):
            _fused_moe_args.aligned(self.op, name, value)

    def _check_tiles(self, a: GroupedGemmArgs) -> None:
        checks.tensor(self.op, "tiles", a.tiles, dtypes=(torch.int32,), min_ndim=2, like=a.x)
        if a.tiles.ndim != 2 or a.tiles.shape[1] != 4 or not a.tiles.is_contiguous():
            raise ArgumentError(self.op, "tiles", "[any, 4], contiguous", checks.describe(a.tiles))
        _fused_moe_args.aligned(self.op, "tiles", a.tiles)
        checks.tensor(self.op, "num_tiles", a.num_tiles, dtypes=(torch.int32,), shape=(1,), like=a.x)

    def _check_scales(self, a: GroupedGemmArgs) -> None:
        experts, features, hidden = a.weight.shape
        rows, groups = a.x.shape[0], ceil_div(hidden, BLOCK)
        weight_shapes = {
            "fp8_tensor": (experts,),
            "fp8_channel": (experts, features),
            "fp8_block": (experts, ceil_div(features, BLOCK), groups),
        }
        scales = {"x_scale": a.x_scale, "weight_scale": a.weight_scale}
        for name, scale in scales.items():
            if (scale is None) != (a.quant == "bf16"):
                expected = f"{'None' if scale is not None else 'a float32 tensor'} with quant={a.quant!r}"
                raise ArgumentError(self.op, name, expected, "None" if scale is None else checks.describe(scale))
        if a.x_scale is None or a.weight_scale is None:
            return
        checks.tensor(self.op, "weight_scale", a.weight_scale, dtypes=_FP32, shape=weight_shapes[a.quant], like=a.x)
        if not a.weight_scale.is_contiguous():
            raise ArgumentError(self.op, "weight_scale", "contiguous", f"strides {a.weight_scale.stride()}")
        checks.tensor(self.op, "x_scale", a.x_scale, dtypes=_FP32, like=a.x, dense_last=False)
        allowed = _fused_moe_args.x_scale_shapes(a.quant, rows, groups)
        if tuple(a.x_scale.shape) not in allowed:
            expected = "of shape " + " or ".join(str(list(shape)) for shape in allowed)
            raise ArgumentError(self.op, "x_scale", expected, checks.describe(a.x_scale))

    def plan(self, *args: Any) -> Plan | str:
        a = GroupedGemmArgs(*args)
        experts, features, hidden = a.weight.shape
        if not a.x.shape[0] or not a.tiles.shape[0]:
            return NOTHING
        config = GroupedGemmConfig(
            weight_t="bf16" if a.quant == "bf16" else "e4m3",
            quant=QUANT.index(a.quant),
            tokens=a.tile_rows,
            per_sm=down_per_sm(a.tile_rows),
        )
        resident = tune.sm_count(a.x.device) * config.per_sm
        scaled = a.x_scale is not None and a.x_scale.numel() > 1
        values: dict[str, int | float | str] = {
            "num_rows": a.x.shape[0],
            "num_experts": experts,
            "depth": hidden,
            "features": features,
            "x_stride": row_stride(a.x),
            "x_scale_row_stride": a.x_scale.stride(0) if a.x_scale is not None and scaled else 0,
            "x_scale_group_stride": a.x_scale.stride(1) if a.x_scale is not None and a.quant == "fp8_block" else 0,
            "out_stride": row_stride(a.out),
            "most_tiles": a.tiles.shape[0],
            "blocks": min(resident, a.tiles.shape[0] * ceil_div(features, _FEATURES)),
        }
        for name in ("x_scale", "weight_scale"):
            if getattr(a, name) is None:
                values[name] = 0
        return Plan(GROUPED_GEMM, config, values)

    def reference(self, *args: Any) -> None:
        a = GroupedGemmArgs(*args)
        if a.x.device.type == "meta":
            return
        dtype = torch.float64 if a.out.dtype == torch.float64 else torch.float32
        x = _fused_moe_reference.scaled_rows(a.x, a.x_scale, dtype)
        with tf32(False, x.device):
            for expert, first, most, _ in a.tiles[: int(a.num_tiles)].tolist():
                rows = min(most, a.tile_rows)
                scale = None if a.weight_scale is None else a.weight_scale[expert]
                weight = _fused_moe_reference.scaled_weight(a.weight[expert], scale, a.quant, dtype)
                a.out[first : first + rows] = (x[first : first + rows] @ weight.t()).to(a.out.dtype)


grouped_gemm_op = GroupedGemmOp()
define(grouped_gemm_op)


def grouped_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    tiles: torch.Tensor,
    num_tiles: torch.Tensor,
    tile_rows: int,
    *,
    x_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    quant: str = "bf16",
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Multiply rows with the weights of their experts: `out[r] = x[r] @ weight[e].T` for the rows r of each tile, of expert e.

    Args:
        x: `[num_rows, hidden_size]`, rows sorted by expert: bfloat16, or float8_e4m3fn with the FP8 kinds of quant. Rows at
            any stride of whole 16 bytes; hidden_size a multiple of 16 (bfloat16: of 8).
        weight: `[num_experts, features, hidden_size]` of the same dtype, contiguous. Up to 512 experts.
        tiles: int32 `[any, 4]`: expert, first row, number of rows, 0, as `moe_plan` makes them. Of a tile with more rows than
            tile_rows only so many count. Only debug mode looks whether experts and rows exist: otherwise those that do not
            are read and written all the same.
        num_tiles: int32 `[1]`, how many of them count, at most all (likewise); read on the device.
        tile_rows: 16, 32, 64, 128 or 192, the most rows of a tile.
        x_scale, weight_scale: float32, of FP8; a value is its code times its scale.

            - "fp8_tensor": `[1]` or `[num_rows, 1]`, and `[num_experts]`
            - "fp8_channel": `[num_rows, 1]` or `[num_rows]`, and `[num_experts, features]`
            - "fp8_block": `[num_rows, ceil(hidden_size / 128)]`, and `[num_experts, ceil(features / 128),
              ceil(hidden_size / 128)]`
        quant: "bf16", "fp8_tensor", "fp8_channel" or "fp8_block".
        out: bfloat16 `[num_rows, features]`. Rows of no tile keep what they held; in a new tensor they are undefined.
        backend: run this backend or fail.

    Returns:
        `out`. Sums are float32, rounded once. Bits repeat, and those of a row depend on that row alone.

    Raises:
        ArgumentError: shapes that do not agree, scales of another granularity than quant has, a wrong dtype, device or
            alignment, `out` in the memory of an input, a tensor that requires grad.

    Safe under CUDA graphs, with tiles that change between replays, once the signature has run or been prewarmed. Method:
    grouped products over tiles as in MegaBlocks (Gale et al., 2022).
    """
    op = GroupedGemmOp.op
    require(op, "x", x, 2)
    require(op, "weight", weight, 3)
    if out is None:
        out = x.new_empty((x.shape[0], weight.shape[1]), dtype=torch.bfloat16)
    args = (x, weight, tiles, num_tiles, tile_rows, x_scale, weight_scale, quant, out)
    if compiling("moe.grouped_gemm", backend):
        torch.ops.hpcjit.moe_grouped_gemm(*args)
    elif backend is None:
        grouped_gemm_op.fast(*args)
    else:
        grouped_gemm_op(*args, backend=backend)
    return out
