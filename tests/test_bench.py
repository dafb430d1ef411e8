"""The benchmark without a GPU: what is measured, how rows are rated, written, merged and compared with targets."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from hpcjit import trace
from hpcjit.bench import environment, report, runner, targets, timer
from hpcjit.bench.environment import Ceilings
from hpcjit.bench.runner import Bench, Row
from hpcjit.cases.moe_experts import Experts
from hpcjit.cli import main
from hpcjit.errors import ArgumentError, BackendError, FormatError, UnknownOpError
from hpcjit.ops.layernorm import rmsnorm
from hpcjit.replay import cases_of_trace
from hpcjit.spec import KernelBackend
from hpcjit.trace_file import TensorSignature, Trace, TraceRecord

CPU = torch.device("cpu")
CASE = "32x4096"


def bench(**options) -> Bench:
    return Bench(CPU, environment.describe(CPU, "abc"), Ceilings(copy=1e12), host=False, **options)


def jobs(backend: str = "torch", op: str = "rmsnorm"):
    return runner.make_jobs(runner.choose_cases([op], [CASE]), [backend], CPU)


class TestChoosing:
    def test_every_operator_has_bench_cases(self):
        assert {case.op for case in runner.choose_cases([], [])} == set(runner.ops())

    def test_an_exact_case_name_wins_over_parts(self):
        assert [case.name for case in runner.choose_cases(["rmsnorm"], ["32x4096"])] == ["32x4096"]
        assert len(runner.choose_cases(["rmsnorm"], ["x4096"])) > 1

    def test_an_unknown_case_is_named_with_the_closest(self):
        with pytest.raises(ArgumentError, match=r"32x4097.*did you mean '32x4096'"):
            runner.choose_cases(["rmsnorm"], ["32x4097"])

    def test_an_unknown_operator(self):
        with pytest.raises(UnknownOpError, match="did you mean 'rmsnorm'"):
            runner.choose_cases(["rmsnrm"], [])

    def test_an_unknown_backend(self):
        with pytest.raises(BackendError, match="did you mean 'flashinfer'"):
            jobs("flashinfr")

    def test_by_default_only_what_can_run_here(self):
        found = runner.make_jobs(runner.choose_cases(["rmsnorm"], [CASE]), [], CPU)
        assert [job.backend for job in found] == [KernelBackend.TORCH, KernelBackend.TORCH_COMPILE]

    def test_backends_come_in_the_order_of_importance(self):
        order = [job.backend for job in runner.make_jobs(runner.choose_cases([], []), ["torch", "jit"], CPU)]
        assert order == sorted(order, key=runner.ORDER.index)
        assert order[0] is KernelBackend.JIT
        assert set(runner.ORDER) == set(KernelBackend)


class TestMeasuring:
    def test_a_row_has_everything(self):
        (job,) = jobs()
        row = bench().measure(job)
        assert row.ok
        assert row.cold_us > 0
        assert row.hot_us > 0
        assert 0 < row.err < 0.01
        assert row.gbps == pytest.approx(job.case.bytes / row.cold_us / 1e3)
        assert row.floor_us == pytest.approx(job.case.bytes / 1e6)
        assert row.pct_of_ceiling == pytest.approx(100 * row.floor_us / row.cold_us)
        assert row.command == "hpcjit bench layernorm.rmsnorm --case 32x4096 --backend torch --device cpu"
        assert row.environment["commit"] == "abc"

    def test_host_time_of_the_public_call(self):
        (job,) = jobs()
        row = Bench(CPU, environment.describe(CPU, "abc"), Ceilings(), l2="cold").measure(job)
        assert row.host_us > 0
        assert row.hot_us is None

    def test_a_backend_that_cannot_run_gives_a_row_with_the_reason(self):
        (job,) = jobs("jit")
        row = bench().measure(job)
        assert not row.ok
        assert "needs cuda SM >= 8.0" in row.error
        assert row.failed

    def test_a_wrong_kernel_is_found(self, monkeypatch):
        (job,) = jobs()
        monkeypatch.setattr(job.op, "forward_native", lambda x, weight, eps, out: out.copy_(x))
        row = bench().measure(job)
        assert not row.ok
        assert row.load > 1

    def test_peers_are_timed_without_our_checks(self):
        (job,) = jobs()
        with runner.unchecked(job):
            job.op.check("nonsense")
        with pytest.raises(ArgumentError):
            job.op.check("nonsense", torch.ones(1), 1e-6, torch.ones(1))

    def test_the_time_limit_leaves_rows_out(self, monkeypatch):
        clock = iter([0.0, 0.0, 10.0])
        monkeypatch.setattr(runner.time, "monotonic", lambda: next(clock))
        monkeypatch.setattr(Bench, "measure", lambda self, job: Row(*job.key))
        rows = [row for _, row in bench().run(jobs() * 2, time_limit_s=5)]
        assert rows[0] is not None
        assert rows[1] is None

    def test_public_calls_cover_every_argument_of_the_schema(self):
        (job,) = jobs()
        args = job.case.args(CPU)
        call = runner._public_call(job, args)
        call()
        assert torch.equal(args[3], rmsnorm(args[0], args[1], args[2]))

    def test_statistics(self):
        sample = timer._sample([float(i) for i in range(1, 26)], 3, "graph")
        assert sample.us == 13
        assert sample.p20 < 6 < 20 < sample.p80
        assert sample.copies == 3

    def test_floor_is_the_larger_of_memory_and_arithmetic(self):
        ceilings = Ceilings(copy=1e12, bf16=1e12, fp8=2e12)
        assert ceilings.floor_us(1000, 0, False) == pytest.approx(1e-3)
        assert ceilings.floor_us(1000, 10**9, False) == pytest.approx(1000)
        assert ceilings.floor_us(1000, 10**9, True) == pytest.approx(500)


def row(backend: str, us: float, **facts) -> Row:
    return Row("layernorm.rmsnorm", CASE, backend, cold_us=us, err=1e-3, **facts)


class TestRotation:
    def test_copies_of_everything(self):
        """Without turns: whole copies, more than `touch` together, never fewer than two but where there is no room."""
        args = torch.ones(1000), 3, torch.ones(250)
        assert len(timer.rotation(args, 50_000, 10**9)) == 11
        assert len(timer.rotation(args, 10, 10**9)) == 2
        assert len(timer.rotation(args, 50_000, 16_000)) == 3
        assert len(timer.rotation(args, 50_000, 0)) == 1
        assert len(timer.rotation((torch.ones(1),), 10**6, 10**9)) == timer.MAX_COPIES
        first, second = timer.rotation(args, 10, 10**9)
        assert first[0].data_ptr() not in (second[0].data_ptr(), args[0].data_ptr())

    def test_turns_touch_other_experts(self):
        """Of one token's few experts: enough calls, weights of two copies, no expert twice before all have had their turn."""
        case = Experts(1, 32, 64, 32, 4, quant="bf16", codes=False).case("a")
        args = case.args("cpu")
        weights = 2 * 32 * 3 * 64 * 32
        touch = weights + weights // 2
        calls = timer.rotation(args, touch, 10**9, case)
        assert len(calls) == 2 * -(-(touch // case.bytes + 1) // 2)
        assert len(calls) * case.bytes > touch
        copies = [a[1].data_ptr() for a in calls]
        assert copies[:4] == [*dict.fromkeys(copies)] * 2
        for copy in set(copies):
            ids = torch.cat([a[3] for a in calls if a[1].data_ptr() == copy]).flatten().tolist()
            assert len(set(ids[:32])) == min(len(ids), 32)
        assert len({a[0].data_ptr() for a in calls} | {a[-1].data_ptr() for a in calls}) == 2 * len(calls)

    def test_one_copy_turns_too(self):
        case = Experts(3, 8, 64, 32, 2, quant="bf16", codes=False).case("a")
        calls = timer.rotation(case.args("cpu"), 10 * case.bytes, 0, case)
        assert len(calls) == 11
        assert len({a[1].data_ptr() for a in calls}) == 1
        assert not torch.equal(calls[0][3], calls[1][3])


class TestReport:
    def test_speed_ups_are_over_every_other_backend(self):
        ours, *others = runner.with_speedups([row("jit", 2.0), row("torch", 5.0), row("flashinfer", 3.0)])
        assert ours.speedup == {"torch": 2.5, "flashinfer": 1.5}
        assert not any(other.speedup for other in others)
        headings = [heading for heading, _, _ in report._columns([ours, *others])]
        assert headings[-2:] == ["x flashinfer", "x torch"]
        assert report._over("flashinfer")(ours) == "1.50"
        assert report._over("triton")(ours) == ""

    def test_footer_has_means_and_the_worst_ratio(self):
        rows = runner.with_speedups([row("jit", 2.0, target_us=2.5), row("torch", 8.0)])
        text = "\n".join(report.footer(rows, environment.describe(CPU, "abc"), Ceilings()))
        assert "over torch: geometric mean 4.00x of 1 cases, worst 4.00x (layernorm.rmsnorm 32x4096)" in text
        assert "targets met: 1 of 1" in text
        assert "commit abc" in text

    def test_rows_survive_the_file(self, tmp_path: Path):
        rows = [
            row("jit", 2.125, environment={"gpu": "X"}, speedup={"torch": 2.0}),
            row("torch", 4.25, error="no | good"),
        ]
        report.write_rows(tmp_path / "r.jsonl", rows)
        assert report.read_rows(tmp_path / "r.jsonl") == rows
        first = json.loads((tmp_path / "r.jsonl").read_text().splitlines()[0])
        assert {"op", "case", "backend", "cold_us", "hot_us", "host_us", "err", "gbps", "pct_of_ceiling", "gpu"} <= set(
            first
        )

    def test_an_infinite_error_is_still_json(self):
        facts = report.to_json(Row("a.b", "c", "jit", err=math.inf))
        assert json.loads(json.dumps(facts, allow_nan=False))["err"] is None

    def test_new_rows_replace_old_ones(self):
        merged = report.merged([row("jit", 2.0), row("torch", 4.0)], [row("jit", 1.0)])
        assert [(r.backend, r.cold_us) for r in merged] == [("jit", 1.0), ("torch", 4.0)]

    @pytest.mark.parametrize("line", ["{", "[]", '{"op": "a.b"}', '{"op": "a.b", "case": "c", "backend": "nope"}'])
    def test_a_damaged_file_is_named(self, tmp_path: Path, line: str):
        path = tmp_path / "r.jsonl"
        path.write_text(line + "\n")
        with pytest.raises(FormatError, match=r"r\.jsonl: line 1"):
            report.read_rows(path)

    def test_markdown_has_a_row_per_row(self):
        text = report.markdown([row("jit", 2.0), row("torch", 4.0)], environment.describe(CPU, "abc"), Ceilings())
        assert text.count("| 32x4096 |") == 2
        assert "## layernorm.rmsnorm" in text


class TestTargets:
    def write(self, tmp_path: Path, document) -> Path:
        path = tmp_path / "targets.json"
        path.write_text(document if isinstance(document, str) else json.dumps(document))
        return path

    def test_rows_are_found_by_shape_and_by_name(self, tmp_path: Path):
        document = {
            "elementwise": [{"op": "rmsnorm", "shape": [32, 4096], "target_us": 1.5, "peers_us": {"x": 2, "y": None}}],
            "router": [{"op": "gemm.router_gemm", "N": 192, "K": 4096, "M": 16, "target_us": 3.28}],
            "attention": [
                {"op": "attention.decode", "heads": "1x8", "dtype": "fp8", "case": "64x4K", "target_us": 19.6}
            ],
            "moe": [{"op": "moe.fused_moe", "model": "q", "mode": "tp8", "num_tokens": 16, "target_us": 53}],
            "notes": {"op": "none"},
        }
        found = targets.load(self.write(tmp_path, document))
        assert len(found) == 4
        assert found.of("layernorm.rmsnorm", "32x4096").peers_us == {"x": 2.0}
        assert found.of("gemm.router_gemm", "N=192 K=4096 M=16").target_us == 3.28
        assert found.of("attention.decode", "1x8 fp8 64x4K").target_us == 19.6
        assert found.of("moe.fused_moe", "q tp8 16").target_us == 53
        assert found.of("layernorm.rmsnorm", "32x4097") is None

    @pytest.mark.parametrize(
        ("document", "named"),
        [
            ("{", "not JSON"),
            ("[]", "object"),
            ({}, "no row"),
            ({"a": [{"op": 3, "target_us": 1, "shape": [1]}]}, r"a\[0\]: 'op'"),
            ({"a": [{"op": "x", "target_us": -1, "shape": [1]}]}, r"a\[0\]: 'target_us'"),
            ({"a": [{"op": "x", "target_us": 1}]}, r"a\[0\]: names no case"),
            ({"a": [{"op": "x", "target_us": 1, "shape": [1], "peers_us": 3}]}, r"a\[0\]: 'peers_us'"),
        ],
    )
    def test_a_malformed_table_is_named(self, tmp_path: Path, document, named: str):
        with pytest.raises(FormatError, match=named):
            targets.load(self.write(tmp_path, document))

    def test_verdicts(self):
        assert report._verdict(row("jit", 2.0, target_us=2.0)) == "met"
        assert report._verdict(row("jit", 3.0, target_us=2.0)) == "1.50x"
        assert report._verdict(row("jit", 3.0)) == ""


class TestCommand:
    ARGS = ("bench", "rmsnorm", "--case", CASE, "--backend", "torch", "--device", "cpu", "--no-host", "--l2", "cold")

    def test_tables_and_files(self, tmp_path: Path, capsys):
        assert main([*self.ARGS, "--out", str(tmp_path / "new" / "folder")]) == 0
        assert "layernorm.rmsnorm" in capsys.readouterr().out
        (line,) = (tmp_path / "new" / "folder" / "results.jsonl").read_text().splitlines()
        assert json.loads(line)["backend"] == "torch"
        assert "| 32x4096 | torch |" in (tmp_path / "new" / "folder" / "results.md").read_text()

    def test_resume_measures_nothing_twice(self, tmp_path: Path, monkeypatch):
        assert main([*self.ARGS, "--out", str(tmp_path)]) == 0
        monkeypatch.setattr(Bench, "measure", lambda self, job: pytest.fail("measured again"))
        assert main([*self.ARGS, "--out", str(tmp_path), "--resume"]) == 0

    def test_json_goes_to_standard_output(self, capsys):
        assert main([*self.ARGS, "--json"]) == 0
        (line,) = capsys.readouterr().out.splitlines()
        assert json.loads(line)["cold_us"] > 0

    def test_a_failing_kernel_of_ours_is_exit_code_1(self):
        assert main(["bench", "rmsnorm", "--case", CASE, "--backend", "jit", "--device", "cpu"]) == 1

    def test_list_runs_nothing(self, capsys):
        assert main(["bench", "rmsnorm", "--device", "cpu", "--backend", "jit", "--list"]) == 0
        first = capsys.readouterr().out.splitlines()[0]
        assert first.startswith("hpcjit bench layernorm.rmsnorm --case ")
        assert first.endswith(" --backend jit --device cpu")

    @pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPU")
    def test_list_without_a_gpu_has_the_rows_of_one(self, capsys):
        assert main(["bench", "rmsnorm", "--case", CASE, "--list"]) == 0
        rows = capsys.readouterr().out.splitlines()
        assert f"hpcjit bench layernorm.rmsnorm --case {CASE} --backend jit" in rows
        assert f"hpcjit bench layernorm.rmsnorm --case {CASE} --backend torch" in rows

    @pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPU")
    def test_no_gpu_is_said_before_anything_runs(self, capsys):
        assert main(["bench", "rmsnorm"]) == 2
        assert "--device cpu" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("extra", "named"),
        [
            (["--backend", "nope"], "unknown backend"),
            (["--device", "toaster"], "--device"),
            (["--device", "meta"], "--device"),
            (["--device", "mps"], "--device"),
            (["--time-limit", "nan"], "--time-limit"),
            (["--time-limit", "-1"], "--time-limit"),
            (["--case", "nope"], "--case"),
            (["--plots"], "--out"),
            (["--against", "missing.json"], "missing.json"),
            (["--from", "missing.jsonl"], "missing.jsonl"),
            (["--out", "/proc/nowhere"], "/proc/nowhere"),
        ],
    )
    def test_bad_input(self, extra: list[str], named: str, capsys):
        assert main(["bench", "rmsnorm", "--device", "cpu", *extra]) == 2
        captured = capsys.readouterr()
        assert named in captured.err
        assert not captured.out

    def test_from_a_trace(self, tmp_path: Path, capsys):
        trace.enable_fused_op_trace()
        try:
            rmsnorm(torch.ones(3, 64).bfloat16(), torch.ones(64).bfloat16())
            trace.save(tmp_path / "t.jsonl")
        finally:
            trace.disable_fused_op_trace()
        options = ["--device", "cpu", "--backend", "torch", "--no-host", "--json"]
        assert main(["bench", "--from", str(tmp_path / "t.jsonl"), *options]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert facts["op"] == "layernorm.rmsnorm"
        assert "bfloat16[3x64]" in facts["case"]
        assert facts["ok"]

    @pytest.mark.parametrize("sample", [[], [2**70], [[0, 1]]], ids=["empty", "huge", "histogram"])
    def test_samples_of_a_trace(self, sample: list, tmp_path: Path):
        """An empty tensor has an empty sample; one that does not fit its dtype is a damaged trace."""
        tokens = len(sample)
        caches = dict.fromkeys(("key_cache", "value_cache"), "float32[2, 4, 1, 8]")
        record = TraceRecord(
            "kvcache.reshape_and_cache",
            KernelBackend.TORCH,
            {
                name: TensorSignature.parse(text)
                for name, text in {
                    **dict.fromkeys(("key", "value"), f"float32[{tokens}, 1, 8]"),
                    **caches,
                    "slot_mapping": f"int64[{tokens}]",
                }.items()
            },
            {"k_scale": None, "v_scale": None, "k_factor": 1.0, "v_factor": 1.0, "layout": "NHD"},
            values=[{"slot_mapping": tuple(sample)}],
        )
        trace.save(tmp_path / "t.jsonl", Trace([record]))
        (case,) = cases_of_trace(tmp_path / "t.jsonl", [])
        if sample == [2**70]:
            with pytest.raises(FormatError, match="'slot_mapping' do not fit int64"):
                case.args("cpu")
        else:
            assert case.args("cpu")[4].tolist() == list(range(tokens))


@pytest.mark.gpu
class TestOnGpu:
    def test_cold_and_hot_of_a_copy(self):
        device = torch.device("cuda", torch.cuda.current_device())
        args = torch.ones(1 << 24, device=device), torch.empty(1 << 24, device=device)
        cold = timer.cold(lambda x, y: y.copy_(x), args, device)
        hot = timer.hot(lambda x, y: y.copy_(x), args, device)
        assert cold.copies >= 2
        assert cold.p20 <= cold.us <= cold.p80
        assert 0 < hot.us <= 2 * cold.us

    def test_a_reference_that_no_graph_can_hold_is_timed_eagerly(self):
        device = torch.device("cuda", torch.cuda.current_device())
        sample = timer.cold(lambda x: x.sum().item(), (torch.ones(1024, device=device),), device, or_eager=True)
        assert sample.timer == "eager"
        torch.randn(8, device=device)  # refused if torch's generator still believed in the failed capture

    def test_every_demo_case_is_measured(self):
        assert main(["bench", "rmsnorm", "--case", CASE, "--backend", "jit,torch"]) == 0
