"""`triptych serve` with an adapter of the vision tower beside the demonstration model."""

import json
from pathlib import Path

import httpx2
import pytest

from tests.e2e.serve_command import ServeCommand, serve_command
from tests.noise import PATIENCE_S
from triptych.client import question_message
from triptych.demo import SAMPLES
from triptych.options import DEMONSTRATION_MODEL

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(300)]


def write_adapter(directory: Path) -> Path:
    """Writes an adapter that changes every embedding beyond recognition."""
    import torch
    from safetensors.torch import save_file

    vision = json.loads((DEMONSTRATION_MODEL / "config.json").read_text())["vision_config"]
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for block in range(vision["depth"]):
        name = f"base_model.model.model.visual.blocks.{block}.attn.proj"
        for part, shape in (("A", (8, vision["hidden_size"])), ("B", (vision["hidden_size"], 8))):
            tensors[f"{name}.lora_{part}.weight"] = torch.randn(shape, generator=generator)
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def ask(command: ServeCommand, model: str) -> str:
    """Returns the answer about an image."""
    message = question_message([str(SAMPLES / "shapes.png")], "What colour is the circle?")
    body = {"model": model, "messages": [message], "temperature": 0, "max_tokens": 20}
    found = httpx2.post(f"{command.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    assert found.status_code == 200, found.text
    return found.json()["choices"][0]["message"]["content"]


def test_the_models_of_one_image_have_embeddings_of_their_own(tmp_path: Path) -> None:
    """The adapter's is used for no answer of the base model, neither new nor from the cache."""
    place = write_adapter(tmp_path / "adapter")
    options = ["--model", str(DEMONSTRATION_MODEL), "--adapter", f"blurred={place}"]
    with serve_command(tmp_path, options) as command:
        base = "triptych-demo"
        first, other = ask(command, base), ask(command, "blurred")
        assert "red" in first and first != other
        assert [ask(command, base), ask(command, "blurred")] == [first, other]
