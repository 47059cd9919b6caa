"""Tiny checkpoints that see videos, and Hugging Face's answers about some.

Imports transformers, which takes seconds: see tiny_tower.py.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import tests.parity.torchvision_ops  # noqa: F401 - before transformers

# isort: split
from transformers import (
    PaddleOCRVLConfig,
    PaddleOCRVLForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.paddleocr_vl.image_processing_paddleocr_vl import (
    PaddleOCRVLImageProcessor,
)
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata

from tests.e2e.tiny_qwen3_5 import make_model as make_qwen3_5
from tests.image_processor import CENTRED
from tests.parity.oracle import TOWERS, fill
from tests.parity.rope_index import time_continues
from tests.tiny_tokenizer import added_ids, vocab_size, write_model_directory


@dataclass
class Seen:
    """A video as both sides are given it.

    Attributes:
        frames: [n, h, w, 3], all of them, as decoded.
        rate: frames per second.
        sampling: `fps` or `num_frames`; None: all frames.
    """

    frames: np.ndarray
    rate: float
    sampling: Mapping[str, Any] | None = field(default_factory=dict[str, Any])


def make_qwen3_vl(directory: Path) -> Qwen3VLForConditionalGeneration:
    """A tiny checkpoint with a tokenizer, a template and processors."""
    write_model_directory(directory)
    own = json.loads((directory / "config.json").read_text())
    own["text_config"] |= {
        "hidden_size": 64, "head_dim": 32, "rope_parameters": {
            "rope_theta": 10000.0, "rope_type": "default", "mrope_section": [8, 4, 4],
            "mrope_interleaved": True,
        }, "eos_token_id": added_ids()["<|im_end|>"],
    }  # fmt: skip
    own["vision_config"]["out_hidden_size"] = 64
    config = Qwen3VLConfig(**{key: own[key] for key in own if key != "architectures"})
    model = Qwen3VLForConditionalGeneration(config).eval()
    fill(model, 0)
    kept = (directory / "generation_config.json").read_text()
    model.save_pretrained(directory)
    (directory / "generation_config.json").write_text(kept)
    model.generation_config.eos_token_id = None
    return model


def make_earlier(directory: Path, family: str) -> PreTrainedModel:
    """A Qwen2-VL or Qwen2.5-VL, likewise."""
    write_model_directory(directory)
    own = json.loads((directory / "config.json").read_text())
    ids = {name: number for name, number in own.items() if name.endswith("_token_id")}
    section = {
        # Ranks divide the rows of the head.
        "vocab_size": vocab_size() + vocab_size() % 2, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 16384, "bos_token_id": None, "pad_token_id": None,
        "eos_token_id": added_ids()["<|im_end|>"],
        "rope_parameters": {
            "rope_theta": 1e4, "rope_type": "default", "mrope_section": [2, 3, 3]
        },
    }  # fmt: skip
    sizes = TOWERS[family] | {"patch_size": 14}
    if family == "qwen2_vl":
        config = Qwen2VLConfig(
            text_config=section, vision_config=sizes | {"hidden_size": 64}, **ids
        )
        model = Qwen2VLForConditionalGeneration(config).eval()
    elif family == "paddleocr_vl":
        # With tied embeddings, which are this configuration's default, the model answers with the
        # last token of the prompt again and again, whatever the image or the adapter.
        section |= {"head_dim": 16, "use_bias": True, "tie_word_embeddings": False}
        config = PaddleOCRVLConfig(
            text_config=section, vision_config=sizes, tie_word_embeddings=False, **ids
        )
        model = PaddleOCRVLForConditionalGeneration(config).eval()
    else:
        sizes |= {"out_hidden_size": 64}
        config = Qwen2_5_VLConfig(text_config=section, vision_config=sizes, **ids)
        model = Qwen2_5_VLForConditionalGeneration(config).eval()
    fill(model, 0)
    kept = (directory / "generation_config.json").read_text()
    model.save_pretrained(directory)
    (directory / "generation_config.json").write_text(kept)
    model.generation_config.eos_token_id = None
    time_continues(model.model)
    patches = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2} | CENTRED
    for name, low, high in (("", 65536, 1 << 20), ("video_", 4096, 1 << 19)):
        limits = {"min_pixels": low, "max_pixels": high}
        (directory / f"{name}preprocessor_config.json").write_text(json.dumps(patches | limits))
    if family == "paddleocr_vl":
        own = {"image_processor_type": "PaddleOCRVLImageProcessor", "temporal_patch_size": 1}
        limits = {"min_pixels": 20_000, "max_pixels": 1 << 18}
        options = json.dumps(patches | limits | own)
        (directory / "preprocessor_config.json").write_text(options)
    return model


MAKERS = {
    "qwen3_vl": make_qwen3_vl,
    "qwen3_5": make_qwen3_5,
    "qwen2_vl": partial(make_earlier, family="qwen2_vl"),
    "qwen2_5_vl": partial(make_earlier, family="qwen2_5_vl"),
    "paddleocr_vl": partial(make_earlier, family="paddleocr_vl"),
}


class Oracle:
    """Hugging Face's model and processors of a directory."""

    def __init__(self, model: Any, directory: Path) -> None:
        self._model = model
        self._template = (directory / "chat_template.jinja").read_text()
        images = json.loads((directory / "preprocessor_config.json").read_text())
        videos = json.loads((directory / "video_preprocessor_config.json").read_text())
        self._videos, processor = Qwen3VLVideoProcessor(**videos), Qwen3VLProcessor
        kind = Qwen2VLImageProcessor
        if isinstance(model, PaddleOCRVLForConditionalGeneration):
            # Its own processor asks the tokenizer for names that this one's template has not.
            kind, processor = PaddleOCRVLImageProcessor, Qwen2VLProcessor
        if "Qwen2" in type(model).__name__:
            is_first = isinstance(model, Qwen2VLForConditionalGeneration)
            self._videos = Qwen2VLVideoProcessor(fps=2.0, **videos)
            processor = Qwen2VLProcessor if is_first else Qwen2_5_VLProcessor
        self._processor: Any = processor(
            kind(**images),
            PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json")),
            self._videos,
        )

    @torch.no_grad()
    def answer(
        self,
        messages: list,
        videos: Sequence[Seen],
        images: Sequence[Image.Image] = (),
        num_tokens: int = 8,
        cap: bool | None = None,
    ) -> tuple[int, list[int], list[float]]:
        """Prompt tokens, greedy tokens and their logprobs."""
        text = self._processor.tokenizer.apply_chat_template(
            messages, chat_template=self._template, add_generation_prompt=True, tokenize=False
        )
        chosen, metadata = [], []
        for video in videos:
            told = VideoMetadata(total_num_frames=len(video.frames), fps=video.rate)
            indices = np.arange(len(video.frames))
            if video.sampling is not None:
                indices = self._videos.sample_frames(told, **video.sampling)
            told.frames_indices = indices.tolist()
            chosen.append(torch.from_numpy(video.frames[indices]).permute(0, 3, 1, 2).contiguous())
            metadata.append(told)
        given: dict[str, Any] = {"images": list(images)} if images else {}
        if videos:
            given |= {"videos": chosen, "video_metadata": metadata, "do_sample_frames": False}
            given |= {} if cap is None else {"cap_pixels_per_frame": cap}
        inputs = self._processor(text=[text], return_tensors="pt", **given)
        out = self._model.generate(
            **inputs, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        length = inputs["input_ids"].shape[1]
        tokens = out.sequences[0, length:].tolist()
        logprobs = torch.cat(out.logits).float().log_softmax(-1)
        return length, tokens, [float(row[t]) for row, t in zip(logprobs, tokens, strict=True)]
