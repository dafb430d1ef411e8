"""Attention, and the rotary embedding and query-key norms fused with it."""

from hpcjit.ops._lazy import lazy
from hpcjit.ops._peers import FLASH_ATTN, FLASHINFER, FLASHINFER_XQA, SGLANG, TRITON, TRITON_FP8
from hpcjit.registry import register_fused_op
from hpcjit.spec import CapabilityRequirement, KernelBackend

# The kernels are shaped for Hopper's shared memory.
_JIT = frozenset({CapabilityRequirement.cuda(min_sm=(9, 0))})

_DECODE = {KernelBackend.JIT: _JIT} | TRITON_FP8 | FLASHINFER | FLASHINFER_XQA | FLASH_ATTN

register_fused_op("attention.decode", f"{__name__}._decode", "decode_op", _DECODE)

_MERGE_STATE = {KernelBackend.JIT: frozenset({CapabilityRequirement.cuda(min_sm=(8, 0))})} | SGLANG | TRITON

register_fused_op("attention.merge_state", f"{__name__}._merge_state", "merge_state_op", _MERGE_STATE)

__getattr__, __dir__, _ = lazy(
    __name__, {"decode": "_decode", "merge_state": "_merge_state", "decode_workspace_bytes": "_decode_memory"}
)
__all__ = ["decode", "merge_state"]  # the operators
