"""The demonstration model answers about clips through `triptych serve` as under Hugging Face."""

import warnings

import pytest

from demo.evaluate import HTTPAnswerer
from demo.heldout import held_out_clips, is_right
from tests.e2e.cluster import DEMO_MODEL
from tests.e2e.serve_command import ServeCommand
from tests.noise import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.slow]

NUM_CLIPS = 4


def test_answers_about_clips_are_those_of_hugging_face(demo: ServeCommand) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the import of transformers and torchvision
        from demo.hf import HFAnswerer  # here: each process of the test run collects all files

    items = list(held_out_clips(NUM_CLIPS))
    questions = [(item.images, item.question) for item in items]
    ours = list(HTTPAnswerer(demo.url, None, 4, PATIENCE_S)(questions))
    theirs = list(HFAnswerer(DEMO_MODEL, "float32", batch_size=8, coded=True)(questions))
    assert ours == theirs
    right = [is_right(item, reply) for item, reply in zip(items, ours, strict=True)]
    assert sum(right) >= 0.9 * len(items)  # an untrained model has none right
