"""The calls on which the Triton baselines are tested; as a program, runs them in Triton's interpreter, on the CPU.

It prints, as one JSON object, what is wrong with each call. It needs a process of its own with TRITON_INTERPRET=1, which
Triton reads when it is imported.
"""

from __future__ import annotations

import json

import torch
from op_grid import FP8, FP32, GRID, Entry
from op_tools import operator

from hpcjit import numerics
from hpcjit.cases import Args, Maker
from hpcjit.errors import BackendError
from hpcjit.jit_op import JitOp
from hpcjit.spec import KernelBackend

NAN, INF = float("nan"), float("inf")

# A rule that compares with the error of another result is harsh where that is right by luck. Float32 results of the GPU's
# approximate exponential and division may miss it by this much (four roundings); no other dtype can hide behind that.
ROUNDINGS = 4 * torch.finfo(torch.float32).eps


def _rows(m: Maker) -> torch.Tensor:
    """Rows with NaN, with infinities, of zeros and of NaN alone."""
    x = m.normal(6, 1000)
    x[0, 3], x[1, 999], x[2, 0], x[3], x[4] = NAN, INF, -INF, 0.0, NAN
    return x


def _quant(m: Maker) -> Args:
    return _rows(m), m.poison(6, 1000, dtype=FP8), m.poison(6, 1, dtype=FP32)


def _norm_quant(m: Maker) -> Args:
    x = m.normal(6, 1000)
    x[1], x[2] = 0.0, NAN
    return x, None, m.normal(1000), 1e-6, True, m.poison(6, 1000, dtype=FP8), m.poison(6, 1, dtype=FP32)


def _gated_quant(m: Maker) -> Args:
    x = torch.cat([_rows(m)[:, :500], m.normal(6, 500) + 1.0], dim=1)
    x[5, :500] = -1000.0  # exp of its negative overflows
    return x, True, 0, False, m.poison(6, 500, dtype=FP8), m.poison(6, 1, dtype=FP32)


def _routing(m: Maker, renormalize: bool, experts: int = 40) -> Args:
    x = m.normal(9, experts, dtype=FP32)
    x[0], x[1], x[2] = 1.0, -INF, NAN
    x[3, ::2], x[4, 5:9], x[5, 1:], x[6, :38], x[7, :20] = NAN, INF, -INF, NAN, -INF
    x[8, ::2], x[8, 1::2] = 0.0, -0.0
    outputs = m.poison(9, 8, dtype=FP32), m.poison(9, 8, dtype=torch.int32)
    return x, 8, renormalize, 0.0, 1.0, 0, None, None, *outputs


def _routing_by_sigmoid(m: Maker) -> Args:
    x, top_k, renormalize, _, *rest = _routing(m, True)
    return x, top_k, renormalize, *rest


SPECIAL = [
    Entry("quantization.per_token_quant_fp8", "special values", _quant, "NaN does not count in the maximum"),
    Entry("layernorm.rmsnorm_quant_fp8", "special values", _norm_quant, "NaN does not count in the maximum"),
    Entry("activation.silu_and_mul_quant_fp8", "special values", _gated_quant, "NaN does not count; overflow of exp"),
    Entry(
        "moe.topk_softmax", "special values", lambda m: _routing(m, False), "ties, NaN last and once, nothing to choose"
    ),
    Entry("moe.topk_softmax", "special values renorm", lambda m: _routing(m, True), "no weight at all is not 0 / 0"),
    Entry("moe.topk_sigmoid", "special values", _routing_by_sigmoid, "likewise"),
]


def covered(op: JitOp, args: Args) -> bool:
    """Whether the baseline takes these options."""
    named = dict(zip(op.arguments, args, strict=True))
    if op.op == "gemm.router_gemm":
        return bool(named["x"].dtype == torch.bfloat16)
    if op.op == "attention.decode":
        halves = (named["v_cache"].dtype, named["out"].dtype)
        return named["schedule"] != "invariant" and halves != (torch.bfloat16, torch.float16)
    absent = ("group_size", "softcap", "num_shared_experts")
    padded = named.get("num_valid_tokens") is not None
    return named.get("dynamic", True) and not padded and not any(named.get(name) for name in absent)


_GRID = [entry for entry in GRID if KernelBackend.TRITON in operator(entry.op).capabilities]
REFUSED = [entry for entry in _GRID if not covered(operator(entry.op), entry.make(Maker("meta")))]
CALLS = [entry for entry in _GRID if entry not in REFUSED] + SPECIAL
SMALL = [entry for entry in CALLS if entry.make(Maker("meta"))[0].shape[0] <= 100]  # the interpreter is slow


def wrong(op: JitOp, args: Args) -> list[str]:
    """What the baseline computes too far from the reference."""
    return [
        str(deviation)
        for deviation in numerics.check(op, args, op.forward_triton)
        if deviation.code_steps > 1 or not deviation.err <= max(deviation.bound, ROUNDINGS)
    ]


def _interpret_like_the_gpu() -> None:
    """Round and multiply as the GPU does: the interpreter cuts bfloat16 off, loses the carry of float8, and multiplies
    matrices of bfloat16 as the integers in which it keeps them."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    floats = {
        tl.float32: torch.float32,
        tl.float16: torch.float16,
        tl.bfloat16: torch.bfloat16,
        tl.float8e4nv: torch.float8_e4m3fn,
    }
    bits = {8: torch.uint8, 16: torch.uint16, 32: torch.uint32}

    def convert(values, source, target, rounding_mode):
        x = torch.from_numpy(np.atleast_1d(values).copy()).view(floats[source]).to(floats[target])
        return x.view(bits[target.primitive_bitwidth]).numpy().reshape(np.shape(values))

    def dot(builder, a, b, total, *precision):
        product = np.matmul(*(convert(x.data, x.dtype.scalar, tl.float32, None).view(np.float32) for x in (a, b)))
        return interpreter.TensorHandle(product + total.data, total.dtype.scalar)

    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor, *scope):
        patch(tensor, *scope)
        tensor.__index__ = lambda self: self.handle.data.item()  # that of older ones fails with a recent numpy

    interpreter._convert_float = convert
    interpreter._patch_lang_tensor = patch_with_index
    interpreter.InterpreterBuilder.create_dot = dot


def main() -> None:
    _interpret_like_the_gpu()
    found: dict[str, list[str]] = {}
    for entry in [*SMALL, *REFUSED]:
        try:
            found[entry.id] = wrong(operator(entry.op), entry.make(Maker("cpu")))
        except BackendError as error:
            found[entry.id] = [f"refused: {error}"]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
