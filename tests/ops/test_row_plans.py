"""What the row kernels pull into L2 before they wait: one request a row only where rows are whole multiples of 16 bytes."""

from __future__ import annotations

import pytest
import torch

from hpcjit import build
from hpcjit.cases import Maker
from hpcjit.ops._rows import LINES, NO_PREFETCH, WHOLE_ROW
from hpcjit.replay import operator


@pytest.fixture
def m() -> Maker:
    return Maker("meta")


def norm(m: Maker, tokens: int, hidden: int, *, residual: bool = False, dtype: torch.dtype = torch.bfloat16):
    x, weight = m.normal(tokens, hidden, dtype=dtype), m.normal(hidden, dtype=dtype)
    name = "layernorm.fused_add_rmsnorm" if residual else "layernorm.rmsnorm"
    args = (x, torch.empty_like(x), weight, 1e-6) if residual else (x, weight, 1e-6, torch.empty_like(x))
    return operator(name).plan(*args)


def compiles(plan, arch: str):
    """Older GPUs have no such request."""
    assert build.compile_only(plan.template, plan.config, arch).manifest["spill_bytes"] == 0


class TestNorm:
    @pytest.mark.parametrize("hidden", [4096, 7168, 16384])
    def test_many_rows_with_a_residual(self, m: Maker, hidden: int):
        assert norm(m, 2048, hidden, residual=True).config.prefetch == WHOLE_ROW

    @pytest.mark.parametrize("hidden", [4097, 4098, 4100])
    def test_rows_of_no_whole_16_bytes(self, m: Maker, hidden: int):
        assert norm(m, 2048, hidden, residual=True).config.prefetch == NO_PREFETCH

    def test_few_rows(self, m: Maker):
        assert norm(m, 32, 4096, residual=True).config.prefetch == LINES

    def test_rows_that_share_a_block(self, m: Maker):
        assert norm(m, 16384, 1024, residual=True).config.prefetch == NO_PREFETCH

    def test_rows_that_no_block_holds(self, m: Maker):
        config = norm(m, 64, 65536, residual=True, dtype=torch.float32).config
        assert (config.vecs_per_thread, config.prefetch) == (0, NO_PREFETCH)

    @pytest.mark.parametrize("residual", [False, True])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("hidden", [*range(4089, 4106), 8 * 1024, 8 * 1024 + 4, 65528])
    def test_always_whole(self, m: Maker, hidden: int, dtype: torch.dtype, residual: bool):
        config = norm(m, 2048, hidden, residual=residual, dtype=dtype).config
        assert config.prefetch != WHOLE_ROW or (hidden * dtype.itemsize % 16 == 0 and config.vec * dtype.itemsize == 16)

    @pytest.mark.slow
    @pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
    def test_compiles(self, m: Maker, arch: str):
        compiles(norm(m, 2048, 4096, residual=True), arch)


class TestPerTokenQuant:
    @pytest.mark.slow
    @pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
    def test_compiles(self, m: Maker, arch: str):
        compiles(self.quant(m, 2048, 4096), arch)

    def quant(self, m: Maker, tokens: int, hidden: int):
        x = m.normal(tokens, hidden)
        out, scale = m.poison(tokens, hidden, dtype=torch.float8_e4m3fn), m.poison(tokens, dtype=torch.float32)
        return operator("quantization.per_token_quant_fp8").plan(x, out, scale)

    def test_many_rows(self, m: Maker):
        assert self.quant(m, 2048, 4096).config.prefetch_row

    @pytest.mark.parametrize(("tokens", "hidden"), [(32, 4096), (2048, 4100), (65536, 512)])
    def test_few_odd_or_short_rows(self, m: Maker, tokens: int, hidden: int):
        assert not self.quant(m, tokens, hidden).config.prefetch_row
