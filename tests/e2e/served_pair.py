"""A served model beside Hugging Face's: prompts of equal length, equal greedy tokens, and logprobs
within 2e-4 in float32.
"""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx2
import numpy as np
from PIL import Image

from tests.e2e.serve_command import ServeCommand
from tests.noise import PATIENCE_S

if TYPE_CHECKING:
    from tests.e2e.tiny_video import Oracle, Seen

NUM_TOKENS = 8
TOLERANCE = 2e-4


@dataclass
class Pair:
    """A served model and its oracle."""

    name: str
    command: ServeCommand
    oracle: "Oracle"

    @property
    def url(self) -> str:
        return self.command.url

    def ask(self, messages: list, **fields: object) -> dict[str, Any]:
        """The gateway's greedy answer."""
        body = {
            "messages": messages, "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True,
            "logprobs": True, "return_token_ids": True, "include_stage_times": True, **fields,
        }  # fmt: skip
        answer = httpx2.post(f"{self.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def check(
        self,
        messages: list,
        videos: "Sequence[Seen]",
        images: Sequence[Image.Image] = (),
        cap: bool | None = None,
        **fields: object,
    ) -> dict[str, Any]:
        """The gateway's answer, which equals the oracle's."""
        length, tokens, logprobs = self.oracle.answer(
            plain(messages), videos, images, NUM_TOKENS, cap
        )
        assert len(set(tokens)) > 1, "a constant answer shows nothing"
        answer = self.ask(messages, **fields)
        assert answer["usage"]["prompt_tokens"] == length
        assert answer["choices"][0]["token_ids"] == tokens
        found = [each["logprob"] for each in answer["choices"][0]["logprobs"]["content"]]
        error = max(abs(a - b) for a, b in zip(found, logprobs, strict=True))
        print(f"{error:.1e}")
        assert error < TOLERANCE
        return answer


def plain(messages: list) -> list:
    """As a chat template takes them."""
    found = []
    for message in messages:
        content = message["content"]
        if isinstance(content, list):
            kinds = {"image_url": "image", "video_url": "video"}
            content = [
                part if part["type"] == "text" else {"type": kinds.get(part["type"], part["type"])}
                for part in content
            ]
        found.append({**message, "content": content})
    return found


def noise(count: int, height: int, width: int, seed: int) -> np.ndarray:
    """Frames that change smoothly, in time and place: a video codec keeps them."""
    rng = np.random.default_rng(seed)
    ends = rng.integers(0, 255, (2, 6, 8, 3), np.uint8)
    first, last = (
        np.asarray(Image.fromarray(end).resize((width, height), Image.Resampling.BICUBIC), float)
        for end in ends
    )
    shares = np.linspace(0, 1, count)[:, None, None, None]
    return (first * (1 - shares) + last * shares).round().astype(np.uint8)


def png(frame: np.ndarray) -> str:
    data = io.BytesIO()
    Image.fromarray(frame).save(data, "PNG")
    return f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"


def listed(frames: np.ndarray, **options: object) -> dict:
    return {"type": "video", "video": [png(frame) for frame in frames], **options}


def asking(*parts: dict, text: str = "What colour is it?") -> dict:
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
