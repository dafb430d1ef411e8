"""router_topk: the bits of the two operators that it replaces, by every way, what it leaves in memory, refused calls."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from op_grid import placed
from op_tools import rejects, same_bits
from router_topk_grid import CALLS, FP32, INT32, Routed

from hpcjit import build, numerics, toolchain, workspace
from hpcjit.cases import Maker, cases_of
from hpcjit.errors import ArgumentTypeError
from hpcjit.jit_op import Plan
from hpcjit.ops.gemm import router_gemm
from hpcjit.ops.gemm._router_gemm import router_gemm_op
from hpcjit.ops.moe import _router_topk_plan, grouped_topk, router_topk, topk_sigmoid, topk_softmax
from hpcjit.ops.moe._router_topk import router_topk_op
from hpcjit.ops.moe._router_topk_plan import WAYS

NAN, INF = float("nan"), float("inf")
OP = "moe.router_topk"

every_call = pytest.mark.parametrize("call", [call for call, _ in CALLS], ids=lambda call: call.label.replace(" ", "_"))
# Tokens on both sides of the ends of tiles and of the two kernels, and of more blocks than run at once.
SIZES = [1, 2, 8, 9, 17, 33, 64, 65, 97, 129, 200, 511, 1025, 4100]
EXPERTS, HIDDEN = 256, 1024


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each way in turn, whichever is the fastest."""
    monkeypatch.setattr(_router_topk_plan, "way_of", lambda *args: request.param)
    router_topk_op._forget()
    yield request.param
    monkeypatch.undo()
    router_topk_op._forget()


every_way = pytest.mark.usefixtures("way")


def drawn(m: Maker, tokens: int, experts: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    return m.normal(tokens, hidden), m.normal(experts, hidden, dtype=FP32, std=0.02)


def two_steps(x, weight, top_k, *, mode="accurate", scoring="softmax", num_groups=1, topk_groups=1, **options):
    """Logits, weights and ids by the operators that the fused one replaces."""
    logits = router_gemm(x, weight, mode=mode)
    options = {"renormalize": True} | options
    if num_groups > 1:
        options |= {"num_groups": num_groups, "topk_groups": topk_groups, "scoring": scoring}
        return logits, *grouped_topk(logits, top_k, **options)
    gate = {"softmax": topk_softmax, "sigmoid": topk_sigmoid}[scoring]
    return logits, *gate(logits, top_k, **options)


def assert_same(x, weight, top_k, **options) -> None:
    expected = two_steps(x, weight, top_k, **options)
    logits = torch.full_like(expected[0], NAN)
    for wanted in (None, logits):
        weights, ids = router_topk(x, weight, top_k, logits=wanted, **options)
        assert torch.equal(ids, expected[2])
        assert same_bits(weights, expected[1])
    assert same_bits(logits, expected[0])
    assert_clean()


def assert_clean() -> None:
    """What the launches of any stream count with, and pass logits on in, is zero again."""
    if not torch.cuda.is_available():
        return
    torch.cuda.synchronize()
    for table in workspace._streams.values():
        for block in table.values():
            assert block[5] is None or not block[5].any(), "counters were left"


OPTIONS = {
    "softmax": {},
    "fast": {"mode": "fast", "renormalize": False},
    "sigmoid": {"scoring": "sigmoid", "scaling_factor": 2.5, "num_shared_experts": 1},
    "groups": {"scoring": "sigmoid", "num_groups": 8, "topk_groups": 4, "mode": "fast"},
}


def plans_of(call: Routed) -> list[Plan]:
    """Those of the call and of its two steps."""
    args = call.args(Maker("meta"), placed)
    logits = torch.empty(call.tokens, call.experts, device="meta")
    product, gate, gate_args = router_topk_op._call(*args).steps(logits)
    found = router_gemm_op.plan(*product), gate.plan(*gate_args)
    return [plan for plan in found if isinstance(plan, Plan)] + [plan for _, plan in router_topk_op.alternatives(*args)]


@pytest.fixture(scope="module", autouse=True)
def compiled(request: pytest.FixtureRequest, built: None) -> None:
    """What the GPU tests of this file run, as many kernels at once as there are cores."""
    if not torch.cuda.is_available() or not any(item.get_closest_marker("gpu") for item in request.session.items):
        return
    calls = [call for call, _ in CALLS]
    shapes = [(tokens, EXPERTS, HIDDEN) for tokens in SIZES]
    shapes += [(tokens, 72, 512) for tokens in (6, 300)] + [(tokens, 40, 256) for tokens in (5, 200)]
    names = {"num_groups": "groups", "scaling_factor": "scale", "num_shared_experts": "shared"}
    for options in OPTIONS.values():
        named = {names.get(key, key): value for key, value in options.items() if key != "topk_groups"}
        if "groups" in named:
            named["groups"] = options["num_groups"], options["topk_groups"]
        calls += [
            Routed(*shape, 8 if shape[1] == EXPERTS else 4, logits=wanted, **named)
            for shape in shapes
            for wanted in (False, True)
        ]
    wanted = {(plan.template, plan.config): None for call in calls for plan in plans_of(call)}
    arch = toolchain.arch_of_device(0)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for future in [pool.submit(build.compile_only, template, config, arch) for template, config in wanted]:
            future.result()


@every_way
class TestTwoSteps:
    @every_call
    def test_of_the_grid(self, m: Maker, call: Routed):
        args = call.args(m, placed)
        named = dict(zip(router_topk_op.arguments, args, strict=True))
        named["mode"] = named.pop("accuracy")
        x, weight, top_k, *_ = args
        options = {key: value for key, value in named.items() if key not in ("x", "weight", "top_k", "logits")}
        outputs = {key: options.pop(key) for key in ("weights", "ids")}
        _, weights, ids = two_steps(x, weight, top_k, **options)
        found = router_topk(x, weight, top_k, **options, **outputs)
        assert found[0] is outputs["weights"]
        assert found[1] is outputs["ids"]
        assert torch.equal(outputs["ids"], ids)
        assert same_bits(outputs["weights"], weights)
        assert_clean()

    @pytest.mark.gpu
    @pytest.mark.parametrize("tokens", SIZES)
    @pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
    def test_tokens(self, tokens: int, options):
        assert_same(*drawn(Maker("cuda"), tokens, EXPERTS, HIDDEN), 8, **options)

    @pytest.mark.gpu
    @pytest.mark.slow
    @pytest.mark.parametrize("case", cases_of(OP), ids=lambda case: case.name.replace(" ", "_"))
    def test_cases(self, case):
        """Every shape that is measured, with the constants that are measured there, on values that round."""
        args = case.args("cuda")
        named = dict(zip(router_topk_op.arguments, args, strict=True))
        names = ("scoring", "num_groups", "topk_groups", "renormalize", "scaling_factor", "bias")
        options = {name: named[name] for name in names} | {"mode": named["accuracy"]}
        x, weight = args[:2]
        assert_same(*drawn(Maker("cuda"), x.shape[0], *weight.shape), 8, **options)

    @pytest.mark.parametrize("tokens", [6, 300])
    def test_values_that_a_product_repairs(self, m: Maker, tokens: int):
        """Infinities, NaN and weights too large for a term: logits that are computed a second time."""
        x, weight = drawn(m, tokens, 72, 512)
        x[1, 3], x[2], x[3, 5] = INF, 0.0, NAN
        weight[2, 511], weight[3, 1], weight[4, 2] = 3.4e38, INF, NAN
        for options in OPTIONS.values():
            assert_same(x, weight, 4, **options)

    @pytest.mark.parametrize("tokens", [5, 200])
    def test_logits_of_zero(self, m: Maker, tokens: int):
        """A zero is a logit like any other."""
        x, weight = drawn(m, tokens, 40, 256)
        x[::2] = 0.0
        weight[::3] = 0.0
        for options in OPTIONS.values():
            assert_same(x, weight, 4, **options)

    @pytest.mark.parametrize("tokens", [40, 300])
    @pytest.mark.parametrize("valid", [-3, 0, 1, 39, 1000])
    def test_padding(self, m: Maker, tokens: int, valid: int):
        x, weight = drawn(m, tokens, 64, 256)
        x[max(0, valid) :] = NAN
        number = torch.tensor([valid], dtype=INT32, device=m.device)
        assert_same(x, weight, 4, num_valid_tokens=number, num_shared_experts=2)

    def test_views(self, m: Maker):
        x, weight = m.normal(70, 325)[:, 3:323], m.normal(40, 2, 320, dtype=FP32)[:, 0]
        weights, ids = m.poison(70, 9, dtype=FP32), m.poison(70, 9, dtype=INT32)
        logits = m.poison(70, 50, dtype=FP32)
        router_topk(x, weight, 4, logits=logits[:, 3:43], weights=weights[:, 2:6], ids=ids[:, 1:5])
        expected = two_steps(x.contiguous(), weight.contiguous(), 4)
        assert torch.equal(ids[:, 1:5], expected[2])
        assert logits[:, :3].isnan().all()
        assert logits[:, 43:].isnan().all()
        assert weights[:, 6:].isnan().all()
        assert (ids[:, 5:] == torch.iinfo(torch.int32).min).all()

    def test_no_tokens(self, m: Maker):
        weights, ids = router_topk(*drawn(m, 0, 64, 128), 8, num_shared_experts=1)
        assert weights.shape == ids.shape == (0, 9)


@pytest.mark.gpu
@every_way
class TestMemory:
    @pytest.mark.parametrize("tokens", [2, 64, 97, 511])
    def test_repeats(self, tokens: int):
        """The same bits each time, between calls of other sizes that take the same memory."""
        m = Maker("cuda")
        x, weight = drawn(m, tokens, EXPERTS, HIDDEN)
        first = router_topk(x, weight, 8)
        for other in (1, 8, 65, 200, 1025):
            router_topk(m.normal(other, HIDDEN), weight, 8, mode="fast", renormalize=False)
            assert_clean()
            again = router_topk(x, weight, 8)
            assert torch.equal(first[1], again[1])
            assert same_bits(first[0], again[0])

    @pytest.mark.parametrize("tokens", [1, 17, 64, 129, 1025])
    def test_replays(self, tokens: int):
        """A thousand replays of two calls, with other values in between."""
        m = Maker("cuda")
        x, weight = drawn(m, tokens, EXPERTS, HIDDEN)
        router_topk(x, weight, 8)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            first, second = router_topk(x, weight, 8), router_topk(x, weight, 8)
        for _ in range(4):
            x.copy_(m.normal(tokens, HIDDEN))
            weight.copy_(m.normal(EXPERTS, HIDDEN, dtype=FP32, std=0.02))
            _, *expected = two_steps(x, weight, 8)
            for _ in range(250):
                graph.replay()
            for found in (first, second):
                assert same_bits(found[0], expected[0])
                assert torch.equal(found[1], expected[1])

    @pytest.mark.parametrize("sizes", [(1, 8), (64, 64), (33, 511), (4100, 1025)], ids=str)
    def test_streams_at_once(self, sizes):
        """Blocks of both wait while those of the other run."""
        m = Maker("cuda")
        calls = [drawn(m, tokens, EXPERTS, HIDDEN) for tokens in sizes]
        expected = [two_steps(*call, 8) for call in calls]
        streams = [torch.cuda.Stream() for _ in calls]
        torch.cuda.synchronize()
        results: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in calls]
        for _ in range(50):
            for call, stream, found in zip(calls, streams, results, strict=True):
                with torch.cuda.stream(stream):
                    found.append(router_topk(*call, 8))
        torch.cuda.synchronize()
        for found, (_, weights, ids) in zip(results, expected, strict=True):
            for result in found:
                assert torch.equal(result[1], ids)
                assert same_bits(result[0], weights)
        assert_clean()

    def test_beside_others(self):
        """In chains with kernels that launch early or late, of every kind."""
        m = Maker("cuda")
        x, weight = drawn(m, 511, EXPERTS, HIDDEN)
        sizes = random.Random(1).choices([size for size in SIZES if size <= 511], k=100)
        expected = {tokens: two_steps(x[:tokens], weight, 8) for tokens in set(sizes)}
        found = []
        for tokens in sizes:
            logits = router_gemm(x[:tokens], weight)
            found.append(router_topk(x[:tokens], weight, 8))
            topk_softmax(logits, 8)
        for tokens, (weights, ids) in zip(sizes, found, strict=True):
            assert same_bits(weights, expected[tokens][1])
            assert torch.equal(ids, expected[tokens][2])


class TestRefused:
    @pytest.mark.parametrize(
        ("argument", "x", "weight"),
        [
            ("x", (4, 64, FP32), (8, 64, FP32)),
            ("x", (2, 4, 64, torch.bfloat16), (8, 64, FP32)),
            ("x", (4, 0, torch.bfloat16), (8, 0, FP32)),
            ("weight", (4, 64, torch.bfloat16), (8, 63, FP32)),
            ("weight", (4, 64, torch.bfloat16), (8, 64, torch.bfloat16)),
            ("weight", (4, 64, torch.bfloat16), (8, 64, torch.int32)),
            ("weight", (4, 64, torch.bfloat16), (0, 64, FP32)),
            ("weight", (4, 64, torch.bfloat16), (1025, 64, FP32)),
        ],
    )
    def test_factors(self, m: Maker, argument, x, weight):
        tensors = [torch.zeros(shape, dtype=dtype, device=m.device) for *shape, dtype in (x, weight)]
        outputs = m.poison(x[0], 4, dtype=FP32), m.poison(x[0], 4, dtype=INT32)
        with rejects(OP, argument, *outputs):
            router_topk(*tensors, 4, weights=outputs[0], ids=outputs[1])

    @pytest.mark.parametrize(
        ("argument", "options"),
        [
            ("top_k", {"top_k": 65}),
            ("top_k", {"top_k": 0}),
            ("top_k", {"top_k": 9, "num_groups": 8, "topk_groups": 1}),
            ("mode", {"mode": "exact"}),
            ("scoring", {"scoring": "relu"}),
            ("num_groups", {"num_groups": 5}),
            ("topk_groups", {"num_groups": 8, "topk_groups": 9}),
            ("scaling_factor", {"scaling_factor": NAN}),
            ("num_shared_experts", {"num_shared_experts": 33}),
            ("renormalize", {"renormalize": 1}),
        ],
    )
    def test_options(self, m: Maker, argument, options):
        x, weight = drawn(m, 4, 64, 128)
        with rejects(OP, argument, x, weight):
            router_topk(x, weight, **{"top_k": 4} | options)

    def test_tensors(self, m: Maker):
        x, weight = drawn(m, 4, 64, 128)
        weights, ids = m.poison(4, 4, dtype=FP32), m.poison(4, 4, dtype=INT32)
        for argument, value in {
            "weights": m.poison(4, 5, dtype=FP32),
            "ids": m.poison(3, 4, dtype=INT32),
            "logits": m.poison(4, 65, dtype=FP32),
            "bias": m.normal(63, dtype=FP32),
            "num_valid_tokens": torch.ones(2, dtype=INT32, device=m.device),
        }.items():
            with rejects(OP, argument, weights, ids):
                router_topk(x, weight, 4, **{"weights": weights, "ids": ids} | {argument: value})
        for argument, dtype in {"logits": torch.bfloat16, "ids": torch.int64, "bias": torch.bfloat16}.items():
            shape = {"logits": (4, 64), "ids": (4, 4), "bias": (64,)}[argument]
            value = torch.zeros(shape, dtype=dtype, device=m.device)
            with rejects(OP, argument, weights, error=ArgumentTypeError):
                router_topk(x, weight, 4, **{"weights": weights, argument: value})

    def test_memory(self, m: Maker):
        x, weight = drawn(m, 4, 64, 128)
        with rejects(OP, "weights", weight, match="'weight'"):
            router_topk(x, weight, 4, weights=weight.view(-1)[:16].view(4, 4))
        logits = m.poison(4, 64, dtype=FP32)
        with rejects(OP, "logits", logits, match="'weights'"):
            router_topk(x, weight, 4, logits=logits, weights=logits[:, :4])
        with rejects(OP, "logits", match="overlap"):
            router_topk(x, weight, 4, logits=m.poison(1, 64, dtype=FP32).expand(4, 64))
        with rejects(OP, "logits", match="other memory"):
            router_topk(x, weight, 4, logits=weight[:4, :64])

    def test_grad(self, m: Maker):
        x, weight = drawn(m, 4, 64, 128)
        with rejects(OP, "weight", match="gradient"):
            router_topk(x, weight.requires_grad_(), 4)


@pytest.mark.gpu
@every_way
def test_steps_backend():
    """The two operators that are compared with leave the same bits."""
    for call, _ in CALLS:
        args = call.args(Maker("cuda"), placed)
        first, second = numerics.copy_args(args), numerics.copy_args(args)
        router_topk_op.forward_jit(*first)
        router_topk_op.forward_jit_steps(*second)
        for a, b in zip(first[-3:], second[-3:], strict=True):
            assert a is None or same_bits(a, b)
