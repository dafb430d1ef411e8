"""RMSNorm of every head of queries and keys, in place."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hpcjit import checks
from hpcjit.build import Config, Template
from hpcjit.errors import ArgumentError, ArgumentTypeError
from hpcjit.fused_op import define
from hpcjit.jit_op import NOTHING, JitOp, Plan
from hpcjit.ops import _peers
from hpcjit.ops._rows import TYPE_NAMES, vector_width
from hpcjit.ops._tensors import FLOATS, accumulation_dtype, compiling, distinct

_MAX_VECS = 8  # of a lane; a longer head is read twice
_FEW_LANES = 2**18  # below, more threads in flight are worth more than more loads per thread


@dataclass(frozen=True)
class QkNormConfig(Config):
    input_t: str = "bf16"
    weight_t: str = "bf16"
    threads: int = 256
    lanes: int = 16
    vec: int = 8
    vecs_per_lane: int = 1
    exact: bool = True
    heads_per_group: int = 1
    pdl: bool = True


QK_NORM = Template(
    op="layernorm.qk_norm",
    header="layernorm/qk_norm.cuh",
    entry="hpcjit::layernorm::QkNorm",
    config=QkNormConfig,
    params=(
        *("q", "k", "q_weight", "k_weight", "num_tokens", "num_q_heads", "num_k_heads", "head_dim"),
        *("q_token_stride", "q_head_stride", "k_token_stride", "k_head_stride", "eps"),
    ),
)


class QkNormOp(JitOp):
    op = "layernorm.qk_norm"
    schema = "(Tensor(a!) q, Tensor(b!) k, Tensor q_weight, Tensor k_weight, float eps) -> ()"

    def check(
        self, q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float
    ) -> None:
        checks.tensor(self.op, "q", q, dtypes=FLOATS, min_ndim=3)
        if q.ndim != 3 or 0 in q.shape[1:]:
            raise ArgumentError(self.op, "q", "[num_tokens, num_q_heads, head_dim]", checks.describe(q))
        checks.tensor(self.op, "k", k, dtypes=(q.dtype,), min_ndim=3, like=q)
        if k.ndim != 3 or k.shape[0] != q.shape[0] or k.shape[2] != q.shape[2] or k.shape[1] == 0:
            expected = f"[{q.shape[0]}, num_k_heads, {q.shape[2]}] like q"
            raise ArgumentError(self.op, "k", expected, checks.describe(k))
        distinct(self.op, "q", q)
        distinct(self.op, "k", k)
        checks.apart(self.op, "k", k, "q", q)
        for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
            checks.tensor(self.op, name, weight, dtypes=(q.dtype, torch.float32), shape=q.shape[2:], like=q)
        if k_weight.dtype != q_weight.dtype:
            raise ArgumentTypeError(self.op, "k_weight", f"{q_weight.dtype} like q_weight", checks.describe(k_weight))
        checks.number(self.op, "eps", eps, low=0.0)
        checks.no_grad(self.op, q=q, k=k, q_weight=q_weight, k_weight=k_weight)

    def plan(
        self, q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float
    ) -> Plan | str:
        num_tokens, num_q_heads, head_dim = q.shape
        if num_tokens == 0:
            return NOTHING
        placed = [(x, x.stride(axis) if x.shape[axis] > 1 else 0) for x in (q, k) for axis in (0, 1)]
        vec = vector_width(head_dim, q.element_size(), [*placed, (q_weight, 0), (k_weight, 0)])
        num_vecs = head_dim // vec
        lanes = min(32, 1 << (num_vecs - 1).bit_length())
        vecs = -(-num_vecs // lanes)
        if vecs > _MAX_VECS:
            vecs = 0
        many = num_tokens * (num_q_heads + k.shape[1]) * lanes > _FEW_LANES
        config = QkNormConfig(
            TYPE_NAMES[q.dtype],
            TYPE_NAMES[q_weight.dtype],
            lanes=lanes,
            vec=vec,
            vecs_per_lane=vecs,
            exact=vecs * lanes == num_vecs,
            heads_per_group=2 if many and vecs == 1 else 1,
        )
        values = {
            "num_tokens": num_tokens,
            "num_q_heads": num_q_heads,
            "num_k_heads": k.shape[1],
            "head_dim": head_dim,
            "q_token_stride": q.stride(0),
            "q_head_stride": q.stride(1),
            "k_token_stride": k.stride(0),
            "k_head_stride": k.stride(1),
        }
        return Plan(QK_NORM, config, values)

    def reference(
        self, q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float
    ) -> None:
        for heads, weight in ((q, q_weight), (k, k_weight)):
            x = heads.to(accumulation_dtype(heads.dtype))
            heads.copy_(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(x.dtype))

    def forward_aot(
        self, q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float
    ) -> None:
        self.check(q, k, q_weight, k_weight, eps)
        _peers.sglang("layernorm.norm", "fused_inplace_qknorm")(q, k, q_weight, k_weight, eps)

    def forward_triton(
        self, q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float
    ) -> None:
        self.check(q, k, q_weight, k_weight, eps)
        from hpcjit.ops.layernorm import _triton

        _triton.qk_norm(self.op, q, k, q_weight, k_weight, eps)


qk_norm_op = QkNormOp()
define(qk_norm_op)


def qk_norm(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    backend: str | None = None,
) -> None:
    """RMSNorm of every head of the queries and the keys, in place and in one launch.

        q[t, h, :] = q[t, h, :] * rsqrt(mean(q[t, h, :]^2) + eps) * q_weight        likewise k with k_weight

    Args:
        q: `[num_tokens, num_q_heads, head_dim]`, bfloat16, float16 or float32; any token and head strides, such as those of
            a view of a fused QKV projection. A head_dim of 64, 128, 256, 512 or 1024 is fast; any other works.
        k: `[num_tokens, num_k_heads, head_dim]`, dtype of `q`.
        q_weight: `[head_dim]`, the dtype of `q` or float32, contiguous.
        k_weight: like `q_weight`.
        eps: added to the mean square; at least 0.
        backend: run this backend or fail.

    Raises:
        ArgumentError: a wrong dtype, shape, stride or device, or a tensor that requires grad.

    Computed in float32 and rounded once; bits repeat. Safe under CUDA graphs once the signature has run or been prewarmed.
    Method: Henry et al., 2020, with the norm of Zhang and Sennrich, 2019.
    """
    if compiling("layernorm.qk_norm", backend):
        torch.ops.hpcjit.layernorm_qk_norm(q, k, q_weight, k_weight, eps)
    elif backend is None:
        qk_norm_op.fast(q, k, q_weight, k_weight, eps)
    else:
        qk_norm_op(q, k, q_weight, k_weight, eps, backend=backend)
