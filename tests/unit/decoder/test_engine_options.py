"""Options of the runner that follow from the settings and the model."""

from pathlib import Path
from typing import Any

import pytest

from services.decoder import engine_options
from services.decoder.settings import DecoderSettings
from tests.decoder_harness import write_checkpoint, write_draft_head, write_hybrid


@pytest.fixture
def hybrid(tmp_path: Path) -> Path:
    return write_draft_head(write_hybrid(tmp_path / "hybrid"))


def test_models_with_recurrent_states_keep_the_inputs_of_fewer_drafts(
    hybrid: Path, tmp_path: Path
) -> None:
    def most(model: Path, **options: Any) -> int:
        settings = DecoderSettings(model=model, **options)
        return engine_options.runner_options(settings, "cpu").max_drafts

    text = write_checkpoint(tmp_path)
    assert most(text) == 0
    assert most(text, speculation="lookup") == 15
    assert most(text, speculation="lookup", speculation_tokens=4) == 4
    assert most(hybrid, speculation="lookup") == most(hybrid, speculation="mtp") == 8
    assert most(hybrid, speculation="mtp", speculation_tokens=15) == 15
