"""Contents of the KV cache: write, copy, quantise, transfer."""

from hpcjit.ops._lazy import lazy
from hpcjit.ops._peers import TRITON_FP8
from hpcjit.registry import register_fused_op
from hpcjit.spec import CapabilityRequirement, KernelBackend

_JIT = frozenset({CapabilityRequirement.cuda(min_sm=(8, 0))})

_BACKENDS = {KernelBackend.JIT: _JIT} | TRITON_FP8

register_fused_op("kvcache.reshape_and_cache", f"{__name__}._reshape_and_cache", "reshape_and_cache_op", _BACKENDS)

__getattr__, __dir__, __all__ = lazy(__name__, {"reshape_and_cache": "_reshape_and_cache"})
