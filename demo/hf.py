"""Answers from a model directory through HF transformers: the reference for the whole stack.

The only door of this folder to transformers, because torchvision has to be imported before it.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from demo.clips import Clip, frames, mp4_bytes, sampled_indices

MAX_NEW_TOKENS = 96
_KEPT_ALIVE: list[torch.library.Library] = []


def import_torchvision() -> None:
    """Import torchvision also where it is built for another kind of torch.

    HF's image processor needs only its transforms. The plain wheel refuses to load beside a
    CPU-only torch because two operators are missing, so they are declared (and never called).
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for module in [m for m in sys.modules if m.split(".")[0] == "torchvision"]:
            del sys.modules[module]
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            with contextlib.suppress(RuntimeError):  # declared before
                library.define(f"{operator}(Tensor dets, Tensor scores, float t) -> Tensor")
        _KEPT_ALIVE.append(library)
        importlib.import_module("torchvision")


import_torchvision()

# After torchvision, which transformers imports in its turn.
from transformers import (  # noqa: E402
    AutoModelForImageTextToText,
    AutoProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen3_vl.modeling_qwen3_vl import (  # noqa: E402
    apply_rotary_pos_emb_vision,
)
from transformers.video_utils import VideoMetadata  # noqa: E402
from transformers.vision_utils import (  # noqa: E402
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
)

__all__ = [
    "AutoModelForImageTextToText",
    "AutoProcessor",
    "HFAnswerer",
    "Qwen3VLConfig",
    "Qwen3VLForConditionalGeneration",
    "apply_rotary_pos_emb_vision",
    "get_vision_interpolation_indices_and_weights",
    "get_vision_position_ids",
]


class HFAnswerer:
    """Greedy answers of one model; batches are padded on the left.

    Clips are shown as drawn, or (`coded`) as PyAV decodes them from the mp4 file of a request.
    """

    def __init__(
        self,
        folder: Path,
        dtype: str,
        device: str = "cpu",
        batch_size: int = 1,
        coded: bool = False,
    ) -> None:
        self._processor = AutoProcessor.from_pretrained(folder)
        self._processor.tokenizer.padding_side = "left"
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=getattr(torch, dtype))
        self._model = model.to(device).eval()  # not .to(dtype): that would round the rope tables
        self._device, self._batch_size, self._coded = device, batch_size, coded

    def __call__(self, questions: Sequence[tuple[Sequence[bytes | Clip], str]]) -> Iterator[str]:
        """One answer for each (PNG images and clips, question), in order."""
        for start in range(0, len(questions), self._batch_size):
            yield from self._answer(questions[start : start + self._batch_size])

    @torch.inference_mode()
    def _answer(self, batch: Sequence[tuple[Sequence[bytes | Clip], str]]) -> list[str]:
        texts, images, videos = [], [], []
        for pictures, question in batch:
            content = [
                {"type": "video" if isinstance(shown, Clip) else "image"} for shown in pictures
            ]
            messages = [{"role": "user", "content": [*content, {"type": "text", "text": question}]}]
            texts.append(
                self._processor.apply_chat_template(
                    messages, add_generation_prompt=True, tokenize=False
                )
            )
            for shown in pictures:
                if isinstance(shown, Clip):
                    videos.append(self._video(shown))
                else:
                    images.append(Image.open(io.BytesIO(shown)).convert("RGB"))
        sampled = {}
        if videos:
            sampled = {
                "videos": [video for video, _ in videos],
                "video_metadata": [metadata for _, metadata in videos],
                "do_sample_frames": False,
            }
        inputs = self._processor(
            text=texts, images=images or None, padding=True, return_tensors="pt", **sampled
        ).to(self._device)
        output = self._model.generate(**inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
        replies = output[:, inputs["input_ids"].shape[1] :]
        return self._processor.batch_decode(replies, skip_special_tokens=True)

    def _video(self, clip: Clip) -> tuple[np.ndarray, VideoMetadata]:
        """The sampled frames [n, height, width, 3], and which they are."""
        indices = sampled_indices(clip)
        shown = decoded(mp4_bytes(clip))[indices] if self._coded else frames(clip, indices)
        return shown, VideoMetadata(
            total_num_frames=clip.num_frames, fps=float(clip.rate), frames_indices=indices
        )


def decoded(mp4: bytes) -> np.ndarray:
    """All frames of an mp4 file, [n, height, width, 3] uint8. Needs PyAV."""
    import av

    with av.open(io.BytesIO(mp4)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
