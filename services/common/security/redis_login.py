"""Options with which Redis clients log in, by a password from a file that may change, and
reconnect.
"""

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from redis.credentials import CredentialProvider
from redis.exceptions import ReadOnlyError


def login(url: str, password_file: Path | None) -> tuple[str, dict[str, Any]]:
    """Returns the URL and the options of a client that logs in as the URL's user.

    Args:
        url: `redis://`, `rediss://` or `unix://` URL.
        password_file: file with the password, which is read at each connection. None if the URL has
            the password, or if there is no password.
    """
    # A client that reaches a replica disconnects: after a failover the address may belong to
    # another server.
    options: dict[str, Any] = {"retry_on_error": [ReadOnlyError]}
    if password_file is None:
        return url, options
    parts = urlsplit(url)
    options["credential_provider"] = _PasswordFile(parts.username, password_file)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl(), options


class _PasswordFile(CredentialProvider):
    def __init__(self, user: str | None, path: Path) -> None:
        self._user = user
        self._path = path

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = self._path.read_text().strip()
        return (password,) if self._user is None else (self._user, password)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()
