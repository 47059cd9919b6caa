"""Credentials of the services: certificates, a token, or both.

A service shows them to the other services, and accepts theirs. They are mounted files, which are
read again when they have changed. This file does not know gRPC; `rpc_credentials` uses it there.
"""

import hmac
import logging
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from services.common.security.watched_files import CHECK_INTERVAL_S, WatchedFiles
from services.common.settings import PeerSettings, SettingsError

log = logging.getLogger(__name__)

# File names of a Kubernetes secret of type `kubernetes.io/tls` that cert-manager writes.
CA_FILE, CERTIFICATE_FILE, KEY_FILE = "ca.crt", "tls.crt", "tls.key"
MIN_TOKEN_CHARS = 16


@dataclass(frozen=True, slots=True)
class Certificates:
    """Certificates of a service in PEM.

    Attributes:
        ca: certificates of the trusted authorities.
        chain: the service's own certificate with its chain.
        key: private key of the service's certificate.
    """

    ca: bytes
    chain: bytes
    key: bytes


class TokenFile:
    """Tokens in a file, one per line. The first token is sent and every token is accepted, so that
    a new token can be accepted everywhere before it is sent anywhere.

    Args:
        path: path of the file.
        check_interval_s: shortest time between two checks for a change of the file.

    Raises:
        SettingsError: the file has no valid tokens, or cannot be read.
    """

    def __init__(self, path: Path, *, check_interval_s: float = CHECK_INTERVAL_S) -> None:
        self._tokens = WatchedFiles(
            (path,), lambda data: _tokens(path, data[0]), check_interval_s=check_interval_s
        )

    @property
    def sent(self) -> str:
        """Token that the service sends with its calls."""
        return self._tokens.current()[0].decode()

    def accepts(self, given: str) -> bool:
        """Returns whether a caller's token is accepted. All wrong tokens take the same time."""
        token = given.encode()
        return any([hmac.compare_digest(token, known) for known in self._tokens.current()])


@dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials that the settings name. Without certificates and token, calls are neither
    encrypted nor authenticated.

    Attributes:
        certificates: the service's certificates. None if calls are not encrypted.
        token: the services' tokens. None if calls have no token.
        stage: stage of turning credentials on, see `PeerSettings.peer_credentials`.
    """

    certificates: WatchedFiles[Certificates] | None = None
    token: TokenFile | None = None
    stage: Literal["accepted", "shown", "required"] = "required"

    @property
    def shown(self) -> "Credentials":
        """Credentials that the service's own calls show. They are empty in the stage `accepted`, in
        which servers may not know them yet.
        """
        return NO_CREDENTIALS if self.stage == "accepted" else self

    @classmethod
    def from_settings(cls, settings: PeerSettings) -> "Credentials":
        """Reads the files that the settings name.

        Raises:
            SettingsError: a file is missing or not valid, or the settings name no credentials for
                their stage.
        """
        directory, token_file = settings.peer_tls_directory, settings.peer_token_file
        if settings.peer_credentials != "required" and not (directory or token_file):
            raise SettingsError(
                f"peer_credentials={settings.peer_credentials} needs peer_tls_directory or "
                "peer_token_file"
            )
        return cls(
            certificates=None if directory is None else watch_certificates(directory),
            token=None if token_file is None else TokenFile(token_file),
            stage=settings.peer_credentials,
        )

    def __bool__(self) -> bool:
        return self.certificates is not None or self.token is not None


NO_CREDENTIALS = Credentials()


def watch_certificates(
    directory: Path, *, check_interval_s: float = CHECK_INTERVAL_S
) -> WatchedFiles[Certificates]:
    """Reads the certificates in a directory, now and when they change.

    Args:
        directory: directory with `ca.crt`, `tls.crt` and `tls.key`.
        check_interval_s: shortest time between two checks for a change of the files.

    Raises:
        SettingsError: a file is missing or not valid.
    """
    paths = [directory / name for name in (CA_FILE, CERTIFICATE_FILE, KEY_FILE)]
    return WatchedFiles(
        paths, lambda data: _certificates(directory, data), check_interval_s=check_interval_s
    )


def _certificates(directory: Path, data: Sequence[bytes]) -> Certificates:
    """Returns the certificates.

    Raises:
        ValueError: key and certificate do not belong together, as when only one of the files has
            been replaced.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(directory / CA_FILE)
        # The empty password makes OpenSSL refuse an encrypted key instead of asking for a password.
        context.load_cert_chain(
            directory / CERTIFICATE_FILE, directory / KEY_FILE, password=lambda: b""
        )
    except (ssl.SSLError, OSError) as error:
        raise ValueError(f"the certificates in {directory} are not valid: {error}") from None
    return Certificates(*data)


def _tokens(path: Path, data: bytes) -> tuple[bytes, ...]:
    tokens = tuple(line.strip() for line in data.splitlines() if line.strip())
    if not tokens:
        raise ValueError(f"{path} has no token")
    for token in tokens:
        if len(token) < MIN_TOKEN_CHARS or not all(0x21 <= byte <= 0x7E for byte in token):
            raise ValueError(
                f"{path}: a token has at least {MIN_TOKEN_CHARS} characters, "
                "all of them printable ASCII"
            )
    return tokens
