"""Models that are quantized while they are read: our logits are those of the same weights in an FP8
checkpoint, whose quantizer shares no code with ours. Float32, CPU, weight-only; the weights are
equal, so the difference is 0.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.gemm import fp8_weight
from services.common.families import read_spec
from services.common.model_spec import UnsupportedOption
from services.common.nn.checkpoint import CheckpointError
from services.common.nn.collectives import ALONE, Ranks
from services.common.quantization import quantized_at_load
from tests import fp8_checkpoints, packed_checkpoints
from tests.decoder_harness import Harness
from tests.parity import rank_main
from tests.parity.oracle import EXPERTS, Tiny, largest_difference, make_oracle
from tests.parity.quantized import SHAPES, TEXTS
from tests.parity.qwen3_5_oracle import CONFIGS as HYBRIDS
from tests.parity.qwen3_5_oracle import make_qwen3_5
from tests.parity.test_language_model import CLEARLY_WRONG
from tests.parity.test_ranks import MOE
from tests.parity.text_oracle import _config, make_text_oracle

# isort: split
from transformers import Qwen3MoeConfig

pytestmark = pytest.mark.usefixtures("one_thread")

MAKERS: dict[str, Callable[[Path], object]] = {
    "qwen3": lambda path: make_text_oracle(TEXTS["qwen3"], path),
    "llama-biases": lambda path: make_text_oracle(TEXTS["llama-biases"], path),
    "qwen3-vl": lambda path: make_oracle(SHAPES["partial-blocks"], path),
    "qwen3-moe": lambda path: make_text_oracle(
        _config(Qwen3MoeConfig, 4, 2, 64, head_dim=16, norm_topk_prob=True, **MOE), path
    ),
    "qwen3.5-experts": lambda path: make_qwen3_5(HYBRIDS["experts-one-shared"], path),
}
LEFT = ("mlp.gate", "shared_expert_gate", "in_proj_a", "in_proj_b")


@pytest.mark.parametrize("name", MAKERS)
def test_logits_are_those_of_an_fp8_checkpoint(name: str, tmp_path: Path) -> None:
    MAKERS[name](tmp_path / "source")
    fp8_checkpoints.write(
        tmp_path / "source", tmp_path / "fp8", "compressed-channel",
        modules=lambda module: "layers" in module and "visual" not in module
        and not module.endswith(LEFT),
    )  # fmt: skip
    plain = rank_main.logits(tmp_path / "source", ALONE)
    found = rank_main.logits(tmp_path / "source", ALONE, "fp8")
    assert largest_difference(found, rank_main.logits(tmp_path / "fp8", ALONE)) == 0
    assert largest_difference(found, plain) > CLEARLY_WRONG


def test_a_runner_takes_the_option(tmp_path: Path) -> None:
    make_text_oracle(TEXTS["qwen3"], tmp_path / "source")
    fp8_checkpoints.write(tmp_path / "source", tmp_path / "fp8", "compressed-channel")
    ids, found = list(range(9)), []
    for directory, quantization in ((tmp_path / "source", "fp8"), (tmp_path / "fp8", "")):
        harness = Harness(directory, quantization=quantization)
        found.append(harness.prompt_logits(harness.start(ids)))
    assert found[0].equal(found[1])


@pytest.mark.parametrize("transposed", [True, False])
def test_fused_experts_are_quantized_one_by_one(transposed: bool, tmp_path: Path) -> None:
    make_oracle(Tiny(4, 2, 32, (6, 5, 5), (0, 2), False, experts=EXPERTS), tmp_path)
    path = tmp_path / "model.safetensors"
    if transposed:
        made = {key: x.mT if x.dim() == 3 and "experts" in key else x
                for key, x in load_file(path).items()}  # fmt: skip
        save_file({key: x.contiguous() for key, x in made.items()}, path)
    model = rank_main.loaded(tmp_path, ALONE, "fp8")
    files, seen = load_file(path), 0
    for index, layer in enumerate(model.layers):
        if not hasattr(layer.mlp, "experts"):
            continue
        assert layer.mlp.gate.is_plain
        for name, stack in layer.mlp.experts.stacks.items():
            (key,) = (k for k in files if f"language_model.layers.{index}.mlp.experts.{name}" in k)
            assert stack.weight_format == "fp8_channel"
            seen += 1
            values = fp8_weight.dequantize(stack.method.weight(stack)[1], torch.float32)
            meant = files[key][1].mT if transposed else files[key][1]
            rows = meant.float().abs().amax(1, keepdim=True)
            assert stack.weight_scale[1].equal(rows / 448)
            assert ((values - meant).abs() <= meant.abs() / 16 + rows / 448 * 2**-10).all()
    assert seen >= 2


def test_a_rank_quantizes_what_it_holds(tmp_path: Path) -> None:
    """Its columns of a row have a scale of their own."""
    make_text_oracle(TEXTS["qwen3"], tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    for rank in range(2):
        model = rank_main.loaded(tmp_path, Ranks(rank, 2), "fp8")
        down = model.layers[1].mlp.down_proj
        meant = files["model.layers.1.mlp.down_proj.weight"].chunk(2, 1)[rank].float()
        assert down.weight_scale.equal(meant.abs().amax(1, keepdim=True) / 448)
        gate = files["model.layers.1.mlp.gate_proj.weight"].chunk(2, 0)[rank].float()
        scale = model.layers[1].mlp.gate_up_proj.weight_scale[: len(gate)]
        assert scale.equal(gate.abs().amax(1, keepdim=True) / 448)


def test_what_is_left_as_it_is(tmp_path: Path) -> None:
    make_qwen3_5(HYBRIDS["experts-one-shared"], tmp_path)
    model = rank_main.loaded(tmp_path, ALONE, "fp8")
    plain = {name for name, part in model.named_modules() if getattr(part, "is_plain", False)}
    assert {name.rpartition(".")[2] for name in plain} == {
        "gate", "gate_proj", "lm_head", "shared_expert_gate"
    }  # fmt: skip
    kinds = {parameter.dtype for parameter in model.layers[0].mlp.experts.parameters()}
    assert kinds == {torch.float8_e4m3fn, torch.float32}  # values and scales, no second copy


def test_files_that_are_quantized_otherwise_contradict_it(tmp_path: Path) -> None:
    make_text_oracle(TEXTS["qwen3"], tmp_path / "source")
    packed_checkpoints.write(tmp_path / "source", tmp_path / "packed", "ct-32")
    message = "--quantization fp8 and quantization_config contradict each other: .* w4a16"
    with pytest.raises(UnsupportedOption, match=message):
        quantized_at_load(read_spec(tmp_path / "packed"), "fp8")
    with pytest.raises(UnsupportedOption, match="--quantization 'int4' is not supported"):
        quantized_at_load(read_spec(tmp_path / "source"), "int4")
    fp8_checkpoints.write(tmp_path / "source", tmp_path / "fp8", "fp8-block")
    spec = read_spec(tmp_path / "fp8")
    assert quantized_at_load(spec, "fp8") == spec and quantized_at_load(spec, "") == spec


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    make_text_oracle(TEXTS["qwen3"], tmp_path / "source")
    lost = "model.layers.1.self_attn.k_proj.weight"
    packed_checkpoints.write(
        tmp_path / "source", tmp_path / "broken", "ct-32", modules=lambda _: False, config={},
        change=lambda key, tensor: None if key == lost else tensor,
    )  # fmt: skip
    with pytest.raises(CheckpointError, match=rf"missing tensors: {lost}$"):
        rank_main.loaded(tmp_path / "broken", ALONE, "fp8")
