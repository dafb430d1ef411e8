"""Routing from the hidden states: router logits and their gate in one call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from hpcjit import checks, tune
from hpcjit.errors import ArgumentError
from hpcjit.fused_op import define
from hpcjit.jit_op import NOTHING, JitOp, Plan
from hpcjit.ops._tensors import accumulation_dtype, compiling, distinct, overwrites_none, require_rank
from hpcjit.ops.gemm import _router_plan
from hpcjit.ops.gemm._router_gemm import check_factors, router_gemm_op
from hpcjit.ops.moe import _router_topk_plan
from hpcjit.ops.moe._gate import MAX_EXPERTS, GateArgs, GateOp, outputs
from hpcjit.ops.moe._grouped_topk import grouped_topk_op
from hpcjit.ops.moe._topk_sigmoid import topk_sigmoid_op
from hpcjit.ops.moe._topk_softmax import topk_softmax_op


class _Call(NamedTuple):
    x: torch.Tensor
    weight: torch.Tensor
    top_k: int
    scoring: str
    num_groups: int
    topk_groups: int
    renormalize: bool
    scaling_factor: float
    num_shared_experts: int
    accuracy: str
    bias: torch.Tensor | None
    num_valid_tokens: torch.Tensor | None
    logits: torch.Tensor | None
    weights: torch.Tensor
    ids: torch.Tensor

    def gate(self, logits: torch.Tensor) -> GateArgs:
        """The gate's part of the call."""
        shared: dict[str, Any] = {name: getattr(self, name) for name in GateArgs._fields if name in self._fields}
        return GateArgs(**shared | {"logits": logits})

    def steps(self, logits: torch.Tensor) -> tuple[tuple[Any, ...], JitOp, tuple[Any, ...]]:
        """The arguments of the product that leaves its result in `logits`, and the gate with its arguments."""
        product = self.x, self.weight, self.accuracy, logits
        a = self.gate(logits)
        gate: GateOp = topk_softmax_op if self.scoring == "softmax" else topk_sigmoid_op
        if self.num_groups > 1:
            gate = grouped_topk_op
        return product, gate, tuple(getattr(a, name) for name in gate.arguments)


class RouterTopkOp(GateOp):
    op = "moe.router_topk"
    # Not "mode": torch's own wrappers of operators have an argument of that name.
    schema = (
        "(Tensor x, Tensor weight, int top_k, str scoring, int num_groups, int topk_groups, bool renormalize,"
        " float scaling_factor, int num_shared_experts, str accuracy, Tensor? bias, Tensor? num_valid_tokens,"
        " Tensor(a!)? logits, Tensor(b!) weights, Tensor(c!) ids) -> ()"
    )
    tensor_core_sums = ("logits",)
    tuned_table = _router_topk_plan.TABLE

    def _call(self, *args: Any) -> _Call:
        if len(args) != len(self.arguments):
            raise TypeError(f"{self.op}: expected {len(self.arguments)} arguments, got {len(args)}")
        return _Call(*args)

    def check(self, *args: Any) -> None:
        c = self._call(*args)
        num_experts = check_factors(self.op, c.x, {"weight": c.weight}, torch.float32)
        if num_experts > MAX_EXPERTS:
            expected = f"[num_experts, hidden_size] of at most {MAX_EXPERTS} experts"
            raise ArgumentError(self.op, "weight", expected, checks.describe(c.weight))
        checks.choice(self.op, "mode", c.accuracy, tuple(_router_plan.TERMS))
        # Stands for logits where the call wants none.
        a = c.gate(c.x.new_empty(1, dtype=torch.float32).expand(c.x.shape[0], num_experts))
        self._check_options(a)
        self._check_groups(a)
        self._check_tensors(a)
        self._check_written(c, num_experts)

    def _check_written(self, c: _Call, num_experts: int) -> None:
        read = {"x": c.x, "weight": c.weight, "bias": c.bias, "num_valid_tokens": c.num_valid_tokens}
        written = {"weights": c.weights, "ids": c.ids}
        if c.logits is not None:
            shape = c.x.shape[0], num_experts
            checks.tensor(self.op, "logits", c.logits, dtypes=(torch.float32,), shape=shape, like=c.x)
            distinct(self.op, "logits", c.logits)
            for name, value in written.items():
                checks.apart(self.op, "logits", c.logits, name, value)
            written["logits"] = c.logits
        for name, value in written.items():
            overwrites_none(self.op, name, value, read)
        checks.no_grad(self.op, x=c.x, weight=c.weight, logits=c.logits)

    def plan(self, *args: Any) -> Plan | str:
        c = self._call(*args)
        if not c.x.shape[0]:
            return NOTHING
        return self._plan(c, _router_topk_plan.way_of(c.x, c.weight.shape[0], c.accuracy))

    def _plan(self, c: _Call, way: str) -> Plan:
        # Where no logits are wanted they are kept in rows as these: contiguous, aligned. Otherwise the layout of `logits` says
        # which lane has which expert, whatever the gate reads, so that all ways add up in the same order.
        rows = torch.empty(c.x.shape[0], c.weight.shape[0], dtype=torch.float32, device="meta")
        out = rows if c.logits is None else c.logits
        _, gate, gate_args = c.steps(out)
        gate_plan = gate.plan(*gate_args)
        assert isinstance(gate_plan, Plan)
        product = _router_plan.plan(c.x, c.weight, c.accuracy, out)
        return _router_topk_plan.plan(product, gate_plan, c.logits, way)

    def tuned_shape(self, *args: Any) -> tuple[str, int]:
        c = self._call(*args)
        shape = _router_plan.shape_of(c.x, c.weight.shape[0])
        return _router_plan.shape_name(shape, c.accuracy, c.x.dtype), shape.num_tokens

    def alternatives(self, *args: Any) -> Iterator[tuple[tune.Values, Plan]]:
        c = self._call(*args)
        if c.x.shape[0]:
            yield from (({"way": way}, self._plan(c, way)) for way in _router_topk_plan.WAYS)

    def reference(self, *args: Any) -> None:
        """What `router_gemm` and the gate promise, one after the other."""
        c = self._call(*args)
        product, gate, gate_args = c.steps(_logits_of(c, accumulation_dtype(c.weight.dtype)))
        router_gemm_op.reference(*product)
        gate.reference(*gate_args)

    def forward_native(self, *args: Any) -> None:
        """With a float32 product in either mode."""
        self.check(*args)
        c = self._call(*args)
        product, gate, gate_args = c.steps(_logits_of(c, torch.float32))
        router_gemm_op.forward_native(*product)
        gate.reference(*gate_args)

    def forward_jit_steps(self, *args: Any) -> None:
        """Two operators: `router_gemm`, then the gate."""
        self.check(*args)
        c = self._call(*args)
        product, gate, gate_args = c.steps(_logits_of(c, torch.float32))
        router_gemm_op.forward_jit(*product)
        gate.forward_jit(*gate_args)


def _logits_of(c: _Call, dtype: torch.dtype) -> torch.Tensor:
    return c.x.new_empty((c.x.shape[0], c.weight.shape[0]), dtype=dtype) if c.logits is None else c.logits


router_topk_op = RouterTopkOp()
define(router_topk_op)


def router_topk(
    x: torch.Tensor,
    weight: torch.Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    num_groups: int = 1,
    topk_groups: int = 1,
    bias: torch.Tensor | None = None,
    renormalize: bool = True,
    scaling_factor: float = 1.0,
    num_shared_experts: int = 0,
    num_valid_tokens: torch.Tensor | None = None,
    mode: str = "accurate",
    logits: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route every token from its hidden state: router logits, then the gate, in one call.

        logits[m, n] = sum over k of x[m, k] * weight[n, k]      (float32 on tensor cores)
        s            = softmax(logits) or sigmoid(logits)        (float32)
        c            = logits, or s + bias with a bias
        ids          = indices of the top_k largest c, largest first; with num_groups > 1 only among the topk_groups groups of
                       neighbouring experts whose best c (with a bias: whose two best c together) are the largest
        weights      = scaling_factor * s[ids], or scaling_factor * s[ids] / sum(s[ids]) with renormalize

    The result has the bits of `gemm.router_gemm(x, weight, mode=mode)` and then `topk_softmax`, `topk_sigmoid` or, with
    num_groups > 1, `grouped_topk` of these logits; their docstrings say what infinities, NaN and ties give.

    Args:
        x: `[num_tokens, hidden_size]`, bfloat16 or float16; any row stride, last axis contiguous.
        weight: float32 `[num_experts, hidden_size]`, likewise, 1 to 1024 experts. It is read anew at each call.
        top_k: 1 to 32, and at most the experts of topk_groups groups.
        scoring: "softmax" or "sigmoid".
        num_groups: 1 to 32, a divisor of num_experts.
        topk_groups: 1 to num_groups.
        bias: None, or float32 `[num_experts]`, which decides the choice but does not enter the weights.
        renormalize: make the weights of a token add up to 1, before they are scaled; a sum of 0 leaves them 0.
        scaling_factor: of the weights.
        num_shared_experts: 0 to 32; so many more columns with the ids num_experts, num_experts + 1, ... and weight 1,
            whatever the scaling_factor.
        num_valid_tokens: None, or int32 `[1]` on the device. Rows from there on are padding: id -1 and weight 0 in every
            column. Their logits are computed all the same.
        mode: "accurate", logits as good as a float32 product's, or "fast"; see `router_gemm`.
        logits: None, or float32 `[num_tokens, num_experts]`, any row stride: receives the logits too.
        weights: float32 `[num_tokens, top_k + num_shared_experts]`, receives the weights. A new tensor by default.
        ids: int32 likewise, receives the experts. A new tensor by default.
        backend: run this backend or fail. "jit_steps" is the two operators that this one replaces.

    Returns:
        `(weights, ids)`. Bits repeat, and those of a token do not depend on what other rows hold.

    Raises:
        ArgumentError: a wrong rank, dtype, shape, stride or device, an option out of range, num_groups that does not divide
            the experts, fewer than top_k experts in the kept groups, an output in the memory of an input or of another
            output, a tensor that requires grad.

    By one kernel or by two, whichever is faster; logits pass through memory of the stream (see `hpcjit.workspace`): 4 bytes
    for each token and expert. Safe under CUDA graphs once the signature has run or been prewarmed.
    """
    require_rank(RouterTopkOp.op, "x", x, 2)
    require_rank(RouterTopkOp.op, "weight", weight, 2)
    if weights is None or ids is None:
        shape = x.shape[0], weight.shape[0]
        like = torch.empty(1, dtype=torch.float32, device=x.device).expand(shape)
        weights, ids = outputs(RouterTopkOp.op, like, top_k, num_shared_experts, weights, ids)
    args = (x, weight, top_k, scoring, num_groups, topk_groups, renormalize, scaling_factor, num_shared_experts, mode)
    tensors = (bias, num_valid_tokens, logits, weights, ids)
    if compiling("moe.router_topk", backend):
        torch.ops.hpcjit.moe_router_topk(*args, *tensors)
    elif backend is None:
        router_topk_op.fast(*args, *tensors)
    else:
        router_topk_op(*args, *tensors, backend=backend)
    return weights, ids
