"""`triptych serve --model DIR` serves a Qwen3.5 checkpoint without options, images and all: its
greedy tokens are Hugging Face's.
"""

import base64
import io
from pathlib import Path

import httpx2
import numpy as np
import pytest
from PIL import Image

from tests.e2e.serve_command import serve_command
from tests.noise import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_TOKENS = 12


def test_it_is_served_without_options(tmp_path: Path) -> None:
    from tests.e2e.tiny_qwen3_5 import expected, make_model

    directory = tmp_path / "tiny"
    model = make_model(directory)
    noise = np.random.default_rng(0).integers(0, 255, (12, 16, 3), np.uint8)
    image = Image.fromarray(noise).resize((320, 256), Image.Resampling.BICUBIC)
    data = io.BytesIO()
    image.save(data, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"

    def conversation(picture: dict) -> list:
        text = {"type": "text", "text": "What colour is the circle?"}
        return [{"role": "user", "content": [picture, text]}]

    num_prompt, tokens = expected(
        model, directory, conversation({"type": "image"}), image, NUM_TOKENS
    )
    with serve_command(tmp_path, ["--model", str(directory)]) as command:
        listed = httpx2.get(f"{command.url}/v1/models", timeout=PATIENCE_S).json()["data"][0]
        assert listed["input_modalities"] == ["text", "image", "video"]
        body = {
            "model": listed["id"], "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True,
            "messages": conversation({"type": "image_url", "image_url": {"url": url}}),
            "logprobs": True, "return_token_ids": True,
        }  # fmt: skip
        for _ in range(2):
            answer = httpx2.post(
                f"{command.url}/v1/chat/completions", json=body, timeout=PATIENCE_S
            )
            assert answer.status_code == 200, answer.text
            found = answer.json()
            assert found["usage"]["prompt_tokens"] == num_prompt
            assert found["choices"][0]["token_ids"] == tokens
        answer = httpx2.post(
            f"{command.url}/v1/chat/completions", json=body | {"max_pixels": 1}, timeout=PATIENCE_S
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] < num_prompt
