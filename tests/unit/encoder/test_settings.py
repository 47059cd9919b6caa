from pathlib import Path

import pytest

from services.common.settings import SettingsError
from services.encoder.settings import EncoderSettings


def test_defaults() -> None:
    settings = EncoderSettings.from_environment({"ENCODER_MODEL": "/m", "HOME": "/root"})
    assert (settings.model, settings.port, settings.redis_url) == (Path("/m"), 50051, "")


def test_the_engine_gets_the_same_settings() -> None:
    settings = EncoderSettings.from_environment(
        {"ENCODER_MODEL": "/m", "ENCODER_DEVICE": "cuda:1", "ENCODER_MEMORY_FRACTION": "0.2"}
    )
    assert EncoderSettings.model_validate_json(settings.model_dump_json()) == settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ENCODER_PROT", "9"),
        ("ENCODER_PORT", "70000"),
        ("ENCODER_DEVICE", "tpu"),
        ("ENCODER_DTYPE", "int8"),
        ("ENCODER_MAX_BATCH_PATCHES", "0"),
        ("ENCODER_MEMORY_FRACTION", "1.5"),
        ("ENCODER_CACHE_TTL_S", "0"),
    ],
)
def test_a_bad_variable_is_named(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=name):
        EncoderSettings.from_environment({"ENCODER_MODEL": "/m", name: value})


def test_the_model_is_required() -> None:
    with pytest.raises(SettingsError, match="ENCODER_MODEL"):
        EncoderSettings.from_environment({})
