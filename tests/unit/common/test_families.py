"""Checkpoint directories as specs: published configs, transformers' defaults, refusals by name."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import services
from services.common.families import FAMILIES, read_spec
from services.common.model_spec import (
    ConversationSpec,
    ModelSpec,
    ModelSpecError,
    MoESpec,
    RopeSpec,
    UnsupportedOption,
)

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "eos_token_id": 151645,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072,
    "max_position_embeddings": 40960, "max_window_layers": 28, "num_attention_heads": 16,
    "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "eos_token_id": 151645, "hidden_act": "silu",
    "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 32768,
    "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 131072, "tie_word_embeddings": False, "use_sliding_window": False,
    "vocab_size": 152064,
}  # fmt: skip
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False,
    "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 131072,
    "mlp_bias": False, "num_attention_heads": 32, "num_hidden_layers": 16,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "tie_word_embeddings": True, "vocab_size": 128256,
}  # fmt: skip
MISTRAL = {
    "architectures": ["MistralForCausalLM"], "eos_token_id": 2, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 14336,
    "max_position_embeddings": 131072, "num_attention_heads": 32, "num_hidden_layers": 40,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
    "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 131072,
}  # fmt: skip
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
    "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3_5 = {
    "architectures": ["Qwen3_5ForCausalLM"], "attention_bias": False, "attn_output_gate": True,
    "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
    "hidden_size": 2560, "intermediate_size": 9216, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144,
    "mlp_only_layers": [], "num_attention_heads": 16, "num_hidden_layers": 32,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
        "rope_theta": 10000000, "rope_type": "default",
    },
    "tie_word_embeddings": True, "vocab_size": 248320,
}  # fmt: skip
CONFIGS = {
    "qwen3": QWEN3,
    "qwen2": QWEN2,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen3-moe": QWEN3_MOE,
}
ABSENT = object()


def read(
    directory: Path, config: dict[str, Any], generation: dict | None = None, /, **changes: Any
) -> ModelSpec:
    fields = {key: value for key, value in (config | changes).items() if value is not ABSENT}
    (directory / "config.json").write_text(json.dumps(fields))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return read_spec(directory)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_published_config_is_a_text_model(tmp_path: Path, config: dict) -> None:
    spec = read(tmp_path, config)
    text = spec.text
    assert (spec.vision, spec.checkpoint.text_prefix) == (None, "model.")
    assert text.num_layers == config["num_hidden_layers"]
    assert text.group_size == config["num_attention_heads"] // config["num_key_value_heads"]
    assert text.rms_norm_eps == config["rms_norm_eps"]
    assert text.max_position_embeddings == config["max_position_embeddings"]
    assert text.tie_word_embeddings is config["tie_word_embeddings"]
    assert (text.rope.theta, text.rope.mrope_section) == (float(config["rope_theta"]), None)
    assert text.rope.rotary_dim == text.head_dim
    assert text.sliding_window is None
    with pytest.raises(ModelSpecError, match="no vision tower"):
        _ = spec.vision_part


def test_forms_of_tool_calls(tmp_path: Path) -> None:
    found = {name: read(tmp_path, config).conversation for name, config in CONFIGS.items()}
    found["qwen3.5"] = read(tmp_path, QWEN3_5).conversation
    found["qwen3.5-moe"] = read(tmp_path, QWEN3_5, **EXPERTS_3_5).conversation
    qwen = ConversationSpec(tool_parsers=("qwen3_coder", "hermes"), thinks=True)
    assert all(spec == qwen for name, spec in found.items() if name.startswith("qwen"))
    assert found["llama"].tool_parsers == ("llama3_json",)
    assert found["mistral"] == ConversationSpec()


def test_families_differ_in_norms_biases_and_head_size(tmp_path: Path) -> None:
    specs = {name: read(tmp_path, config).text for name, config in CONFIGS.items()}
    assert [name for name, text in specs.items() if text.qk_norm] == ["qwen3", "qwen3-moe"]
    assert [name for name, text in specs.items() if text.qkv_bias] == ["qwen2"]
    assert not any(text.o_bias or text.mlp_bias for text in specs.values())
    assert [text.head_dim for text in specs.values()] == [128, 128, 64, 128, 128]
    assert specs["mistral"].head_dim != 5120 // 32


def test_experts(tmp_path: Path) -> None:
    assert read(tmp_path, QWEN3).text.moe is None
    expected = MoESpec(num_experts=128, top_k=8, intermediate_size=768)
    assert read(tmp_path, QWEN3_MOE).text.moe == expected
    assert read(tmp_path, QWEN3_MOE, norm_topk_prob=ABSENT).text.moe == replace(
        expected, norm_topk_prob=False
    )
    renamed: dict[str, Any] = {
        "num_experts": ABSENT,
        "num_local_experts": 16,
    }  # as transformers 5 writes it
    moe = read(tmp_path, QWEN3_MOE, **renamed).text.moe
    assert moe is not None and moe.num_experts == 16
    assert read(tmp_path, QWEN3_MOE, intermediate_size=ABSENT).text.intermediate_size == 768


@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({}, []),
        ({"mlp_only_layers": None}, []),
        ({"mlp_only_layers": [3, 0]}, [0, 3]),
        ({"decoder_sparse_step": 2}, [0, 2, 4]),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, [0, 1, 2, 3, 4]),
        ({"decoder_sparse_step": 7}, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_dense_layers_between_experts(tmp_path: Path, changes: dict, dense: list[int]) -> None:
    text = read(tmp_path, QWEN3_MOE, num_hidden_layers=6, **changes).text
    assert [layer for layer in range(6) if not text.has_experts(layer)] == dense


def test_biases_are_switched_on_by_the_config(tmp_path: Path) -> None:
    llama = read(tmp_path, LLAMA, attention_bias=True, mlp_bias=True).text
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)
    qwen3 = read(tmp_path, QWEN3, attention_bias=True).text
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.mlp_bias) == (True, True, False)
    qwen2 = read(tmp_path, QWEN2, attention_bias=False).text
    assert (qwen2.qkv_bias, qwen2.o_bias) == (True, False)


@pytest.mark.parametrize("head_dim", [None, ABSENT])
def test_head_dim_follows_from_the_hidden_size(tmp_path: Path, head_dim: object) -> None:
    assert read(tmp_path, LLAMA, head_dim=head_dim).text.head_dim == 64
    assert read(tmp_path, MISTRAL, head_dim=head_dim).text.head_dim == 160


def test_defaults_of_absent_fields_are_those_of_transformers(tmp_path: Path) -> None:
    absent = dict.fromkeys(("head_dim", "num_key_value_heads", "rope_theta"), ABSENT)
    qwen3 = read(tmp_path, QWEN3, **absent, num_attention_heads=32).text
    assert (qwen3.head_dim, qwen3.num_kv_heads, qwen3.rope.theta) == (128, 32, 1e4)
    assert read(tmp_path, LLAMA, **absent).text.num_kv_heads == 32
    assert read(tmp_path, MISTRAL, **absent).text.num_kv_heads == 8
    assert read(tmp_path, MISTRAL, num_key_value_heads=None).text.num_kv_heads == 32
    assert read(tmp_path, MISTRAL, sliding_window=ABSENT).text.sliding_window == 4096


def test_llama3_rope(tmp_path: Path) -> None:
    expected = RopeSpec(
        kind="llama3", theta=5e5, rotary_dim=64, factor=32.0, low_freq_factor=1.0,
        high_freq_factor=4.0, original_max_position_embeddings=8192,
    )  # fmt: skip
    assert read(tmp_path, LLAMA).text.rope == expected
    old = {key: value for key, value in LLAMA["rope_scaling"].items() if key != "rope_type"}
    assert read(tmp_path, LLAMA, rope_scaling=old | {"type": "llama3"}).text.rope == expected
    new = LLAMA["rope_scaling"] | {"rope_theta": 5e5}
    changes = {"rope_scaling": ABSENT, "rope_theta": ABSENT, "rope_parameters": new}
    assert read(tmp_path, LLAMA, **changes).text.rope == expected


def test_yarn_rope(tmp_path: Path) -> None:
    given = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    text = read(tmp_path, QWEN3, rope_scaling=given).text
    assert text.rope == RopeSpec(
        kind="yarn", theta=1e6, rotary_dim=128, factor=4.0,
        original_max_position_embeddings=32768, attention_factor=0.1 * math.log(4) + 1,
    )  # fmt: skip
    assert text.max_position_embeddings == 131072, "the scaled context can be served"
    del given["original_max_position_embeddings"]
    rope = read(tmp_path, QWEN3, rope_scaling=given).text.rope
    assert rope.original_max_position_embeddings == QWEN3["max_position_embeddings"]
    given |= {"factor": None, "original_max_position_embeddings": 10240}
    assert read(tmp_path, QWEN3, rope_scaling=given).text.rope.factor == 4.0


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"attention_factor": 1.5}, 1.5),
        ({"mscale": 0.707, "mscale_all_dim": 1.0},
         (0.0707 * math.log(4) + 1) / (0.1 * math.log(4) + 1)),
        ({"mscale": 1.0}, 0.1 * math.log(4) + 1),
        ({"factor": 0.5}, 1.0),
    ],
)  # fmt: skip
def test_yarn_attention_factor(tmp_path: Path, given: dict, expected: float) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    rope = read(tmp_path, QWEN3, rope_scaling=scaling | given).text.rope
    assert rope.attention_factor == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"use_sliding_window": False, "sliding_window": 4096}, None),
        ({"use_sliding_window": True, "sliding_window": None}, None),
        ({"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 28}, None),
        ({"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 21}, 4096),
        ({"use_sliding_window": True, "sliding_window": 4096,
          "layer_types": ["full_attention"] * 28}, None),
        ({"use_sliding_window": True, "sliding_window": 64,
          "layer_types": ["full_attention", "sliding_attention"] * 14}, 64),
    ],
)  # fmt: skip
def test_a_qwen_sliding_window_counts_where_a_layer_has_it(
    tmp_path: Path, changes: dict, expected: int | None
) -> None:
    for config in (QWEN2, QWEN3):
        assert read(tmp_path, config, **changes).text.sliding_window == expected


def test_a_window_of_qwen3_moe_is_that_of_all_layers(tmp_path: Path) -> None:
    window: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 64}
    for changes in (window, window | {"max_window_layers": 48}):
        assert read(tmp_path, QWEN3_MOE, **changes).text.sliding_window == 64
    for off in ({"use_sliding_window": False}, {"sliding_window": None}):
        assert read(tmp_path, QWEN3_MOE, **window | off).text.sliding_window is None


def test_eos_ids_of_both_files(tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA).eos_token_ids == (128001, 128008, 128009)
    assert read(tmp_path, QWEN2, {"eos_token_id": [151645, 151643]}).eos_token_ids == (
        151645, 151643,
    )  # fmt: skip
    assert read(tmp_path, QWEN2, {"eos_token_id": 7}).eos_token_ids == (7, 151645)
    assert read(tmp_path, QWEN2, {}, eos_token_id=None).eos_token_ids == ()


def test_eos_ids_beyond_the_vocabulary_end_nothing(tmp_path: Path) -> None:
    """As where somebody has left tokens out of it: each request would be refused for them."""
    size = read(tmp_path, QWEN2).text.vocab_size
    stale = {"eos_token_id": [size, 151645, size + 5, -1]}
    assert read(tmp_path, QWEN2, stale).eos_token_ids == (151645,)
    assert read(tmp_path, QWEN2, stale, vocab_size=1000).eos_token_ids == ()


def test_quantization_is_read_for_text_models_too(tmp_path: Path) -> None:
    given = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    quantization = read(tmp_path, QWEN3, quantization_config=given).checkpoint.quantization
    assert quantization is not None and quantization.format == "fp8_block"
    assert read(tmp_path, QWEN3).checkpoint.quantization is None


SCALING = {"factor": 2.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("config", "changes", "named"),
    [
        (LLAMA, {"rope_scaling": SCALING | {"rope_type": "dynamic"}}, "rope_type 'dynamic'"),
        (LLAMA, {"rope_scaling": SCALING | {"type": "linear"}}, "rope_type 'linear'"),
        (LLAMA, {"rope_scaling": SCALING | {"type": "longrope"}}, "rope_type 'longrope'"),
        (QWEN3, {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 2, 3]}},
         "mrope_section"),
        (MISTRAL, {"rope_parameters": {"rope_type": "yarn", "llama_4_scaling_beta": 0.1}},
         "llama_4_scaling_beta"),
        (QWEN3, {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
         "full_attention"),
        # Of DeepSeek-R1-0528-Qwen3-8B; transformers ignores it, others multiply by it.
        (QWEN3, {"rope_scaling": SCALING | {"rope_type": "yarn", "attn_factor": 0.878}},
         "attn_factor"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (LLAMA, {"rope_scaling": None, "rope_parameters": {"partial_rotary_factor": 0.25}},
         "partial_rotary_factor 0.25"),
        (QWEN2, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (QWEN3, {"num_experts": 128}, "num_experts 128"),
        (MISTRAL, {"num_local_experts": 8}, "num_local_experts 8"),
        (QWEN3_MOE, {"num_experts_per_tok": 129}, "num_experts_per_tok 129"),
        (QWEN3, {"layer_types": ["linear_attention"]}, "layer_types linear_attention"),
        (LLAMA, {"num_key_value_heads": 5}, "num_key_value_heads 5"),
        (LLAMA, {"rope_scaling": LLAMA["rope_scaling"] | {"high_freq_factor": 1}},
         "high_freq_factor 1"),
        (LLAMA, {"head_dim": 63}, "head_dim 63"),
        (QWEN3_MOE, {"use_qk_norm": False}, "use_qk_norm False"),
        (QWEN3_MOE, {"qkv_bias": True}, "qkv_bias True"),
        (QWEN2, {"use_mrope": True}, "use_mrope True"),
        (QWEN2, {"quantization_config": {"quant_method": "aqlm"}}, "quant_method 'aqlm'"),
    ],
)  # fmt: skip
def test_an_unsupported_option_is_refused_by_name(
    tmp_path: Path, config: dict, changes: dict, named: str
) -> None:
    with pytest.raises(UnsupportedOption, match=named) as caught:
        read(tmp_path, config, **changes)
    assert str(tmp_path) in str(caught.value)
    assert "not supported" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": ABSENT}, "hidden_size"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide', not a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"num_key_value_heads": [8]}, r"num_key_value_heads is \[8\]"),
        ({"rms_norm_eps": "small"}, "malformed"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": "llama3"}, "malformed"),
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported"),
        ({"architectures": None}, r"\(none\) is not supported"),
        ({"architectures": 1.5}, "1.5 is not supported"),
        ({"architectures": [{}]}, r"\{\} is not supported"),
    ],
)
def test_a_malformed_config_is_an_error_that_says_what(
    tmp_path: Path, changes: dict, named: str
) -> None:
    with pytest.raises(ModelSpecError, match=named):
        read(tmp_path, LLAMA, **changes)


@pytest.mark.parametrize(
    "text", ["{", "[" * 100_000, '{"a": ' + "9" * 5000 + "}", "\ud800"], ids=lambda text: text[:8]
)
def test_a_file_that_is_no_json_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(ModelSpecError, match=r"config\.json is not JSON"):
        read_spec(tmp_path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelSpecError, match=r"config\.json cannot be read: Is a directory"):
        read_spec(tmp_path)


def test_an_architecture_alone_is_a_list_of_one(tmp_path: Path) -> None:
    spec = read(tmp_path, LLAMA, architectures="LlamaForCausalLM")
    assert spec.architecture == "LlamaForCausalLM"


def test_every_family_of_the_registry_reads(tmp_path: Path) -> None:
    """A registry line whose module is missing would show only when such a model is started."""
    tested = {config["architectures"][0] for config in CONFIGS.values()}
    assert set(FAMILIES) - tested == {
        "ColQwen3", "ColQwen3_5", "Qwen3Model",  # test_task.py
        "PaddleOCRVLForConditionalGeneration",
        "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration",
        "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration",
    }  # fmt: skip


# Qwen3.5.

VISION = {
    "depth": 12, "hidden_size": 768, "intermediate_size": 3072, "num_heads": 12, "patch_size": 16,
    "temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 2304,
    "out_hidden_size": 2560, "deepstack_visual_indexes": [],
}  # fmt: skip


def read_qwen3_5(directory: Path, **changes: Any) -> ModelSpec:
    """The whole model; changes are those of its text part."""
    section = {key: value for key, value in (QWEN3_5 | changes).items() if value is not ABSENT}
    size = {"shortest_edge": 65536, "longest_edge": 16777216}
    (directory / "preprocessor_config.json").write_text(
        json.dumps({"size": size, "patch_size": 16, "image_mean": 0.5, "image_std": 0.5})
    )
    return read(
        directory,
        {
            "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": section,
            "vision_config": VISION, "image_token_id": 248056, "eos_token_id": 248046,
            "tie_word_embeddings": True,
        },
        {"eos_token_id": [248046, 248044]},
    )  # fmt: skip


PLACES = ("common/families", "encoder/models")


def test_no_service_names_a_family_that_sees() -> None:
    """A family has a file of its spec, and its layers may have files in `models`."""
    names = re.compile(r"qwen[-_. ]?(2[-_. ]?(5[-_. ]?)?vl|3[-_. ]?(vl|5))|paddle", re.IGNORECASE)
    root = Path(services.__path__[0])
    named = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if names.search(path.read_text(encoding="utf-8"))
    }
    own = {path for path in named if re.match(r"common/families/|(en|de)coder/models/", path)}
    both = {f"{place}/{name}.py" for place in PLACES for name in ("qwen2_vl", "qwen3_vl")}
    assert named == own >= both


def test_qwen3_5_has_layers_of_two_kinds_and_a_tower_without_deepstack(tmp_path: Path) -> None:
    spec = read_qwen3_5(tmp_path)
    text, linear = spec.text, spec.text.linear_attention
    assert text.attention_layers == tuple(range(3, 32, 4))
    assert sorted(text.attention_layers + text.linear_layers) == list(range(32))
    assert (text.head_dim, text.rope.rotary_dim, text.rope.mrope_section) == (256, 64, (11, 11, 10))
    assert text.output_gate and text.zero_centred_norms and text.qk_norm
    assert linear is not None
    assert (linear.num_channels, linear.group_size, linear.conv_width) == (8192, 2, 4)
    assert spec.vision_part.tower.num_features == 1
    assert spec.checkpoint.text_prefix == "model.language_model."
    assert spec.checkpoint.ignores("mtp.layers.0.mlp.up_proj.weight")
    assert spec.eos_token_ids == (248046, 248044)


def test_qwen3_5_without_a_tower_is_a_text_model(tmp_path: Path) -> None:
    spec = read(tmp_path, QWEN3_5)
    assert (spec.vision, spec.checkpoint.text_prefix) == (None, "model.")
    assert spec.text.rope.mrope_section == (11, 11, 10)
    assert spec.checkpoint.ignores("mtp.fc.weight")
    assert spec.checkpoint.ignores("model.visual.merger.norm.weight")


def test_qwen3_5_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    names = [name for name in QWEN3_5 if name.startswith("linear_")]
    names += ["head_dim", "full_attention_interval", "rope_parameters", "attn_output_gate"]
    text = read_qwen3_5(tmp_path, **dict.fromkeys(names, ABSENT)).text
    assert text.linear_attention == read_qwen3_5(tmp_path).text.linear_attention
    assert text.attention_layers == tuple(range(3, 32, 4))
    assert (text.head_dim, text.rope.rotary_dim, text.rope.theta) == (256, 64, 1e4)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"output_gate_type": "sigmoid"}, "output_gate_type 'sigmoid'"),
        ({"attn_output_gate": False}, "attn_output_gate False"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype 'bfloat16'"),
        ({"layer_scale": True}, "layer_scale True"),
        ({"mlp_only_layers": [3]}, r"mlp_only_layers \[3\]"),
        ({"layer_types": ["mamba"] * 32}, "layer_types mamba"),
        ({"layer_types": ["linear_attention"] * 32}, "without full_attention"),
        ({"full_attention_interval": 1}, "without linear_attention"),
        ({"linear_num_value_heads": 24}, "linear_num_value_heads 24"),
        ({"partial_rotary_factor": 0.1, "rope_parameters": ABSENT}, "rotates 25 of 256"),
        ({"num_experts": 8}, "num_experts 8"),
    ],
)
def test_qwen3_5_refuses_by_name(tmp_path: Path, changes: dict, named: str) -> None:
    with pytest.raises(UnsupportedOption, match=named):
        read_qwen3_5(tmp_path, **changes)


def test_qwen3_5_that_is_to_do_without_its_tower_is_refused(tmp_path: Path) -> None:
    read_qwen3_5(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for value in (None, False):  # as published
        assert read(tmp_path, config, language_model_only=value).vision is not None
    with pytest.raises(UnsupportedOption, match="language_model_only True"):
        read(tmp_path, config, language_model_only=True)


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_a_rotation_beside_the_text_config_is_not_left_unread(tmp_path: Path, name: str) -> None:
    """Where people put what a model card says of longer contexts."""
    read_qwen3_5(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262144}
    with pytest.raises(UnsupportedOption, match=rf"json: {name} .* write it into text_config"):
        read(tmp_path, config, **{name: yarn})
    config["text_config"] |= {name: yarn}
    assert read(tmp_path, config, **{name: yarn}).text.rope.kind == "yarn", "said twice"


def test_qwen3_5_serves_the_other_name_of_its_gate(tmp_path: Path) -> None:
    assert read_qwen3_5(tmp_path, output_gate_type="swish").text.output_gate


EXPERTS_3_5: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 40,
    "num_attention_heads": 16, "num_key_value_heads": 2, "num_experts": 256,
    "num_experts_per_tok": 8, "moe_intermediate_size": 512, "intermediate_size": ABSENT,
    "shared_expert_intermediate_size": 512,
}  # fmt: skip


def test_qwen3_5_with_experts(tmp_path: Path) -> None:
    text = read(tmp_path, QWEN3_5, **EXPERTS_3_5).text
    assert text.moe == MoESpec(
        num_experts=256, top_k=8, intermediate_size=512, shared_intermediate_size=512
    )
    assert (text.intermediate_size, text.num_layers, len(text.linear_layers)) == (512, 40, 30)
    with pytest.raises(ModelSpecError, match="lacks 'shared_expert_intermediate_size'"):
        read(tmp_path, QWEN3_5, **EXPERTS_3_5 | {"shared_expert_intermediate_size": ABSENT})
    with pytest.raises(UnsupportedOption, match="mlp_only_layers"):
        read(tmp_path, QWEN3_5, **EXPERTS_3_5 | {"mlp_only_layers": [3]})
