"""Tensors of more than 2^31 elements: an offset in 32 bits would read or write somewhere else.

Only some rows hold values: the first, the last, and those on both sides of element 2^31. The rule is checked on them.
"""

from __future__ import annotations

import pytest
import torch
from op_tools import operator, same_bits

from hpcjit import numerics
from hpcjit.cases import Maker
from hpcjit.ops.gemm import router_gemm
from hpcjit.ops.kvcache import reshape_and_cache
from hpcjit.ops.moe import moe_align_block_size, topk_softmax
from hpcjit.ops.quantization import per_tensor_quant_fp8

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

BF16, FP8, FP32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32


@pytest.fixture(autouse=True)
def room():
    """Room for the largest of these tests, given back afterwards."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free GPU memory")
    yield
    torch.cuda.empty_cache()


@pytest.fixture
def gpu() -> Maker:
    return Maker("cuda")


def rows_around(columns: int) -> tuple[int, torch.Tensor]:
    """How many rows of so many columns reach past 2^31 elements, and which of them to look at."""
    middle = 2**31 // columns
    count = middle + 5
    return count, torch.tensor([0, 1, middle - 1, middle, middle + 1, count - 1], device="cuda")


def sparse(gpu: Maker, count: int, columns: int, rows: torch.Tensor, dtype: torch.dtype = BF16) -> torch.Tensor:
    x = torch.zeros(count, columns, dtype=dtype, device="cuda")
    x[rows] = gpu.normal(len(rows), columns, dtype=dtype)
    return x


def check_rows(op: str, args, rows: torch.Tensor) -> None:
    """Run the JIT backend on `args`, and the references on those rows of them alone."""
    owner = operator(op)
    count = args[0].shape[0]

    def take(value):
        return value[rows] if isinstance(value, torch.Tensor) and value.shape[0] == count else value

    native = tuple(take(value) for value in args)
    exact = numerics.upcast(native)
    owner.forward_jit(*args)
    actual = tuple(take(value) for value in args)
    owner.reference(*native)
    owner.reference(*exact)
    named = [dict(zip(owner.arguments, values, strict=True)) for values in (actual, native, exact)]
    for deviation in numerics.compare(*named, owner.mutated, owner.tensor_core_sums):
        assert deviation.ok, str(deviation)


def test_rmsnorm(gpu):
    count, rows = rows_around(4096)
    x = sparse(gpu, count, 4096, rows)
    check_rows("layernorm.rmsnorm", (x, gpu.normal(4096), 1e-6, torch.empty_like(x)), rows)


def test_fused_add_rmsnorm(gpu):
    count, rows = rows_around(8192)
    args = sparse(gpu, count, 8192, rows), sparse(gpu, count, 8192, rows), gpu.normal(8192), 1e-6
    check_rows("layernorm.fused_add_rmsnorm", args, rows)


def test_rmsnorm_quant_fp8(gpu):
    count, rows = rows_around(4096)
    x, out = sparse(gpu, count, 4096, rows), torch.empty(count, 4096, dtype=FP8, device="cuda")
    scale = torch.empty(count, 1, device="cuda")
    check_rows("layernorm.rmsnorm_quant_fp8", (x, None, gpu.normal(4096), 1e-6, True, out, scale), rows)


def test_qk_norm(gpu):
    """Views of one fused projection: strides carry the size."""
    count, rows = rows_around(48 * 128)
    qkv = sparse(gpu, count, 48 * 128, rows).view(count, 48, 128)
    check_rows("layernorm.qk_norm", (qkv[:, :32], qkv[:, 32:40], gpu.normal(128), gpu.normal(128), 1e-6), rows)


def test_silu_and_mul(gpu):
    count, rows = rows_around(4096)
    args = sparse(gpu, count, 8192, rows), torch.empty(count, 4096, dtype=BF16, device="cuda")
    check_rows("activation.silu_and_mul", args, rows)


@pytest.mark.parametrize("group_size", [0, 128])
def test_silu_and_mul_quant_fp8(gpu, group_size):
    count, rows = rows_around(4096)
    x, out = sparse(gpu, count, 8192, rows), torch.empty(count, 4096, dtype=FP8, device="cuda")
    scale = torch.empty(count, 4096 // group_size if group_size else 1, device="cuda")
    check_rows("activation.silu_and_mul_quant_fp8", (x, True, group_size, False, out, scale), rows)


def test_per_token_quant_fp8(gpu):
    count, rows = rows_around(4096)
    x, out = sparse(gpu, count, 4096, rows), torch.empty(count, 4096, dtype=FP8, device="cuda")
    check_rows("quantization.per_token_quant_fp8", (x, out, torch.empty(count, 1, device="cuda")), rows)


def test_per_token_group_quant_fp8(gpu):
    """Groups of 16: scales alone are 2^27, column-major, past 2^31 in bytes of the input many times."""
    count, rows = rows_around(4096)
    x, out = sparse(gpu, count, 4096, rows), torch.empty(count, 4096, dtype=FP8, device="cuda")
    scale = torch.empty(256, count, device="cuda").t()
    check_rows("quantization.per_token_group_quant_fp8", (x, 16, False, out, scale), rows)


@pytest.mark.parametrize("pad", [0, 8])
def test_per_tensor_quant_fp8(gpu, pad):
    """The largest element is the very last; with gaps between rows (pad) and as one flat list."""
    count, rows = rows_around(4096)
    x = torch.zeros(count, 4096 + pad, dtype=BF16, device="cuda")[:, :4096]
    x[rows] = gpu.normal(len(rows), 4096)
    x[-1, -1] = 1000.0
    out, scale = per_tensor_quant_fp8(x)
    small, same = per_tensor_quant_fp8(x[rows].contiguous())
    assert torch.equal(scale, same)
    assert same_bits(out[rows], small)
    assert float(out[-1, -1]) == 448


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=str)
def test_reshape_and_cache(gpu, dtype):
    """Slots on both sides of element 2^31 and the last one; page and slot products need 64 bits."""
    page, heads, dim = 64, 8, 128
    pages = 2**31 // (page * heads * dim) + 3
    key_cache = torch.zeros(pages, page, heads, dim, dtype=dtype, device="cuda")
    value_cache = torch.zeros_like(key_cache)
    middle = 2**31 // (heads * dim)
    slots = torch.tensor([0, middle - 1, middle, pages * page - 1, pages * page, -1], device="cuda")
    key, value = gpu.normal(6, heads, dim), gpu.normal(6, heads, dim)
    reshape_and_cache(key, value, key_cache, value_cache, slots)
    for cache, source in ((key_cache, key), (value_cache, value)):
        flat = cache.view(-1, heads, dim)
        expected = source[:4] if dtype == BF16 else source[:4].float().to(dtype)
        assert same_bits(flat[slots[:4]], expected)
        written = flat.view(torch.uint8 if dtype == FP8 else torch.int16).flatten(1).any(-1)
        assert written.nonzero().flatten().tolist() == slots[:4].tolist()


def test_topk_softmax(gpu):
    count, rows = rows_around(1024)
    logits = sparse(gpu, count, 1024, rows)
    weights, ids = topk_softmax(logits, 4)
    small_weights, small_ids = topk_softmax(logits[rows].contiguous(), 4)
    assert same_bits(weights[rows], small_weights)
    assert torch.equal(ids[rows], small_ids)
    assert (ids[2] == torch.arange(4, device="cuda")).all()


def test_router_gemm_tokens(gpu):
    count, rows = rows_around(4096)
    x, weight = sparse(gpu, count, 4096, rows), gpu.normal(16, 4096, dtype=FP32, std=0.02)
    args = x, weight, "accurate", torch.empty(count, 16, dtype=FP32, device="cuda")
    check_rows("gemm.router_gemm", args, rows)


def test_router_gemm_experts(gpu):
    """More experts than any model has: the row products of the weights need 64 bits."""
    count, rows = rows_around(4096)
    weight, x = sparse(gpu, count, 4096, rows, FP32), gpu.normal(3, 4096)
    y = router_gemm(x, weight)
    assert numerics.error(y[:, rows], x.double() @ weight[rows].double().t()) < 2.0**-19
    assert int(y.count_nonzero()) == y[:, rows].count_nonzero()


def test_gate_of_distant_rows(gpu):
    """A row stride of 2^31: row offsets need more than 32 bits."""
    logits = torch.zeros(2**32 + 64, dtype=BF16, device="cuda").as_strided((3, 64), (2**31, 1))
    logits.copy_(gpu.normal(3, 64))
    found, expected = topk_softmax(logits, 4), topk_softmax(logits.contiguous(), 4)
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


def test_moe_sum_reduce(gpu):
    count, rows = rows_around(8 * 4096)
    x = torch.zeros(count, 8, 4096, dtype=BF16, device="cuda")
    x[rows] = gpu.normal(len(rows), 8, 4096)
    args = x, 2.0, torch.rand(count, 8, device="cuda"), torch.empty(count, 4096, dtype=BF16, device="cuda")
    check_rows("moe.moe_sum_reduce", args, rows)


def test_moe_align_block_size(gpu):
    """2^27 pairs: chunks of a million, and counts past 16 bits."""
    ids = gpu.integers(-1, 64, 2**24, 8)
    sorted_token_ids, expert_ids, post = moe_align_block_size(ids, 64, 128)
    flat = ids.flatten()
    count = int(post)
    assert count == int(sum(-(-int((flat == e).sum()) // 128) * 128 for e in range(64)))
    pairs = sorted_token_ids[:count].view(-1, 128)
    real = pairs < flat.numel()
    assert torch.equal(real.sum(), (flat >= 0).sum())
    owner = flat[pairs.clamp(max=flat.numel() - 1).long()]
    assert torch.equal(owner[real], expert_ids[: count // 128].unsqueeze(1).expand_as(owner)[real])
    steps = pairs.flatten().diff()
    assert (steps[(expert_ids[: count // 128].repeat_interleave(128).diff() == 0)] >= 0).all(), "in increasing order"
    assert (sorted_token_ids[count:] == flat.numel()).all()
    assert (expert_ids[count // 128 :] == -1).all()
