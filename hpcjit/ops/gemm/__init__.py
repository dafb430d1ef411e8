"""Matrix products, dense and scaled."""

from hpcjit.ops._lazy import lazy
from hpcjit.ops._peers import CUBLAS_TF32, TRITON
from hpcjit.registry import register_fused_op
from hpcjit.spec import CapabilityRequirement, KernelBackend

# Warpgroup products are Hopper's alone.
_JIT = {KernelBackend.JIT: frozenset({CapabilityRequirement.cuda(min_sm=(9, 0), max_sm=(9, 0))})}

register_fused_op("gemm.router_gemm", f"{__name__}._router_gemm", "router_gemm_op", _JIT | CUBLAS_TF32 | TRITON)
register_fused_op("gemm.gemm_bf16x2", f"{__name__}._gemm_bf16x2", "gemm_bf16x2_op", _JIT)

__getattr__, __dir__, _ = lazy(
    __name__,
    {"router_gemm": "_router_gemm", "gemm_bf16x2": "_gemm_bf16x2", "prepare_router_weight": "_gemm_bf16x2"},
)
__all__ = ["gemm_bf16x2", "router_gemm"]  # the operators
