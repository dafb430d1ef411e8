"""What a trace records, what it leaves out, and its file."""

from __future__ import annotations

import json
import os
import stat
import threading

import pytest
import torch

from hpcjit import trace, trace_file
from hpcjit.errors import ArgumentError, ArgumentTypeError, FormatError
from hpcjit.fused_op import BaseFusedOp
from hpcjit.spec import KernelBackend
from hpcjit.trace import TensorSignature, Trace, TraceRecord


class Decode(BaseFusedOp):
    op = "attention.probe_decode"
    trace_values = ("seq_lens", "topk_ids:histogram", "absent")

    def forward_native(self, query, seq_lens=None, topk_ids=None, scale=1.0, **options):
        return query


@pytest.fixture(autouse=True)
def clean():
    yield
    trace.disable_fused_op_trace()
    trace.clear_fused_op_trace()


@pytest.fixture
def op():
    return Decode()


def records() -> list[TraceRecord]:
    return trace.get_fused_op_trace().records


class TestSignature:
    @pytest.mark.parametrize(
        ("tensor", "text"),
        [
            (torch.zeros(2, 3, dtype=torch.bfloat16), "bfloat16[2, 3]"),
            (torch.zeros(2, 3).t(), "float32[3, 2] stride [1, 3]"),
            (torch.zeros(8)[::2], "float32[4] stride [2]"),
            (torch.zeros(()), "float32[]"),
            (torch.zeros(0, 4, dtype=torch.float8_e4m3fn), "float8_e4m3fn[0, 4]"),
        ],
    )
    def test_text_and_back(self, tensor, text):
        signature = TensorSignature.of(tensor)
        assert str(signature) == text
        assert TensorSignature.parse(text) == signature

    @pytest.mark.parametrize(
        "text",
        ["", "bfloat16", "[2]", "float32[-1]", "float32[2,3]", "float32[2] stride []", "float32[2, 3] stride [1]",
         "float32[2] ", "float32[99999999999999999999]", "float32[" + "9" * 5000 + "]", "float32[²]"],
    )  # fmt: skip
    def test_malformed(self, text):
        with pytest.raises(ValueError, match=r".") as info:
            TensorSignature.parse(text)
        assert len(str(info.value)) < 200


class TestRecording:
    def test_off_by_default_and_after_disabling(self, op):
        op(torch.zeros(2))
        trace.enable_fused_op_trace()
        op(torch.zeros(2))
        trace.disable_fused_op_trace()
        op(torch.zeros(2))
        assert [r.count for r in records()] == [1]  # what was recorded stays readable

    def test_equal_calls_are_counted(self, op):
        trace.enable_fused_op_trace()
        for rows in (2, 3, 2, 2):
            op(torch.zeros(rows, 4), scale=0.5)
        assert [(str(r.tensors["query"]), r.count) for r in records()] == [("float32[2, 4]", 3), ("float32[3, 4]", 1)]
        assert records()[0] == TraceRecord(
            "attention.probe_decode",
            KernelBackend.TORCH,
            {"query": TensorSignature("float32", (2, 4))},
            {"scale": 0.5},
            3,
        )

    def test_positional_and_keyword_calls_are_the_same(self, op):
        trace.enable_fused_op_trace()
        op(torch.zeros(2), torch.ones(1, dtype=torch.int32))
        op(query=torch.zeros(2), seq_lens=torch.ones(1, dtype=torch.int32))
        assert len(records()) == 1

    def test_everything_that_matters_tells_records_apart(self, op):
        trace.enable_fused_op_trace()
        x = torch.zeros(4, 4)
        for tensor in (x, x.double(), x.t(), x[:2]):
            op(tensor)
        for value in (1, 1.0, True, "1", None):
            op(x, scale=value)
        op(x, backend="torch")  # not an argument of the operator: the same as op(x)
        assert len(records()) == 9

    def test_arguments_that_are_not_tensors(self, op):
        class Plan:
            def __repr__(self):
                raise AssertionError("printing a plan could wait for the device")

        trace.enable_fused_op_trace()
        op(
            torch.zeros(1), nan=float("nan"), dtype=torch.float16, device=torch.device("cpu"), sizes=[1, 2],
            plan=Plan(), pair=(torch.zeros(3), 5), long="x" * 1000,
        )  # fmt: skip
        (record,) = records()
        long = record.scalars.pop("long")
        assert record.scalars == {
            "nan": "nan", "dtype": "torch.float16", "device": "cpu", "sizes": "[1, 2]", "pair.1": 5,
            "plan": "<TestRecording.test_arguments_that_are_not_tensors.<locals>.Plan>",
        }  # fmt: skip
        assert record.tensors["pair.0"] == TensorSignature("float32", (3,))
        assert len(long) == trace.MAX_TEXT

    def test_a_call_that_fails_is_not_recorded(self):
        class Failing(Decode):
            op = "attention.probe_failing"

            def forward_native(self, query):
                raise ValueError("no")

        trace.enable_fused_op_trace()
        with pytest.raises(ValueError, match="no"):
            Failing()(torch.zeros(1))
        assert records() == []

    def test_named_backends_are_recorded(self, op):
        trace.enable_fused_op_trace()
        op(torch.zeros(1), backend="torch")
        assert [r.backend for r in records()] == [KernelBackend.TORCH]

    def test_bounded(self, op):
        trace.enable_fused_op_trace(max_signatures=2)
        for rows in (1, 2, 3, 4, 1):
            op(torch.zeros(rows))
        found = trace.get_fused_op_trace()
        assert ([r.count for r in found], found.dropped_calls) == ([2, 1], 2)

    def test_a_bound_below_one_is_an_error(self):
        with pytest.raises(ArgumentError, match="max_signatures"):
            trace.enable_fused_op_trace(max_signatures=0)
        with pytest.raises(ArgumentTypeError, match="'max_signatures' must be an integer, got '5'"):
            trace.enable_fused_op_trace(max_signatures="5")

    def test_clear_and_enable_start_afresh(self, op):
        trace.enable_fused_op_trace()
        op(torch.zeros(1))
        trace.clear_fused_op_trace()
        assert records() == []
        op(torch.zeros(1))
        trace.enable_fused_op_trace()
        assert records() == []

    def test_a_snapshot_does_not_change(self, op):
        trace.enable_fused_op_trace()
        op(torch.zeros(1))
        before = trace.get_fused_op_trace()
        op(torch.zeros(1))
        assert [r.count for r in before] == [1]

    def test_threads(self, op):
        trace.enable_fused_op_trace(values=True)
        lengths = torch.arange(4)

        def work():
            for rows in range(200):
                op(torch.zeros(rows % 5), lengths)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [r.count for r in records()] == [320] * 5


class TestValues:
    def test_not_kept_unless_asked(self, op):
        trace.enable_fused_op_trace()
        op(torch.zeros(1), torch.tensor([3, 4]))
        assert records()[0].values == []

    def test_kept_at_calls_1_2_4_8(self, op):
        trace.enable_fused_op_trace(values=True)
        for call in range(1, 11):
            op(torch.zeros(2), torch.tensor([call, 7]))
        (record,) = records()
        assert record.count == 10
        assert record.values == [{"seq_lens": (call, 7)} for call in (1, 2, 4, 8)]

    def test_histogram(self, op):
        trace.enable_fused_op_trace(values=True)
        op(torch.zeros(2), topk_ids=torch.tensor([[5, 0], [5, -1], [5, 0]]))
        assert records()[0].values == [{"topk_ids": ((-1, 1), (0, 2), (5, 3))}]

    def test_a_large_input_is_dropped_and_counted(self, op):
        trace.enable_fused_op_trace(values=True)
        op(torch.zeros(2), torch.zeros(4097, dtype=torch.int32))
        op(torch.zeros(2), torch.zeros(4096, dtype=torch.int32))
        found = trace.get_fused_op_trace()
        assert ([len(r.values) for r in found], found.dropped_values) == ([0, 1], 1)

    def test_bounded_in_all(self, op, monkeypatch):
        monkeypatch.setattr(trace, "MAX_VALUES_IN_ALL", 10)
        trace.enable_fused_op_trace(values=True)
        for rows in (1, 2, 3):
            op(torch.zeros(rows), torch.zeros(4, dtype=torch.int32))
        found = trace.get_fused_op_trace()
        assert ([len(r.values) for r in found], found.dropped_values) == ([1, 1, 0], 1)

    def test_what_is_not_an_integer_tensor_is_passed_over(self, op):
        trace.enable_fused_op_trace(values=True)
        op(torch.zeros(2), torch.zeros(2))
        op(torch.zeros(2), None)
        assert [r.values for r in records()] == [[], []]
        assert trace.get_fused_op_trace().dropped_values == 0

    def test_nothing_is_read_during_capture(self, op, monkeypatch):
        capturing = True
        monkeypatch.setattr(trace, "_capturing", lambda tensors: capturing)
        trace.enable_fused_op_trace(values=True)
        for _ in range(3):
            op(torch.zeros(2), torch.tensor([1]))
        assert records()[0].values == []
        capturing = False
        op(torch.zeros(2), torch.tensor([2]))
        assert records()[0].values == [{"seq_lens": (2,)}]

    @pytest.mark.gpu
    def test_a_real_capture_is_not_disturbed(self, op):
        query, lengths = torch.zeros(2, device="cuda"), torch.tensor([3, 4], device="cuda")
        experts = torch.tensor([1, 1, 0], device="cuda")
        trace.enable_fused_op_trace(values=True)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            op(query, lengths, experts)
        (record,) = records()
        assert (record.count, record.values) == (1, [])
        op(query, lengths, experts)
        assert records()[0].values == [{"seq_lens": (3, 4), "topk_ids": ((0, 1), (1, 2))}]


SAMPLE = Trace(
    [
        TraceRecord(
            "attention.decode",
            KernelBackend.JIT,
            {"query": TensorSignature("bfloat16", (64, 8, 128)), "cache": TensorSignature("float32", (3, 2), (1, 3))},
            {"scale": 0.125, "causal": True, "name": "x", "window": None, "top": 3},
            17,
            [{"seq_lens": (4096, 12), "topk_ids": ((0, 5), (7, 1))}, {"seq_lens": ()}],
        ),
        TraceRecord("layernorm.rmsnorm", KernelBackend.TORCH),
    ],
    dropped_calls=3,
    dropped_values=1,
)


class TestFile:
    def test_round_trip(self, tmp_path):
        trace.save(tmp_path / "a.jsonl", SAMPLE)
        assert trace.load(tmp_path / "a.jsonl") == SAMPLE
        assert trace.load(os.fspath(tmp_path / "a.jsonl")) == SAMPLE

    def test_saves_the_last_trace_by_default(self, op, tmp_path):
        trace.enable_fused_op_trace(values=True)
        op(torch.zeros(2), torch.tensor([1, 2]), scale=float("inf"))
        trace.disable_fused_op_trace()
        trace.save(tmp_path / "a.jsonl")
        assert trace.load(tmp_path / "a.jsonl") == trace.get_fused_op_trace()
        trace.save(tmp_path / "b.jsonl", Trace())
        assert len(trace.load(tmp_path / "b.jsonl")) == 0

    def test_form(self, tmp_path):
        trace.save(tmp_path / "a.jsonl", SAMPLE)
        header, record, _ = map(json.loads, (tmp_path / "a.jsonl").read_text().splitlines())
        assert header == {
            "format": "hpcjit-trace", "version": 1, "records": 2, "dropped_calls": 3, "dropped_values": 1
        }  # fmt: skip
        assert record["tensors"]["cache"] == "float32[3, 2] stride [1, 3]"

    def test_a_failed_write_leaves_the_old_file_and_nothing_else(self, tmp_path, monkeypatch):
        path = tmp_path / "a.jsonl"
        trace.save(path, SAMPLE)

        def full(descriptor):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            trace.save(path, Trace())
        assert trace.load(path) == SAMPLE
        assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]

    def test_what_cannot_be_written_leaves_nothing(self, tmp_path):
        bad = Trace([TraceRecord("moe.x", KernelBackend.JIT, scalars={"a": float("nan")})])
        with pytest.raises(ValueError, match="JSON compliant"):
            trace.save(tmp_path / "a.jsonl", bad)
        assert list(tmp_path.iterdir()) == []

    def test_permissions_follow_the_umask(self, tmp_path):
        before = os.umask(0o027)
        try:
            trace.save(tmp_path / "a.jsonl", SAMPLE)
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / "a.jsonl").stat().st_mode) == 0o640

    def test_a_missing_folder_is_named_and_not_the_temporary_file(self, tmp_path):
        path = tmp_path / "none" / "a.jsonl"
        with pytest.raises(FileNotFoundError) as caught:
            trace.save(path, SAMPLE)
        assert caught.value.filename == str(path)

    def test_a_missing_file_is_an_os_error(self, tmp_path):
        with pytest.raises(FileNotFoundError):
            trace.load(tmp_path / "none.jsonl")


HEADER = {"format": "hpcjit-trace", "version": 1, "records": 1, "dropped_calls": 0, "dropped_values": 0}
RECORD = {"op": "moe.x", "backend": "jit", "count": 1, "tensors": {"a": "float32[2]"}, "scalars": {}, "values": []}


def without(fields: dict, name: str) -> dict:
    return {key: value for key, value in fields.items() if key != name}


class TestDamagedFile:
    def check(self, tmp_path, content, match):
        path = tmp_path / "a.jsonl"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(FormatError, match=match) as info:
            trace.load(path)
        assert str(path) in str(info.value)
        assert len(str(info.value)) < len(str(path)) + 600

    def lines(self, *items):
        return "".join(json.dumps(item) + "\n" for item in items)

    def test_the_base_is_sound(self, tmp_path):
        (tmp_path / "a.jsonl").write_text(self.lines(HEADER, RECORD))
        assert len(trace.load(tmp_path / "a.jsonl")) == 1

    @pytest.mark.parametrize(
        ("content", "match"),
        [
            (b"", "line 1: .*empty or truncated"),
            (b"\n", "line 1: not JSON"),
            (b"[1]\n", r"line 1: must be a JSON object, got \[1\]"),
            (b"\x1f\x8b\x08\xff\n", "line 1: not JSON"),
            (b"[" * 100_000 + b"\n", "line 1: not JSON"),
            (b'{"format": NaN}\n', "line 1: not JSON: NaN"),
            (b'{"format": ' + b"9" * 10_000 + b"}\n", "line 1: not JSON"),
        ],
    )
    def test_not_a_trace(self, tmp_path, content, match):
        self.check(tmp_path, content, match)

    @pytest.mark.parametrize("field", list(HEADER))
    def test_header_field_missing(self, tmp_path, field):
        self.check(tmp_path, self.lines(without(HEADER, field), RECORD), f"line 1: field '{field}' is missing")

    @pytest.mark.parametrize(
        ("field", "value"),
        [("format", "other"), ("format", None), ("version", 2), ("version", True), ("version", "1"), ("version", 1.0),
         ("records", -1), ("records", True), ("records", 1.5), ("dropped_calls", None), ("dropped_values", "0")],
    )  # fmt: skip
    def test_header_field_wrong(self, tmp_path, field, value):
        self.check(tmp_path, self.lines({**HEADER, field: value}, RECORD), f"line 1: field '{field}' must be")

    @pytest.mark.parametrize("field", list(RECORD))
    def test_record_field_missing(self, tmp_path, field):
        self.check(tmp_path, self.lines(HEADER, without(RECORD, field)), f"line 2: field '{field}' is missing")

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("op", "x"), ("op", "nogroup.x"), ("op", None), ("op", 3), ("op", "moe." + "x" * 10_000 + "!"),
            ("backend", "cudnn"), ("backend", None), ("backend", []), ("backend", "z" * 100_000),
            ("count", 0), ("count", -1), ("count", True), ("count", 1.0), ("count", "1"), ("count", None),
            ("tensors", []), ("tensors", None), ("tensors", {"a": 3}), ("tensors", {"a": "float32[x]"}),
            ("scalars", []), ("scalars", {"a": [1]}), ("scalars", {"a": {}}),
            ("values", {}), ("values", [3]), ("values", [{"a": 3}]), ("values", [{"a": [1.5]}]),
            ("values", [{"a": [True]}]), ("values", [{"a": [[1, 2, 3]]}]), ("values", [{"a": [1, [1, 2]]}]),
            ("values", [{"a": [0] * 4097}]),
        ],
    )  # fmt: skip
    def test_record_field_wrong(self, tmp_path, field, value):
        self.check(tmp_path, self.lines(HEADER, {**RECORD, field: value}), f"line 2: field '{field}' must be")

    def test_a_number_beyond_double_is_not_finite(self, tmp_path):
        text = self.lines(HEADER, RECORD).replace('"scalars": {}', '"scalars": {"a": 1e999}')
        self.check(tmp_path, text, "line 2: field 'scalars' must be.*not finite")

    def test_truncated_in_a_line(self, tmp_path):
        text = self.lines(HEADER, RECORD)
        self.check(tmp_path, text[:-1], "line 2: .*truncated")
        self.check(tmp_path, text[:-20], "line 2: .*truncated")

    def test_truncated_between_lines(self, tmp_path):
        self.check(tmp_path, self.lines({**HEADER, "records": 2}, RECORD), "line 3: .*truncated")

    def test_more_than_the_header_promises(self, tmp_path):
        self.check(tmp_path, self.lines(HEADER, RECORD, RECORD), "line 3: the header promises 1 records")

    def test_a_huge_line_is_not_read_whole(self, tmp_path, monkeypatch):
        monkeypatch.setattr(trace_file, "MAX_LINE_BYTES", 1000)
        self.check(tmp_path, self.lines(HEADER, {**RECORD, "pad": "x" * 2000}), "line 2: longer than 1000 bytes")
