"""Tiny random checkpoints, and what Hugging Face's implementation makes of them.

Weights are scaled so that the largest logits are 60 to 105: an absolute tolerance then means as
much as it would on a real model.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import tests.parity.torchvision_ops  # noqa: F401 - before transformers

# isort: split
from transformers import (
    AutoModelForImageTextToText,
    PaddleOCRVLConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from services.common.families import read_spec
from services.common.model_spec import ModelSpec, TowerSpec
from tests.image_processor import write_image_processor

VOCAB_SIZE = 320
IMAGE_ID, VIDEO_ID, VISION_START_ID, VISION_END_ID, EOS_ID = 311, 312, 313, 314, 315
NUM_TEXT_IDS = 300


@dataclass(frozen=True)
class Tiny:
    """One configuration."""

    heads: int
    kv_heads: int
    head_dim: int
    section: tuple[int, int, int]
    taps: tuple[int, ...]
    tied: bool
    hidden: int = 64
    layers: int = 3
    intermediate: int = 96
    theta: float = 5e6
    rope: dict[str, object] = field(default_factory=lambda: {"rope_type": "default"})
    experts: Mapping[str, object] | None = None  # fields of the config; None: dense
    family: str = "qwen3_vl"


EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}

CONFIGS = {
    "gqa1-hd16-one-tap": Tiny(4, 4, 16, (4, 2, 2), (1,), True, layers=2),
    "gqa3-hd32-odd-heads": Tiny(3, 1, 32, (6, 5, 5), (0, 2), False),
    "gqa4-hd64-three-taps": Tiny(8, 2, 64, (12, 10, 10), (0, 1, 3), True, layers=4),
    "five-heads-hd16": Tiny(5, 5, 16, (2, 3, 3), (2,), False, hidden=80, theta=1e4),
    "gqa3-narrow-hidden": Tiny(6, 2, 32, (8, 4, 4), (1, 2), True, hidden=48, layers=4),
    "gqa4-hd64-time-heavy": Tiny(4, 1, 64, (24, 4, 4), (0, 1, 2), False, hidden=96, layers=5),
    "as-many-taps-as-layers": Tiny(2, 1, 16, (4, 2, 2), (0, 1, 2), True, layers=3),
    "gqa2-hd32-yarn": Tiny(
        4,
        2,
        32,
        (8, 4, 4),
        (0, 1),
        False,
        theta=1e4,
        rope={"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024},
    ),
    "moe-gqa3-two-taps": Tiny(
        3, 1, 32, (6, 5, 5), (0, 2), True, layers=8, experts=EXPERTS | {"mlp_only_layers": [2]}
    ),
    "qwen2-gqa3-hd32": Tiny(3, 1, 32, (4, 5, 7), (), True, hidden=96, theta=1e6, family="qwen2_vl"),
    "paddleocr-gqa4-hd32-biases": Tiny(
        4, 1, 32, (4, 6, 6), (), True, hidden=48, theta=5e5, family="paddleocr_vl"
    ),
    "qwen2.5-gqa2-hd16": Tiny(
        4, 2, 16, (2, 3, 3), (), False, layers=2, theta=1e6, family="qwen2_5_vl"
    ),
}
# Towers of families other than Qwen3-VL. Windows are two tokens wide, which seldom divide a grid.
TOWERS: dict[str, dict[str, object]] = {
    "qwen2_vl": {"depth": 3, "embed_dim": 48, "num_heads": 3, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "depth": 4, "hidden_size": 32, "num_heads": 2, "intermediate_size": 44, "window_size": 56,
        "fullatt_block_indexes": [1, 3], "tokens_per_second": 2,
    },
    "paddleocr_vl": {
        "num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 3,
        "intermediate_size": 72, "image_size": 70,
    },
}  # fmt: skip


@dataclass(eq=False)
class Prompt:
    """Token ids with expanded placeholders; `grids` (h, w) in patches, by image."""

    token_ids: list[int]
    grids: list[tuple[int, int]]
    offsets: list[int]  # first placeholder of each image
    pixel_values: Tensor | None


@dataclass
class Answer:
    """What Hugging Face computes for a prompt."""

    logits: Tensor  # [T, V]
    positions: np.ndarray  # [3, T] int32
    delta: int
    embeddings: list[Tensor]  # of each image, [features, n, hidden]


@dataclass
class Oracle:
    """One checkpoint on disk and in memory."""

    directory: Path
    model: PreTrainedModel
    spec: ModelSpec

    def prompt(self, *parts: int | tuple[int, int], seed: int = 0) -> Prompt:
        """`5` is five text tokens, `(4, 6)` an image of 4 x 6 patches."""
        rng = np.random.default_rng(seed)
        token_ids: list[int] = []
        grids: list[tuple[int, int]] = []
        offsets: list[int] = []
        for part in parts:
            if isinstance(part, int):
                token_ids += rng.integers(0, NUM_TEXT_IDS, part).tolist()
            else:
                grids.append(part)
                offsets.append(len(token_ids) + 1)
                count = part[0] * part[1] // 4
                token_ids += [VISION_START_ID, *[IMAGE_ID] * count, VISION_END_ID]
        pixels = None
        if grids:
            vision = self.spec.vision_part.tower
            width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
            num_patches = sum(h * w for h, w in grids)
            pixels = torch.from_numpy(rng.uniform(-1, 1, (num_patches, width)).astype(np.float32))
        return Prompt(token_ids, grids, offsets, pixels)

    def remember(self) -> "Oracle":
        """Makes each prompt and computes its answer once from here on: the weights must stay as
        they are, and nobody writes into an answer.
        """
        for name in ("prompt", "answer", "generate"):
            setattr(self, name, functools.cache(getattr(self, name)))
        return self

    def _inputs(self, prompt: Prompt) -> dict[str, Tensor]:
        ids = torch.tensor([prompt.token_ids])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if prompt.pixel_values is not None:
            inputs["pixel_values"] = self._pixels(prompt)
            inputs["image_grid_thw"] = torch.tensor([(1, h, w) for h, w in prompt.grids])
            inputs["mm_token_type_ids"] = (ids == IMAGE_ID).int()
        return inputs

    def _pixels(self, prompt: Prompt) -> Tensor:
        """The prompt's patches in the order and shape that Hugging Face's tower takes."""
        assert prompt.pixel_values is not None
        vision = self.spec.vision_part.tower
        if vision.kind != "paddleocr_vl":
            return prompt.pixel_values
        return in_rows(prompt.pixel_values, prompt.grids, vision)

    @torch.no_grad()
    def answer(self, prompt: Prompt) -> Answer:
        """The whole model's logits, and what the language model takes beside the ids."""
        inputs = self._inputs(prompt)
        if prompt.pixel_values is None:
            logits = self.model(**inputs).logits[0]
            positions = np.broadcast_to(np.arange(len(prompt.token_ids)), (3, len(logits)))
            return Answer(logits, positions.astype(np.int32), 0, [])
        features: list[Tensor] = []

        def take(_tower: nn.Module, _inputs: tuple, out: Any) -> None:
            first = out if isinstance(out, Tensor) else out.pooler_output  # of a projector
            features.extend((first, *(getattr(out, "deepstack_features", None) or ())))

        tower: Any = self.model.model
        last = getattr(tower, "projector", tower.visual)
        hook = last.register_forward_hook(take)
        logits = self.model(**inputs).logits[0]
        hook.remove()
        positions, delta = self.model.model.get_rope_index(
            inputs["input_ids"],
            inputs["mm_token_type_ids"],
            image_grid_thw=inputs["image_grid_thw"],
            attention_mask=inputs["attention_mask"],
        )
        embeddings = torch.stack(features).split([h * w // 4 for h, w in prompt.grids], dim=1)
        return Answer(
            logits,
            np.ascontiguousarray(positions[:, 0].numpy().astype(np.int32)),
            int(delta),
            [part.contiguous() for part in embeddings],
        )

    @torch.no_grad()
    def generate(self, prompt: Prompt, num_tokens: int) -> tuple[list[int], Tensor]:
        """Greedy tokens, and the logits they were chosen from: `[num_tokens, V]`."""
        model: Any = self.model
        out = model.generate(
            **self._inputs(prompt), max_new_tokens=num_tokens, min_new_tokens=num_tokens,
            do_sample=False, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        tokens = out.sequences[0, len(prompt.token_ids) :].tolist()
        return tokens, torch.cat(out.logits)


def in_rows(patches: Tensor, grids: Sequence[tuple[int, int]], tower: TowerSpec) -> Tensor:
    """Patches of merge blocks in the order of rows, as `[N, channels, patch, patch]`."""
    merge, found = tower.spatial_merge_size, []
    for part, (height, width) in zip(patches.split([h * w for h, w in grids]), grids, strict=True):
        blocks = part.view(height // merge, width // merge, merge, merge, -1)
        found.append(blocks.transpose(1, 2).flatten(0, 3))
    return torch.cat(found).unflatten(1, (tower.in_channels, tower.patch_size, tower.patch_size))


def largest_difference(actual: Tensor, expected: Tensor) -> float:
    """Absolute, of finite logits of one shape."""
    assert actual.shape == expected.shape
    assert torch.isfinite(actual).all()
    return float((actual - expected).abs().max())


def make_oracle(tiny: Tiny, directory: Path, seed: int = 0) -> Oracle:
    """A checkpoint, made with Hugging Face's classes and saved as they do."""
    if tiny.family != "qwen3_vl":
        return _saved(_earlier_config(tiny), directory, seed)
    kind = Qwen3VLConfig if tiny.experts is None else Qwen3VLMoeConfig
    config = kind(
        text_config={
            "vocab_size": VOCAB_SIZE, "hidden_size": tiny.hidden, "num_hidden_layers": tiny.layers,
            "intermediate_size": tiny.intermediate, "num_attention_heads": tiny.heads,
            "num_key_value_heads": tiny.kv_heads, "head_dim": tiny.head_dim,
            "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "attention_bias": False,
            "rope_parameters": {
                "rope_theta": tiny.theta, "mrope_interleaved": True,
                "mrope_section": list(tiny.section), **tiny.rope,
            },
            "tie_word_embeddings": tiny.tied, "bos_token_id": None, "eos_token_id": EOS_ID,
            "pad_token_id": None, **(tiny.experts or {}),
        },
        vision_config={
            "depth": 4, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2,
            "patch_size": 8, "temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3,
            "num_position_embeddings": 64, "out_hidden_size": tiny.hidden,
            "deepstack_visual_indexes": list(tiny.taps),
        },
        image_token_id=IMAGE_ID, video_token_id=VIDEO_ID, vision_start_token_id=VISION_START_ID,
        vision_end_token_id=VISION_END_ID, tie_word_embeddings=tiny.tied,
    )  # fmt: skip
    return _saved(config, directory, seed)


def _earlier_config(tiny: Tiny) -> PreTrainedConfig:
    """The configuration of a family with sectioned M-RoPE. Heads of Qwen2-VL and Qwen2.5-VL have
    `hidden / heads` elements.
    """
    kind, own, width = {
        "qwen2_vl": (Qwen2VLConfig, {}, {"hidden_size": tiny.hidden}),
        "qwen2_5_vl": (Qwen2_5_VLConfig, {}, {"out_hidden_size": tiny.hidden}),
        "paddleocr_vl": (PaddleOCRVLConfig, {"use_bias": True, "head_dim": tiny.head_dim}, {}),
    }[tiny.family]
    assert own or tiny.heads * tiny.head_dim == tiny.hidden
    return kind(
        text_config={
            "vocab_size": VOCAB_SIZE, "hidden_size": tiny.hidden, "num_hidden_layers": tiny.layers,
            "intermediate_size": tiny.intermediate, "num_attention_heads": tiny.heads,
            "num_key_value_heads": tiny.kv_heads, "max_position_embeddings": 8192,
            "rope_parameters": {
                "rope_theta": tiny.theta, "mrope_section": list(tiny.section), **tiny.rope,
            },
            "tie_word_embeddings": tiny.tied, "bos_token_id": None, "eos_token_id": EOS_ID,
            "pad_token_id": None, **own,
        },
        vision_config=TOWERS[tiny.family] | {"patch_size": 14} | width,
        image_token_id=IMAGE_ID, video_token_id=VIDEO_ID, vision_start_token_id=VISION_START_ID,
        vision_end_token_id=VISION_END_ID, tie_word_embeddings=tiny.tied,
    )  # fmt: skip


def _saved(config: PreTrainedConfig, directory: Path, seed: int) -> Oracle:
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.set_experts_implementation("eager")
    fill(model, seed)
    model.save_pretrained(directory)
    write_image_processor(directory, 1024, 1 << 24)
    model.generation_config.eos_token_id = None
    return Oracle(directory, model, read_spec(directory))


@torch.no_grad()
def fill(model: PreTrainedModel, seed: int) -> None:
    """Random weights that make every layer, bias and norm matter."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and name.endswith("weight"):
            parameter.uniform_(0.5, 1.5, generator=generator)
        elif "embed_tokens" in name or "lm_head" in name:
            # Logits are sums of `hidden` products with a normed state: their spread is 13.
            parameter.normal_(0.0, 13 / parameter.shape[1] ** 0.5, generator=generator)
        else:
            fan_in = parameter[0].numel() if parameter.ndim > 1 else 16
            if "experts" in name:
                fan_in = parameter.shape[-1]
            parameter.normal_(0.0, 1.2 / fan_in**0.5, generator=generator)
