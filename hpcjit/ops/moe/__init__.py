"""Mixture of experts: routing, permutation and the expert products."""

from hpcjit.ops._lazy import lazy
from hpcjit.ops._peers import SGLANG, TRITON
from hpcjit.registry import register_fused_op
from hpcjit.spec import CapabilityRequirement, KernelBackend

_JIT = frozenset({CapabilityRequirement.cuda(min_sm=(8, 0))})

_BACKENDS = {KernelBackend.JIT: _JIT} | SGLANG | TRITON

register_fused_op("moe.topk_softmax", f"{__name__}._topk_softmax", "topk_softmax_op", _BACKENDS)

__getattr__, __dir__, __all__ = lazy(__name__, {"topk_softmax": "_topk_softmax"})
