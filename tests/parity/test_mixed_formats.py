"""Checkpoints whose layers are stored in different formats: our logits are those of Hugging Face's
model with dequantized weights, and each layer gets the kernels of its own format. Float32, CPU;
tolerance as in test_fp8.py.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.common.nn.checkpoint import CheckpointError
from tests import fp4_checkpoints, int8_checkpoints, mxfp8_checkpoints, packed_checkpoints
from tests.decoder_harness import Harness
from tests.fp8_checkpoints import FP8_BLOCK, compressed, write
from tests.int8_checkpoints import INT8
from tests.parity.oracle import EOS_ID, VOCAB_SIZE, Oracle
from tests.parity.oracle import largest_difference as error
from tests.parity.qwen3_5_oracle import CONFIGS, make_qwen3_5
from tests.parity.test_int8 import weight_only
from tests.parity.test_language_model import CLEARLY_WRONG, TOLERANCE
from tests.parity.test_moe_fp8 import Model as ExpertsModel
from tests.parity.text_oracle import make_text_oracle

# isort: split
from transformers import Qwen3Config

pytestmark = pytest.mark.usefixtures("one_thread")

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
TWO_GROUPS = compressed() | {
    "format": "mixed-precision",
    "config_groups": {
        "mlp": compressed("block")["config_groups"]["group_0"]
        | {"targets": [r"re:.*mlp\..*"], "format": "float-quantized"},
        "rest": compressed()["config_groups"]["group_0"] | {"format": "float-quantized"},
    },
}


def among(*endings: str) -> Callable[[str], bool]:
    return lambda module: "layers" in module and module.endswith(endings)


def ignoring(*modules: str) -> dict:
    return FP8_BLOCK | {"modules_to_not_convert": ["lm_head", *modules]}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=256, intermediate_size=320, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=2048,
        eos_token_id=EOS_ID, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    return make_text_oracle(config, tmp_path_factory.mktemp("model"))


def expected(oracle: Oracle, meant: dict[str, Tensor]) -> Tensor:
    original = {name: tensor.clone() for name, tensor in oracle.model.state_dict().items()}
    oracle.model.load_state_dict(meant)
    logits = oracle.answer(oracle.prompt(40)).logits
    oracle.model.load_state_dict(original)
    return logits


def check(oracle: Oracle, directory: Path, meant: dict[str, Tensor], formats: set[str]) -> None:
    harness = Harness(directory)
    ids = oracle.prompt(40).token_ids
    for chunk_size in (None, 1):
        found = harness.prompt_logits(harness.start(ids), chunk_size)
        assert error(found, expected(oracle, meant)) < TOLERANCE
    table = harness.model.ops.table
    assert {name for name in table.operations if name.startswith("project")} == {
        f"project[{each}]" for each in formats
    }


@pytest.mark.parametrize("quantized", [ATTENTION, MLP, ("gate_proj", "up_proj"), ("o_proj",)])
def test_unquantized_layers_beside_fp8(
    oracle: Oracle, tmp_path: Path, quantized: tuple[str, ...]
) -> None:
    left = [name for name in ATTENTION + MLP if name not in quantized]
    meant = write(
        oracle.directory, tmp_path / "mixed", "fp8-block", modules=among(*quantized),
        config=ignoring(*left),
    )  # fmt: skip
    check(oracle, tmp_path / "mixed", meant, {"plain", "fp8_block"})


def test_blocks_and_channels_in_one_checkpoint(oracle: Oracle, tmp_path: Path) -> None:
    first = write(oracle.directory, tmp_path / "blocks", "compressed-block", modules=among(*MLP))
    meant = write(
        tmp_path / "blocks", tmp_path / "mixed", "compressed-channel", modules=among(*ATTENTION),
        config=TWO_GROUPS,
    )  # fmt: skip
    meant = {name: tensor for name, tensor in meant.items() if not name.endswith("_scale")}
    meant |= {name: first[name] for name in meant if "mlp" in name}
    check(oracle, tmp_path / "mixed", meant, {"fp8_block", "fp8_channel"})
    swapped = dict(meant)
    for name in meant:  # the check would see a scale of another layer
        if name.endswith("layers.0.mlp.gate_proj.weight"):
            swapped[name] = meant[name] * 1.5
    assert error(expected(oracle, swapped), expected(oracle, meant)) > CLEARLY_WRONG


def test_parts_of_a_layer_in_two_formats_are_refused(oracle: Oracle, tmp_path: Path) -> None:
    groups = {
        "q": TWO_GROUPS["config_groups"]["mlp"] | {"targets": [r"re:.*q_proj$"]},
        "rest": TWO_GROUPS["config_groups"]["rest"],
    }
    write(
        oracle.directory, tmp_path / "mixed", "compressed-channel",
        modules=among(*ATTENTION, *MLP), config=TWO_GROUPS | {"config_groups": groups},
    )  # fmt: skip
    with pytest.raises(CheckpointError, match=r"q_proj, .*k_proj, .* in different formats"):
        Harness(tmp_path / "mixed")


def test_quantized_tensors_without_a_weight_are_found(oracle: Oracle, tmp_path: Path) -> None:
    """The configuration denies them, and no tensor is called `weight`."""
    write(
        oracle.directory, tmp_path / "mixed", "fp8-block", modules=among(*MLP),
        config=ignoring("down_proj"),
        change=lambda name, tensor: None if name.endswith("0.mlp.down_proj.weight") else tensor,
    )  # fmt: skip
    with pytest.raises(CheckpointError, match=r"0\.mlp\.down_proj.*but not by quantization_config"):
        Harness(tmp_path / "mixed")


@pytest.mark.parametrize("rest", ["bf16", "fp8", "int8"])
def test_experts_in_4_bit_beside_attention_in_another_format(
    tmp_path: Path, rest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configuration's groups say which is which, and the files hold it."""
    model = ExpertsModel(tmp_path, 64)
    packed, attention = packed_checkpoints.compressed(32), {"fp8": compressed(), "int8": INT8}
    groups = {
        "experts": packed["config_groups"]["group_0"]
        | {"targets": [r"re:.*\.experts\..*"], "format": "pack-quantized"},
    }
    if rest in attention:
        groups["rest"] = attention[rest]["config_groups"]["group_0"] | {
            "targets": [r"re:.*self_attn\..*"], "format": attention[rest]["format"],
        }  # fmt: skip
    config = packed | {"format": "mixed-precision", "ignore": ["lm_head"], "config_groups": groups}
    first = tmp_path / "experts"
    meant = packed_checkpoints.write(
        model.source, first, "ct-32", modules=lambda module: ".experts." in module, config=config
    )
    writer = {"fp8": partial(write, name="compressed-channel"), "int8": int8_checkpoints.write}
    if rest == "bf16":
        first.rename(model.directory)
    else:
        again = writer[rest](
            first, model.directory, modules=lambda module: "self_attn" in module, config=config
        )
        meant |= {key: tensor for key, tensor in again.items() if key in meant and "attn" in key}
    harness = Harness(model.directory)
    layers = harness.model.layers
    assert layers[0].mlp.experts.weight_format == "w4a16"
    formats = {"bf16": "plain", "fp8": "fp8_channel", "int8": "int8"}
    assert layers[1].self_attn.qkv_proj.weight_format == formats[rest]
    if rest == "int8":  # the weights alone: test_int8.py has quantized inputs
        weight_only(monkeypatch)
    assert error(model.ours(), model.expected(meant)) < TOLERANCE


@pytest.mark.parametrize(
    ("has_experts", "algorithm"),
    [(False, "FP8"), (True, "FP8"), (True, "FP8_PB_WO"), (True, "FP8_PER_CHANNEL_PER_TOKEN"),
     (True, "MXFP8")],
)  # fmt: skip
def test_modelopts_mixed_precision(tmp_path: Path, has_experts: bool, algorithm: str) -> None:
    """Attention in one of ModelOpt's kinds of FP8, MLPs in e2m1, the head and routers as they were;
    experts are named as one.
    """
    model = ExpertsModel(tmp_path, 96)
    layers = range(model.oracle.spec.text.num_layers)
    named = {f"model.layers.{index}.self_attn.{part}": {"quant_algo": algorithm}
             for index in layers for part in ATTENTION}  # fmt: skip
    whole = [f"model.layers.{index}.mlp.experts" for index in layers] if has_experts else []
    named |= {name: {"quant_algo": "NVFP4", "group_size": 16} for name in whole}
    config = fp4_checkpoints.MODELOPT | {
        "quant_algo": "MIXED_PRECISION", "quantized_layers": named, "ignore": ["lm_head"]
    }  # fmt: skip
    first = tmp_path / "first"
    name = {"FP8_PB_WO": "modelopt-block", "FP8_PER_CHANNEL_PER_TOKEN": "modelopt-channel"}
    writer = mxfp8_checkpoints.write if algorithm == "MXFP8" else write
    meant = writer(
        model.source, first, name.get(algorithm, "modelopt"), modules=among(*ATTENTION),
        config=config,
    )  # fmt: skip
    if has_experts:
        again = fp4_checkpoints.write(
            first, model.directory, "modelopt", config=config,
            modules=lambda module: ".experts." in module,
        )  # fmt: skip
        meant |= {key: tensor for key, tensor in again.items() if ".experts." in key}
    else:
        first.rename(model.directory)
    layer = Harness(model.directory).model.layers[0]
    found = {"FP8_PB_WO": "fp8_block", "MXFP8": "mxfp8"}.get(algorithm, "fp8_channel")
    assert layer.self_attn.qkv_proj.weight_format == found
    assert layer.mlp.experts.weight_format == ("nvfp4" if has_experts else "plain")
    assert error(model.ours(), model.expected(meant)) < TOLERANCE


def test_qwen3_5_as_its_nvfp4_builds_are_published(tmp_path: Path) -> None:
    """MLPs in e2m1 but for the last one's, which two groups name; the rest and the head in FP8; and
    linear attention on the list of what is ignored, for its own parameters.
    """
    tiny = replace(CONFIGS["odd-heads-repeated-thrice"], hidden=192, layers=4)
    oracle = make_qwen3_5(tiny, tmp_path / "source")
    part = r"re:.*(self_attn\.[qkvo]_proj|linear_attn\.(in_proj_qkv|in_proj_z|out_proj))$"
    packed = fp4_checkpoints.compressed("nvfp4", inputs=True)["config_groups"]["group_0"]
    targets = [part, "re:.*lm_head", r"re:.*layers\.3\.mlp\..*"]
    groups = {
        "group_0": compressed()["config_groups"]["group_0"]
        | {"targets": targets, "format": "float-quantized"},
        "group_1": packed | {"targets": [r"re:.*mlp\..*"], "format": "nvfp4-pack-quantized"},
    }
    linear = [f"model.language_model.layers.{index}.linear_attn" for index in range(3)]
    ignored = [*linear, *(f"{name}.{part}" for name in linear for part in ("norm", "in_proj_a"))]
    ignored += ["re:.*visual.*", "re:.*in_proj_b$", "re:^mtp.*"]
    config = compressed() | {
        "format": "mixed-precision", "config_groups": groups, "ignore": ignored
    }  # fmt: skip

    def is_e2m1(module: str) -> bool:
        return "language_model" in module and ".mlp." in module and "layers.3" not in module

    def is_fp8(module: str) -> bool:
        return any(re.match(target[3:], module) for target in targets)

    first, second = tmp_path / "first", tmp_path / "second"
    meant = fp4_checkpoints.write(
        oracle.directory, first, "nvfp4-inputs", modules=is_e2m1, config=config
    )
    again = write(first, second, "compressed-channel", modules=is_fp8, config=config)
    meant |= {key: again[key] for key in meant if is_fp8(key.removesuffix(".weight"))}
    meant = {key: tensor for key, tensor in meant.items() if not key.startswith("mtp.")}
    original = oracle.answer(oracle.prompt(40)).logits
    oracle.model.load_state_dict(meant)
    logits = oracle.answer(oracle.prompt(40)).logits
    assert error(original, logits) > CLEARLY_WRONG
    harness = Harness(second)
    formats = [x.mlp.down_proj.weight_format for x in harness.model.layers]
    assert formats == ["nvfp4", "nvfp4", "nvfp4", "fp8_channel"]
    found = harness.prompt_logits(harness.start(oracle.prompt(40).token_ids), None)
    assert error(found, logits) < TOLERANCE


def test_a_group_whose_files_are_of_another_is_an_error(tmp_path: Path) -> None:
    model = ExpertsModel(tmp_path, 64)
    config = packed_checkpoints.compressed(32, ignore=["lm_head"])
    wrong = compressed()["config_groups"]["group_0"] | {"targets": [r"re:.*\.experts\..*"]}
    config["config_groups"] |= {"experts": wrong | {"format": "float-quantized"}}
    packed_checkpoints.write(
        model.source, model.directory, "ct-32", config=config,
        modules=lambda module: "layers" in module and not module.endswith("mlp.gate"),
    )  # fmt: skip
    with pytest.raises(CheckpointError, match=r"missing.*experts\.0\.\w+\.weight.*weight_packed"):
        model.ours()


@pytest.mark.parametrize("part", ["experts", "attention", "gate and up"])
def test_experts_in_another_format(tmp_path: Path, part: str) -> None:
    model = ExpertsModel(tmp_path, 128)
    chosen = {
        "experts": lambda module: ".experts." in module,
        "attention": lambda module: "self_attn" in module,
        "gate and up": lambda module: ".experts." in module and "down" not in module,
    }[part]
    left = {
        "experts": ["self_attn", "layers.1.mlp"],
        "attention": ["mlp"],
        "gate and up": ["self_attn", "layers.1.mlp", r"re:.*down_proj"],
    }[part]
    left = [f"re:.*{name}.*" if not name.startswith("re:") else name for name in left]
    config = FP8_BLOCK | {"modules_to_not_convert": ["lm_head", "re:.*mlp.gate$", *left]}
    meant = model.write(modules=chosen, config=config)
    found = model.ours()
    assert error(found, model.expected(meant)) < TOLERANCE
    harness = Harness(model.directory)
    experts = harness.model.layers[0].mlp.experts
    assert experts.weight_format == {
        "experts": "fp8_block", "attention": "plain", "gate and up": "fp8_block+plain"
    }[part]  # fmt: skip
    assert f"moe[{experts.weight_format}]" in harness.model.ops.table.operations
    assert not torch.equal(found, torch.zeros_like(found))
