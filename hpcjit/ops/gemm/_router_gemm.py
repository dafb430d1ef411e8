"""Router logits: 16-bit activations times fp32 weights, with an fp32 product's accuracy on tensor cores."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from hpcjit import checks, tune
from hpcjit.errors import ArgumentError
from hpcjit.fused_op import define
from hpcjit.jit_op import NOTHING, JitOp, Plan, own_precision
from hpcjit.ops._tensors import accumulation_dtype, compiling, distinct, overwrites_none, require
from hpcjit.ops.gemm import _router_plan

ACTIVATIONS = (torch.bfloat16, torch.float16)
RESULTS = (torch.float32, torch.bfloat16)


class RouterGemmOp(JitOp):
    op = "gemm.router_gemm"
    # Not "mode": torch's own wrappers of operators have an argument of that name.
    schema = "(Tensor x, Tensor weight, str accuracy, Tensor(a!) out) -> ()"
    tensor_core_sums = ("out",)
    tuned_table = _router_plan.TABLE

    def check(self, x: torch.Tensor, weight: torch.Tensor, accuracy: str, out: torch.Tensor) -> None:
        check_product(self.op, x, {"weight": weight}, torch.float32, out)
        checks.choice(self.op, "mode", accuracy, tuple(_router_plan.TERMS))

    def plan(self, x: torch.Tensor, weight: torch.Tensor, accuracy: str, out: torch.Tensor) -> Plan | str:
        return _router_plan.plan(x, weight, accuracy, out) if out.numel() else NOTHING

    def tuned_shape(self, x: torch.Tensor, weight: torch.Tensor, accuracy: str, out: torch.Tensor) -> tuple[str, int]:
        shape = _router_plan.shape_of(x, weight.shape[0])
        return _router_plan.shape_name(shape, accuracy, x.dtype), shape.num_tokens

    def alternatives(
        self, x: torch.Tensor, weight: torch.Tensor, accuracy: str, out: torch.Tensor
    ) -> Iterator[tuple[tune.Values, Plan]]:
        return _router_plan.alternatives(x, weight, accuracy, out)

    def reference(self, x: torch.Tensor, weight: torch.Tensor, accuracy: str, out: torch.Tensor) -> None:
        """What the mode promises: the product in float32, or the weights in two bfloat16 parts, also in float32."""
        if accuracy == "accurate" or weight.dtype == torch.float64:
            matmul(x, weight, out)
            return
        high = weight.bfloat16().float()
        with tf32(False, x.device):
            product = x.float() @ high.t()
            out.copy_(product.add_(x.float() @ (weight - high).bfloat16().float().t()))

    def forward_native(self, x: torch.Tensor, weight: torch.Tensor, accuracy: str, out: torch.Tensor) -> None:
        """Float32 in either mode: what plain torch does, which is cuBLAS on a GPU."""
        self.check(x, weight, accuracy, out)
        with own_precision((x,)):
            matmul(x, weight, out)

    def forward_cublas_tf32(self, x: torch.Tensor, weight: torch.Tensor, accuracy: str, out: torch.Tensor) -> None:
        """The product that torch makes when it may round float32 to 11 bits. It meets neither mode's promise."""
        self.check(x, weight, accuracy, out)
        matmul(x, weight, out, fast=True)

    def forward_triton(self, x: torch.Tensor, weight: torch.Tensor, accuracy: str, out: torch.Tensor) -> None:
        self.check(x, weight, accuracy, out)
        from hpcjit.ops.gemm import _triton

        _triton.router_gemm(self.op, x, weight, _router_plan.TERMS[accuracy], out)


def check_product(
    op: str, x: torch.Tensor, weights: dict[str, torch.Tensor], dtype: torch.dtype, out: torch.Tensor
) -> None:
    """Refuse whatever is not `out[m, n] = sum over k of x[m, k] weight[n, k]` for every one of `weights`."""
    num_experts = check_factors(op, x, weights, dtype)
    checks.tensor(op, "out", out, dtypes=RESULTS, shape=(x.shape[0], num_experts), like=x)
    distinct(op, "out", out)
    overwrites_none(op, "out", out, {"x": x, **weights})
    checks.no_grad(op, x=x, out=out, **weights)


def check_factors(op: str, x: torch.Tensor, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> int:
    """The same of what is multiplied alone. Returns the number of experts."""
    checks.tensor(op, "x", x, dtypes=ACTIVATIONS if dtype == torch.float32 else (dtype,))
    if x.ndim != 2 or not x.shape[1]:
        raise ArgumentError(op, "x", "[num_tokens, hidden_size]", checks.describe(x))
    num_experts = None
    for name, weight in weights.items():
        checks.tensor(op, name, weight, dtypes=(dtype,), like=x)
        expected = f"[{num_experts or 'num_experts'}, {x.shape[1]}]"
        if weight.ndim != 2 or weight.shape[1] != x.shape[1] or weight.shape[0] != (num_experts or weight.shape[0]):
            raise ArgumentError(op, name, expected, checks.describe(weight))
        if not weight.shape[0]:
            raise ArgumentError(op, name, f"{expected} with an expert or more", checks.describe(weight))
        num_experts = weight.shape[0]
    assert num_experts is not None
    return num_experts


def matmul(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, fast: bool = False) -> None:
    """`out = x @ weight.T` in float32, or float64 if that is what the weights have; `fast` allows TF32."""
    dtype = accumulation_dtype(weight.dtype)
    with tf32(fast, x.device):
        if out.dtype == dtype and x.shape[0]:
            torch.mm(x.to(dtype), weight.t(), out=out)
        else:
            out.copy_(x.to(dtype) @ weight.t())


_PRECISION = threading.RLock()  # of float32 products, which is one setting for the whole process


@contextlib.contextmanager
def tf32(allowed: bool, device: torch.device) -> Iterator[None]:
    """Sets, within the block, whether products of float32 on the device may be less than that."""
    owner = torch.backends.cuda.matmul if device.type == "cuda" else getattr(torch.backends.mkldnn, "matmul", None)
    name: str = "fp32_precision"
    wanted: str | bool = "tf32" if allowed else "ieee"
    if not hasattr(owner, name):  # a torch before 2.9, which has a switch for GPUs alone
        name, wanted = "allow_tf32", allowed
    if not hasattr(owner, name):
        yield
        return
    with _PRECISION:
        before = getattr(owner, name)
        setattr(owner, name, wanted)
        try:
            yield
        finally:
            setattr(owner, name, before)


router_gemm_op = RouterGemmOp()
define(router_gemm_op)


def router_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    mode: str = "accurate",
    out_dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Logits of a router: `out[m, n] = sum over k of x[m, k] * weight[n, k]`, with fp32 weights on tensor cores.

    Args:
        x: `[num_tokens, hidden_size]`, bfloat16 or float16; any row stride, last axis contiguous.
        weight: float32 `[num_experts, hidden_size]`, likewise. It is read and split anew at each call: a change in place
            takes effect at once.
        mode: "accurate", as good as a float32 product: the weights in three 16-bit terms, which is exact for bfloat16; or
            "fast", two terms, which leave 2^-17 of each weight. Float16 activations take two float16 terms in either mode,
            which leave 2^-22.
        out_dtype: float32 or bfloat16, of a new result.
        out: receives the result, `[num_tokens, num_experts]`, float32 or bfloat16; any row stride. A new tensor by default.
        backend: run this backend or fail.

    Returns:
        `out`. Sums are float32, in a fixed order: bits repeat, and a row's depend on it, the weights and the number of rows,
        not on what other rows hold.

        Infinities, NaN and weights near the largest float32 give what a float32 product gives; finding that out costs time.
        Of weights below 2^-110 what lies under 2^-133 is lost; with float16 activations, of any weight what lies under 2^-36.

        A hidden_size of whole fours with rows on 16-byte boundaries (8-byte for x) is fast; any other works.

    Raises:
        ArgumentError: a wrong rank, dtype, shape, stride, device or mode, an `out` that begins where an input does, or a tensor
            that requires grad. Other overlaps are not looked for.

    Safe under CUDA graphs once the signature has run or been prewarmed. Method: fp32 as a sum of bfloat16 terms, Henry, Tang
    and Heinecke, 2019; summation outside of the tensor core, Ootomo and Yokota, 2022.
    """
    require(RouterGemmOp.op, "x", x, 2)
    require(RouterGemmOp.op, "weight", weight, 2)
    if out is None:
        checks.choice(RouterGemmOp.op, "out_dtype", out_dtype, RESULTS)
        out = x.new_empty((x.shape[0], weight.shape[0]), dtype=out_dtype)
    if compiling("gemm.router_gemm", backend):
        torch.ops.hpcjit.gemm_router_gemm(x, weight, mode, out)
    elif backend is None:
        router_gemm_op.fast(x, weight, mode, out)
    else:
        router_gemm_op(x, weight, mode, out, backend=backend)
    return out
