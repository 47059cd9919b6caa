"""The decoder's settings from the environment."""

from pathlib import Path

import pytest

from services.common.settings import SettingsError
from services.decoder.settings import DecoderSettings


def read(**variables: str) -> DecoderSettings:
    return DecoderSettings.from_environment(
        {"DECODER_MODEL": "/model", **{f"DECODER_{k}": v for k, v in variables.items()}}
    )


def test_only_the_model_has_no_default():
    settings = read()
    assert settings.model == Path("/model")
    assert (settings.address, settings.device) == ("127.0.0.1:50052", "auto")
    assert settings.kv_cache_bytes is None
    with pytest.raises(SettingsError, match="DECODER_MODEL"):
        DecoderSettings.from_environment({})


def test_an_unknown_variable_is_named():
    with pytest.raises(SettingsError, match="DECODER_PROT"):
        read(PROT="1")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ADDRESS", "127.0.0.1:70000"),
        ("DEVICE", "gpu"),
        ("DTYPE", "int8"),
        ("LOAD_FORMAT", "gguf"),
        ("MEMORY_FRACTION", "1.5"),
        ("MAX_NUM_SEQUENCES", "0"),
        ("STEP_MS", "0"),
        ("KV_CACHE_BYTES", "0"),
        ("SHUTDOWN_GRACE_S", "-1"),
        ("LOG_LEVEL", "LOUD"),
    ],
)
def test_a_bad_value_is_named(name, value):
    with pytest.raises(SettingsError, match=f"DECODER_{name}"):
        read(**{name: value})


def test_a_head_needs_the_speculation_that_uses_it() -> None:
    assert read(SPECULATION="mtp", SPECULATION_HEAD="/base").speculation_head == Path("/base")
    with pytest.raises(SettingsError, match="only used with speculation mtp"):
        read(SPECULATION="lookup", SPECULATION_HEAD="/base")


def test_states_of_drafts_are_not_kept_on_the_host() -> None:
    assert read(SPECULATION="lookup", KV_HOST_BYTES="1000000").kv_host_bytes == 1000000
    with pytest.raises(SettingsError, match="kv_host_bytes does not go with speculation mtp"):
        read(SPECULATION="mtp", KV_HOST_BYTES="1000000")


def test_settings_cross_to_the_engine_process_unchanged():
    settings = read(MAX_MODEL_LEN="4096", KV_CACHE_BYTES="1000000", DEVICE="cuda:1")
    assert DecoderSettings.model_validate_json(settings.model_dump_json()) == settings


def test_settings_are_few() -> None:
    assert len(DecoderSettings.model_fields) <= 33
