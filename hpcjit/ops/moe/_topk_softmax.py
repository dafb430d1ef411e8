"""Softmax over experts and its top-k: the routing of a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hpcjit import checks
from hpcjit.build import Config, Template
from hpcjit.errors import ArgumentError
from hpcjit.fused_op import define
from hpcjit.jit_op import NOTHING, JitOp, Plan
from hpcjit.ops import _peers
from hpcjit.ops._rows import AT_END, AT_START, TYPE_NAMES, vector_width
from hpcjit.ops._tensors import FLOATS, accumulation_dtype, require

MAX_EXPERTS = 1024
MAX_TOP_K = 32  # one lane of a warp keeps one winner


@dataclass(frozen=True)
class TopkSoftmaxConfig(Config):
    logits_t: str = "fp32"
    threads: int = 128
    per_lane: int = 4
    vec: int = 4
    top_k: int = 8
    renormalize: bool = True
    has_softcap: bool = False
    has_bias: bool = False
    ranked: bool = True
    prefetch: bool = False
    min_blocks: int = 1
    trigger: int = 0
    pdl: bool = True


TOPK_SOFTMAX = Template(
    op="moe.topk_softmax",
    header="moe/topk_softmax.cuh",
    entry="hpcjit::moe::TopkSoftmax",
    config=TopkSoftmaxConfig,
    params=(
        "logits",
        "bias",
        "weights",
        "ids",
        "num_tokens",
        "num_experts",
        "logits_stride",
        "weights_stride",
        "ids_stride",
        "softcap",
    ),
)

_BLOCK_PER_SM = 132 * 8  # tokens, one a warp, from which every SM of an H200 has a block of 256 threads
_HALF_FULL = 4096  # tokens that take half of its warps
_MAX_RANKED = 16  # for more winners than half the lanes, the candidates of one of 32 lanes each soon exceed 32


class TopkSoftmaxOp(JitOp):
    op = "moe.topk_softmax"
    schema = (
        "(Tensor logits, int top_k, bool renormalize, float softcap, Tensor? bias, Tensor(a!) weights, Tensor(b!) ids)"
        " -> ()"
    )
    trace_values = ("ids:histogram",)

    def check(
        self,
        logits: torch.Tensor,
        top_k: int,
        renormalize: bool,
        softcap: float,
        bias: torch.Tensor | None,
        weights: torch.Tensor,
        ids: torch.Tensor,
    ) -> None:
        checks.tensor(self.op, "logits", logits, dtypes=FLOATS, min_ndim=2)
        if logits.ndim != 2 or not 1 <= logits.shape[1] <= MAX_EXPERTS:
            expected = f"[num_tokens, num_experts] of 1 to {MAX_EXPERTS} experts"
            raise ArgumentError(self.op, "logits", expected, checks.describe(logits))
        num_tokens, num_experts = logits.shape
        checks.integer(self.op, "top_k", top_k, low=1, high=min(MAX_TOP_K, num_experts))
        checks.choice(self.op, "renormalize", renormalize, (False, True))
        checks.number(self.op, "softcap", softcap, low=0.0)
        if bias is not None:
            checks.tensor(self.op, "bias", bias, dtypes=(torch.float32,), shape=(num_experts,), like=logits)
        for name, value, dtype in (("weights", weights, torch.float32), ("ids", ids, torch.int32)):
            checks.tensor(self.op, name, value, dtypes=(dtype,), shape=(num_tokens, top_k), like=logits)
            checks.rows(self.op, name, value, written=True)
        checks.no_grad(self.op, logits=logits, bias=bias, weights=weights)

    def plan(
        self,
        logits: torch.Tensor,
        top_k: int,
        renormalize: bool,
        softcap: float,
        bias: torch.Tensor | None,
        weights: torch.Tensor,
        ids: torch.Tensor,
    ) -> Plan | str:
        num_tokens, num_experts = logits.shape
        if num_tokens == 0:
            return NOTHING
        _, logits_stride = checks.rows(self.op, "logits", logits)
        share = -(-num_experts // 32)  # experts of a lane
        vec = vector_width(num_experts, logits.element_size(), [(logits, logits_stride)])
        while vec > share:
            vec //= 2
        per_lane = -(-share // vec) * vec
        plain = softcap == 0 and bias is None
        few = num_tokens <= _BLOCK_PER_SM
        config = TopkSoftmaxConfig(
            TYPE_NAMES[logits.dtype],
            threads=32 if few else 256,  # few: all SMs at work, and a block ends with its token
            per_lane=per_lane,
            vec=vec,
            top_k=top_k,
            renormalize=bool(renormalize),
            has_softcap=softcap > 0,
            has_bias=bias is not None,
            ranked=top_k <= _MAX_RANKED,
            prefetch=few,
            # 32 registers, where they suffice: all warps that an SM can hold.
            min_blocks=8 if not few and plain and per_lane <= 8 else 1,
            # A dependent that waits beside working blocks slows them, unless all room is taken.
            trigger=AT_START if few or num_tokens > _HALF_FULL else AT_END,
        )
        return Plan(
            TOPK_SOFTMAX,
            config,
            {
                "bias": 0 if bias is None else "bias",
                "num_tokens": num_tokens,
                "num_experts": num_experts,
                "logits_stride": logits_stride,
                "weights_stride": checks.rows(self.op, "weights", weights)[1],
                "ids_stride": checks.rows(self.op, "ids", ids)[1],
            },
        )

    def reference(
        self,
        logits: torch.Tensor,
        top_k: int,
        renormalize: bool,
        softcap: float,
        bias: torch.Tensor | None,
        weights: torch.Tensor,
        ids: torch.Tensor,
    ) -> None:
        x = logits.to(accumulation_dtype(logits.dtype))
        p = _softmax(softcap * torch.tanh(x / softcap) if softcap > 0 else x)
        score = x if bias is None else p + bias  # by the logits themselves: a softcap can round neighbours to one value
        # A stable sort keeps equal scores in the order of their ids; NaN first becomes what sorts last.
        nan = score.isnan()
        order = torch.where(nan, -torch.inf, score).sort(dim=-1, descending=True, stable=True).indices
        order = order.gather(-1, nan.gather(-1, order).to(torch.uint8).sort(dim=-1, stable=True).indices)[:, :top_k]
        chosen = p.gather(-1, order)
        if renormalize:
            total = chosen.sum(-1, keepdim=True)
            chosen = torch.where(total > 0, chosen / total, 0)
        weights.copy_(chosen)
        ids.copy_(order)

    def forward_aot(
        self,
        logits: torch.Tensor,
        top_k: int,
        renormalize: bool,
        softcap: float,
        bias: torch.Tensor | None,
        weights: torch.Tensor,
        ids: torch.Tensor,
    ) -> None:
        self.check(logits, top_k, renormalize, softcap, bias, weights, ids)
        _peers.sglang("moe.moe_topk_softmax", "topk_softmax")(weights, ids, logits, renormalize, softcap, bias)

    def forward_triton(
        self,
        logits: torch.Tensor,
        top_k: int,
        renormalize: bool,
        softcap: float,
        bias: torch.Tensor | None,
        weights: torch.Tensor,
        ids: torch.Tensor,
    ) -> None:
        """No softcap."""
        self.check(logits, top_k, renormalize, softcap, bias, weights, ids)
        from hpcjit.ops.moe import _triton

        _triton.topk_softmax(self.op, logits, top_k, renormalize, softcap, bias, weights, ids)


def _softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax in which NaN weighs nothing, several +inf share, and a row without anything above -inf is all zero."""
    x = torch.where(x.isnan(), -torch.inf, x)
    largest = x.amax(-1, keepdim=True)
    e = torch.where(x == largest, 1, torch.exp(x - largest))
    e = torch.where(largest == -torch.inf, 0, e)
    return e / e.sum(-1, keepdim=True).clamp_min(1)


topk_softmax_op = TopkSoftmaxOp()
define(topk_softmax_op)


def topk_softmax(
    logits: torch.Tensor,
    top_k: int,
    *,
    renormalize: bool = False,
    softcap: float = 0.0,
    bias: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route every token: softmax over its experts' logits, and the `top_k` largest.

        x       = logits, or softcap * tanh(logits / softcap) if softcap > 0
        p       = softmax(x)                                     (float32)
        ids     = indices of the top_k largest logits, or p + bias with a bias, largest first
        weights = p[ids], or p[ids] / sum(p[ids]) with renormalize

    Args:
        logits: `[num_tokens, num_experts]`, bfloat16, float16 or float32, 1 to 1024 experts, experts contiguous.
        top_k: 1 to 32, and at most num_experts.
        renormalize: make the weights of a token add up to 1.
        softcap: at least 0; 0 is none.
        bias: None, or float32 `[num_experts]`, which decides the choice but does not enter the weights.
        weights: float32 `[num_tokens, top_k]`, receives the weights. A new tensor by default.
        ids: int32 `[num_tokens, top_k]`, receives the experts. A new tensor by default.
        backend: run this backend or fail.

    Returns:
        `(weights, ids)`. Equal scores go to the lowest id. NaN logits weigh 0 and are chosen last; the ids of a token are
        always different and in range. If no logit is above -inf all weights are 0. Bits repeat.

    Raises:
        ArgumentError: a wrong dtype, shape, stride or device, top_k or softcap out of range, a tensor that requires grad.

    Safe under CUDA graphs once the signature has run or been prewarmed.
    """
    require(TopkSoftmaxOp.op, "logits", logits, 2)
    if weights is None or ids is None:
        checks.integer(TopkSoftmaxOp.op, "top_k", top_k, low=1, high=min(MAX_TOP_K, logits.shape[1] or MAX_TOP_K))
    if weights is None:
        weights = logits.new_empty((logits.shape[0], top_k), dtype=torch.float32)
    if ids is None:
        ids = logits.new_empty((logits.shape[0], top_k), dtype=torch.int32)
    args = (logits, top_k, renormalize, softcap, bias, weights, ids)
    if torch.compiler.is_compiling():
        torch.ops.hpcjit.moe_topk_softmax(*args)
    elif backend is None:
        topk_softmax_op.fast(*args)
    else:
        topk_softmax_op(*args, backend=backend)
    return weights, ids
