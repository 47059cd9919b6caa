"""What a service shows to the others and accepts from them: certificates, a token, or both.

Both are files that are mounted, and read again when they have changed. Nothing here knows gRPC;
`rpc_credentials` uses them.
"""

import hmac
import logging
import os
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypeVar

from services.common.settings import PeerSettings, SettingsError

log = logging.getLogger(__name__)

# As in a Kubernetes secret of type `kubernetes.io/tls` that cert-manager fills.
CA_FILE, CERTIFICATE_FILE, KEY_FILE = "ca.crt", "tls.crt", "tls.key"
# How soon a change is seen: files are looked at once in this time at most.
CHECK_INTERVAL_S = 1.0
MIN_TOKEN_CHARS = 16
_MAX_FILE_BYTES = 1 << 20

Content = TypeVar("Content")


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM: the authorities that are trusted, the own certificate with its chain, its key."""

    ca: bytes
    chain: bytes
    key: bytes


class WatchedFiles(Generic[Content]):
    """Files whose content is replaced while the process runs.

    Args:
        paths: the files; a change of any of them is a change.
        parse: makes the content of their bytes; raises ValueError for one that is not valid.

    Raises:
        SettingsError: they cannot be read at first. Later, what was read before stays.
    """

    def __init__(self, paths: Sequence[Path], parse: Callable[[Sequence[bytes]], Content]) -> None:
        self._paths = paths
        self._parse = parse
        self._lock = threading.Lock()
        self._refused: object = None
        self._next_check = 0.0
        self._state: object = None
        try:
            self._state, self._content = self._read()
        except (OSError, ValueError) as error:
            raise SettingsError(str(error)) from None

    def current(self) -> Content:
        """The newest valid content, the same object until it changes. Any thread may call."""
        if time.monotonic() >= self._next_check:
            with self._lock:
                self._next_check = time.monotonic() + CHECK_INTERVAL_S
                self._reload()
        return self._content

    def _reload(self) -> None:
        state: object = None
        try:
            state = self._stat()
            if state == self._state:
                self._refused = None
                return
            self._state, self._content = self._read()
            log.info("read anew: %s", ", ".join(map(str, self._paths)))
        except (OSError, ValueError) as error:
            if state != self._refused or state is None:
                log.error("not read, what was there before stays: %s", error)
            self._refused = state

    def _read(self) -> tuple[object, Content]:
        for _ in range(5):
            state = self._stat()
            data = [path.read_bytes() for path in self._paths]
            if self._stat() == state:  # else they were replaced meanwhile
                return state, self._parse(data)
        raise ValueError(f"{self._paths[0]} changes all the time")

    def _stat(self) -> object:
        found = [os.stat(path) for path in self._paths]
        for path, each in zip(self._paths, found, strict=True):
            if each.st_size > _MAX_FILE_BYTES:
                raise ValueError(f"{path} has more than {_MAX_FILE_BYTES} bytes")
        return [(each.st_mtime_ns, each.st_size, each.st_ino) for each in found]


class TokenFile:
    """Tokens, one a line. The first is sent; all are accepted, so that a new one can be accepted
    everywhere before it is sent anywhere.
    """

    def __init__(self, path: Path) -> None:
        self._tokens = WatchedFiles((path,), lambda data: _tokens(path, data[0]))

    @property
    def sent(self) -> str:
        """The token that this service sends."""
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
