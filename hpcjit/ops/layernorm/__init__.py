"""RMSNorm and LayerNorm, also with a residual added or the result quantised."""

from hpcjit.ops._lazy import lazy
from hpcjit.registry import register_fused_op
from hpcjit.spec import CapabilityRequirement, KernelBackend

_JIT = frozenset({CapabilityRequirement.cuda(min_sm=(8, 0))})

for _name, _module in {
    "rmsnorm": "_rmsnorm",
    "gemma_rmsnorm": "_rmsnorm",
    "fused_add_rmsnorm": "_fused_add_rmsnorm",
    "gemma_fused_add_rmsnorm": "_fused_add_rmsnorm",
    "layernorm": "_layernorm",
    "rmsnorm_quant_fp8": "_rmsnorm_quant_fp8",
    "qk_norm": "_qk_norm",
}.items():
    register_fused_op(f"layernorm.{_name}", f"{__name__}.{_module}", f"{_name}_op", {KernelBackend.JIT: _JIT})

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "rmsnorm": "_rmsnorm",
        "gemma_rmsnorm": "_rmsnorm",
        "fused_add_rmsnorm": "_fused_add_rmsnorm",
        "gemma_fused_add_rmsnorm": "_fused_add_rmsnorm",
        "layernorm": "_layernorm",
        "rmsnorm_quant_fp8": "_rmsnorm_quant_fp8",
        "qk_norm": "_qk_norm",
    },
)
