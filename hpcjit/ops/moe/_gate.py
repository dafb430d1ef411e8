"""What the gates of a mixture of experts share: one template, one set of checks, one reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hpcjit import checks
from hpcjit.build import Config, Template
from hpcjit.errors import ArgumentError
from hpcjit.jit_op import NOTHING, JitOp, Plan
from hpcjit.ops import _peers
from hpcjit.ops._rows import AT_END, AT_START, TYPE_NAMES, vector_width
from hpcjit.ops._tensors import FLOATS, accumulation_dtype, require_rank
from hpcjit.spec import KernelBackend

MAX_EXPERTS = 1024
MAX_TOP_K = 32  # one lane of a warp keeps one winner
MAX_GROUPS = 32  # at least one lane for each
MAX_SHARED = 32
SMALLEST_CAP = 2.0**-126  # float32 divides by it
SCORINGS = ("sigmoid", "softmax")


@dataclass(frozen=True)
class GateConfig(Config):
    logits_t: str = "fp32"
    threads: int = 256
    per_lane: int = 8
    vec: int = 4
    top_k: int = 8
    num_groups: int = 1
    topk_groups: int = 1
    shared_experts: int = 0
    exact: bool = False
    sigmoid: bool = False
    renormalize: bool = True
    scaled: bool = False
    has_softcap: bool = False
    has_bias: bool = False
    has_valid: bool = False
    ranked: bool = True
    wide: bool = False
    prefetch: bool = False
    min_blocks: int = 1
    trigger: int = 0
    pdl: bool = True


GATE = Template(
    op="moe.gate",
    header="moe/gate_kernel.cuh",
    entry="hpcjit::moe::Gate",
    config=GateConfig,
    params=(
        "logits",
        "bias",
        "num_valid_tokens",
        "weights",
        "ids",
        "num_tokens",
        "num_experts",
        "logits_stride",
        "weights_stride",
        "ids_stride",
        "softcap",
        "scaling_factor",
    ),
)

_BLOCK_PER_SM = 132 * 8  # tokens, one a warp, from which every SM of an H200 has a block of 256 threads
_HALF_FULL = 4096  # tokens that take half of its warps
_MAX_RANKED = 16  # for more winners than half the lanes, the candidates of one of 32 lanes each soon exceed 32


class GateArgs(NamedTuple):
    """The arguments of any gate by name. Fewer than two groups, or all of them kept, are no groups."""

    logits: torch.Tensor
    top_k: int
    renormalize: bool
    scaling_factor: float
    num_shared_experts: int
    bias: torch.Tensor | None
    num_valid_tokens: torch.Tensor | None
    weights: torch.Tensor
    ids: torch.Tensor
    softcap: float = 0.0
    scoring: str = "softmax"
    num_groups: int = 1
    topk_groups: int = 1

    @property
    def grouped(self) -> bool:
        return self.topk_groups < self.num_groups


class GateOp(JitOp):
    """A gate's schema names its options; those that it lacks have the defaults of `GateArgs`."""

    trace_values = ("ids:histogram",)
    scoring = "softmax"

    def gate(self, *args: Any) -> GateArgs:
        if len(args) != len(self.arguments):
            raise TypeError(f"{self.op}: expected {len(self.arguments)} arguments, got {len(args)}")
        return GateArgs(**{"scoring": self.scoring} | dict(zip(self.arguments, args, strict=True)))

    def check(self, *args: Any) -> None:
        a = self.gate(*args)
        checks.tensor(self.op, "logits", a.logits, dtypes=FLOATS, min_ndim=2)
        if a.logits.ndim != 2 or not 1 <= a.logits.shape[1] <= MAX_EXPERTS:
            expected = f"[num_tokens, num_experts] of 1 to {MAX_EXPERTS} experts"
            raise ArgumentError(self.op, "logits", expected, checks.describe(a.logits))
        self._check_options(a)
        self._check_groups(a)
        self._check_tensors(a)

    def _check_options(self, a: GateArgs) -> None:
        checks.choice(self.op, "scoring", a.scoring, SCORINGS)
        checks.integer(self.op, "top_k", a.top_k, low=1, high=min(MAX_TOP_K, a.logits.shape[1]))
        checks.choice(self.op, "renormalize", a.renormalize, (False, True))
        checks.number(self.op, "softcap", a.softcap, low=0.0)
        if 0 < a.softcap < SMALLEST_CAP:
            raise ArgumentError(self.op, "softcap", f"0 or at least {SMALLEST_CAP:.3g}", a.softcap)
        checks.number(self.op, "scaling_factor", a.scaling_factor)
        checks.integer(self.op, "num_shared_experts", a.num_shared_experts, low=0, high=MAX_SHARED)

    def _check_groups(self, a: GateArgs) -> None:
        num_experts = a.logits.shape[1]
        checks.integer(self.op, "num_groups", a.num_groups, low=1, high=MAX_GROUPS)
        if num_experts % a.num_groups:
            raise ArgumentError(self.op, "num_groups", f"a divisor of the {num_experts} experts", a.num_groups)
        checks.integer(self.op, "topk_groups", a.topk_groups, low=1, high=a.num_groups)
        size = num_experts // a.num_groups
        if a.top_k > a.topk_groups * size:
            expected = f"at most the {a.topk_groups * size} experts of {a.topk_groups} groups of {size}"
            raise ArgumentError(self.op, "top_k", expected, a.top_k)

    def _check_tensors(self, a: GateArgs) -> None:
        num_tokens, num_experts = a.logits.shape
        if a.bias is not None:
            checks.tensor(self.op, "bias", a.bias, dtypes=(torch.float32,), shape=(num_experts,), like=a.logits)
        if a.num_valid_tokens is not None:
            int32 = (torch.int32,)
            checks.tensor(self.op, "num_valid_tokens", a.num_valid_tokens, dtypes=int32, shape=(1,), like=a.logits)
        columns = a.top_k + a.num_shared_experts
        for name, value, dtype in (("weights", a.weights, torch.float32), ("ids", a.ids, torch.int32)):
            checks.tensor(self.op, name, value, dtypes=(dtype,), shape=(num_tokens, columns), like=a.logits)
            checks.rows(self.op, name, value, written=True)
        checks.apart(self.op, "ids", a.ids, "weights", a.weights)
        checks.no_grad(self.op, logits=a.logits, bias=a.bias, weights=a.weights)

    def plan(self, *args: Any) -> Plan | str:
        a = self.gate(*args)
        num_tokens, num_experts = a.logits.shape
        if num_tokens == 0:
            return NOTHING
        values: dict[str, int | float | str] = {
            "num_tokens": num_tokens,
            "num_experts": num_experts,
            "logits_stride": checks.rows(self.op, "logits", a.logits)[1],
            "weights_stride": checks.rows(self.op, "weights", a.weights)[1],
            "ids_stride": checks.rows(self.op, "ids", a.ids)[1],
        }
        wide = max(value for value in values.values() if isinstance(value, int)) >= 2**31
        values |= {name: 0 for name in ("bias", "num_valid_tokens") if getattr(a, name) is None}
        if "softcap" not in self.arguments:
            values["softcap"] = 0.0
        return Plan(GATE, _config(a, int(values["logits_stride"]), wide), values)

    def reference(self, *args: Any) -> None:
        route(self.gate(*args))

    def forward_triton(self, *args: Any) -> None:
        """No softcap, groups, shared experts or padding."""
        self.check(*args)
        from hpcjit.ops.moe import _triton

        _triton.gate(self.op, self.gate(*args))

    def _refuse(self, backend: KernelBackend, a: GateArgs, *unsupported: str) -> None:
        """Refuse a call of a peer that has none of these options, and reads rows without gaps."""
        for name in unsupported:
            if getattr(a, name) != GateArgs._field_defaults.get(name, _UNUSED.get(name)):
                _peers.refuse(self.op, backend, f"it has no {name}")
        for name in ("logits", "bias", "weights", "ids"):
            value = getattr(a, name)
            if value is not None and not value.is_contiguous():
                _peers.refuse(self.op, backend, f"it takes contiguous tensors, '{name}' has strides {value.stride()}")


_UNUSED: dict[str, Any] = {"bias": None, "num_shared_experts": 0, "num_valid_tokens": None, "scaling_factor": 1.0}


def _config(a: GateArgs, logits_stride: int, wide: bool) -> GateConfig:
    num_tokens, num_experts = a.logits.shape
    groups = a.num_groups if a.grouped else 1
    group_lanes = 32 // (1 << (groups - 1).bit_length())
    size = num_experts // groups
    share = -(-size // group_lanes)  # experts of a lane
    placed = [(a.logits, logits_stride)] + ([] if a.bias is None else [(a.bias, 0)])
    vec = vector_width(size, a.logits.element_size(), placed)
    while vec > share:
        vec //= 2
    per_lane = -(-share // vec) * vec
    chosen_from = a.topk_groups * group_lanes if a.grouped else 32  # lanes
    few = num_tokens <= _BLOCK_PER_SM
    return GateConfig(
        TYPE_NAMES[a.logits.dtype],
        threads=32 if few else 256,  # few: all SMs at work, and a block ends with its token
        per_lane=per_lane,
        vec=vec,
        top_k=a.top_k,
        num_groups=groups,
        topk_groups=a.topk_groups if a.grouped else 1,
        shared_experts=a.num_shared_experts,
        exact=per_lane * 32 == num_experts,
        sigmoid=a.scoring == "sigmoid",
        renormalize=bool(a.renormalize),
        scaled=a.scaling_factor != 1.0,
        has_softcap=a.softcap > 0,
        has_bias=a.bias is not None,
        has_valid=a.num_valid_tokens is not None,
        ranked=a.top_k <= min(_MAX_RANKED, chosen_from // 2),
        wide=wide,
        prefetch=few,
        min_blocks=1 if few else _min_blocks(a, per_lane),
        # A dependent that waits beside working blocks slows them, unless all room is taken.
        trigger=AT_START if few or num_tokens > _HALF_FULL else AT_END,
    )


def _min_blocks(a: GateArgs, per_lane: int) -> int:
    """Of 256 threads on an SM: 8 are all that it can hold, with 32 registers each; 6 leave 40. As many as do not spill."""
    if a.softcap > 0 or per_lane > 12:
        return 1
    crowded = a.grouped and (a.num_shared_experts or a.num_valid_tokens is not None)
    return 8 if per_lane <= 8 and not crowded else 6


# --- the reference --------------------------------------------------------------------------------------------------


def route(a: GateArgs) -> None:
    """Scores of all experts, the best of them by a stable sort, their weights."""
    x = a.logits.to(accumulation_dtype(a.logits.dtype))
    if a.scoring == "sigmoid":
        scores = torch.where(x.isnan(), 0, torch.sigmoid(x))
    else:
        scores = _softmax(a.softcap * torch.tanh(x / a.softcap) if a.softcap > 0 else x)
    # By the logits themselves: a sigmoid or a softcap can round neighbours to one value.
    choice = x if a.bias is None else torch.where(x.isnan(), x, scores + a.bias)
    ids = _best(choice, _dropped(choice, a) if a.grouped else None, a.top_k)
    weights = scores.gather(-1, ids)
    if a.renormalize:
        total = weights.sum(-1, keepdim=True)
        weights = torch.where(total > 0, weights / total, 0)
    _store(a, weights * a.scaling_factor, ids)


def _softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax in which NaN weighs nothing, several +inf share, and a row without anything above -inf is all zero."""
    x = torch.where(x.isnan(), -torch.inf, x)
    largest = x.amax(-1, keepdim=True)
    e = torch.where(x == largest, 1, torch.exp(x - largest))
    e = torch.where(largest == -torch.inf, 0, e)
    return e / e.sum(-1, keepdim=True).clamp_min(1)


def _dropped(choice: torch.Tensor, a: GateArgs) -> torch.Tensor:
    """Whether an expert's group is not among the best ones."""
    groups = torch.where(choice.isnan(), -torch.inf, choice).unflatten(-1, (a.num_groups, -1))
    best = groups.topk(min(2, groups.shape[-1]) if a.bias is not None else 1).values.sum(-1)
    best = torch.where(best.isnan(), -torch.inf, best)
    kept = best.sort(dim=-1, descending=True, stable=True).indices[:, : a.topk_groups]
    dropped = torch.ones_like(best, dtype=torch.bool).scatter(-1, kept, False)
    return dropped.repeat_interleave(groups.shape[-1], dim=-1)


def _best(score: torch.Tensor, dropped: torch.Tensor | None, count: int) -> torch.Tensor:
    """Indices of the largest scores, equal ones in the order of their ids; then those of NaN; what was dropped comes last."""
    nan = score.isnan()
    order = torch.where(nan, -torch.inf, score).sort(dim=-1, descending=True, stable=True).indices
    kind = nan.to(torch.uint8) if dropped is None else torch.where(dropped, 2, nan.to(torch.uint8))
    return order.gather(-1, kind.gather(-1, order).sort(dim=-1, stable=True).indices)[:, :count]


def _store(a: GateArgs, weights: torch.Tensor, ids: torch.Tensor) -> None:
    num_tokens, num_experts = a.logits.shape
    if a.num_shared_experts:
        shared = num_experts + torch.arange(a.num_shared_experts, device=ids.device)
        ids = torch.cat([ids, shared.expand(num_tokens, -1)], dim=-1)
        weights = torch.cat([weights, weights.new_ones(num_tokens, a.num_shared_experts)], dim=-1)
    if a.num_valid_tokens is not None:
        padding = (torch.arange(num_tokens, device=ids.device) >= a.num_valid_tokens).unsqueeze(-1)
        ids, weights = torch.where(padding, -1, ids), torch.where(padding, 0, weights)
    a.weights.copy_(weights)
    a.ids.copy_(ids)


# --- the public functions -------------------------------------------------------------------------------------------


def outputs(
    op: str,
    logits: torch.Tensor,
    top_k: int,
    num_shared_experts: int,
    weights: torch.Tensor | None,
    ids: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The results' tensors, new where the caller gave none."""
    require_rank(op, "logits", logits, 2)
    if weights is None or ids is None:
        checks.integer(op, "top_k", top_k, low=1, high=min(MAX_TOP_K, logits.shape[1] or MAX_TOP_K))
        checks.integer(op, "num_shared_experts", num_shared_experts, low=0, high=MAX_SHARED)
        shape = (logits.shape[0], top_k + num_shared_experts)
    if weights is None:
        weights = logits.new_empty(shape, dtype=torch.float32)
    if ids is None:
        ids = logits.new_empty(shape, dtype=torch.int32)
    return weights, ids
