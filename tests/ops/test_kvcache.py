"""The kvcache group: where every element lands, what stays untouched, scales, debug mode, and calls that are refused."""

from __future__ import annotations

import pytest
import torch
from op_tools import bits, rejects, same_bits

from hpcjit.cases import Maker
from hpcjit.errors import ArgumentError, ArgumentTypeError
from hpcjit.fused_op import reset_decisions
from hpcjit.ops.kvcache import reshape_and_cache

OP = "kvcache.reshape_and_cache"
PAGES, PAGE, HEADS, DIM = 5, 4, 3, 64
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def caches(m: Maker, layout: str = "NHD", dtype: torch.dtype = BF16, dim: int = DIM):
    axes = (PAGE, HEADS) if layout == "NHD" else (HEADS, PAGE)
    return [m.poison(PAGES, *axes, dim, dtype=dtype) for _ in range(2)]


def tokens(m: Maker, count: int = 6, dtype: torch.dtype = BF16):
    return m.normal(count, HEADS, DIM, dtype=dtype), m.normal(count, HEADS, DIM, dtype=dtype)


def slots(m: Maker, *values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=m.device)


def at(cache: torch.Tensor, layout: str, slot: int) -> torch.Tensor:
    """[heads, dim] of one slot, spelled out."""
    page, offset = divmod(slot, PAGE)
    return cache[page, offset] if layout == "NHD" else cache[page, :, offset]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
class TestPlacement:
    @pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=str)
    def test_every_slot(self, m: Maker, layout, slot_dtype):
        """Each token's bits are in its slot, and every other slot keeps the poison."""
        key, value = tokens(m)
        key_cache, value_cache = caches(m, layout)
        mapping = [7, 0, 19, 4, 3, 12]
        arguments = key, value, key_cache, value_cache, slots(m, *mapping, dtype=slot_dtype)
        assert reshape_and_cache(*arguments, layout=layout) is None
        for slot in range(PAGES * PAGE):
            for source, cache in ((key, key_cache), (value, value_cache)):
                got = at(cache, layout, slot)
                if slot in mapping:
                    assert same_bits(got, source[mapping.index(slot)])
                else:
                    assert (bits(got) == bits(m.poison(1))).all()

    def test_negative_and_far_slots_are_not_written(self, m: Maker, layout):
        """NaN keys of tokens without a slot reach nothing, and live slots keep every bit."""
        key, value = tokens(m)
        key[[0, 2, 4, 5]] = torch.nan
        cache_pair = [m.normal(*cache.shape) for cache in caches(m, layout)]
        before = [cache.clone() for cache in cache_pair]
        mapping = slots(m, -1, 9, -(2**40), 2, PAGES * PAGE, 2**40)
        reshape_and_cache(key, value, *cache_pair, mapping, layout=layout)
        for cache, old, source in zip(cache_pair, before, (key, value), strict=True):
            assert cache.isfinite().all()
            assert same_bits(at(cache, layout, 9), source[1])
            assert same_bits(at(cache, layout, 2), source[3])
            for slot in set(range(PAGES * PAGE)) - {9, 2}:
                assert same_bits(at(cache, layout, slot), at(old, layout, slot))

    def test_bits_are_copied(self, m: Maker, layout):
        """NaN payloads, infinities and negative zeros arrive as they are."""
        patterns = torch.arange(2**16, dtype=torch.int32, device=m.device).to(torch.int16)
        count = 2**16 // (HEADS * DIM)
        key = patterns[: count * HEADS * DIM].view(count, HEADS, DIM).view(BF16)
        pages = -(-count // PAGE)
        axes = (PAGE, HEADS) if layout == "NHD" else (HEADS, PAGE)
        key_cache, value_cache = m.poison(pages, *axes, DIM), m.poison(pages, *axes, DIM)
        order = m.permutation(pages * PAGE)[:count].contiguous()
        reshape_and_cache(key, key, key_cache, value_cache, order, layout=layout)
        for cache in (key_cache, value_cache):
            flat = cache if layout == "NHD" else cache.transpose(1, 2)
            assert same_bits(flat.reshape(-1, HEADS, DIM)[order], key)

    def test_fp8_scales(self, m: Maker, layout):
        """A number, a tensor of one and a tensor per head divide the values of their heads; both caches differ."""
        key, value = tokens(m)
        per_head = torch.tensor([0.01, 0.5, 2.0], device=m.device)
        key_cache, value_cache = caches(m, layout, FP8)
        mapping = slots(m, *range(6))
        reshape_and_cache(key, value, key_cache, value_cache, mapping, k_scale=per_head, v_scale=0.25, layout=layout)
        for t in range(6):
            exact = (key[t].double() / per_head.double()[:, None]).clamp(-448, 448)
            got = at(key_cache, layout, t).double()
            assert ((got - exact).abs() <= exact.abs() * 2**-4 * (1 + 2**-20) + 2.0**-10).all()
            assert same_bits(at(value_cache, layout, t), (value[t].float() * 4).clamp(-448, 448).to(FP8))
        one = [cache.clone() for cache in caches(m, layout, FP8)]
        two = [cache.clone() for cache in one]
        reshape_and_cache(key, value, *one, mapping, k_scale=0.5, layout=layout)
        reshape_and_cache(key, value, *two, mapping, k_scale=torch.full((1,), 0.5, device=m.device), layout=layout)
        assert same_bits(one[0], two[0])
        assert same_bits(one[1], two[1])
        assert same_bits(at(one[1], layout, 3), value[3].float().to(FP8)), "no scale is 1"


@pytest.fixture
def debug(monkeypatch):
    """Debug mode, with plans made for it."""
    monkeypatch.setenv("HPCJIT_DEBUG", "1")
    reset_decisions()
    yield
    reset_decisions()


class TestDebugMode:
    def test_a_slot_past_the_end_raises(self, m: Maker, debug):
        """It names position and value, and no slot is written but those of the other tokens."""
        key, value = tokens(m)
        key_cache, value_cache = caches(m)
        with pytest.raises(ArgumentError, match=r"'slot_mapping'.*slots 20, got 20 at position 3 \(1 such"):
            reshape_and_cache(key, value, key_cache, value_cache, slots(m, 0, 1, -1, 20, 4, 5))
        written = [slot for slot in range(PAGES * PAGE) if at(key_cache, "NHD", slot).isfinite().all()]
        assert set(written) <= {0, 1, 4, 5}

    def test_all_are_counted(self, m: Maker, debug):
        key, value = tokens(m)
        with pytest.raises(ArgumentError, match=r"\(3 such entries\)"):
            reshape_and_cache(key, value, *caches(m), slots(m, 0, 99, 2**33, 3, 4, 20))

    def test_good_slots_pass(self, m: Maker, debug):
        key, value = tokens(m)
        reshape_and_cache(key, value, *caches(m), slots(m, 0, -1, 2, 3, 4, 19))


class TestRefused:
    @pytest.fixture
    def call(self, m: Maker):
        """A good call that single arguments are taken out of."""
        key, value = tokens(m)
        key_cache, value_cache = caches(m)
        return {
            "key": key,
            "value": value,
            "key_cache": key_cache,
            "value_cache": value_cache,
            "slot_mapping": slots(m, *range(6)),
        }

    def refused(self, call, argument, match="", error=ArgumentError, **changed):
        changed = call | changed
        watched = [changed[name] for name in ("key_cache", "value_cache") if isinstance(changed[name], torch.Tensor)]
        with rejects(OP, argument, *watched, match=match, error=error):
            reshape_and_cache(**changed)

    def test_key_and_value(self, m: Maker, call):
        self.refused(call, "key", "[num_tokens, num_kv_heads, head_dim]", key=m.normal(6, HEADS, 2, DIM))
        self.refused(call, "key", "rank 3", key=m.normal(6, DIM))
        self.refused(call, "key", key=call["key"].double(), error=ArgumentTypeError)
        self.refused(call, "value", "[6, 3, value_head_dim]", value=m.normal(5, HEADS, DIM))
        self.refused(call, "value", value=call["value"].half(), error=ArgumentTypeError)
        self.refused(call, "key", "last axis", key=m.normal(6, HEADS, 2 * DIM)[..., ::2])

    def test_caches(self, m: Maker, call):
        self.refused(
            call, "key_cache", "[num_pages, page_size, 3, 64]", key_cache=m.poison(PAGES, PAGE, HEADS + 1, DIM)
        )
        self.refused(call, "key_cache", "layout HND", layout="HND")
        self.refused(call, "value_cache", "5 pages of 4 slots", value_cache=m.poison(PAGES + 1, PAGE, HEADS, DIM))
        self.refused(call, "value_cache", value_cache=call["value_cache"].to(FP8), error=ArgumentTypeError)
        self.refused(call, "key_cache", key_cache=call["key_cache"].float(), error=ArgumentTypeError)
        one = m.poison(1, PAGE, HEADS, DIM)
        self.refused(call, "key_cache", "do not overlap", key_cache=one.expand(PAGES, PAGE, HEADS, DIM))

    def test_slots(self, m: Maker, call):
        self.refused(call, "slot_mapping", "of shape [6]", slot_mapping=slots(m, 1, 2))
        mapping = call["slot_mapping"]
        self.refused(call, "slot_mapping", "int32 or int64", slot_mapping=mapping.short(), error=ArgumentTypeError)

    def test_options(self, m: Maker, call):
        self.refused(call, "layout", "'NHD', 'HND'", layout="DNH")
        fp8 = dict(zip(("key_cache", "value_cache"), caches(m, dtype=FP8), strict=True))
        for bad in (0.0, -1.0, float("nan"), float("inf")):
            self.refused(call | fp8, "k_scale", k_scale=bad)
        self.refused(call | fp8, "v_scale", "[1] or [3]", v_scale=torch.ones(2, device=m.device))
        self.refused(call | fp8, "v_scale", v_scale="0.5", error=ArgumentTypeError)
        self.refused(call | fp8, "key_cache", "a tensor", key_cache=None, k_scale=2.0, error=ArgumentTypeError)

    def test_scales_need_a_float8_cache(self, m: Maker, call):
        """Also when the same call without them has been made before: a number is no part of its signature."""
        reshape_and_cache(**call)
        self.refused(call, "k_scale", "not float8", k_scale=0.5)
        self.refused(call, "v_scale", "not float8", v_scale=torch.ones(1, device=m.device))
