"""Mixture of experts: routing, permutation and the expert products."""

from hpcjit.ops._lazy import lazy
from hpcjit.ops._peers import DEEPGEMM, FLASHINFER, SGLANG, TRITON, TRITON_FP8
from hpcjit.registry import register_fused_op
from hpcjit.spec import CapabilityRequirement, KernelBackend

_JIT = {KernelBackend.JIT: frozenset({CapabilityRequirement.cuda(min_sm=(8, 0))})}

# Warpgroup products are Hopper's alone.
_HOPPER = frozenset({CapabilityRequirement.cuda(min_sm=(9, 0), max_sm=(9, 0))})

_BACKENDS = {
    "topk_softmax": _JIT | SGLANG | TRITON,
    "topk_sigmoid": _JIT | SGLANG | TRITON,
    "grouped_topk": _JIT | FLASHINFER,
    "router_topk": {KernelBackend.JIT: _HOPPER, KernelBackend.JIT_STEPS: _HOPPER},
    "moe_align_block_size": _JIT | SGLANG,
    "moe_sum_reduce": _JIT | SGLANG | TRITON,
    "fused_moe": {KernelBackend.JIT: _HOPPER} | DEEPGEMM | TRITON_FP8,
    "moe_plan": _JIT,
    "moe_reduce": _JIT | TRITON,
    "grouped_gemm": {KernelBackend.JIT: _HOPPER},
}

for _name, _backends in _BACKENDS.items():
    register_fused_op(f"moe.{_name}", f"{__name__}._{_name}", f"{_name}_op", _backends)

__getattr__, __dir__, __all__ = lazy(__name__, {name: f"_{name}" for name in _BACKENDS})
