"""RMSNorm and LayerNorm, also with a residual added or the result quantised."""

from hpcjit.ops._lazy import lazy
from hpcjit.ops._peers import FLASHINFER, SGLANG, TRITON, TRITON_FP8
from hpcjit.registry import register_fused_op
from hpcjit.spec import CapabilityRequirement, KernelBackend

_JIT = frozenset({CapabilityRequirement.cuda(min_sm=(8, 0))})

_MODULES = {
    "rmsnorm": "_rmsnorm",
    "gemma_rmsnorm": "_rmsnorm",
    "fused_add_rmsnorm": "_fused_add_rmsnorm",
    "gemma_fused_add_rmsnorm": "_fused_add_rmsnorm",
    "layernorm": "_layernorm",
    "rmsnorm_quant_fp8": "_rmsnorm_quant_fp8",
    "qk_norm": "_qk_norm",
}
_PEERS = {
    "rmsnorm": FLASHINFER | SGLANG | TRITON,
    "gemma_rmsnorm": FLASHINFER | TRITON,
    "fused_add_rmsnorm": FLASHINFER | SGLANG,
    "gemma_fused_add_rmsnorm": FLASHINFER,
    "layernorm": FLASHINFER,
    "rmsnorm_quant_fp8": TRITON_FP8,
    "qk_norm": SGLANG | TRITON,
}

for _name, _module in _MODULES.items():
    _backends = {KernelBackend.JIT: _JIT} | _PEERS.get(_name, {})
    register_fused_op(f"layernorm.{_name}", f"{__name__}.{_module}", f"{_name}_op", _backends)

__getattr__, __dir__, __all__ = lazy(__name__, _MODULES)
