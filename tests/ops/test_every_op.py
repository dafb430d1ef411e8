"""What holds for every operator, on the grid of awkward calls and on its demo case."""

from __future__ import annotations

import pytest
import torch
from op_grid import GRID, Entry
from op_tools import DEMOS, OPS, as_public, bits, call_public, operator, outside, public, same_bits, tensors, whole

from hpcjit import build, numerics, prewarm
from hpcjit.cases import Case, Maker, all_cases
from hpcjit.jit_op import NOTHING, Plan
from hpcjit.registry import registry
from hpcjit.spec import KernelBackend

# Codes of float8 that may differ from those of the float64 reference: values near a tie. With 8 bits of significand in
# the input and a scale from a power of two, up to one value in 64 lies exactly on a tie of y / scale before it is rounded.
NEAR_TIES = 0.02

# Elements of a wide access, where they are not 16-bit.
_WIDEST = {"moe.gate": 4} | {
    f"moe.router_topk_{kind}{pair}": 4 for kind in ("stream", "tile") for pair in ("", "_pair")
}

grid = pytest.mark.parametrize("entry", GRID, ids=lambda entry: entry.id)
every_demo = pytest.mark.parametrize("case", DEMOS, ids=lambda case: f"{case.op}-{case.name}".replace(" ", "_"))


def test_all_operators_are_listed():
    assert set(OPS) == set(registry.ops())
    assert {entry.op for entry in GRID} == set(OPS)


class TestPlans:
    @grid
    def test_of_the_grid(self, entry: Entry):
        """Every awkward call passes the checks and has a plan that gives each launch parameter a value."""
        op, args = operator(entry.op), entry.make(Maker("meta"))
        op.check(*args)
        plan = op.plan(*args)
        assert entry.why
        if plan == NOTHING:
            assert any(t.numel() == 0 for t in tensors(args)), "only an empty call launches nothing"
            return
        assert isinstance(plan, Plan)
        known = {*plan.values, *op.arguments, "workspace", "counters", "fault"}
        assert set(plan.template.params) <= known
        scratch = "workspace" in plan.template.params and getattr(plan.config, "dynamic", False)
        assert plan.workspace_bytes or not scratch

    @pytest.mark.parametrize("case", list(all_cases()), ids=lambda case: f"{case.op}-{case.name}".replace(" ", "_"))
    def test_of_the_cases(self, case):
        """Cases are well-formed, move as much as they say, and have wide accesses: they are what is measured."""
        op, args = operator(case.op), case.args("meta")
        op.check(*args)
        plan = op.plan(*args)
        assert isinstance(plan, Plan)
        if case.op == "attention.decode":
            small_pages = case.name.endswith((" p1", "fp8 32x128+32x4K p16"))
            assert plan.config.whole_tiles or small_pages, "whole tiles are copied at once"
        elif case.op.startswith("gemm."):
            assert getattr(plan.config, "aligned", True)
        else:
            assert getattr(plan.config, "vec", 8) == _WIDEST.get(plan.template.op, 8)
        read = {id(t): t.numel() * t.element_size() for t in tensors(args)}
        assert case.bytes <= 2 * sum(read.values())


@grid
class TestGrid:
    def test_reference_on_cpu(self, entry: Entry):
        """The reference in the operator's own dtypes meets the rule too, and does not touch what it should not."""
        op, args = operator(entry.op), entry.make(Maker("cpu"))
        for deviation in numerics.check(op, args, op.forward_native):
            assert deviation.ok, str(deviation)
        _assert_contained(op, args, op.forward_native)

    @pytest.mark.gpu
    def test_rule(self, entry: Entry):
        op, args = operator(entry.op), entry.make(Maker("cuda"))
        for deviation in numerics.check(op, args, op.forward_jit):
            assert deviation.ok, str(deviation)

    @pytest.mark.gpu
    def test_float8_codes(self, entry: Entry):
        """Codes are those of the float64 reference, except for few next to a tie (the rule itself allows all one step)."""
        op, args = operator(entry.op), entry.make(Maker("cuda"))
        outputs = [op.arguments.index(name) for name in op.mutated]
        outputs = [
            i for i in outputs if args[i] is not None and args[i].dtype == torch.float8_e4m3fn and args[i].numel()
        ]
        if not outputs:
            return
        actual, exact = numerics.copy_args(args), numerics.upcast(args)
        op.forward_jit(*actual)
        op.reference(*exact)
        for i in outputs:
            steps = (numerics.codes(actual[i]) - numerics.codes(exact[i])).abs()
            assert int(steps.max()) <= 1
            assert int(steps.count_nonzero()) <= max(2, NEAR_TIES * steps.numel())

    @pytest.mark.gpu
    def test_repeats_and_stays_inside(self, entry: Entry):
        """Two runs agree in every bit; inputs and the gaps of outputs keep theirs."""
        op, args = operator(entry.op), entry.make(Maker("cuda"))
        first, second = numerics.copy_args(args), numerics.copy_args(args)
        op.forward_jit(*first)
        op.forward_jit(*second)
        for a, b in zip(tensors(first), tensors(second), strict=True):
            assert same_bits(a, b)
        _assert_contained(op, args, op.forward_jit)


def _assert_contained(op, args, run) -> None:
    after = numerics.copy_args(args)
    before = [outside(t).clone() for t in tensors(after)]
    run(*after)
    for t, gap in zip(tensors(after), before, strict=True):
        assert torch.equal(outside(t), gap), "written outside of a view"
    written = {id(after[op.arguments.index(name)]) for name in op.mutated}
    for old, new in zip(args, after, strict=True):
        if isinstance(new, torch.Tensor) and id(new) not in written:
            assert same_bits(old, new), "an input was changed"


@every_demo
class TestTorchLibrary:
    def test_opcheck(self, case: Case, device: torch.device):
        """Schema, fake implementation and functionalisation agree with what the operator does."""
        args = _small(case, device)
        operator(case.op)  # which defines it for torch
        overload = getattr(torch.ops.hpcjit, case.op.replace(".", "_")).default
        if any(t.dtype == torch.float8_e4m3fn for t in tensors(args)):  # torch compares results, and cannot float8
            tests = ("test_autograd_registration", "test_faketensor")
        else:
            tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(overload, args, test_utils=tests)

    def test_compiles_as_one_graph(self, case: Case, device: torch.device):
        """The public function has no graph break, and the compiled call gives the bits of the eager one."""
        args = case.args(device)
        eager, compiled = numerics.copy_args(args), numerics.copy_args(args)
        expected = call_public(case.op, eager)
        torch._dynamo.reset()
        positional, keywords = as_public(case.op, compiled)
        result = torch.compile(public(case.op), fullgraph=True, backend="aot_eager")(*positional, **keywords)
        assert (result is None) == (expected is None)
        for a, b in zip(_made(case.op, eager, expected), _made(case.op, compiled, result), strict=True):
            assert same_bits(a, b)

    def test_grad_is_refused(self, case: Case, device: torch.device):
        """There is no backward: an input that requires grad is an error, and no error under no_grad."""
        args = list(case.args(device))
        if not args[0].is_floating_point():
            pytest.skip("integers have no gradient")
        args[0].requires_grad_()
        with pytest.raises(ValueError, match="gradient"):
            operator(case.op)(*args)
        with torch.no_grad():
            operator(case.op)(*args)

    def test_meta_tensors(self, case: Case):
        """A call without memory is checked and does nothing, as that of a model on the meta device."""
        call_public(case.op, case.args("meta"))

    def test_too_few_arguments(self, case: Case, device: torch.device):
        with pytest.raises(TypeError):
            operator(case.op)(*case.args(device)[:-1])


def _made(op: str, args, result) -> list[torch.Tensor]:
    """All tensors of a public call, its results in their place."""
    if op == "layernorm.rmsnorm_quant_fp8":  # its dynamic scale is always a new tensor
        args = (*args[:-1], result[1])
    return tensors(args)


def _small(case: Case, device: torch.device):
    """opcheck compares outputs with allclose: no NaN may be left, so poison becomes zero."""
    args = numerics.copy_args(case.args(device))
    for t in tensors(args):
        if t.dtype == torch.float8_e4m3fn or not t.isfinite().all():
            whole(t).zero_()
    return args


@every_demo
@pytest.mark.gpu
class TestOnTheGpu:
    def test_public_function(self, case: Case):
        """The public function leaves the bits that the JIT backend leaves."""
        args = case.args("cuda")
        direct, called = numerics.copy_args(args), numerics.copy_args(args)
        operator(case.op).forward_jit(*direct)
        result = call_public(case.op, called)
        for a, b in zip(tensors(direct), _made(case.op, called, result), strict=True):
            assert same_bits(a, b)

    def test_graph_replay(self, case: Case):
        """A captured call reads what its inputs hold at replay."""
        owner = operator(case.op)
        args = case.args("cuda")
        owner.forward_jit(*numerics.copy_args(args))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            owner.forward_jit(*args)
        for seed in (1, 2):
            fresh = case.args("cuda", seed)
            for t, new in zip(tensors(args), tensors(fresh), strict=True):
                t.copy_(new)
            owner.forward_jit(*fresh)
            graph.replay()
            for t, new in zip(tensors(args), tensors(fresh), strict=True):
                assert same_bits(t, new)

    def test_current_stream(self, case: Case):
        """Work goes to the current stream: it sees what that stream wrote after a long wait, on two streams at once."""
        owner = operator(case.op)
        fresh = [case.args("cuda", seed) for seed in (1, 2)]
        args = [tuple(torch.zeros_like(v) if isinstance(v, torch.Tensor) else v for v in each) for each in fresh]
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in args]
        for stream, mine, new in zip(streams, args, fresh, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)
                for t, value in zip(tensors(mine), tensors(new), strict=True):
                    t.copy_(value)
                owner.forward_jit(*mine)
        torch.cuda.synchronize()
        for mine, new in zip(args, fresh, strict=True):
            owner.forward_jit(*new)
            for t, expected in zip(tensors(mine), tensors(new), strict=True):
                assert same_bits(t, expected)

    def test_second_device(self, case: Case):
        """Tensors of a device that is not current are worked on where they are."""
        if torch.cuda.device_count() < 2:
            pytest.skip("one GPU")
        here, there = case.args("cuda:0"), case.args("cuda:0")
        there = tuple(v.to("cuda:1") if isinstance(v, torch.Tensor) else v for v in there)
        operator(case.op).forward_jit(*here)
        operator(case.op).forward_jit(*there)
        assert torch.cuda.current_device() == 0
        for a, b in zip(tensors(here), tensors(there), strict=True):
            assert torch.equal(bits(a).cpu(), bits(b).cpu())

    def test_mixed_devices(self, case: Case):
        args = list(case.args("cuda"))
        i = max(i for i, value in enumerate(args) if isinstance(value, torch.Tensor))
        args[i] = args[i].cpu()
        with pytest.raises(ValueError, match=f"'{operator(case.op).arguments[i]}'"):
            operator(case.op)(*args)


@every_demo
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_template_compiles(case: Case, arch: str):
    """The template of each demo case compiles for the primary and the oldest architecture it is for, without spilling."""
    op = operator(case.op)
    if reason := registry.get(case.op, KernelBackend.JIT).why_not(prewarm.platform_of(arch)):
        pytest.skip(reason)
    plan = op.plan(*case.args("meta"))
    entry = build.compile_only(plan.template, plan.config, arch)
    assert entry.manifest["spill_bytes"] == 0
    assert not any(kernel["serialized"] for kernel in entry.manifest["kernels"])
    assert entry.manifest["registers"] > 0


def test_public_functions_exist():
    assert all(callable(public(op)) for op in OPS)
