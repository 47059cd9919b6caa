"""The decoder's dispatch table for models and devices that are not here, and what calls it."""

import logging
from dataclasses import replace

import pytest
import torch

from benchmarks.kernels import kernel_table
from benchmarks.text_shapes import TEXT_SHAPES
from kernels import plain, tuning
from kernels.device import KNOWN_DEVICES, DeviceFacts
from services.common.nn.dispatch import TokenRange, UnknownOverride
from services.common.nn.formats import rows_of
from services.common.nn.layers import RMSNorm
from services.common.nn.linear import Linear, UnquantizedLinear
from services.decoder.operations import table
from services.decoder.operations.ops import Ops, create_ops
from services.decoder.operations.table import KernelFacts, Row

H200 = KNOWN_DEVICES["h200"]


def names(facts: KernelFacts, operation: str, tokens: list[int], *, captured: bool) -> list[str]:
    made = table.resolve(facts)
    made.is_captured = captured
    return [made.choose(operation, count).name for count in tokens]


def facts_of(shape: str, device: DeviceFacts = H200, **changes: object) -> KernelFacts:
    return KernelFacts(device, replace(TEXT_SHAPES[shape], **changes), torch.bfloat16)


@pytest.mark.parametrize("shape", TEXT_SHAPES)
def test_every_size_has_its_kernels_on_an_h200(shape: str) -> None:
    facts, sizes = facts_of(shape), [1, 2, 3, 64, 65, 832, 2048]
    assert names(facts, "norm_linear", sizes, captured=True) == ["gemv"] + ["unfused"] * 6
    assert names(facts, "norm_swiglu", sizes[:3], captured=False) == ["gemv", "unfused", "unfused"]
    assert names(facts, "project", sizes[:5], captured=True) == ["skinny_gemm"] * 4 + ["linear"]
    found = names(facts, "linear_residual", sizes, captured=True)
    assert found == ["gemv", *["unfused"] * 4, "gemm", "gemm"]
    assert names(facts, "linear", [831, 832], captured=True) == ["plain", "cublaslt"]
    least = facts.launch_hiding_tokens
    found = names(facts, "linear", [831, least - 1, max(832, least)], captured=False)
    assert found == ["plain", "plain" if least > 832 else found[1], "cublaslt"]
    found = names(facts, "linear_residual", [831, max(832, least)], captured=False)
    assert found == ["unfused", "gemm"]
    assert names(facts, "linear_swiglu", [64, 65], captured=False) == ["skinny_gemm", "silu_mul"]


def test_larger_models_hide_slow_launches_with_fewer_tokens() -> None:
    """A layer has as many launches whatever its size. Quantized ones take half of the time."""
    found = {shape: facts_of(shape).launch_hiding_tokens for shape in TEXT_SHAPES}
    assert found == {"2b": 2048, "4b": 1022, "8b": 535, "32b": 212, "30b-a3b": 1821}
    assert replace(facts_of("8b"), weight_format="fp8_block").launch_hiding_tokens == 1069
    assert facts_of("2b", hidden_size=512).launch_hiding_tokens == 2048  # nothing was measured


def test_the_next_kernel_starts_before_the_wait_unless_weights_are_quantized() -> None:
    facts = facts_of("8b")
    assert (facts.pdl, facts_of("8b", KNOWN_DEVICES["a100"]).pdl) == (2, 0)
    for weight_format in ("fp8_block", "w4a16", "plain+w4a16"):
        assert replace(facts, weight_format=weight_format).pdl == 1


def test_experts_that_no_kernel_reads_are_dequantized() -> None:
    for weight_format in ("int8+plain", "w4a16+plain"):
        facts = replace(facts_of("30b-a3b"), weight_format=weight_format)
        made = table.resolve(facts, formats={weight_format: ()})
        assert made.choose("moe", 1).name == "dequantized"
        assert "not " + weight_format.split("+")[0] in made.rejected["moe", "gemv"]
    facts = replace(facts_of("30b-a3b"), weight_format="fp8_block")
    assert names(facts, "moe", [1, 100], captured=True) == ["gemv", "grouped_gemm"]
    for weight_format in ("w4a16", "w8a16", "nvfp4", "mxfp4", "mxfp8"):
        facts = replace(facts, weight_format=weight_format)
        made = table.resolve(facts, formats={weight_format: ()})
        assert made.choose("moe", 1).name == "packed"
    facts = replace(facts, weight_format="int8")
    assert table.resolve(facts, formats={"int8": ()}).choose("moe", 1).name == "int8"


def test_measured_shapes_have_the_constants_that_were_measured() -> None:
    config = tuning.split_k_config(H200, 4096, 2048)
    assert config is not None and (config.splits, config.stages(64, 232448)) == (2, 6)
    config = tuning.skinny_swiglu_config(H200, 12288, 2048)
    assert config is not None and (config.splits, config.stages(16, 232448)) == (1, 3)
    assert tuning.gemv_config("linear_residual", 2048, 6144) == tuning.GemvConfig(8, 2048, 0, 4)


@pytest.mark.parametrize("shape", TEXT_SHAPES)
@pytest.mark.parametrize("device", KNOWN_DEVICES)
def test_splits_of_k_leave_few_sms_idle(shape: str, device: str) -> None:
    facts = facts_of(shape, KNOWN_DEVICES[device])
    gpu = facts.device
    shapes = [(facts.qkv_size, facts.text.hidden_size), *facts.residual_shapes]
    for rows, columns in shapes:
        config = tuning.split_k_config(gpu, rows, columns)
        assert config is not None
        assert columns % config.tile == 0 and rows % config.rows == 0
        ctas = rows // config.rows * -(-columns // config.span(columns))
        assert ctas / (-(-ctas // gpu.num_sms) * gpu.num_sms) > (0.75 if device == "h200" else 0.65)
        assert config.stages(64, gpu.shared_memory_bytes) >= 2


@pytest.mark.parametrize(
    ("facts", "operation", "reason"),
    [
        (facts_of("8b", KNOWN_DEVICES["a100"]), "norm_linear", "programmatic dependent launch"),
        (facts_of("8b", DeviceFacts("cpu")), "qk_rope_cache", "needs a GPU"),
        (facts_of("8b", replace(H200, has_triton=False)), "rms_norm", "needs Triton"),
        (facts_of("8b", KNOWN_DEVICES["b200"]), "linear_swiglu", "needs Hopper's wgmma"),
        (facts_of("8b", mlp_bias=True), "linear_swiglu", "needs an MLP without biases"),
        (facts_of("8b", hidden_size=4090), "project", "does not divide into tiles"),
        (
            replace(facts_of("8b"), weight_format="fp8_block"), "norm_linear",
            "needs unquantized weights, not fp8_block",
        ),
        (replace(facts_of("8b"), num_ranks=2), "linear_residual", "on one rank"),
        (replace(facts_of("8b"), dtype=torch.float32), "project", "not torch.float32"),
        (
            facts_of("8b", rope=replace(TEXT_SHAPES["8b"].rope, rotary_dim=64)),
            "fused_decode_attention",
            "needs rotary_dim 64 to be head_dim 128",
        ),
    ],
)  # fmt: skip
def test_what_cannot_run_says_why(facts: KernelFacts, operation: str, reason: str) -> None:
    made = table.resolve(facts)
    assert any(reason in why for (of, _), why in made.rejected.items() if of == operation)
    last = [row.name for row in table.ROWS if row.operation == operation][-1]
    assert made._operations[operation][-1].name == last


def test_the_table_prints_for_every_shape_and_device(capsys: pytest.CaptureFixture[str]) -> None:
    kernel_table.main(["--shape", "all", "--device", "all", "--kernels", "greedy=plain"])
    printed = capsys.readouterr().out
    assert printed.count("norm_linear") == len(TEXT_SHAPES) * len(KNOWN_DEVICES)
    assert "8b, bfloat16, plain weights, on A100 (a100)" in printed
    assert "triton: overridden by plain" in printed


def test_a_wrong_setting_is_an_error_that_names_it() -> None:
    text, cpu = TEXT_SHAPES["2b"], torch.device("cpu")
    for wrong in ("norm=plain", "norm_linear=fast", "norm_linear=gemv"):
        with pytest.raises(UnknownOverride, match=wrong.partition("=")[0]):
            create_ops(cpu, text, torch.float32, overrides=wrong)
    assert create_ops(cpu, text, torch.float32, overrides="plain").max_fused_context(1) == 0


def test_a_kernel_that_fails_while_warming_up_is_replaced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Even one that others call: the composed operation ends with the next implementation."""
    asked: list[str] = []

    def fails(x: torch.Tensor, layer: Linear) -> torch.Tensor:
        asked.append("fails")
        raise RuntimeError("out of shared memory")

    row: Row = Row("project", "broken", lambda _: fails)
    facts = facts_of("2b", DeviceFacts("cpu"))
    ops = Ops(table.resolve(facts, rows=[row, *table.ROWS]))
    norm, layer = RMSNorm(8, 1e-6), Linear(8, 4)
    norm.weight.data.fill_(1.0)
    layer.weight.data.normal_()
    x = torch.randn(3, 8)
    expected = plain.norm_linear(x, norm.weight, norm.eps, layer.weight)
    with caplog.at_level(logging.WARNING), ops.warming_up():
        kernels = ops.for_tokens(3)
        for _ in range(2):
            found, residual = kernels.norm_linear(None, x, norm, layer)
            assert torch.equal(found, expected) and residual is x
    assert len(caplog.records) == 1 and "project: broken failed" in caplog.text
    assert len(asked) == 2, "the step at hand asks twice, a later one does not"
    found, _ = ops.for_tokens(3).norm_linear(None, x, norm, layer)
    assert torch.equal(found, expected) and len(asked) == 2
    assert ops.table.calls() == {("rms_norm", "plain"): 1, ("project", "linear"): 1}


def test_a_kernel_that_fails_after_warming_up_is_an_error() -> None:
    """The device may be broken: nothing computed on it is trusted, and the engine ends."""

    def fails(x: torch.Tensor, layer: Linear) -> torch.Tensor:
        raise RuntimeError("an illegal memory access")

    row: Row = Row("project", "broken", lambda _: fails)
    ops = Ops(table.resolve(facts_of("2b", DeviceFacts("cpu")), rows=[row, *table.ROWS]))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        ops.for_tokens(3).project(torch.randn(3, 8), Linear(8, 4))


def test_a_graph_chooses_its_own_kernels_and_counts_replays() -> None:
    facts, made = facts_of("2b", DeviceFacts("cpu")), []
    row: Row = Row(
        "project", "many", lambda _: lambda x, layer: made.append("many") or layer(x),
        tokens=lambda _: TokenRange(2, least_eager=2048),
    )  # fmt: skip
    ops = Ops(table.resolve(facts, rows=[row, *table.ROWS]))
    x, layer = torch.randn(3, 8), Linear(8, 4)
    ops.for_tokens(3).project(x, layer)
    assert made == []
    with ops.table.capturing() as calls:
        ops.for_tokens(3).project(x, layer)
    assert made == ["many"]
    calls.num_replays += 5
    assert ops.table.calls() == {("project", "linear"): 1, ("project", "many"): 5}


@pytest.mark.parametrize("device", KNOWN_DEVICES)
def test_layers_of_each_format_get_what_a_model_of_that_format_alone_gets(device: str) -> None:
    """Of a model that mixes formats."""
    facts = facts_of("8b", KNOWN_DEVICES[device])
    formats = {**rows_of("plain"), **rows_of("fp8_block"), **rows_of("fp8_channel")}
    mixed = table.resolve(facts, formats=formats)
    for weight_format in formats:
        alone = table.resolve(replace(facts, weight_format=weight_format))
        for operation in table.LAYER_ARGUMENT:
            found = mixed.usable(f"{operation}[{weight_format}]")
            expected = [(entry.name, str(entry.tokens)) for entry in alone.usable(operation)]
            assert [(entry.name, str(entry.tokens)) for entry in found] == expected
            for tokens in (1, 2, 16, 33, 64, 4096):
                chosen = mixed.choose(operation, tokens, weight_format)
                assert chosen.name == alone.choose(operation, tokens).name
    assert {f"{each}_linear" for each in ("fp8_block", "fp8_channel")} < set(mixed.operations)


def test_one_token_of_a_large_fp8_model_takes_the_skinny_gemm_on_hopper() -> None:
    chosen = {
        (shape, device): table.resolve(
            replace(facts_of(shape, KNOWN_DEVICES[device]), weight_format="fp8_block")
        )
        .choose("norm_linear", 1)
        .name
        for shape in ("8b", "32b")
        for device in ("h200", "b200")
    }
    assert chosen == {
        ("8b", "h200"): "fp8_gemv", ("32b", "h200"): "fp8_norm",
        ("8b", "b200"): "fp8_gemv", ("32b", "b200"): "fp8_gemv",
    }  # fmt: skip


def test_an_override_holds_for_the_formats_that_have_it() -> None:
    formats = {**rows_of("plain"), **rows_of("fp8_block")}
    made = table.resolve(facts_of("8b"), {"norm_linear": "gemv"}, formats=formats)
    names = {
        each: [entry.name for entry in made.usable(f"norm_linear[{each}]")] for each in formats
    }
    assert names == {"plain": ["gemv"], "fp8_block": ["fp8_gemv", "fp8_norm", "unfused"]}
    with pytest.raises(UnknownOverride, match="norm_linear=fast: there is no such"):
        table.resolve(facts_of("8b"), {"norm_linear": "fast"}, formats=formats)


def test_a_kernel_that_fails_is_replaced_for_its_format_alone() -> None:
    def fails(x: torch.Tensor, layer: Linear) -> torch.Tensor:
        raise RuntimeError("out of shared memory")

    row: Row = Row("project", "broken", lambda _: fails)
    formats = {"plain": (), "other": (row,)}
    ops = Ops(table.resolve(facts_of("2b", DeviceFacts("cpu")), formats=formats), formats)
    plain, other = Linear(8, 4), Linear(8, 4)
    other.method = type("Other", (UnquantizedLinear,), {"weight_format": "other"})()
    for layer in (plain, other):
        torch.nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(0))
    x = torch.ones(2, 8)
    with ops.warming_up():
        for layer in (plain, other):
            assert torch.equal(ops.for_tokens(2).project(x, layer), layer(x))
    assert "project[other]" in {key for key, _ in ops.table.rejected}
    ops.for_tokens(2).project(x, other)
    assert ops.table.calls()["project", "linear"] == 1
