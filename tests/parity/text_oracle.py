"""Tiny random checkpoints of the text families, made with Hugging Face's classes."""

from collections.abc import Callable
from pathlib import Path

import tests.parity.torchvision_ops  # noqa: F401 - before transformers

# isort: split
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from services.common.families import read_spec
from tests.parity.oracle import EOS_ID, VOCAB_SIZE, Oracle, fill

# Contexts before scaling are far shorter than the prompts: both ends of the ramp matter.
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}


def _config(
    kind: Callable[..., PreTrainedConfig], heads: int, kv_heads: int, hidden: int, **fields: object
) -> PreTrainedConfig:
    given = {
        "vocab_size": VOCAB_SIZE, "hidden_size": hidden, "intermediate_size": 96,
        "num_hidden_layers": 3, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "bos_token_id": None,
        "eos_token_id": EOS_ID, "pad_token_id": None, "rope_parameters": DEFAULT,
    } | fields  # fmt: skip
    return kind(**given)


CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3-odd-heads-tied": lambda: _config(
        Qwen3Config, 3, 1, 64, head_dim=32, tie_word_embeddings=True
    ),
    "qwen3-gqa1-yarn": lambda: _config(Qwen3Config, 4, 4, 48, head_dim=16, rope_parameters=YARN),
    "qwen3-biases": lambda: _config(
        Qwen3Config, 8, 2, 64, head_dim=16, attention_bias=True, num_hidden_layers=4
    ),
    # 2 * moe_intermediate_size is hidden_size: fused tensors do not show which way round they are.
    "qwen3-moe-odd-heads-dense-between": lambda: _config(
        Qwen3MoeConfig, 3, 1, 64, head_dim=32, num_hidden_layers=8, norm_topk_prob=True,
        num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, decoder_sparse_step=2,
        mlp_only_layers=[3],
    ),
    "qwen3-moe-biases-tied": lambda: _config(
        Qwen3MoeConfig, 4, 4, 48, head_dim=16, norm_topk_prob=False, attention_bias=True,
        num_experts=5, num_experts_per_tok=2, moe_intermediate_size=40, tie_word_embeddings=True,
    ),
    "qwen2-tied": lambda: _config(Qwen2Config, 4, 2, 64, tie_word_embeddings=True),
    "qwen2-odd-heads-yarn": lambda: _config(
        Qwen2Config, 7, 1, 112,
        rope_parameters=YARN | {"truncate": False, "mscale": 1.0, "mscale_all_dim": 0.7},
    ),
    "llama-llama3": lambda: _config(LlamaConfig, 8, 2, 128, rope_parameters=LLAMA3),
    "llama-gqa1-biases-tied": lambda: _config(
        LlamaConfig, 5, 5, 80, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "llama-wide-heads-llama3": lambda: _config(
        LlamaConfig, 3, 1, 48, head_dim=64, rope_parameters=LLAMA3 | {"factor": 32.0},
        tie_word_embeddings=True,
    ),
    "mistral-wide-heads": lambda: _config(
        MistralConfig, 6, 2, 96, head_dim=32, sliding_window=None
    ),
    "mistral-yarn": lambda: _config(
        MistralConfig, 4, 1, 64, sliding_window=None,
        rope_parameters=YARN | {"attention_factor": 1.3, "beta_fast": 8.0, "beta_slow": 2.0},
    ),
}  # fmt: skip


def make_text_oracle(config: PreTrainedConfig, directory: Path, seed: int = 0) -> Oracle:
    """Makes the model with Hugging Face's classes and saves it as they do."""
    model = AutoModelForCausalLM.from_config(config).eval()
    model.set_experts_implementation("eager")
    fill(model, seed)
    model.save_pretrained(directory)
    model.generation_config.eos_token_id = None
    return Oracle(directory, model, read_spec(directory))
