"""A tiny Qwen3.5 checkpoint that sees images.

Imports transformers, which takes seconds: see tiny_tower.py.
"""

import json
from pathlib import Path

import tests.parity.torchvision_ops  # noqa: F401 - before transformers

# isort: split
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from tests.parity.qwen3_5_oracle import fill_hybrid
from tests.tiny_tokenizer import added_ids, vocab_size, write_model_directory


def make_model(directory: Path) -> Qwen3_5ForConditionalGeneration:
    """A tiny checkpoint with a tokenizer, a template and an image processor."""
    write_model_directory(directory)
    own = json.loads((directory / "config.json").read_text())
    ids = {name: number for name, number in own.items() if name.endswith("_token_id")}
    vision = {k: v for k, v in own["vision_config"].items() if k != "deepstack_visual_indexes"}
    rope = {
        "rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True,
        "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25,
    }  # fmt: skip
    config = Qwen3_5Config(
        text_config={
            "vocab_size": vocab_size(), "hidden_size": 64, "intermediate_size": 96,
            "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 32, "max_position_embeddings": 4096, "rope_parameters": rope,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
            "linear_value_head_dim": 16, "bos_token_id": None, "pad_token_id": None,
            "eos_token_id": added_ids()["<|im_end|>"],
        },
        vision_config=vision | {"out_hidden_size": 64}, **ids,
    )  # fmt: skip
    model = Qwen3_5ForConditionalGeneration(config).eval()
    fill_hybrid(model, 0, gain=1.5)
    kept = (directory / "generation_config.json").read_text()
    model.save_pretrained(directory)
    (directory / "generation_config.json").write_text(kept)
    model.generation_config.eos_token_id = None
    return model
