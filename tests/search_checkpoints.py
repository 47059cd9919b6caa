"""The files that make a tiny checkpoint a model for search, as Qwen's have them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.tiny_tokenizer import added_ids, tokenizer_json

END = "<|endoftext|>"
_MODULE = "sentence_transformers.models."
EMBED_FILES = {
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": f"{_MODULE}Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{_MODULE}Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": f"{_MODULE}Normalize"},
    ],
    "1_Pooling/config.json": {
        "word_embedding_dimension": 32, "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": False, "pooling_mode_max_tokens": False,
        "pooling_mode_lasttoken": True, "include_prompt": True,
    },
    "config_sentence_transformers.json": {
        "prompts": {"query": "Instruct: find\nQuery:", "document": ""},
        "default_prompt_name": None, "similarity_fn_name": "cosine",
    },
}  # fmt: skip
YES, NO = 41, 207  # ids of a tiny vocabulary, on different ranks of two
SCORE_FILES = {
    "modules.json": [
        {"path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
        {"path": "1_LogitScore", "type": "sentence_transformers.cross_encoder.LogitScore"},
    ],
    "1_LogitScore/config.json": {"true_token_id": YES, "false_token_id": NO},
}
RERANKER_CARD = "---\nlicense: apache-2.0\npipeline_tag: text-ranking\n---\n# Qwen3-Reranker\n"


def write_files(directory: Path, files: Mapping[str, object]) -> Path:
    """Writes JSON files; a string is written as it is."""
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


def make_embedder(directory: Path) -> Path:
    """Adds the files of an embedding model, whose tokenizer appends `<|endoftext|>`."""
    write_files(directory, EMBED_FILES)
    return write_files(directory, {"tokenizer.json": appending_tokenizer()})


def make_reranker(directory: Path) -> Path:
    """Adds the card of a reranker, and the words yes and no to its tokenizer."""
    return write_files(
        directory, {"README.md": RERANKER_CARD, "tokenizer.json": answering_tokenizer()}
    )


def appending_tokenizer() -> str:
    """The tiny tokenizer, whose prompts end with `<|endoftext|>`, as Qwen3-Embedding's."""
    definition = json.loads(tokenizer_json())
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    end = {"SpecialToken": {"id": END, "type_id": 0}}
    definition["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [sequence, end],
        "pair": [sequence, end, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {END: {"id": END, "ids": [added_ids()[END]], "tokens": [END]}},
    }
    return json.dumps(definition, ensure_ascii=False)


def answering_tokenizer() -> str:
    """The tiny tokenizer with merges for the tokens "yes" and "no", which take the places of others
    in its vocabulary.
    """
    definition = json.loads(tokenizer_json())
    model = definition["model"]
    vocab, merges = model["vocab"], [tuple(merge) for merge in model["merges"]]
    wanted = {"no": [("n", "o")], "yes": [("y", "e"), ("ye", "s")]}
    for word, steps in wanted.items():
        for left, right in steps:
            made = left + right
            if made not in vocab:
                # The longest token that no merge needs gives up its id.
                parts = {part for merge in merges for part in merge} | set(wanted)
                free = max((t for t in vocab if t not in parts), key=lambda t: (len(t), t))
                merges = [merge for merge in merges if "".join(merge) != free]
                vocab[made] = vocab.pop(free)
                merges.append((left, right))
        assert word in vocab
    model["merges"] = [list(merge) for merge in merges]
    return json.dumps(definition, ensure_ascii=False)


def late_config(config: dict[str, Any], dimensions: int) -> dict[str, Any]:
    """Returns the config.json of a ColQwen3 whose base is a Qwen3-VL."""
    return {**config, "architectures": ["ColQwen3"], "model_type": "colqwen3",
            "embed_dim": dimensions, "padding_side": "left"}  # fmt: skip


def hybrid_late_config(config: dict[str, Any], dimensions: int) -> dict[str, Any]:
    """Returns the config.json of a ColQwen3.5 whose base is a Qwen3.5."""
    return {**config, "architectures": ["ColQwen3_5"], "dim": dimensions, "embed_dim": dimensions,
            "retrieval_attention_contract": "causal"}  # fmt: skip
