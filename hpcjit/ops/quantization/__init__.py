"""Conversion to FP8 and other narrow formats."""

from hpcjit.ops._lazy import lazy
from hpcjit.ops._peers import SGLANG, TRITON_FP8
from hpcjit.registry import register_fused_op
from hpcjit.spec import CapabilityRequirement, KernelBackend

_JIT = frozenset({CapabilityRequirement.cuda(min_sm=(8, 0))})
_MODULES = {
    "per_token_quant_fp8": "_per_token_quant_fp8",
    "per_token_group_quant_fp8": "_per_token_group_quant_fp8",
    "per_tensor_quant_fp8": "_per_tensor_quant_fp8",
}

_BASELINES = {"per_token_quant_fp8": TRITON_FP8}

for _name, _module in _MODULES.items():
    _backends = {KernelBackend.JIT: _JIT} | SGLANG | _BASELINES.get(_name, {})
    register_fused_op(f"quantization.{_name}", f"{__name__}.{_module}", f"{_name}_op", _backends)

__getattr__, __dir__, __all__ = lazy(__name__, _MODULES)
