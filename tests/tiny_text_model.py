"""A text model's whole directory: config, tokenizer, chat template, random weights.

Tiny enough for real processes in a test. transformers can load it, too.
"""

import json
from pathlib import Path

from tests.decoder_harness import write_tensors
from tests.tiny_tokenizer import added_ids, tokenizer_json, vocab_size

CHAT_TEMPLATE = (
    "{%- if messages[0].role == 'tool' %}{{ raise_exception('no tool speaks first') }}{% endif -%}"
    "{{- bos_token or '' }}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def write_text_model(
    directory: Path,
    architecture: str = "LlamaForCausalLM",
    *,
    bos_token: str | None = "<|endoftext|>",
    seed: int = 0,
    **config: object,
) -> Path:
    """Writes a model directory that gateway and decoder serve without an encoder.

    Args:
        directory: created if it is missing.
        architecture: of config.json.
        bos_token: of tokenizer_config.json; the template writes it first.
        seed: of the weights.
        config: fields of config.json beside or instead of the tiny ones.
    """
    directory.mkdir(parents=True, exist_ok=True)
    ids = added_ids()
    fields = {
        "architectures": [architecture],
        "model_type": architecture.removesuffix("ForCausalLM").lower(),
        "vocab_size": vocab_size(), "hidden_size": 48, "intermediate_size": 64,
        "num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 1,
        "head_dim": 16, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "tie_word_embeddings": False, "sliding_window": None,
        "eos_token_id": ids["<|im_end|>"], "bos_token_id": None,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    } | config  # fmt: skip
    files = {
        "config.json": fields,
        "generation_config.json": {"eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]]},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos_token,
            "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE,
        },
    }  # fmt: skip
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    (directory / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    return write_tensors(directory, seed)
