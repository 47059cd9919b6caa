"""Configurations of Qwen3.5's text models with their layer for multi-token prediction.

Benchmarks and GPU tests fill these shapes with random weights, since published weights could not be
had. The sizes are those of the published models; `tiny` and `tiny-moe` have the same kinds of
layers and sizes that the kernels support.
"""

import json
from pathlib import Path
from typing import Any

_ROPE = {
    "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
    "mrope_interleaved": True, "mrope_section": [11, 11, 10],
}  # fmt: skip
_COMMON = {
    "vocab_size": 248320, "head_dim": 256, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
    "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "attention_bias": False, "attn_output_gate": True, "mamba_ssm_dtype": "float32",
    "partial_rotary_factor": 0.25, "tie_word_embeddings": False, "eos_token_id": 248044,
    "dtype": "bfloat16", "rope_parameters": _ROPE, "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
}  # fmt: skip
_DENSE = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"}
_MOE = {
    "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text",
    "norm_topk_prob": True,
}  # fmt: skip
_TINY = {
    "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "linear_num_value_heads": 16, "vocab_size": 2048, "eos_token_id": 2047,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "27b": _DENSE | {
        "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64,
        "num_attention_heads": 24, "num_key_value_heads": 4, "linear_num_value_heads": 48,
    },
    "35b-a3b": _MOE | {
        "hidden_size": 2048, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 40,
        "num_attention_heads": 16, "num_key_value_heads": 2, "linear_num_value_heads": 32,
    },
    "tiny": _DENSE | {"intermediate_size": 512},
    "tiny-moe": _MOE | {
        "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "num_experts": 8,
        "num_experts_per_tok": 2,
    },
}  # fmt: skip


def write_shape(name: str, directory: Path) -> Path:
    """Writes the configuration of a shape into a new directory, and returns the directory.

    Args:
        name: a name of `SHAPES`; with `-fp8` behind it, layers are FP8 in blocks of 128, as
            in the published FP8 checkpoints.
        directory: the directory.
    """
    shape = SHAPES[name.removesuffix("-fp8")]
    sizes = _TINY | shape if name.startswith("tiny") else shape
    count = sizes["num_hidden_layers"]
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(count)]
    config = _COMMON | sizes | {"layer_types": kinds}
    if name.endswith("-fp8"):
        layers = [*(f"model.layers.{i}" for i in range(count)), "mtp.layers.0"]
        plain = "mlp.gate", "mlp.shared_expert_gate"
        gates = [f"{layer}.{gate}" for layer in layers for gate in plain]
        gates += [f"{layer}.linear_attn.in_proj_{x}" for layer in layers[:-1] for x in "ab"]
        config["quantization_config"] = {
            "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "model.embed_tokens", "mtp.fc", *gates],
        }  # fmt: skip
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory
