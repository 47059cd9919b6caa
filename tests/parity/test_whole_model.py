"""Our vision tower and our language model together against Hugging Face's whole model, float32.

The tolerance is the language model's own: what the tower rounds differently goes through it, too.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.common.nn.checkpoint import Checkpoint
from services.common.nn.weights import load_weights
from services.encoder.models import create_tower
from tests.decoder_harness import Harness
from tests.parity.oracle import CONFIGS, Oracle, Prompt, make_oracle
from tests.parity.test_language_model import LARGE, PROMPTS, TOLERANCE
from tests.tower import cpu_ops

pytestmark = pytest.mark.usefixtures("one_thread")


class Whole:
    """Both halves of one checkpoint."""

    def __init__(self, name: str, directory: Path) -> None:
        self.oracle: Oracle = make_oracle(CONFIGS[name], directory).remember()
        self.language = Harness(directory)
        spec = self.oracle.spec
        vision, prefix = spec.vision_part.tower, spec.checkpoint.vision_prefix
        with torch.device("meta"):
            self.tower = create_tower(vision, cpu_ops(vision), prefix)
        load_weights(
            self.tower, Checkpoint.open(directory), self.tower.weight_map,
            device="cpu", dtype=torch.float32,
        )  # fmt: skip

    def embeddings(self, prompt: Prompt) -> list[Tensor]:
        if prompt.pixel_values is None:
            return []
        grids = [(1, h, w) for h, w in prompt.grids]
        with torch.inference_mode():
            features = self.tower(prompt.pixel_values, self.tower.layout(grids))
        parts = features.split([h * w // 4 for h, w in prompt.grids], dim=1)
        return [part.contiguous() for part in parts]

    def start(self, prompt: Prompt, positions, delta: int):
        images = list(zip(prompt.offsets, self.embeddings(prompt), strict=True))
        return self.language.start(
            prompt.token_ids, positions=positions, delta=delta, images=images
        )


@pytest.fixture(scope="module", params=CONFIGS)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole(request.param, tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("parts", PROMPTS.values(), ids=PROMPTS)
def test_pixels_to_logits_agree(whole: Whole, parts: tuple) -> None:
    check(whole, parts)


def test_pixels_to_logits_agree_for_a_large_grid(tmp_path: Path) -> None:
    check(Whole("gqa4-hd64-three-taps", tmp_path), LARGE)


def check(whole: Whole, parts: tuple) -> None:
    prompt = whole.oracle.prompt(*parts, seed=7)
    answer = whole.oracle.answer(prompt)
    sequence = whole.start(prompt, answer.positions, answer.delta)
    actual = whole.language.logits(whole.language.chunk(sequence))
    error = float((actual - answer.logits).abs().max())
    whole.language.finish(sequence)
    print(f"{error:.1e}")
    assert error < TOLERANCE


@pytest.mark.parametrize("parts", [PROMPTS["three images"], PROMPTS["interleaved turns"]])
def test_greedy_tokens_are_equal(whole: Whole, parts: tuple) -> None:
    prompt = whole.oracle.prompt(*parts, seed=8)
    expected, _ = whole.oracle.generate(prompt, 8)
    answer = whole.oracle.answer(prompt)
    sequence = whole.start(prompt, answer.positions, answer.delta)
    assert whole.language.generate(sequence, 8, chunk_size=11) == expected
    whole.language.finish(sequence)
