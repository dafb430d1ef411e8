"""Prewarming: from names, sizes, models and traces to kernels in the cache; bad input writes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hpcjit import cache, cases, models, prewarm, trace, usages
from hpcjit.cases import cases_of
from hpcjit.cli import main
from hpcjit.errors import ArgumentError, FormatError
from hpcjit.ops.layernorm import rmsnorm
from hpcjit.ops.moe._fused_moe_args import FusedMoeArgs
from hpcjit.registry import ops

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}
QWEN_MOE = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 1536,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "quantization_config": {"quant_method": "fp8"},
}


def write(folder: Path, document) -> Path:
    path = folder / "config.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def listed(capsys, *options: str) -> list[dict[str, str]]:
    assert main(["prewarm", *options, "--list", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


class TestItems:
    def test_every_operator_has_kernels(self, capsys):
        calls = prewarm.calls_of_cases(cases.all_cases())
        assert {call[0].op for call in calls} == set(ops())
        assert {item["op"] for item in listed(capsys)} <= set(ops())

    def test_equal_kernels_are_compiled_once(self):
        calls = list(prewarm.calls_of_cases(cases_of("layernorm.rmsnorm")))
        assert len(prewarm.items(calls + calls, ["sm_90a"])) == len(prewarm.items(calls, ["sm_90a"]))

    def test_each_architecture_counts(self, capsys):
        one = listed(capsys, "rmsnorm", "--arch", "sm_90a")
        two = listed(capsys, "rmsnorm", "--arch", "sm_90a", "sm_80", "sm_90a")
        assert len(two) == 2 * len(one)
        assert {item["arch"] for item in two} == {"sm_90a", "sm_80"}

    def test_a_template_may_be_named_as_messages_do(self, capsys):
        assert {item["template"] for item in listed(capsys, "layernorm.norm")} == {"layernorm.norm"}

    def test_shapes(self, capsys):
        (item,) = listed(capsys, "rmsnorm", "--shapes", "32x4096")
        assert "bf16" in item["config"]
        (item,) = listed(capsys, "rmsnorm", "--shapes", "32x4096", "--dtype", "fp16")
        assert "fp16" in item["config"]

    def test_every_described_usage_makes_a_kernel(self):
        sizes = {"hidden_size": 4096, "intermediate_size": 4096, "num_experts": 128, "top_k": 8}
        sizes |= {"moe_intermediate_size": 192}
        sizes |= {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "num_groups": 8, "topk_groups": 4}
        assert set(usages.USAGES) == set(ops())
        for op, usage in usages.USAGES.items():
            calls = usages.calls_of(op, tuple(sizes[name] for name in usage.sizes), [16], torch.bfloat16)
            assert [call[0].op for call in calls] == [op]
            assert prewarm.items(calls, ["sm_90a"])


class TestModels:
    def test_a_dense_model(self, tmp_path: Path):
        model = models.load(write(tmp_path, LLAMA))
        assert (model.head_dim, model.num_kv_heads, model.num_experts) == (128, 8, None)
        called = {op.op for op, _ in models.calls_of_model(model, ops())}
        assert {"layernorm.rmsnorm", "layernorm.fused_add_rmsnorm", "activation.silu_and_mul"} <= called
        assert not any("gemma" in op or "gelu" in op or "fp8" in op or op.startswith("moe") for op in called)

    def test_a_mixture_of_experts_in_fp8(self, tmp_path: Path):
        model = models.load(write(tmp_path, QWEN_MOE).parent)
        called = {op.op for op, _ in models.calls_of_model(model, ops())}
        assert {"moe.topk_softmax", "quantization.per_token_group_quant_fp8"} <= called
        assert model.intermediate_sizes == (14336, 1536)

    @pytest.mark.parametrize(
        ("fp8", "shards", "inner"), [(True, 8, 192), (False, 8, 192), (False, 1, 1536), (True, 64, 0)]
    )
    def test_experts_as_they_are_called(self, tmp_path: Path, fp8: bool, shards: int, inner: int):
        """In the checkpoint's own kind, each cut along its inner size; none where the rest is too narrow."""
        config = QWEN_MOE if fp8 else {k: v for k, v in QWEN_MOE.items() if k != "quantization_config"}
        model = models.load(write(tmp_path, config))
        calls = [FusedMoeArgs(*args) for _, args in models.calls_of_model(model, ["moe.fused_moe"], [1, 64], shards)]
        assert len(calls) == (2 if inner else 0)
        for a in calls:
            assert a.quant == ("fp8_block" if fp8 else "bf16")
            assert (a.num_experts, a.intermediate_size) == (128, inner)

    def test_the_gate_follows_the_model(self, tmp_path: Path):
        deepseek = {**QWEN_MOE, "num_experts": 256, "scoring_func": "sigmoid", "n_group": 8, "topk_group": 4}
        for config, expected in (
            (deepseek, "grouped_topk"),
            ({**deepseek, "n_group": 1, "topk_group": 1}, "topk_sigmoid"),
            (QWEN_MOE, "topk_softmax"),
        ):
            model = models.load(write(tmp_path, config))
            called = {op.op.partition(".")[2] for op, _ in models.calls_of_model(model, ops())}
            assert called & {"topk_softmax", "topk_sigmoid", "grouped_topk"} == {expected}
        with pytest.raises(FormatError, match="n_group"):
            models.load(write(tmp_path, {**deepseek, "n_group": 7}))

    def test_gemma(self, tmp_path: Path):
        config = {**LLAMA, "model_type": "gemma3_text", "hidden_act": None, "hidden_activation": "gelu_pytorch_tanh"}
        called = {op.op for op, _ in models.calls_of_model(models.load(write(tmp_path, config)), ops())}
        assert {"layernorm.gemma_rmsnorm", "activation.gelu_tanh_and_mul"} <= called
        assert "layernorm.rmsnorm" not in called

    def test_a_model_with_layer_norm(self, tmp_path: Path):
        config = {**LLAMA, "layer_norm_eps": 1e-5}
        called = {op.op for op, _ in models.calls_of_model(models.load(write(tmp_path, config)), ops())}
        assert "layernorm.layernorm" in called
        assert not any("rmsnorm" in op for op in called)

    @pytest.mark.parametrize(
        ("change", "attends"),
        [
            ({}, True),
            ({"head_dim": 80}, False),
            ({"torch_dtype": "float32"}, False),
            ({"num_attention_heads": 32, "num_key_value_heads": 1}, False),
            ({"num_attention_heads": 30, "num_key_value_heads": 8, "head_dim": 128}, False),
        ],
    )
    def test_decode_is_for_heads_that_it_takes(self, tmp_path: Path, change, attends: bool):
        model = models.load(write(tmp_path, LLAMA | change))
        calls = models.calls_of_model(model, ["attention.decode"])
        assert bool(calls) == attends
        for op, args in calls:
            op.check(*args)

    def test_sizes_are_divided_among_gpus(self, tmp_path: Path):
        model = models.load(write(tmp_path, LLAMA))
        widths = {args[0].shape[-1] for op, args in models.calls_of_model(model, ["activation.silu_and_mul"], shards=8)}
        assert widths == {2 * 14336 // 8}

    def test_a_nested_text_model(self, tmp_path: Path):
        assert models.load(write(tmp_path, {"text_config": LLAMA})).hidden_size == 4096

    def test_few_and_many_tokens_are_both_covered(self, tmp_path: Path):
        model = models.load(write(tmp_path, LLAMA))
        calls = models.calls_of_model(model, ["activation.silu_and_mul"])
        tokens = {args[0].shape[0] for _, args in calls}
        assert {1, 32, 2048, 8192} <= tokens

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"hidden_size": "4096"}, "'hidden_size' must be an integer"),
            ({"hidden_size": True}, "'hidden_size'"),
            ({"hidden_size": -1}, "'hidden_size'"),
            ({"hidden_size": 1 << 40}, "'hidden_size'"),
            ({"hidden_size": None}, "'hidden_size' is missing"),
            ({"num_attention_heads": None}, "'num_attention_heads' is missing"),
            ({"num_attention_heads": 31}, "'head_dim' is missing"),
            ({"intermediate_size": None}, "'intermediate_size' is missing"),
            ({"torch_dtype": "float99"}, "'torch_dtype'.*float99"),
            ({"torch_dtype": 16}, "'torch_dtype'"),
            ({"hidden_act": "relu9"}, "'hidden_act'.*relu9"),
            ({"num_experts": 8}, "'num_experts_per_tok' is missing"),
            ({"num_experts": 8, "num_experts_per_tok": 9}, "at most the 8 experts"),
        ],
    )
    def test_a_malformed_configuration_names_the_field(self, tmp_path: Path, change, named: str):
        with pytest.raises(FormatError, match=named):
            models.load(write(tmp_path, {**LLAMA, **change}))

    def test_an_activation_that_is_no_name(self, tmp_path: Path):
        with pytest.raises(FormatError, match="field 'hidden_act'"):
            models.load(write(tmp_path, {**LLAMA, "hidden_act": ["silu"]}))

    @pytest.mark.parametrize("text", ["", "{", "[]", "3", "\x00", "[" * 100_000])
    def test_what_is_no_configuration(self, tmp_path: Path, text: str):
        with pytest.raises(FormatError, match=r"config\.json"):
            models.load(write(tmp_path, text))

    def test_collecting_restores_the_operators(self):
        x = torch.ones(2, 64)
        with usages.collected() as calls:
            rmsnorm(x, torch.ones(64))
        assert len(calls) == 1
        assert torch.allclose(rmsnorm(x, torch.ones(64)), x)


class TestRunning:
    ARGS = ("prewarm", "rmsnorm", "--shapes", "32x256", "--arch", "sm_90a")

    def test_compiles_then_finds(self, fresh: Path, capsys):
        assert main([*self.ARGS, "--json"]) == 0
        first = json.loads(capsys.readouterr().out)["kernels"]
        assert [kernel["status"] for kernel in first] == ["compiled"]
        assert [entry.arch for entry in cache.entries(root=fresh)] == ["sm_90a"]
        assert main([*self.ARGS, "--json"]) == 0
        assert [kernel["status"] for kernel in json.loads(capsys.readouterr().out)["kernels"]] == ["cached"]
        assert main(self.ARGS) == 0
        assert "1 kernels: 0 compiled, 1 in the cache already" in capsys.readouterr().out

    def test_a_trace(self, fresh: Path, tmp_path: Path, capsys):
        trace.enable_fused_op_trace()
        try:
            rmsnorm(torch.ones(32, 256).bfloat16(), torch.ones(256).bfloat16())
            trace.save(tmp_path / "t.jsonl")
        finally:
            trace.disable_fused_op_trace()
        by_trace = listed(capsys, "--trace", str(tmp_path / "t.jsonl"))
        assert by_trace == listed(capsys, "rmsnorm", "--shapes", "32x256")

    def test_a_missing_compiler_is_said_once(self, fresh: Path, monkeypatch, tmp_path: Path, capsys):
        monkeypatch.setenv("HPCJIT_CUDA_HOME", str(tmp_path))
        assert main(["prewarm", "rmsnorm", "--arch", "sm_90a"]) == 1
        captured = capsys.readouterr()
        assert "failed" in captured.out
        assert "Remedy: pip install 'hpcjit[nvcc]'" in captured.err

    def test_a_cache_that_cannot_be_written(self, fresh: Path, monkeypatch, capsys):
        monkeypatch.setenv("HPCJIT_CACHE_DIR", "/proc/nowhere")
        assert main(self.ARGS) == 2
        assert "HPCJIT_CACHE_DIR" in capsys.readouterr().err


class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "named"),
        [
            (["rmsnrm"], "did you mean 'rmsnorm'"),
            (["layernorm.rmsnrm"], "did you mean 'layernorm.rmsnorm'"),
            (["rmsnorm", "--shapes", "32x"], "--shapes"),
            (["rmsnorm", "--shapes", "-1x4096"], "unrecognized"),
            (["rmsnorm", "--shapes", "0x4096"], "--shapes"),
            (["rmsnorm", "--shapes", "999999999x999999999"], "--shapes"),
            (["rmsnorm", "--shapes", "32x4096x8"], "num_tokens x hidden_size"),
            (["--shapes", "32x4096"], "used with an operator"),
            (["topk_softmax", "--shapes", "4x8x64"], "top_k"),
            (["--arch", "hopper"], "hopper"),
            (["--jobs", "0"], "--jobs"),
            (["--shards", "0"], "--shards"),
            (["--model", "missing.json"], "missing.json"),
            (["--trace", "missing.jsonl"], "missing.jsonl"),
        ],
    )
    def test_is_named_and_nothing_is_written(self, options: list[str], named: str, fresh: Path, capsys):
        try:
            code = main(["prewarm", *options])
        except SystemExit as stop:  # argparse
            code = stop.code
        assert code == 2
        captured = capsys.readouterr()
        assert named in captured.err or named == "unrecognized"
        assert not captured.out
        assert not list(fresh.rglob("kernel.so"))

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"op": "layernorm.nope"}, "unknown operator"),
            ({"tensors": {}}, "needs 'input'"),
            ({"tensors": {"input": "bfloat99[2, 8]", "weight": "bfloat16[8]", "out": "bfloat16[2, 8]"}}, "bfloat99"),
            ({"tensors": {"input": "bfloat16[2, 8]", "weight": "bfloat16[9]", "out": "bfloat16[2, 8]"}}, "'weight'"),
            ({"scalars": {"eps": "much"}}, "'eps' must be a float"),
        ],
    )
    def test_a_trace_that_no_operator_takes(self, change, named: str, tmp_path: Path, fresh: Path, capsys):
        record = {
            "op": "layernorm.rmsnorm",
            "backend": "jit",
            "count": 1,
            "tensors": {"input": "bfloat16[2, 8]", "weight": "bfloat16[8]", "out": "bfloat16[2, 8]"},
            "scalars": {"eps": 1e-6},
            "values": [],
            **change,
        }
        header = {"format": "hpcjit-trace", "version": 1, "records": 1, "dropped_calls": 0, "dropped_values": 0}
        path = tmp_path / "t.jsonl"
        path.write_text(json.dumps(header) + "\n" + json.dumps(record) + "\n")
        assert main(["prewarm", "--trace", str(path)]) == 2
        assert named in capsys.readouterr().err
        assert not list(fresh.rglob("kernel.so"))

    def test_shapes_of_an_operator_that_models_do_not_call(self):
        with pytest.raises(ArgumentError, match=r"did you mean 'layernorm\.rmsnorm'"):
            usages.usage_of("layernorm.rmsnorms")


@pytest.mark.parametrize(
    ("arch", "sm"), [("sm_80", (8, 0)), ("sm_90a", (9, 0)), ("sm_100a", (10, 0)), ("sm_120", (12, 0))]
)
def test_the_device_of_an_architecture(arch: str, sm: tuple[int, int]):
    assert prewarm.platform_of(arch).sm == sm


def test_an_architecture_that_an_operator_does_not_run_on_is_refused_before_any_compile(capsys):
    assert main(["prewarm", "rmsnorm", "--arch", "sm_90a", "sm_75"]) == 2
    captured = capsys.readouterr()
    assert "layernorm.rmsnorm cannot be built for sm_75: needs cuda SM >= 8.0" in captured.err
    assert not captured.out


def test_an_architecture_that_only_some_operators_run_on(capsys):
    """Of all operators those that run there are meant; one that is named has to."""
    calls = list(prewarm.calls_of_cases([*cases_of("layernorm.qk_norm"), *cases_of("attention.decode", "demo")]))
    assert {item.op for item in prewarm.items(calls, ["sm_80"], named=False)} == {"layernorm.qk_norm"}
    assert main(["prewarm", "decode", "--arch", "sm_80"]) == 2
    assert "attention.decode cannot be built for sm_80: needs cuda SM >= 9.0" in capsys.readouterr().err
