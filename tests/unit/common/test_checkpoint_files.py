"""Where answers end, how tokens are drawn, and under which names weights lie, by the files."""

import json
from pathlib import Path

import pytest

from services.common.families import read_spec
from services.common.model_spec import ModelSpec, UnsupportedOption
from services.common.pb.decoder_pb2 import SamplingParams
from services.gateway.request.sampling import model_defaults
from tests.unit.common.test_families import QWEN2


def write(directory: Path, **files: object) -> ModelSpec:
    """The spec of JSON files by their stems."""
    for name, value in ({"config": QWEN2} | files).items():
        (directory / f"{name}.json").write_text(json.dumps(value))
    return read_spec(directory)


TOKENIZER = {
    "added_tokens": [{"id": 151643, "content": "<|endoftext|>"}, {"id": 9, "content": "<end>"}],
    "model": {"vocab": {"</s>": 2}},
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config": {"eos_token": "<end>"}}, (151645, 9)),
        ({"tokenizer_config": {"eos_token": {"content": "<end>"}}}, (151645, 9)),
        ({"tokenizer_config": {"eos_token": "</s>"}}, (151645, 2)),
        ({"tokenizer_config": {"eos_token": None}}, (151645,)),
        ({"tokenizer_config": {"eos_token": "unknown"}}, (151645,)),
        ({"special_tokens_map": {"eos_token": {"content": "<end>"}}}, (151645, 9)),
        (
            {
                "tokenizer_config": {"eos_token": "</s>"},
                "special_tokens_map": {"eos_token": "<end>"},
            },
            (151645, 2),
        ),
        (
            {
                "generation_config": {"eos_token_id": [7, 151645]},
                "tokenizer_config": {"eos_token": "<end>"},
            },
            (7, 151645, 9),
        ),
        (
            {
                "config": QWEN2 | {"eos_token_id": None},
                "tokenizer_config": {"eos_token": "<|endoftext|>"},
            },
            (151643,),
        ),
    ],
)
def test_answers_end_at_the_ids_of_all_files(
    tmp_path: Path, files: dict, expected: tuple[int, ...]
) -> None:
    assert write(tmp_path, tokenizer=TOKENIZER, **files).eos_token_ids == expected


def test_an_eos_token_without_logits_does_not_count(tmp_path: Path) -> None:
    tokenizer = {"added_tokens": [{"id": QWEN2["vocab_size"], "content": "<end>"}]}
    spec = write(tmp_path, tokenizer=tokenizer, tokenizer_config={"eos_token": "<end>"})
    assert spec.eos_token_ids == (151645,)


def test_sampling_defaults_are_the_checkpoints(tmp_path: Path) -> None:
    given = {
        "temperature": 0.5, "top_p": 0.75, "top_k": 11, "min_p": 0.125, "repetition_penalty": 1.5,
        "presence_penalty": 0.25, "frequency_penalty": 0.375, "max_new_tokens": 77,
    }  # fmt: skip
    found = model_defaults(write(tmp_path, generation_config=given))
    assert found == SamplingParams(
        temperature=0.5, top_p=0.75, top_k=11, min_p=0.125, repetition_penalty=1.5,
        presence_penalty=0.25, frequency_penalty=0.375, max_tokens=77, stop_token_ids=(151645,),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("no_repeat_ngram_size", 3), ("num_beams", 4), ("typical_p", 0.9), ("epsilon_cutoff", 0.1),
        ("suppress_tokens", [5]), ("min_new_tokens", 2), ("stop_strings", ["x"]),
        ("bad_words_ids", [[4]]), ("guidance_scale", 1.5), ("forced_eos_token_id", 3),
    ],
)  # fmt: skip
def test_generation_options_that_change_answers_are_refused(
    tmp_path: Path, option: str, value: object
) -> None:
    with pytest.raises(UnsupportedOption, match=rf"generation_config\.json: {option} "):
        write(tmp_path, generation_config={option: value})


def test_neutral_generation_options_are_accepted(tmp_path: Path) -> None:
    neutral = {
        "no_repeat_ngram_size": 0, "num_beams": 1, "typical_p": 1.0, "suppress_tokens": None,
        "bad_words_ids": None, "min_length": 0, "remove_invalid_values": False,
    }  # fmt: skip
    assert write(tmp_path, generation_config=neutral).generation == neutral
