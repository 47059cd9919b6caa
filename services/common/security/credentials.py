"""What a service shows to the others and accepts from them: certificates, a token, or both.

Both are files that are mounted, and read again when they have changed. Nothing here knows gRPC;
`rpc_credentials` uses them.
"""

import hmac
import logging
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from services.common.security.watched_files import WatchedFiles
from services.common.settings import PeerSettings, SettingsError

log = logging.getLogger(__name__)

# As in a Kubernetes secret of type `kubernetes.io/tls` that cert-manager fills.
CA_FILE, CERTIFICATE_FILE, KEY_FILE = "ca.crt", "tls.crt", "tls.key"
MIN_TOKEN_CHARS = 16


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM: the authorities that are trusted, the own certificate with its chain, its key."""

    ca: bytes
    chain: bytes
    key: bytes


class TokenFile:
    """Tokens, one a line. The first is sent; all are accepted, so that a new one can be accepted
    everywhere before it is sent anywhere.
    """

    def __init__(self, path: Path) -> None:
        self._tokens = WatchedFiles((path,), lambda data: _tokens(path, data[0]))

    @property
    def sent(self) -> str:
        return self._tokens.current()[0].decode()

    def accepts(self, given: str) -> bool:
        """Whether a caller's token is one of them. Takes the same time for all wrong ones."""
        token = given.encode()
        return any([hmac.compare_digest(token, known) for known in self._tokens.current()])


@dataclass(frozen=True, slots=True)
class Credentials:
    """What the settings name; neither: calls are neither encrypted nor authenticated."""

    certificates: WatchedFiles[Certificates] | None = None
    token: TokenFile | None = None
    stage: Literal["accepted", "shown", "required"] = "required"

    @property
    def shown(self) -> "Credentials":
        """What own calls show: nothing, as long as servers may not know it."""
        return NO_CREDENTIALS if self.stage == "accepted" else self

    @classmethod
    def from_settings(cls, settings: PeerSettings) -> "Credentials":
        """Reads the files.

        Raises:
            SettingsError: they are missing or not valid.
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


def watch_certificates(directory: Path) -> WatchedFiles[Certificates]:
    """The certificates in a directory with `ca.crt`, `tls.crt` and `tls.key`."""
    paths = [directory / name for name in (CA_FILE, CERTIFICATE_FILE, KEY_FILE)]
    return WatchedFiles(paths, lambda data: _certificates(directory, data))


def _certificates(directory: Path, data: Sequence[bytes]) -> Certificates:
    """Raises ValueError unless key and certificate belong together: a half-replaced pair must not
    be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(directory / CA_FILE)
        # Without a password, a locked key is refused instead of asked about.
        context.load_cert_chain(
            directory / CERTIFICATE_FILE, directory / KEY_FILE, password=lambda: b""
        )
    except (ssl.SSLError, OSError) as error:
        raise ValueError(f"the certificates in {directory}: {error}") from None
    return Certificates(*data)


def _tokens(path: Path, data: bytes) -> tuple[bytes, ...]:
    tokens = tuple(line.strip() for line in data.splitlines() if line.strip())
    if not tokens:
        raise ValueError(f"{path} holds no token")
    for token in tokens:
        if len(token) < MIN_TOKEN_CHARS or not all(0x21 <= byte <= 0x7E for byte in token):
            raise ValueError(
                f"{path}: a token has at least {MIN_TOKEN_CHARS} characters, "
                "all of them printable ASCII"
            )
    return tokens
