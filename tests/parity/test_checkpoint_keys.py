"""Every key of a checkpoint's files is read, or on a list with the reason why it has no effect."""

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import tests.parity.torchvision_ops  # noqa: F401 - before transformers

# isort: split
import transformers
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from services.common.families import (
    FAMILIES,
    generation,
    image_processor,
    read_spec,
)
from services.common.families.keys import READ, WITHOUT_EFFECT, is_known, unknown_keys
from services.common.model_spec import UnsupportedOption
from services.common.quantization import _DECISIVE
from tests import fp4_checkpoints, fp8_checkpoints, mxfp8_checkpoints, packed_checkpoints
from tests.fp8_checkpoints import FP8_BLOCK
from tests.int8_checkpoints import INT8
from tests.search_checkpoints import hybrid_late_config, late_config
from tests.tiny_tokenizer import write_text_model_directory

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = {
    "LlamaForCausalLM": "LlamaConfig", "MistralForCausalLM": "MistralConfig",
    "PaddleOCRVLForConditionalGeneration": "PaddleOCRVLConfig",
    "Qwen2ForCausalLM": "Qwen2Config", "Qwen3ForCausalLM": "Qwen3Config",
    "Qwen3MoeForCausalLM": "Qwen3MoeConfig", "Qwen3_5ForCausalLM": "Qwen3_5TextConfig",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5Config",
    "Qwen3_5MoeForCausalLM": "Qwen3_5MoeTextConfig",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeConfig",
    "Qwen2VLForConditionalGeneration": "Qwen2VLConfig",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2_5_VLConfig",
    "Qwen3VLForConditionalGeneration": "Qwen3VLConfig",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3VLMoeConfig",
}  # fmt: skip
PROCESSOR = {
    "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}, "patch_size": 16,
    "merge_size": 2, "temporal_patch_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    "image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen3VLProcessor",
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}


def config_of(architecture: str) -> dict[str, Any]:
    config = getattr(transformers, CONFIGS[architecture])().to_dict()
    return config | {"architectures": [architecture]}


def write(directory: Path, config: dict[str, Any], **files: dict[str, Any]) -> Path:
    write_text_model_directory(directory)
    files = {"config": config, "preprocessor_config": PROCESSOR} | files
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def test_all_families_are_here():
    # `Qwen3Model` has the keys of Qwen3ForCausalLM, and is refused without a task. The configs of
    # `ColQwen3` and `ColQwen3_5` are not in transformers.
    assert CONFIGS.keys() == FAMILIES.keys() - {"ColQwen3", "ColQwen3_5", "Qwen3Model"}


@pytest.mark.parametrize("architecture", CONFIGS)
def test_no_key_of_transformers_configs_is_unknown(architecture, tmp_path):
    assert not unknown_keys(write(tmp_path, config_of(architecture)))


def test_no_key_of_colqwen3s_config_is_unknown(tmp_path):
    config = late_config(config_of("Qwen3VLForConditionalGeneration"), 320)
    assert not unknown_keys(write(tmp_path, config | {"auto_map": {}, "initializer_range": 0.02}))


def test_no_key_of_colqwen3_5s_config_is_unknown(tmp_path):
    config = hybrid_late_config(config_of("Qwen3_5ForConditionalGeneration"), 320)
    assert not unknown_keys(write(tmp_path, config))


def test_no_key_of_a_generation_config_is_unknown():
    found = transformers.GenerationConfig().to_dict() | vars(transformers.GenerationConfig())
    assert not [key for key in found if not is_known("generation_config.json", key)]


def test_no_option_of_a_published_quantization_is_unknown():
    published = [
        *(config for config, *_ in fp8_checkpoints.FORMATS.values()),
        *fp4_checkpoints.LAYOUTS.values(), *mxfp8_checkpoints.LAYOUTS.values(), INT8,
        *(layout.config for layout in packed_checkpoints.LAYOUTS.values()),
        transformers.GPTQConfig(bits=4).to_dict(), transformers.AwqConfig().to_dict(),
        transformers.FineGrainedFP8Config().to_dict(),
        dict.fromkeys(inspect.signature(transformers.CompressedTensorsConfig).parameters),
    ]  # fmt: skip
    found = {key for config in published for key in config} - {"kwargs"}
    table = "config.json: quantization_config"
    assert not [key for key in (*found, *_DECISIVE) if not is_known(table, key)]


def test_no_key_of_a_video_processor_is_unknown():
    found = Qwen3VLVideoProcessor(size={"shortest_edge": 1, "longest_edge": 2}).to_dict()
    found |= Qwen3VLVideoProcessor.valid_kwargs.__annotations__
    assert not [key for key in found if not is_known("video_preprocessor_config.json", key)]


@pytest.mark.parametrize("files", ["demo", "qwen3-vl-2b", "qwen3.5"])
def test_no_key_of_published_tokenizers_and_processors_is_unknown(files, tmp_path):
    """As in the published files of that name, keys alone."""
    keys = {
        "demo": {},
        "qwen3-vl-2b": {
            "tokenizer_config": (
                "add_bos_token add_prefix_space added_tokens_decoder additional_special_tokens "
                "bos_token chat_template clean_up_tokenization_spaces eos_token errors "
                "model_max_length pad_token split_special_tokens tokenizer_class unk_token"
            ),
        },
        "qwen3.5": {
            "tokenizer_config": (
                "add_prefix_space added_tokens_decoder additional_special_tokens audio_bos_token "
                "audio_eos_token audio_token bos_token chat_template clean_up_tokenization_spaces "
                "eos_token errors image_token model_max_length model_specific_special_tokens "
                "pad_token split_special_tokens tokenizer_class unk_token video_token "
                "vision_bos_token vision_eos_token"
            ),
            "processor_config": "image_processor processor_class video_processor",
        },
    }[files]
    given = {name: {key: {} for key in listed.split()} for name, listed in keys.items()}
    if not given:
        assert not unknown_keys(ROOT / "demo" / "model")
    else:
        assert not unknown_keys(
            write(tmp_path, config_of("Qwen3VLForConditionalGeneration"), **given)
        )


def test_a_key_on_no_list_is_named(tmp_path):
    config = config_of("Qwen3VLForConditionalGeneration")
    config |= {"new_norm": 1, "old_norm": None}
    config["text_config"]["logit_scale"] = 2.0
    config["vision_config"]["tilt"] = 112
    config["quantization_config"] = FP8_BLOCK | {"weight_rotation": "hadamard"}
    directory = write(
        tmp_path, config, generation_config={"contrast": 1},
        processor_config={
            "image_processor": PROCESSOR | {"sharpen": True}, "video_processor": {"blur": 1},
        },
    )  # fmt: skip
    assert unknown_keys(directory) == [
        "config.json: new_norm", "config.json: text_config: logit_scale",
        "config.json: vision_config: tilt",
        "config.json: quantization_config: weight_rotation", "generation_config.json: contrast",
        "processor_config.json: image_processor: sharpen",
        "processor_config.json: video_processor: blur",
    ]  # fmt: skip


def test_no_key_is_on_two_lists():
    assert READ.keys() == WITHOUT_EFFECT.keys()
    for file, keys in READ.items():
        assert not keys & WITHOUT_EFFECT[file].keys(), file


class Recorded(dict[str, Any]):
    """Notes each key that is asked for, nested objects included."""

    def __init__(self, values: dict[str, Any], table: str, asked: dict[str, set[str]]) -> None:
        super().__init__(values)
        self._table = table
        self._asked = asked

    def get(self, key: str, default: Any = None) -> Any:
        return self._found(key, super().get(key, default))

    def __getitem__(self, key: str) -> Any:
        return self._found(key, super().__getitem__(key))

    def _found(self, key: str, value: Any) -> Any:
        self._asked.setdefault(self._table, set()).add(key)
        sections = {"vision_config": "config.json: vision_config", "text_config": "config.json"}
        if isinstance(value, dict) and key in sections:
            return Recorded(value, sections[key], self._asked)
        return value


def test_what_the_families_ask_for_is_on_the_lists_of_what_is_read(tmp_path, monkeypatch):
    asked: dict[str, set[str]] = {}
    families = sys.modules["services.common.families"]
    for module in (families, generation, image_processor):
        original = module.read_json
        monkeypatch.setattr(
            module, "read_json",
            lambda path, original=original: Recorded(original(path), path.name, asked),
        )  # fmt: skip
    for architecture in CONFIGS:
        config = config_of(architecture)
        for rope in ({}, YARN):
            section = config.get("text_config") or config
            section["rope_parameters"] = (section.get("rope_parameters") or {}) | rope
            processor = PROCESSOR | {
                "patch_size": config.get("vision_config", PROCESSOR)["patch_size"]
            }
            if architecture.startswith("PaddleOCR"):
                named = "PaddleOCRVLImageProcessor"
                processor |= {"image_processor_type": named, "temporal_patch_size": 1}
            try:
                videos = {"size": PROCESSOR["size"], "patch_size": processor["patch_size"]}
                files = {"video_preprocessor_config": videos, "preprocessor_config": processor}
                read_spec(write(tmp_path, config, **files))
            except UnsupportedOption as refused:
                assert "rope" in str(refused) or "sliding" in str(refused), architecture
    nested = {"tokenizer.json", "special_tokens_map.json"}
    for file, keys in asked.items():
        if file not in nested:
            assert keys <= READ[file], file
    assert len(asked["config.json"]) > 30 and len(asked["config.json: vision_config"]) > 9


def test_rotary_options_of_the_tower_that_are_not_served_are_refused(tmp_path):
    config = config_of("Qwen3VLForConditionalGeneration")
    read_spec(write(tmp_path, config))
    config["vision_config"]["rope_parameters"] = {"rope_type": "axial", "rope_theta": 5e5}
    with pytest.raises(UnsupportedOption, match="rope_theta"):
        read_spec(write(tmp_path, config))
