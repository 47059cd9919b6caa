"""The shipped model directory: complete, small, and with Qwen's layout."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from demo.tokenizer import ADDED_TOKENS, SPECIAL_TOKENS, VOCAB_SIZE, write_static_files

FOLDER = Path(__file__).parents[3] / "demo" / "model"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def load(name):
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def header():
    with (FOLDER / "model.safetensors").open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        tensors = json.loads(file.read(length))
    tensors.pop("__metadata__")
    return tensors


def test_everything_fits_in_16_mib():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 16 * 2**20


def test_static_files_are_what_the_code_writes(tmp_path):
    write_static_files(tmp_path)
    written = sorted(path.name for path in tmp_path.iterdir())
    shipped = sorted(path.name for path in FOLDER.iterdir())
    assert sorted([*written, "chat_template.jinja", "model.safetensors"]) == shipped
    for name in written:
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes(), name


def test_every_mechanism_is_present():
    config = load("config.json")
    text, vision = config["text_config"], config["vision_config"]
    assert config["architectures"] == ["Qwen3VLForConditionalGeneration"]
    assert config["tie_word_embeddings"]
    assert len(vision["deepstack_visual_indexes"]) >= 2
    assert text["rope_scaling"]["mrope_interleaved"]
    assert text["num_attention_heads"] == 2 * text["num_key_value_heads"]
    names = header()
    assert "model.language_model.layers.0.self_attn.q_norm.weight" in names
    assert "model.visual.deepstack_merger_list.1.linear_fc2.weight" in names
    assert "lm_head.weight" not in names
    assert {tensor["dtype"] for tensor in names.values()} == {"BF16"}
    rows = names["model.language_model.embed_tokens.weight"]["shape"][0]
    assert rows == text["vocab_size"] == VOCAB_SIZE


def test_added_tokens_follow_the_vocabulary_in_qwens_order(tokenizer):
    base = tokenizer.get_vocab_size(with_added_tokens=False)
    assert [tokenizer.token_to_id(token) for token in ADDED_TOKENS] == [
        base + i for i in range(len(ADDED_TOKENS))
    ]
    assert len(ADDED_TOKENS) == 26
    added = tokenizer.get_added_tokens_decoder()
    assert {token.content for token in added.values() if token.special} == set(SPECIAL_TOKENS)
    config = load("config.json")
    for key, token in (
        ("image_token_id", "<|image_pad|>"),
        ("video_token_id", "<|video_pad|>"),
        ("vision_start_token_id", "<|vision_start|>"),
        ("vision_end_token_id", "<|vision_end|>"),
    ):
        assert config[key] == tokenizer.token_to_id(token)
    ends = [tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")]
    assert load("generation_config.json")["eos_token_id"] == ends
    assert load("generation_config.json")["max_new_tokens"] == 256


@pytest.mark.parametrize(
    "text", ["What is it?", "Größe 中文 😀 \u0000\t\r\n  x", "HOUSE 123", "{}<|"]
)
def test_any_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_printed_words_are_spelled_letter_by_letter(tokenizer):
    tokens = tokenizer.encode("The word is HOUSE.").tokens
    assert tokens[-6:] == ["H", "O", "U", "S", "E", "."]
