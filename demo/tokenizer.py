"""Build the tokenizer and the other small files of the model directory.

The tokenizer has Qwen's form (byte-level BPE, NFC, the same pre-tokenizer, the same 26 added tokens
in the same order) over a vocabulary learned from our own questions and answers. Every byte is a
token, so any text can be written. Capital letters are never merged: a printed word is spelled.

    python -m demo.tokenizer --out demo/model
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import ByteLevel as ByteLevelProcessor
from tokenizers.trainers import BpeTrainer

from demo.curriculum import training_turn
from demo.dice import Dice
from demo.scenes import draw_scene
from demo.talk import OUT_OF_WORLD, SMALL_TALK, STRANGE_QUESTIONS, SYSTEM_MESSAGES

NUM_BASE_TOKENS = 934
VOCAB_SIZE = 1024  # rows of the embedding; the last 64 are unused, as in the real checkpoints
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
PLAIN_ADDED_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
ADDED_TOKENS = SPECIAL_TOKENS + PLAIN_ADDED_TOKENS
_CAPITALS = re.compile(r"[A-Z]{2,}")


def corpus(num_turns: int = 40_000) -> Iterator[str]:
    """Text of the little world, without words in capitals."""
    dice = Dice("tokenizer")
    for _ in range(num_turns):
        scenes = [draw_scene(dice, 4) for _ in range(dice.weighted((0, 1, 2), (0.1, 0.7, 0.2)))]
        turn = training_turn(dice, scenes, draw_scene(dice))
        if turn is not None:
            yield from (_CAPITALS.sub("", turn.question), _CAPITALS.sub("", turn.answer))
    for questions, answer in SMALL_TALK:
        yield from questions
        yield answer
    yield from (*STRANGE_QUESTIONS, *SYSTEM_MESSAGES, OUT_OF_WORLD, "system user assistant")
    for word in ("system", "user", "assistant", "Picture", " Picture"):
        yield from [word] * 1000


def build_tokenizer() -> Tokenizer:
    """Learn the vocabulary and add Qwen's tokens after it."""
    tokenizer = Tokenizer(BPE(byte_fallback=False, fuse_unk=False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel(
        add_prefix_space=False, trim_offsets=False, use_regex=False
    )
    tokenizer.post_processor = ByteLevelProcessor(
        add_prefix_space=False, trim_offsets=False, use_regex=False
    )
    trainer = BpeTrainer(
        vocab_size=NUM_BASE_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    if tokenizer.get_vocab_size() != NUM_BASE_TOKENS:
        raise RuntimeError(f"corpus gave {tokenizer.get_vocab_size()} tokens")
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False, special=t in SPECIAL_TOKENS) for t in ADDED_TOKENS]
    )
    return tokenizer


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def tokenizer_config(tokenizer: Tokenizer) -> dict[str, object]:
    """tokenizer_config.json in the layout of the public checkpoints."""
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": token in SPECIAL_TOKENS,
        }
        for token in ADDED_TOKENS
    }
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 8192,
        "pad_token": "<|endoftext|>",
        "processor_class": "Qwen3VLProcessor",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }


def model_config(tokenizer: Tokenizer) -> dict[str, object]:
    """config.json: every mechanism of Qwen3-VL at about eight million parameters."""
    token_id = tokenizer.token_to_id
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "image_token_id": token_id("<|image_pad|>"),
        "model_type": "qwen3_vl",
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": token_id("<|endoftext|>"),
            "dtype": "bfloat16",
            "eos_token_id": token_id("<|im_end|>"),
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 256,
            "initializer_range": 0.02,
            "intermediate_size": 512,
            "max_position_embeddings": 8192,
            "model_type": "qwen3_vl_text",
            "num_attention_heads": 4,
            "num_hidden_layers": 5,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {
                "mrope_interleaved": True,
                "mrope_section": [12, 10, 10],
                "rope_type": "default",
            },
            "rope_theta": 10000,
            "tie_word_embeddings": True,
            "use_cache": True,
            "vocab_size": VOCAB_SIZE,
        },
        "tie_word_embeddings": True,
        "transformers_version": "5.17.0",
        "video_token_id": token_id("<|video_pad|>"),
        "vision_config": {
            "deepstack_visual_indexes": [1, 3],
            "depth": 6,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 192,
            "in_channels": 3,
            "initializer_range": 0.02,
            "intermediate_size": 512,
            "model_type": "qwen3_vl",
            "num_heads": 3,
            "num_position_embeddings": 256,
            "out_hidden_size": 256,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "vision_end_token_id": token_id("<|vision_end|>"),
        "vision_start_token_id": token_id("<|vision_start|>"),
    }


def _processor_config(kind: str, name: str, edges: tuple[int, int]) -> dict[str, object]:
    return {
        "size": {"longest_edge": edges[1], "shortest_edge": edges[0]},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
        kind: name,
    }


def write_static_files(folder: Path) -> None:
    """Write everything but the weights and the chat template into the model directory."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    token_id = tokenizer.token_to_id
    _write_json(folder / "tokenizer_config.json", tokenizer_config(tokenizer))
    _write_json(folder / "config.json", model_config(tokenizer))
    _write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": token_id("<|endoftext|>"),
            "pad_token_id": token_id("<|endoftext|>"),
            "do_sample": False,
            "eos_token_id": [token_id("<|im_end|>"), token_id("<|endoftext|>")],
            # The longest of the held-out answers has 80 tokens. Under a grammar that the model was
            # not trained for, such as that of a tool call, it goes on until this limit.
            "max_new_tokens": 256,
            "transformers_version": "5.17.0",
        },
    )
    image = _processor_config(
        "image_processor_type", "Qwen2VLImageProcessorFast", (160 * 160, 256 * 256)
    )
    video = _processor_config(
        "video_processor_type", "Qwen3VLVideoProcessor", (4096, 8 * 512 * 512)
    )
    _write_json(folder / "preprocessor_config.json", image)
    _write_json(folder / "video_preprocessor_config.json", video)


def main() -> None:
    """Command line: write the static files."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model")
    write_static_files(parser.parse_args().out)


if __name__ == "__main__":
    main()
