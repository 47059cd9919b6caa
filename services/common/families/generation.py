"""Reads a checkpoint's generation_config.json and the ids of its end-of-sequence tokens."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from services.common.model_spec import UnsupportedOption, read_json

# Options of generation_config.json that would change answers and are not implemented, each with the
# values under which it changes nothing. Any other value is refused.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    name: values
    for values, names in (
        ((0,), "no_repeat_ngram_size encoder_no_repeat_ngram_size min_length min_new_tokens"),
        ((0.0,), "epsilon_cutoff eta_cutoff penalty_alpha"),
        ((1,), "num_beams num_beam_groups"),
        ((1.0,), "encoder_repetition_penalty typical_p guidance_scale"),
        ((False,), "token_healing remove_invalid_values renormalize_logits"),
        (([],), "bad_words_ids suppress_tokens begin_suppress_tokens constraints force_words_ids"),
        (([], ""), "stop_strings"),
        (([], {}), "sequence_bias"),
        ((), "top_h forced_bos_token_id forced_eos_token_id exponential_decay_length_penalty"),
        ((), "watermarking_config max_time dola_layers"),
    )
    for name in names.split()
}

log = logging.getLogger(__name__)


def read_generation(directory: Path) -> dict[str, Any]:
    """Reads generation_config.json. Returns an empty dictionary if the file does not exist.

    Raises:
        UnsupportedOption: the file has an option that would change answers and is not implemented.
    """
    path = directory / "generation_config.json"
    generation = read_json(path) if path.exists() else {}
    for name, neutral in NEUTRAL.items():
        value = generation.get(name)
        if value is not None and value not in neutral:
            raise UnsupportedOption(
                f"{name} {value!r} is not supported; remove it to serve without", path.name
            )
    return generation


def eos_token_ids(directory: Path, vocab_size: int, *sources: Mapping[str, Any]) -> tuple[int, ...]:
    """Collects the end-of-sequence token ids of several files, which do not always agree.

    Returns the ids of `sources` in their order and then the id of the tokenizer's own token,
    without duplicates. An id outside the vocabulary is left out with a warning.

    Args:
        directory: the checkpoint.
        vocab_size: number of token ids that the model can sample.
        sources: JSON objects that may have an `eos_token_id`.
    """
    found: list[int | None] = []
    for source in sources:
        given = source.get("eos_token_id")
        found += [given] if isinstance(given, int) else given or ()
    if (token := _eos_token(directory)) is not None:
        found.append(_token_id(directory, token))
    known = tuple(i for i in dict.fromkeys(found) if i is not None and 0 <= i < vocab_size)
    if lost := [token if i is None else i for i in dict.fromkeys(found) if i not in known]:
        log.warning(
            "%s: these end-of-sequence tokens are not in the vocabulary and are ignored: %s",
            directory,
            lost,
        )
    return known


def _eos_token(directory: Path) -> str | None:
    """Reads `eos_token` from tokenizer_config.json, or else from special_tokens_map.json."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = directory / name
        token = read_json(path).get("eos_token") if path.exists() else None
        if isinstance(token, dict):
            token = cast("dict[str, Any]", token).get("content")
        if isinstance(token, str):
            return token
    return None


def _token_id(directory: Path, token: str) -> int | None:
    path = directory / "tokenizer.json"
    if not path.exists():
        return None
    tokenizer = read_json(path)
    for added in tokenizer.get("added_tokens") or ():
        if added["content"] == token:
            return added["id"]
    vocab = (tokenizer.get("model") or {}).get("vocab")
    return vocab.get(token) if isinstance(vocab, dict) else None
