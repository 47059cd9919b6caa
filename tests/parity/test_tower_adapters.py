"""Adapters of the vision tower by name give PEFT's embeddings and logits, float32 on the CPU."""

from pathlib import Path

import pytest
import torch

from services.common.adapter_config import AdapterError, adapts_tower, named_digest
from services.common.settings import SettingsError
from services.encoder.engine_main import load_adapted, load_model
from services.encoder.settings import EncoderSettings
from tests.adapters import EVERYWHERE, adapted_oracle
from tests.cases import first
from tests.decoder_harness import Harness
from tests.parity.oracle import CONFIGS, Oracle, largest_difference, make_oracle
from tests.parity.test_adapters import start
from tests.parity.test_language_model import TOLERANCE

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.thorough]

CPU = torch.device("cpu")
FAMILIES = ("gqa3-hd32-odd-heads", "qwen2.5-gqa2-hd16", "paddleocr-gqa4-hd32-biases")


def settings_of(base: Oracle, **fields: object) -> EncoderSettings:
    return EncoderSettings.model_validate({"model": base.directory, **fields})


@pytest.mark.parametrize("family", first(1, FAMILIES))
def test_each_adapter_has_the_embeddings_and_logits_of_peft(family: str, tmp_path: Path) -> None:
    base = make_oracle(CONFIGS[family], tmp_path / "model")
    tower = tmp_path / "tower"
    text = tmp_path / "text"
    adapted = adapted_oracle(base, tower, 1, target_modules=EVERYWHERE)
    # Names of the language model alone: the tower of Qwen2.5-VL has a gate_proj, too.
    adapted_oracle(base, text, 2, target_modules=r".*language_model.*\.q_proj")
    assert adapts_tower(tower) and not adapts_tower(text)
    settings = settings_of(base, adapters=f"gui={tower},sql={text}")
    model, _ = load_model(base.spec, settings, CPU, torch.float32)
    towers = load_adapted(base.spec, model.ops, settings, CPU, torch.float32)
    assert list(towers) == [named_digest("gui", tower)]  # the other one changes no embedding
    prompt = base.prompt(3, (4, 6), 2, (6, 4), seed=1)
    grids = [(1, *grid) for grid in prompt.grids]
    assert prompt.pixel_values is not None
    for oracle, ours in ((base, model), (adapted, towers[named_digest("gui", tower)])):
        with torch.inference_mode():
            found = ours(prompt.pixel_values, ours.layout(grids))
        expected = torch.cat(oracle.answer(prompt).embeddings, 1)
        assert (found - expected).abs().max() < 2e-5 * expected.abs().max()
    control = torch.cat(base.answer(prompt).embeddings, 1)
    assert (control - expected).abs().max() > 100 * 2e-5 * expected.abs().max()
    # The decoder computes the adapter's changes of the language model for these embeddings.
    harness = Harness(base.directory, adapters=(tower,), max_adapters=1)
    sequence, logits = start(harness, adapted, 0, 0, seed=1)
    assert largest_difference(harness.prompt_logits(sequence), logits) < TOLERANCE


def test_what_is_not_served_is_refused_by_name(tmp_path: Path) -> None:
    base = make_oracle(CONFIGS["gqa1-hd16-one-tap"], tmp_path / "model")
    other = make_oracle(CONFIGS["gqa3-hd32-odd-heads"], tmp_path / "other")
    place = tmp_path / "adapter"
    adapted_oracle(other, place, target_modules=EVERYWHERE)
    for fields, kind, message in (
        ({}, AdapterError, "visual"),
        ({"merge_adapter": place}, SettingsError, "MERGE_ADAPTER"),
        ({"load_format": "dummy"}, SettingsError, "random weights"),
    ):
        settings = settings_of(base, adapters=f"gui={place}", **fields)
        with pytest.raises(kind, match=message):
            load_adapted(base.spec, object(), settings, CPU, torch.float32)  # type: ignore[arg-type]
