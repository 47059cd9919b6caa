"""Tiny random Qwen3.5 checkpoints, made with Hugging Face's classes."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import tests.parity.torchvision_ops  # noqa: F401 - before transformers

# isort: split
from transformers import (
    AutoModelForImageTextToText,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
)

from services.common.families import read_spec
from tests.image_processor import write_image_processor
from tests.parity.oracle import (
    EOS_ID,
    IMAGE_ID,
    VIDEO_ID,
    VISION_END_ID,
    VISION_START_ID,
    VOCAB_SIZE,
    Oracle,
    fill,
)

# transformers would use them silently; the oracle is its torch path.
for _package in ("fla", "causal_conv1d"):
    assert importlib.util.find_spec(_package) is None, f"{_package} would replace the oracle"


@dataclass(frozen=True)
class Tiny:
    """One configuration."""

    heads: int
    kv_heads: int
    head_dim: int
    section: tuple[int, int, int]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    tied: bool
    hidden: int = 64
    layers: int = 8
    partial: float = 0.25
    dtype_of_a_log: torch.dtype = torch.float32
    conv_width: int = 4
    kinds: tuple[str, ...] | None = None
    experts: Mapping[str, object] | None = None  # fields of the config; None: dense


EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}  # fmt: skip
_FULL, _LINEAR = "full_attention", "linear_attention"
CONFIGS = {
    "repeated-twice-tied": Tiny(4, 2, 32, (2, 1, 1), 2, 4, 16, 16, True),
    "odd-heads-repeated-thrice": Tiny(3, 1, 64, (3, 3, 2), 1, 3, 16, 24, False, partial=0.25),
    "not-repeated-bf16-a-log": Tiny(
        5, 5, 16, (2, 1, 1), 3, 3, 24, 16, True, hidden=80, partial=0.5,
        dtype_of_a_log=torch.bfloat16,
    ),
    "wide-heads-nine-layers": Tiny(2, 1, 256, (11, 11, 10), 2, 4, 32, 32, False, layers=9),
    "other-order-whole-rotation": Tiny(
        6, 3, 16, (3, 3, 2), 5, 5, 8, 8, False, partial=1.0, conv_width=3, hidden=48,
        kinds=(_FULL, _LINEAR, _LINEAR, _FULL, _LINEAR, _FULL, _LINEAR, _LINEAR),
    ),
    "experts-one-shared": Tiny(
        4, 2, 32, (2, 1, 1), 2, 4, 16, 16, False, experts=EXPERTS, dtype_of_a_log=torch.bfloat16
    ),
}  # fmt: skip


def make_qwen3_5(tiny: Tiny, directory: Path, seed: int = 0, gain: float = 0.5) -> Oracle:
    """A checkpoint with a tower, dense or with experts, saved as transformers does; see
    `fill_hybrid` for `gain`.
    """
    rope = {
        "rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True,
        "mrope_section": list(tiny.section), "partial_rotary_factor": tiny.partial,
    }  # fmt: skip
    kind = Qwen3_5Config if tiny.experts is None else Qwen3_5MoeConfig
    config = kind(
        text_config={
            "vocab_size": VOCAB_SIZE, "hidden_size": tiny.hidden, "num_hidden_layers": tiny.layers,
            "intermediate_size": 96, "num_attention_heads": tiny.heads,
            "num_key_value_heads": tiny.kv_heads, "head_dim": tiny.head_dim,
            "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "attention_bias": False,
            "rope_parameters": rope, "linear_num_key_heads": tiny.key_heads,
            "linear_num_value_heads": tiny.value_heads, "linear_key_head_dim": tiny.key_dim,
            "linear_value_head_dim": tiny.value_dim, "linear_conv_kernel_dim": tiny.conv_width,
            "layer_types": None if tiny.kinds is None else list(tiny.kinds),
            "tie_word_embeddings": tiny.tied, "bos_token_id": None, "eos_token_id": EOS_ID,
            "pad_token_id": None, **(tiny.experts or {}),
        },
        vision_config={
            "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2,
            "patch_size": 8, "temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3,
            "num_position_embeddings": 64, "out_hidden_size": tiny.hidden,
        },
        image_token_id=IMAGE_ID, video_token_id=VIDEO_ID, vision_start_token_id=VISION_START_ID,
        vision_end_token_id=VISION_END_ID, tie_word_embeddings=tiny.tied,
    )  # fmt: skip
    config._attn_implementation = "eager"
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.set_experts_implementation("eager")
    fill_hybrid(model, seed, gain)
    model.save_pretrained(directory)
    write_image_processor(directory, 1024, 1 << 24)
    rewrite_a_log(directory, tiny.dtype_of_a_log)
    model.generation_config.eos_token_id = None
    return Oracle(directory, model, read_spec(directory))


@torch.no_grad()
def fill_hybrid(model: PreTrainedModel, seed: int, gain: float) -> None:
    """Random weights that make every layer, gate and norm matter.

    Decays spread from nearly 1 to nearly 0. Values of A_log are those of bfloat16, so that a file
    may hold either dtype. Projections are `gain` times as large as in models of three layers: with
    1, eight layers amplify rounding so much that the oracle is 8e-4 from itself in float64; with a
    half, greedy tokens depend on little but the last one.
    """
    fill(model, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.uniform_(-4.0, 1.5, generator=generator)
            parameter.copy_(parameter.bfloat16().float())
        elif name.endswith("dt_bias"):
            parameter.uniform_(-2.0, 1.0, generator=generator)
        elif "norm" in name and "visual" not in name and "linear_attn.norm" not in name:
            parameter.uniform_(-0.5, 0.5, generator=generator)  # zero-centred
        elif name.startswith("model.language_model.layers.") and "proj" in name:
            parameter.mul_(gain)


def rewrite_a_log(directory: Path, dtype: torch.dtype) -> None:
    """Stores A_log in another dtype, and tensors of layers that predict several tokens."""
    path = directory / "model.safetensors"
    tensors = {
        name: tensor.to(dtype) if name.endswith("A_log") else tensor
        for name, tensor in load_file(path).items()
    }
    tensors["mtp.fc.weight"] = torch.zeros(2, 4)
    tensors["mtp.layers.0.self_attn.q_proj.weight"] = torch.zeros(2, 2)
    save_file(tensors, path)
