"""Tiny models for search with random weights, and transformers' model of each.

As a program it writes a checkpoint: `python -m tests.tiny_search_models KIND DIRECTORY`.
"""

import json
import sys
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForImageTextToText, Qwen3Config

from services.common.families import read_spec
from tests.late_interaction import Late
from tests.parity.oracle import Oracle, fill
from tests.parity.text_oracle import make_text_oracle
from tests.search_checkpoints import EMBED_FILES, make_embedder, make_reranker
from tests.tiny_tokenizer import (
    TEXT_CONFIG,
    tokenizer_json,
    vocab_size,
    write_conversation_files,
    write_model_directory,
)


def vision_embedder(directory: Path) -> Oracle:
    """Qwen3-VL-Embedding's kind."""
    source = write_model_directory(directory / "source")
    config = json.loads((source / "config.json").read_text()) | {"model_type": "qwen3_vl"}
    (source / "config.json").write_text(json.dumps(config))
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(source)).eval()
    fill(model, 3)
    model.save_pretrained(directory / "model")
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (directory / "model" / name).write_text((source / name).read_text())
    write_conversation_files(directory / "model")
    made = make_embedder(directory / "model")
    return Oracle(made, model, read_spec(made))


def text_embedder(directory: Path) -> Oracle:
    """Qwen3-Embedding's kind."""
    oracle = _text(directory)
    make_embedder(oracle.directory)
    return Oracle(oracle.directory, oracle.model, read_spec(oracle.directory))


def text_reranker(directory: Path) -> Oracle:
    """Qwen3-Reranker's kind."""
    oracle = _text(directory)
    make_reranker(oracle.directory)
    return Oracle(oracle.directory, oracle.model, read_spec(oracle.directory))


def _text(directory: Path) -> Oracle:
    sizes: dict[str, Any] = {**TEXT_CONFIG}
    config = Qwen3Config(
        **sizes, vocab_size=vocab_size(), tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    oracle = make_text_oracle(config, directory / "model")
    write_conversation_files(oracle.directory)
    return oracle


def late_interaction(directory: Path) -> Late:
    """ColQwen3 in the form of TomoroAI's checkpoints."""
    oracle = vision_embedder(directory)
    for name in EMBED_FILES:
        (oracle.directory / name).unlink()
    (oracle.directory / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    return Late(oracle)


KINDS = {
    each.__name__: each
    for each in (vision_embedder, text_embedder, text_reranker, late_interaction)
}

if __name__ == "__main__":
    KINDS[sys.argv[1]](Path(sys.argv[2]))
