"""Activations and gated activations, also when they quantise their result."""

from hpcjit.ops._lazy import lazy
from hpcjit.ops._peers import FLASHINFER, SGLANG, TRITON_FP8
from hpcjit.registry import register_fused_op
from hpcjit.spec import CapabilityRequirement, KernelBackend

_JIT = frozenset({CapabilityRequirement.cuda(min_sm=(8, 0))})
_MODULES = {
    "silu_and_mul": "_gated",
    "gelu_and_mul": "_gated",
    "gelu_tanh_and_mul": "_gated",
    "silu_and_mul_quant_fp8": "_silu_and_mul_quant_fp8",
}

_PEERS = {_name: FLASHINFER | SGLANG for _name, _module in _MODULES.items() if _module == "_gated"}
_PEERS["silu_and_mul_quant_fp8"] = TRITON_FP8

for _name, _module in _MODULES.items():
    _backends = {KernelBackend.JIT: _JIT} | _PEERS.get(_name, {})
    register_fused_op(f"activation.{_name}", f"{__name__}.{_module}", f"{_name}_op", _backends)

__getattr__, __dir__, __all__ = lazy(__name__, _MODULES)
