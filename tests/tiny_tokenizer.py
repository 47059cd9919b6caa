"""Model directories without weights: a small byte-level BPE, Qwen's added tokens and templates."""

import json
from functools import cache
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.image_processor import CENTRED

FIXTURES = Path(__file__).parent / "fixtures"
CHAT_TEMPLATE = FIXTURES / "qwen3_vl_chat_template.jinja"
TEXT_CHAT_TEMPLATE = FIXTURES / "qwen3_chat_template.jinja"
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
ADDED = (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>",
    "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>",
    "<think>", "</think>",
)  # fmt: skip
CORPUS = (
    "The quick brown fox jumps over the lazy dog. What is in the picture? "
    "A red circle is left of a blue square. How many stars are there? "
    "system user assistant image picture hello world 0123456789 über naïve 中文 "
) * 4
UNUSED_ROWS = 10
TEXT_CONFIG = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 4096,
}  # fmt: skip
IMAGE_PATCHES = dict(patch_size=16, temporal_patch_size=2, merge_size=2)


@cache
def tokenizer_json() -> str:
    """The whole tokenizer.json; the same text each time."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    definition = json.loads(tokenizer.to_str())
    first = len(definition["model"]["vocab"])
    definition["added_tokens"] = [
        {
            "id": first + index, "content": content, "single_word": False, "lstrip": False,
            "rstrip": False, "normalized": False, "special": content in SPECIAL,
        }
        for index, content in enumerate((*SPECIAL, *ADDED))
    ]  # fmt: skip
    return json.dumps(definition, ensure_ascii=False)


def tokenizer_json_with_bos(name: str) -> str:
    """A tokenizer.json whose prompts begin with an added token."""
    token_id = added_ids()[name]
    definition = json.loads(tokenizer_json())
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    definition["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": name, "type_id": 0}}, sequence],
        "pair": [sequence, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {name: {"id": name, "ids": [token_id], "tokens": [name]}},
    }
    return json.dumps(definition)


def tokenizer_json_with_long_token(length: int) -> tuple[str, int]:
    """A tokenizer.json with one more added token, of `length` bytes, and the token's id."""
    definition = json.loads(tokenizer_json())
    last = definition["added_tokens"][-1]
    token_id = last["id"] + 1  # of a row of the model's head that is unused otherwise
    definition["added_tokens"].append({**last, "id": token_id, "content": "x" * length})
    return json.dumps(definition), token_id


@cache
def added_ids() -> dict[str, int]:
    """Added token -> id."""
    return {t["content"]: t["id"] for t in json.loads(tokenizer_json())["added_tokens"]}


@cache
def vocab_size() -> int:
    """Rows of the model's head: all tokens and a few unused ones."""
    return max(added_ids().values()) + 1 + UNUSED_ROWS


def write_model_directory(
    directory: Path, *, min_pixels: int = 65536, max_pixels: int = 1 << 20, **generation: object
) -> Path:
    """Writes all JSON files that a gateway reads; `generation` goes to generation_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    ids = added_ids()
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "text_config": {
            **TEXT_CONFIG, "vocab_size": vocab_size(),
            "rope_scaling": {"mrope_section": [4, 2, 2]}, "rope_theta": 10000.0,
        },
        "vision_config": {
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
            "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2,
            "num_position_embeddings": 64, "out_hidden_size": 32,
            "deepstack_visual_indexes": [0, 1],
        },
    }  # fmt: skip
    files = {
        "config.json": config,
        "preprocessor_config.json": {
            "size": {"shortest_edge": min_pixels, "longest_edge": max_pixels},
            **IMAGE_PATCHES,
            **CENTRED,
        },
        "video_preprocessor_config.json": {
            "size": {"shortest_edge": 4096, "longest_edge": 1 << 22},
            **IMAGE_PATCHES,
            **CENTRED,
        },
        "generation_config.json": {
            "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
            **generation,
        },
        "tokenizer_config.json": {"tokenizer_class": "Qwen2Tokenizer"},
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    (directory / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE.read_text())
    return directory


def write_text_model_directory(directory: Path, **generation: object) -> Path:
    """Likewise for a text model: Qwen3."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        **TEXT_CONFIG, "architectures": ["Qwen3ForCausalLM"], "vocab_size": vocab_size(),
        "rope_theta": 10000.0, "hidden_act": "silu",
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    write_conversation_files(directory, **generation)
    return directory


def write_conversation_files(directory: Path, **generation: object) -> None:
    """Adds tokenizer, chat template and generation config to a text checkpoint."""
    ids = added_ids()
    eos = {"eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]]}
    (directory / "generation_config.json").write_text(json.dumps(eos | generation))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (directory / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    (directory / "chat_template.jinja").write_text(TEXT_CHAT_TEMPLATE.read_text())
