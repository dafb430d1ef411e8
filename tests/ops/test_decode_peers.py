"""`attention.decode` on FlashAttention-3 and FlashInfer: what they are told, what is refused, and when a plan is made anew."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from decode_grid import calls
from decode_stand_ins import FLASHINFER, FlashAttn, Wrapper
from decode_tools import BF16, FP8, FP16, Batch

from hpcjit import numerics
from hpcjit.cases import Maker
from hpcjit.errors import BackendError
from hpcjit.ops import _peers
from hpcjit.ops.attention import _decode_peers
from hpcjit.ops.attention._decode import decode_op
from hpcjit.spec import KernelBackend, package_available

PEERS = {
    "flash_attn": decode_op.forward_flash_attn,
    "flashinfer": decode_op.forward_flashinfer,
    "flashinfer_xqa": decode_op.forward_flashinfer_xqa,
}
GRID = {label: batch for label, batch, _ in calls()}
SMALL = (37, 1, 90)

every_peer = pytest.mark.parametrize("peer", PEERS)


@pytest.fixture(scope="session", autouse=True)
def built() -> None:
    """None of our own kernels runs here, so none is built."""


@pytest.fixture
def stand_ins(monkeypatch):
    """Modules that compute on the CPU in the place of the peers; returns that of FlashAttention-3."""
    module = FlashAttn()
    monkeypatch.setattr(_peers, "flash_attn", lambda name: getattr(module, name))
    monkeypatch.setattr(_peers, "flashinfer", lambda *names: FLASHINFER[names])
    monkeypatch.setattr(_decode_peers, "_plans", {})
    return module


def deviations(peer: str, batch: Batch, device: str = "cpu") -> list[numerics.Deviation]:
    return numerics.check(decode_op, batch(Maker(device)), PEERS[peer])


def rounds_queries(peer: str, batch: Batch) -> bool:
    """Whether the adapter has to round float8 queries that it multiplies by a scale for each of them."""
    return peer != "flash_attn" and batch.q_scale == "row"


@pytest.mark.usefixtures("stand_ins")
@every_peer
class TestWhatThePeerIsTold:
    @pytest.mark.parametrize("label", GRID)
    def test_the_result_or_a_refusal(self, peer: str, label: str):
        batch, found = GRID[label], []
        with contextlib.suppress(BackendError):
            found = deviations(peer, batch)
        assert all(d.ok or (rounds_queries(peer, batch) and d.err < 0.03) for d in found), list(map(str, found))

    @pytest.mark.parametrize("group", [1, 8])
    @pytest.mark.parametrize("layout", ["NHD", "HND"])
    def test_what_every_one_runs(self, peer: str, group: int, layout: str):
        batch = Batch(SMALL, group=group, layout=layout, lse=False, more_width=2)
        fp8 = batch.but(dtype=FP8, q_scale="tensor", k_scale="tensor", v_scale="number")
        runs = [batch, batch.but(window=30), batch.but(dtype=FP16), fp8, fp8.but(v_scale="tensor", k_scale="number")]
        for found in (deviations(peer, batch) for batch in runs):
            assert all(d.ok for d in found), list(map(str, found))

    def test_several_rows_of_a_request(self, peer: str):
        batch = Batch((37, 4, 90), q_lens=4, lse=False)
        for found in (deviations(peer, batch), deviations(peer, batch.but(dtype=FP8, q_scale="tensor"))):
            assert all(d.ok for d in found), list(map(str, found))

    @pytest.mark.parametrize("batch", [Batch([]), Batch([], dtype=FP8)])
    def test_nothing_to_do(self, peer: str, batch: Batch):
        assert not deviations(peer, batch)


_REFUSED = [
    ("flash_attn", Batch(SMALL, cache=FP8), "one dtype"),
    ("flash_attn", Batch(SMALL, out=FP16), "gives bfloat16 for float8"),
    ("flash_attn", Batch(SMALL, head_dim=192, value_head_dim=128), "value_head_dim of its own"),
    ("flash_attn", Batch(SMALL, softcap=3.0), "without softcap"),
    ("flash_attn", Batch(SMALL, sinks=True), "sinks are bfloat16"),
    ("flash_attn", Batch(SMALL, dtype=FP8, q_scale="row"), "not per token and head"),
    ("flash_attn", Batch(SMALL, dtype=FP8, k_scale="token"), "per KV head, not per token"),
    ("flashinfer", Batch(SMALL, sinks=True), "no sinks"),
    ("flashinfer", Batch(SMALL, views="spaced"), "contiguous"),
    ("flashinfer", Batch(SMALL, out=FP16), "the dtype of q"),
    ("flashinfer", Batch(SMALL, cache=FP8, v_scale="head"), "one scale of K"),
    ("flashinfer", Batch((5, 0)), "as many tokens as queries"),
    ("flashinfer", Batch((5, 2), q_lens=3), "as many tokens as queries"),
    ("flashinfer_xqa", Batch(SMALL), "no lse"),
    ("flashinfer_xqa", Batch(SMALL, lse=False, page=256), "pages of 16, 32, 64, 128"),
    ("flashinfer_xqa", Batch(SMALL, lse=False, q_lens=(1, 1, 1)), "same number of queries"),
    ("flashinfer_xqa", Batch((9, 9), lse=False, q_lens=2, window=5), "with a window one"),
    ("flashinfer_xqa", Batch(SMALL, lse=False, views="fused"), "contiguous q"),
    ("flashinfer_xqa", Batch(SMALL, lse=False, head_dim=192, value_head_dim=128), "same strides"),
    ("flashinfer_xqa", Batch((5, 0), lse=False), "as many tokens as queries"),
]


@pytest.mark.usefixtures("stand_ins")
class TestRefused:
    @pytest.mark.parametrize(("peer", "batch", "reason"), _REFUSED)
    def test_what_the_peer_cannot_compute(self, peer: str, batch: Batch, reason: str):
        with pytest.raises(BackendError, match=f"backend {peer} cannot run this call: it.*{reason}"):
            deviations(peer, batch)

    @every_peer
    def test_a_promise_that_it_does_not_make(self, peer: str):
        with pytest.raises(BackendError, match="no schedule 'invariant'"):
            deviations(peer, Batch(SMALL, lse=False, schedule="invariant"))


class TestPlans:
    @pytest.fixture
    def made(self, stand_ins, monkeypatch):
        """The plans that were made."""
        plans: list[object] = stand_ins.plans
        plan = Wrapper._plan
        monkeypatch.setattr(Wrapper, "_plan", lambda *args, **options: (plans.append(0), plan(*args, **options)))
        lengths = _decode_peers._lengths

        def of_xqa(no, a, shape):
            if no.args[1] is KernelBackend.FLASHINFER_XQA:
                plans.append(0)
            return lengths(no, a, shape)

        monkeypatch.setattr(_decode_peers, "_lengths", of_xqa)
        return plans

    @every_peer
    def test_a_repeated_call_does_not_plan(self, peer: str, made):
        args = Batch(SMALL, lse=False)(Maker("cpu"))
        for _ in range(3):
            PEERS[peer](*args)
        assert len(made) == 1
        PEERS[peer](*args[:10], 0.5, *args[11:])
        assert len(made) == 2

    @every_peer
    @pytest.mark.parametrize("name", ["seq_lens", "block_table"])
    def test_new_values_are_planned_anew(self, peer: str, name: str, made):
        batch = Batch(SMALL, lse=False)
        args = batch(Maker("cpu"))
        PEERS[peer](*args)
        changed = args[decode_op.arguments.index(name)]
        if name == "seq_lens":
            changed[0] = 3
        else:
            changed[[0, 1], 0] = changed[[1, 0], 0]  # of two requests in one page each
            args[4][:2] = 1
        found = numerics.check(decode_op, args, lambda *copies: PEERS[peer](*args))
        assert len(made) == 2
        exact = numerics.upcast(args)
        decode_op.reference(*exact)
        assert found
        assert numerics.error(args[19], exact[19]) < 0.01

    @every_peer
    def test_scales_are_read_anew(self, peer: str, stand_ins):
        args = Batch(SMALL, lse=False, dtype=FP8, q_scale="tensor", k_scale="tensor", v_scale="tensor")(Maker("cpu"))
        PEERS[peer](*args)
        for scale in args[6:9]:
            scale.mul_(2)
        PEERS[peer](*args)
        exact = numerics.upcast(args)
        decode_op.reference(*exact)
        assert numerics.error(args[19], exact[19]) < 0.01

    @every_peer
    def test_nothing_is_kept_of_dead_tensors(self, peer: str, stand_ins):
        args = Batch(SMALL, lse=False)(Maker("cpu"))
        PEERS[peer](*args)
        assert len(_decode_peers._plans) == 1
        del args
        gc.collect()
        assert not _decode_peers._plans

    def test_inference_tensors_are_planned_every_time(self, made):
        with torch.inference_mode():
            args = Batch(SMALL, lse=False)(Maker("cpu"))
            for _ in range(2):
                decode_op.forward_flashinfer(*args)
        assert len(made) == 2


_PACKAGES = {"flash_attn": "flash_attn_interface", "flashinfer": "flashinfer", "flashinfer_xqa": "flashinfer"}


@pytest.mark.gpu
@every_peer
class TestInstalled:
    """On the peers themselves; with a float8 cache they may round probabilities and queries to float8."""

    def check(self, peer: str, batch: Batch, allowed: float) -> None:
        if not package_available(_PACKAGES[peer]):
            pytest.skip(f"{_PACKAGES[peer]} is not installed")
        batch = batch.but(lse=peer != "flashinfer_xqa")
        assert all(d.ok or d.err < allowed for d in deviations(peer, batch, "cuda"))

    @pytest.mark.parametrize("layout", ["NHD", "HND"])
    def test_bfloat16(self, peer: str, layout: str):
        self.check(peer, Batch((700, 1, 64, 65, 5000), group=8, layout=layout, more_width=1, dtype=BF16), 0.0)

    @pytest.mark.parametrize("v_scale", ["", "tensor"])
    def test_float8(self, peer: str, v_scale: str):
        batch = Batch((700, 1, 64, 65, 5000), group=8, layout="HND", dtype=FP8, q_scale="tensor", k_scale="number")
        self.check(peer, batch.but(v_scale=v_scale), 0.25)

    def test_a_graph_of_planned_calls(self, peer: str):
        if not package_available(_PACKAGES[peer]):
            pytest.skip(f"{_PACKAGES[peer]} is not installed")
        args = Batch((700, 1, 64, 65, 5000), group=8, layout="HND", lse=False)(Maker("cuda"))
        PEERS[peer](*args)
        expected = args[19].clone()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            PEERS[peer](*args)
        for _ in range(3):
            args[19].fill_(torch.nan)
            graph.replay()
            assert torch.equal(args[19], expected)
