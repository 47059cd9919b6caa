"""The environment becomes settings, or an error that names the variable."""

from pathlib import Path

import pytest

from services.common.model_spec import ModelSpecError
from services.common.settings import SettingsError
from services.gateway.app import create_gateway
from services.gateway.bounds import Bounds
from services.gateway.redis_script import RedisScript
from services.gateway.settings import GatewaySettings

GOOD = {
    "GATEWAY_MODEL": "/models/x",
    "GATEWAY_ENCODER_ADDRESSES": "a:1, b:2,",
    "GATEWAY_DECODER_ADDRESSES": "dns:///decoder:50052",
}


def test_addresses_and_keys_are_split():
    settings = GatewaySettings.from_environment({**GOOD, "GATEWAY_API_KEYS": "k1,k2", "PATH": "x"})
    assert settings.encoders == ("a:1", "b:2")
    assert settings.decoders == ("dns:///decoder:50052",)
    assert settings.keys == ("k1", "k2")
    assert settings.model == Path("/models/x")
    assert "k1" not in repr(settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GATEWAY_PORT", "http"), ("GATEWAY_PORT", "65536"), ("GATEWAY_PROT", "80"),
        ("GATEWAY_API_KEYS", "file:/a,file:/b"),
        ("GATEWAY_ALLOWED_MEDIA", "images"), ("GATEWAY_ALLOWED_MEDIA", "/a,private,/b"),
        ("GATEWAY_LOG_LEVEL", "LOUD"),
        ("GATEWAY_REQUEST_TIMEOUT_S", "0"), ("GATEWAY_DECODER_ADDRESSES", ""),
    ],
)  # fmt: skip
def test_bad_variable_is_named(name, value):
    with pytest.raises(SettingsError, match=name):
        GatewaySettings.from_environment({**GOOD, name: value})


LIMITS = {
    "GATEWAY_MAX_IMAGES": ("max_images_per_request", 32, (0, 1, 1024), ("-1", "1025", "many")),
    "GATEWAY_MAX_VIDEOS": ("max_videos_per_request", 8, (0, 256), ("-1", "257", "")),
    "GATEWAY_MAX_IMAGE_PIXELS": (
        "max_source_pixels", 52_000_000, (1, 40_000_000, 256_000_000), ("0", "256000001", "5e7"),
    ),
    "GATEWAY_MAX_IMAGE_BYTES": (
        "max_image_bytes", 32 << 20, (1024, 60 << 20), ("1023", str((60 << 20) + 1)),
    ),
    "GATEWAY_MAX_BODY_BYTES": (
        "max_body_bytes", 64 << 20, (1 << 20, 512 << 20), ("1000", str((512 << 20) + 1)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LIMITS)
def test_a_limit_has_a_default_and_a_range(name):
    bound, default, good, bad = LIMITS[name]

    def read(**given):
        settings = GatewaySettings.from_environment({**GOOD, **given})
        return getattr(settings if bound == "max_body_bytes" else settings.bounds, bound)

    assert read() == default
    assert [read(**{name: str(value)}) for value in good] == list(good)
    for value in bad:
        with pytest.raises(SettingsError, match=name):
            read(**{name: value})


def test_bounds_are_their_defaults_unless_a_setting_says_otherwise():
    assert GatewaySettings.from_environment(GOOD).bounds == Bounds()


def test_sites_are_names_and_origins_and_media_a_directory_and_private_hosts():
    more = {"GATEWAY_ALLOWED_SITES": "Example.com, .lan,[FD00::1],https://App.example.com,*",
            "GATEWAY_ALLOWED_MEDIA": "private, /srv/images"}  # fmt: skip
    settings = GatewaySettings.from_environment(GOOD | more)
    assert settings.served_hosts == ("example.com", ".lan", "fd00::1")
    assert settings.cors_origins == ("https://app.example.com", "*")
    assert (settings.media_directory, settings.allows_private_media) == (Path("/srv/images"), True)
    none = GatewaySettings.from_environment(GOOD)
    assert (none.media_directory, none.allows_private_media) == (None, False)


@pytest.mark.parametrize(
    ("written", "sent"),
    [
        ("https://app.example.com/", "https://app.example.com"),
        ("https://app.example.com:443", "https://app.example.com"),
        ("http://App.example.com:80/", "http://app.example.com"),
        ("http://localhost:8443", "http://localhost:8443"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("chrome-extension://abc", "chrome-extension://abc"),
    ],
)
def test_origins_are_compared_as_browsers_write_them(written, sent):
    settings = GatewaySettings.from_environment({**GOOD, "GATEWAY_ALLOWED_SITES": written})
    assert settings.cors_origins == (sent,)


@pytest.mark.parametrize(
    "site",
    [
        "https://example.com/page", "example.com:8000", "example.com/", "https://", "a@b.c",
        "*.example.com", "https://*.example.com", "bücher.example", "https://bücher.example",
    ],
)  # fmt: skip
def test_a_site_that_no_request_can_have_is_named(site):
    with pytest.raises(SettingsError, match="GATEWAY_ALLOWED_SITES"):
        GatewaySettings.from_environment({**GOOD, "GATEWAY_ALLOWED_SITES": f"good.example,{site}"})
    for good in ("example.com", ".example.com", "10.0.0.1", "::1", "[fd00::1]"):
        GatewaySettings.from_environment({**GOOD, "GATEWAY_ALLOWED_SITES": good})


def test_no_keys_are_no_key_of_that_name():
    for value, is_open, keys in (("none", True, ()), ("none,k", False, ("none", "k"))):
        settings = GatewaySettings.from_environment({**GOOD, "GATEWAY_API_KEYS": value})
        assert (settings.is_open, settings.keys) == (is_open, keys)


def test_a_file_of_keys_may_be_among_them():
    settings = GatewaySettings.from_environment({**GOOD, "GATEWAY_API_KEYS": "k,file:/keys.json"})
    assert (settings.keys, settings.keys_file) == (("k",), Path("/keys.json"))
    assert not settings.is_open and "k," not in repr(settings)
    with pytest.raises(SettingsError, match="more than one"):
        GatewaySettings.from_environment({**GOOD, "GATEWAY_API_KEYS": "file:a,file:b"})


def test_encoders_are_optional():
    settings = GatewaySettings.from_environment(
        {k: v for k, v in GOOD.items() if k != "GATEWAY_ENCODER_ADDRESSES"}
    )
    assert settings.encoders == ()


def test_missing_variable_is_named():
    for name in GOOD.keys() - {"GATEWAY_ENCODER_ADDRESSES"}:
        with pytest.raises(SettingsError, match=name):
            GatewaySettings.from_environment({k: v for k, v in GOOD.items() if k != name})


def test_settings_are_few():
    assert len(GatewaySettings.model_fields) <= 33


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "gateway"])
def test_off_loopback_a_gateway_needs_keys_or_is_told_to_serve_everybody(host, tmp_path):
    given = {**GOOD, "GATEWAY_HOST": host, "GATEWAY_MODEL": str(tmp_path)}
    with pytest.raises(SettingsError, match="GATEWAY_API_KEYS=none") as refused:
        create_gateway(GatewaySettings.from_environment(given))
    assert "GATEWAY_API_KEYS" in str(refused.value)
    for more in ({"GATEWAY_API_KEYS": "none"}, {"GATEWAY_API_KEYS": "k"},
                 {"GATEWAY_HOST": "127.0.0.1"}, {"GATEWAY_HOST": "::1"}):  # fmt: skip
        # The next thing that is wrong is the model, of which there is none.
        with pytest.raises(ModelSpecError):
            create_gateway(GatewaySettings.from_environment(given | more))


@pytest.mark.parametrize(
    "url", ["localhost:6379", "http://h", "redis://:se/cret@h", "redis://[::1"]
)
@pytest.mark.parametrize("password_file", [None, Path("/password")])
def test_what_is_no_url_of_redis_is_named_without_its_password(url, password_file):
    with pytest.raises(SettingsError, match="GATEWAY_REDIS_URL") as refused:
        RedisScript(url, password_file, "", connect_timeout_s=1, timeout_s=1)
    assert "se/cret" not in str(refused.value)
