"""attention.decode: plans of every supported combination fit the kernel's header; sizes past 32 bits. No GPU."""

from __future__ import annotations

import dataclasses
from itertools import cycle, product

import pytest
import torch
from decode_tools import BF16, FP8, FP16, FP32

from hpcjit import build
from hpcjit.jit_op import Plan
from hpcjit.ops.attention._decode import decode_op
from hpcjit.ops.attention._decode_plan import DECODE, DecodeConfig
from hpcjit.ops.attention._decode_shape import HEAD_DIMS, MAX_GROUP, MAX_Q_LEN, SCHEDULES, DecodeArgs

SMEM_BYTES = 227 * 1024  # of a block on Hopper
PAGE_SIZES = (1, 5, 16, 32, 48, 64, 128, 256)
DTYPES = ((BF16, BF16), (FP16, FP16), (BF16, FP8), (FP16, FP8), (FP8, FP8))  # of q and of the caches
BYTES = {"bf16": 2, "fp16": 2, "e4m3": 1, "int32": 4, "int64": 8}


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


@dataclasses.dataclass(frozen=True)
class Call:
    """A call on meta tensors."""

    head_dims: tuple[int, int] = (128, 128)
    dtypes: tuple[torch.dtype, torch.dtype] = (BF16, BF16)
    group: int = 4
    max_q_len: int = 1
    page_size: int = 64
    schedule: str = "dynamic"
    token_scales: bool = False
    batch: int = 3
    kv_heads: int = 2
    num_pages: int = 9
    table_width: int = 4

    def args(self) -> DecodeArgs:
        q_dtype, kv_dtype = self.dtypes
        rows, pool = (self.batch * self.max_q_len, self.kv_heads * self.group), (self.num_pages, self.page_size)
        caches = [meta(*pool, self.kv_heads, dim, dtype=kv_dtype) for dim in self.head_dims]
        scale = meta(*pool, self.kv_heads, dtype=FP32) if self.token_scales else None
        table, lengths = meta(self.batch, self.table_width, dtype=torch.int32), meta(self.batch, dtype=torch.int32)
        return DecodeArgs(
            *(meta(*rows, self.head_dims[0], dtype=q_dtype), *caches, table, lengths, None, None, scale, scale, None),
            *(1.0, 1.0, 1.0, 1.0, False, 0, self.max_q_len, "NHD", self.schedule),
            *(meta(*rows, self.head_dims[1]), None),
        )


def plan_of(args: DecodeArgs) -> Plan:
    decode_op.check(*args)
    plan = decode_op.plan(*args)
    assert isinstance(plan, Plan)
    return plan


def config_of(call: Call) -> DecodeConfig:
    config = plan_of(call.args()).config
    assert isinstance(config, DecodeConfig)
    return config


# --- the formulas of decode_params.cuh ------------------------------------------------------------------------------


def rows_of(c: DecodeConfig) -> int:
    return c.row_groups * c.row_tiles * 8


def small_bytes(c: DecodeConfig) -> int:
    """sizeof(Small), every member as if it were aligned to 16 bytes."""
    teams, axis = c.warps // c.row_groups, BYTES[c.axis_t]
    members = [8 * rows_of(c) * teams, 4 * teams, axis * c.warps, 4 * c.warps, 4 * c.warps]
    members += [2 * (16 if axis == 4 else 24), 2 * 12, 16 if axis == 4 else 24, 13 * 4]
    return sum(-(-size // 16) * 16 for size in members)


def smem_bytes(c: DecodeConfig) -> int:
    """kSmemBytes."""
    teams, stage = c.warps // c.row_groups, c.tile * (c.head_dim + c.value_head_dim) * BYTES[c.kv_t]
    scales = 2 * c.tile * 4 if 2 in (c.k_scale, c.v_scale) else 0
    sums = rows_of(c) * c.value_head_dim * 4
    rings = teams * (c.stages * (stage + scales) + (sums if sums > stage else 0))
    queries = c.warps * 16 * c.head_dim * 2 if c.shared_q else 0
    return rings + queries + small_bytes(c)


class TestEveryCombination:
    @pytest.mark.parametrize("dtypes", DTYPES, ids=lambda dtypes: " ".join(map(str, dtypes)).replace("torch.", ""))
    @pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
    def test_fits_the_header(self, head_dims, dtypes):
        """Whole teams, a barrier for each, two stages, all query rows, and what an SM has of memory."""
        pages, schedules = cycle(PAGE_SIZES), cycle(SCHEDULES)
        rows = product(range(1, MAX_GROUP + 1), range(1, MAX_Q_LEN + 1), {False, dtypes[1] == FP8})
        for group, max_q_len, token_scales in rows:
            call = Call(head_dims, dtypes, group, max_q_len, next(pages), next(schedules), token_scales)
            c = config_of(call)
            assert c.warps % c.row_groups == 0, call
            assert c.warps // c.row_groups <= 15 or c.row_groups == 1, call
            assert c.stages >= 2, call
            assert c.whole_tiles == (call.page_size % c.tile == 0), call
            assert c.whole_tiles or c.tile <= 32, call
            assert rows_of(c) >= group * max_q_len, call
            assert not c.shared_q or c.row_tiles == 2, call
            assert smem_bytes(dataclasses.replace(c, axis_t="int64")) <= SMEM_BYTES, call

    def test_page_size_and_schedule(self):
        """Neither changes rows, ring or tile, if no rows need a tile of double size."""
        for head_dims, dtypes in product(HEAD_DIMS, DTYPES):
            found = {
                dataclasses.replace(
                    config_of(Call(head_dims, dtypes, page_size=page_size, schedule=schedule)),
                    whole_tiles=False,
                    shifted_pages=False,
                    schedule=0,
                )
                for page_size, schedule in product(PAGE_SIZES, SCHEDULES)
            }
            assert len(found) == 1

    def test_pages_of_powers_of_two_are_shifted(self):
        found = {page: config_of(Call(page_size=page)).shifted_pages for page in PAGE_SIZES}
        assert found == {1: True, 5: False, 16: True, 32: True, 48: False, 64: True, 128: True, 256: True}
        for page, shift in ((1, 0), (48, -1), (64, 6), (256, 8)):
            assert plan_of(Call(page_size=page).args()).values["page_shift"] == shift


class TestManyRows:
    @pytest.mark.parametrize(("q_len", "rows"), [(2, 16), (3, 32), (4, 32), (5, 64)])
    @pytest.mark.parametrize("dtypes", DTYPES, ids=lambda dtypes: " ".join(map(str, dtypes)).replace("torch.", ""))
    def test_who_has_them(self, dtypes, q_len: int, rows: int):
        one, c = (config_of(Call(dtypes=dtypes, group=8, max_q_len=q)) for q in (1, q_len))
        many = q_len > 2
        assert (rows_of(c), c.shared_q, c.tile) == (rows, many, one.tile * (2 if many else 1))
        assert c.stages == 2

    def test_a_tile_of_double_size_needs_pages_that_hold_it(self):
        tiles = {page: config_of(Call(group=8, max_q_len=4, page_size=page)).tile for page in (16, 32, 48, 64)}
        assert tiles == {16: 16, 32: 32, 48: 16, 64: 32}

    def test_cuts_are_of_the_same_bytes(self):
        one, many = (plan_of(Call(group=8, max_q_len=q).args()).values for q in (1, 4))
        for name in ("slack", "margin", "least", "whole"):
            assert one[name] == 2 * many[name], name

    @pytest.mark.slow
    @pytest.mark.parametrize("dtypes", DTYPES, ids=lambda dtypes: " ".join(map(str, dtypes)).replace("torch.", ""))
    @pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 128)], ids=str)
    def test_compiles_without_spills(self, head_dims, dtypes):
        for group, q_len, page_size in product((8, 16), (1, 2, 4, 8), (16, 64)):
            c = config_of(Call(head_dims, dtypes, group, q_len, page_size))
            assert build.compile_only(DECODE, c, "sm_90a").manifest["spill_bytes"] == 0, c


class TestLargeSizes:
    def test_costs_past_32_bits(self):
        assert config_of(Call(batch=10**6)).axis_t == "int32"
        assert config_of(Call(batch=10**6, table_width=2048)).axis_t == "int64"

    @pytest.mark.parametrize("width", [2**23, 2**25])
    def test_capacity(self, width):
        """The end of the last tile of the longest request is an int32, whatever the tile."""
        plan = plan_of(Call(page_size=256, table_width=width).args())
        assert plan.values["capacity"] == 2**31 - 64
        assert plan.values["capacity"] + 32 < 2**31

    def test_pool_that_no_id_reaches_the_end_of(self):
        """Device code has 32 bits for the number of pages and the size of one: what is beyond them changes nothing."""
        assert plan_of(Call(page_size=1, num_pages=2**32).args()).values["num_pages"] == 2**31
        values = plan_of(Call(page_size=2**33).args()).values
        assert values["page_size"] == 2**31 - 1
        assert values["page_shift"] == -1
        assert values["k_page_stride"] == 2**33 * 2 * 128

    def test_strides(self):
        a = Call().args()
        cache = a.k_cache.as_strided(a.k_cache.shape, (2**35, 2**33, 2**31, 1))
        table = a.block_table.as_strided(a.block_table.shape, (2**34, 1))
        values = plan_of(a._replace(k_cache=cache, block_table=table)).values
        strides = ("k_page_stride", "k_slot_stride", "k_head_stride", "table_stride")
        assert [values[name] for name in strides] == [2**35, 2**33, 2**31, 2**34]

    def test_a_static_schedule_without_parts_needs_no_slots(self):
        plan = plan_of(Call(schedule="static", batch=10**6).args())
        assert (plan.values["splits"], plan.workspace_bytes, plan.counter_bytes) == (1, 0, 0)
        plan = plan_of(Call(schedule="static").args())
        assert plan.values["splits"] == 16
        assert (plan.workspace_bytes, plan.counter_bytes) == (0, 3 * 2 * 16 * 8 * (128 + 4) * 4)
