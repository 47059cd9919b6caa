"""Files of certificates and tokens: what is refused, and what follows a change."""

import logging
from pathlib import Path

import pytest

from services.common.security.credentials import Credentials, TokenFile, watch_certificates
from services.common.settings import SettingsError
from services.decoder.settings import DecoderSettings
from tests.certificates import Authority, mount

OLD, NEW = "old-token-0123456789", "new-token-0123456789"


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


def test_a_rotated_certificate_is_read_and_an_unchanged_one_is_the_same(
    authority: Authority, tmp_path: Path
) -> None:
    files = authority.issue("encoder")
    watched = watch_certificates(mount(files, tmp_path / "tls"), check_interval_s=0.0)
    first = watched.current()
    assert (first.ca, first.chain, first.key) == tuple(files.values())
    assert watched.current() is first
    renewed = authority.issue("encoder")
    mount(renewed, tmp_path / "tls")
    assert watched.current().chain == renewed["tls.crt"]


def test_a_key_of_another_certificate_is_not_used_and_said_once(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watched = watch_certificates(
        mount(authority.issue("encoder"), tmp_path / "tls"), check_interval_s=0.0
    )
    first = watched.current()
    mount(authority.issue("encoder") | {"tls.key": authority.issue("x")["tls.key"]},
          tmp_path / "tls")  # fmt: skip
    with caplog.at_level(logging.ERROR):
        assert watched.current() is watched.current() is first
    assert len(caplog.records) == 1 and "stays" in caplog.text
    with pytest.raises(SettingsError, match="KEY_VALUES_MISMATCH"):
        watch_certificates(tmp_path / "tls", check_interval_s=0.0)


@pytest.mark.parametrize("missing", ["ca.crt", "tls.crt", "tls.key"])
def test_a_missing_file_is_named(authority: Authority, tmp_path: Path, missing: str) -> None:
    files = authority.issue("encoder")
    del files[missing]
    with pytest.raises(SettingsError, match=missing.replace(".", r"\.")):
        watch_certificates(mount(files, tmp_path / "tls"), check_interval_s=0.0)


def test_old_and_new_tokens_are_accepted_while_they_change(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{OLD}\n")
    token = TokenFile(path, check_interval_s=0.0)
    assert token.sent == OLD and token.accepts(OLD) and not token.accepts(NEW)
    path.write_text(f"{OLD}\n{NEW}\n")
    assert token.sent == OLD and token.accepts(OLD) and token.accepts(NEW)
    path.write_text(f"{NEW}\n{OLD}\n")
    assert token.sent == NEW and token.accepts(OLD)
    path.write_text(NEW)
    assert token.sent == NEW and not token.accepts(OLD)


@pytest.mark.parametrize("wrong", ["", "\n\n", "short", "with a space 0123456789", "é" * 20])
def test_a_token_that_cannot_be_one_is_refused_and_not_shown(tmp_path: Path, wrong: str) -> None:
    path = tmp_path / "token"
    path.write_text(wrong)
    with pytest.raises(SettingsError) as refused:
        TokenFile(path, check_interval_s=0.0)
    assert str(path) in str(refused.value) and (
        not wrong.strip() or wrong not in str(refused.value)
    )


def test_no_given_token_is_accepted_but_the_whole(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(OLD)
    token = TokenFile(path, check_interval_s=0.0)
    for given in ("", OLD[:-1], OLD + "x", OLD.upper(), "é" * 20):
        assert not token.accepts(given)


def test_credentials_come_from_the_settings(authority: Authority, tmp_path: Path) -> None:
    assert not Credentials.from_settings(DecoderSettings(model=tmp_path))
    (tmp_path / "token").write_text(OLD)
    both = Credentials.from_settings(
        DecoderSettings(
            model=tmp_path,
            peer_tls_directory=mount(authority.issue("decoder"), tmp_path / "tls"),
            peer_token_file=tmp_path / "token",
        )
    )
    assert both and both.certificates and both.token
    with pytest.raises(SettingsError, match="none"):
        Credentials.from_settings(DecoderSettings(model=tmp_path, peer_token_file=Path("/none")))
