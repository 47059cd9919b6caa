"""The largest values that an image's embedding may have leave a model's output finite."""

from pathlib import Path

import pytest
import torch

from services.common.embeddings.embedding import EmbeddingSpec
from tests.decoder_harness import Harness, write_checkpoint

FEATURES, HIDDEN, NUM_TOKENS = 3, 32, 4


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module", params=["float32", "bfloat16", "float16"])
def harness(request: pytest.FixtureRequest, directory: Path) -> Harness:
    return Harness(directory, dtype=request.param)


def logits_with(harness: Harness, value: float) -> torch.Tensor:
    """Logits of a prompt whose image has this value everywhere."""
    dtype = harness.runner.info.dtype
    embedding = torch.full((FEATURES, NUM_TOKENS, HIDDEN), value, dtype=getattr(torch, dtype))
    token_ids = [1, 2, *[95] * NUM_TOKENS, 3, 4]
    return harness.prompt_logits(harness.start(token_ids, images=[(2, embedding)]))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_output_is_finite_at_the_bound(harness: Harness, sign: float) -> None:
    spec = EmbeddingSpec(harness.runner.info.dtype, FEATURES, NUM_TOKENS, HIDDEN)
    usual, largest = (logits_with(harness, sign * v) for v in (1.0, spec.max_magnitude))
    assert usual.isfinite().all() and largest.isfinite().all()
    # The tokens after the image still depend on themselves: no norm has become zero.
    assert not torch.equal(largest[-1], largest[-2]) and largest.abs().max() > 0


def test_far_beyond_the_bound_it_is_not(harness: Harness) -> None:
    largest = torch.finfo(getattr(torch, harness.runner.info.dtype)).max
    assert not logits_with(harness, 0.9 * largest).isfinite().all()
