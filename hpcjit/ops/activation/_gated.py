"""Gated activations: SiLU, GELU and its tanh form, times the other half of the row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from hpcjit import checks
from hpcjit.build import Config, Template
from hpcjit.fused_op import define
from hpcjit.jit_op import NOTHING, JitOp, Plan
from hpcjit.ops import _peers
from hpcjit.ops._rows import TYPE_NAMES, vector_width
from hpcjit.ops._tensors import FLOATS, accumulation_dtype, compiling, require

NONE, SILU, GELU, GELU_TANH = range(4)  # hpcjit::Activation

_FEW_VECS = 2**18  # output vectors up to which small blocks, hence more SMs at work, and evict-first loads are faster


@dataclass(frozen=True)
class GatedConfig(Config):
    input_t: str = "bf16"
    threads: int = 256
    vec: int = 8
    vecs_per_thread: int = 1
    activation: int = SILU
    stream_in: bool = True
    stream_out: bool = False
    trigger: int = 0
    pdl: bool = True


GATED = Template(
    op="activation.gated",
    header="activation/gated.cuh",
    entry="hpcjit::activation::Gated",
    config=GatedConfig,
    params=("input", "output", "num_tokens", "hidden_size", "input_stride", "output_stride"),
)


def check_gated_input(op: str, input: torch.Tensor) -> None:
    """What every gated activation asks of its input: rows of an even number of columns."""
    checks.tensor(op, "input", input, dtypes=FLOATS, min_ndim=1)
    checks.rows(op, "input", input)
    if input.shape[-1] == 0 or input.shape[-1] % 2:
        raise checks.ArgumentError(op, "input", "of an even number of columns, at least 2", checks.describe(input))
    checks.no_grad(op, input=input)


def gate(input: torch.Tensor, activation: int) -> torch.Tensor:
    """The reference of every gated activation, not yet rounded."""
    x, up = input.to(accumulation_dtype(input.dtype)).chunk(2, dim=-1)
    if activation == SILU:
        return F.silu(x) * up
    return F.gelu(x, approximate="tanh" if activation == GELU_TANH else "none") * up


class GatedOp(JitOp):
    schema = "(Tensor input, Tensor(a!) out) -> ()"
    activation: ClassVar[int]
    peer: ClassVar[str]  # its name in other packages

    def check(self, input: torch.Tensor, out: torch.Tensor) -> None:
        check_gated_input(self.op, input)
        shape = (*input.shape[:-1], input.shape[-1] // 2)
        checks.tensor(self.op, "out", out, dtypes=(input.dtype,), shape=shape, like=input)
        checks.rows(self.op, "out", out, written=True)
        checks.no_grad(self.op, out=out)

    def plan(self, input: torch.Tensor, out: torch.Tensor) -> Plan | str:
        if out.numel() == 0:
            return NOTHING
        num_tokens, input_stride = checks.rows(self.op, "input", input)
        _, output_stride = checks.rows(self.op, "out", out)
        hidden_size = out.shape[-1]
        vec = vector_width(hidden_size, input.element_size(), [(input, input_stride), (out, output_stride)])
        few = num_tokens * hidden_size // vec <= _FEW_VECS
        config = GatedConfig(
            TYPE_NAMES[input.dtype],
            threads=128 if few else 512,
            vec=vec,
            vecs_per_thread=1,
            activation=self.activation,
            stream_in=few,
        )
        return Plan(
            GATED,
            config,
            {
                "output": "out",
                "num_tokens": num_tokens,
                "hidden_size": hidden_size,
                "input_stride": input_stride,
                "output_stride": output_stride,
            },
        )

    def reference(self, input: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(gate(input, self.activation))

    def forward_flashinfer(self, input: torch.Tensor, out: torch.Tensor) -> None:
        self.check(input, out)
        _peers.flashinfer("activation", self.peer)(input, out)

    def forward_aot(self, input: torch.Tensor, out: torch.Tensor) -> None:
        self.check(input, out)
        _peers.sglang("activation.activation", self.peer)(input, out)


class SiluAndMulOp(GatedOp):
    op = "activation.silu_and_mul"
    activation = SILU
    peer = "silu_and_mul"


class GeluAndMulOp(GatedOp):
    op = "activation.gelu_and_mul"
    activation = GELU
    peer = "gelu_and_mul"


class GeluTanhAndMulOp(GatedOp):
    op = "activation.gelu_tanh_and_mul"
    activation = GELU_TANH
    peer = "gelu_tanh_and_mul"


silu_and_mul_op = SiluAndMulOp()
gelu_and_mul_op = GeluAndMulOp()
gelu_tanh_and_mul_op = GeluTanhAndMulOp()
define(silu_and_mul_op)
define(gelu_and_mul_op)
define(gelu_tanh_and_mul_op)


def _half(op: GatedOp, input: torch.Tensor) -> torch.Tensor:
    require(op.op, "input", input)
    return input.new_empty((*input.shape[:-1], input.shape[-1] // 2))


def silu_and_mul(input: torch.Tensor, *, out: torch.Tensor | None = None, backend: str | None = None) -> torch.Tensor:
    """SwiGLU of every row `[x | up]`: `out = x / (1 + exp(-x)) * up`.

    Args:
        input: `[..., 2 * hidden_size]`, bfloat16, float16 or float32; the last axis contiguous, the leading axes foldable
            into one. A `hidden_size` that is a multiple of 8 (16-byte aligned rows) is fast; any other works.
        out: `[..., hidden_size]`, where the result goes; must not overlap `input`. A new tensor by default.
        backend: run this backend or fail; see `hpcjit ops show activation.silu_and_mul`.

    Returns:
        `out`. Computed in float32 and rounded once; bits repeat.

    Raises:
        ArgumentError: an odd number of columns, a wrong dtype, shape, stride or device, or a tensor that requires grad.

    Safe under CUDA graphs once the signature has run or been prewarmed. Method: Shazeer, 2020.
    """
    if out is None:
        out = _half(silu_and_mul_op, input)
    if compiling("activation.silu_and_mul", backend):
        torch.ops.hpcjit.activation_silu_and_mul(input, out)
    elif backend is None:
        silu_and_mul_op.fast(input, out)
    else:
        silu_and_mul_op(input, out, backend=backend)
    return out


def gelu_and_mul(input: torch.Tensor, *, out: torch.Tensor | None = None, backend: str | None = None) -> torch.Tensor:
    """GEGLU of every row `[x | up]`: `out = x / 2 * (1 + erf(x / sqrt(2))) * up`.

    Arguments, result, errors and guarantees are those of `silu_and_mul`.
    """
    if out is None:
        out = _half(gelu_and_mul_op, input)
    if compiling("activation.gelu_and_mul", backend):
        torch.ops.hpcjit.activation_gelu_and_mul(input, out)
    elif backend is None:
        gelu_and_mul_op.fast(input, out)
    else:
        gelu_and_mul_op(input, out, backend=backend)
    return out


def gelu_tanh_and_mul(
    input: torch.Tensor, *, out: torch.Tensor | None = None, backend: str | None = None
) -> torch.Tensor:
    """GEGLU with the tanh form of GELU: `out = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) * up`.

    Arguments, result, errors and guarantees are those of `silu_and_mul`.
    """
    if out is None:
        out = _half(gelu_tanh_and_mul_op, input)
    if compiling("activation.gelu_tanh_and_mul", backend):
        torch.ops.hpcjit.activation_gelu_tanh_and_mul(input, out)
    elif backend is None:
        gelu_tanh_and_mul_op.fast(input, out)
    else:
        gelu_tanh_and_mul_op(input, out, backend=backend)
    return out
