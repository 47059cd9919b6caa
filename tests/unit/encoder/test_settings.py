from pathlib import Path

import pytest

from services.common.settings import SettingsError
from services.encoder.settings import EncoderSettings


def test_defaults() -> None:
    settings = EncoderSettings.from_environment({"ENCODER_MODEL": "/m", "HOME": "/root"})
    assert (settings.model, settings.redis_url) == (Path("/m"), "")
    assert (settings.address, settings.host) == ("127.0.0.1:50051", "127.0.0.1")


def test_the_engine_gets_the_same_settings() -> None:
    settings = EncoderSettings.from_environment(
        {"ENCODER_MODEL": "/m", "ENCODER_DEVICE": "cuda:1", "ENCODER_MEMORY_FRACTION": "0.2"}
    )
    assert EncoderSettings.model_validate_json(settings.model_dump_json()) == settings


def test_nothing_else_of_the_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENCODER_METRICS_PORT", "1")
    monkeypatch.setenv("encoder_health_port", "2")
    given = EncoderSettings.from_environment({"ENCODER_MODEL": "/m"})
    handed = EncoderSettings.model_validate_json('{"model": "/m"}')
    assert given == handed
    assert (given.metrics_port, given.health_port) == (9101, 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ENCODER_PROT", "9"),
        ("ENCODER_ADDRESS", "127.0.0.1:70000"),
        ("ENCODER_ADDRESS", "127.0.0.1"),
        ("ENCODER_ADDRESS", ":50051"),
        ("ENCODER_ADDRESS", "unix:"),
        ("ENCODER_DEVICE", "tpu"),
        ("ENCODER_DTYPE", "int8"),
        ("ENCODER_MEMORY_FRACTION", "1.5"),
        ("ENCODER_CACHE_BYTES", "0"),
    ],
)
def test_a_bad_variable_is_named(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=name):
        EncoderSettings.from_environment({"ENCODER_MODEL": "/m", name: value})


def test_the_model_is_required() -> None:
    with pytest.raises(SettingsError, match="ENCODER_MODEL"):
        EncoderSettings.from_environment({})


def test_an_address_is_a_port_or_a_socket() -> None:
    for address, host in (("[::]:50051", "::"), ("unix:/run/e.sock", "127.0.0.1"), ("h:0", "h")):
        given = {"ENCODER_MODEL": "/m", "ENCODER_ADDRESS": address}
        settings = EncoderSettings.from_environment(given)
        assert (settings.address, settings.host) == (address, host)


def test_settings_are_few() -> None:
    assert len(EncoderSettings.model_fields) <= 19
