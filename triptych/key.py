"""`triptych key`: makes an API key and its entry in the gateway's key file."""

import hashlib
import json
import os
import re
import secrets
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")  # names of tenants and keys that the gateway accepts


class KeyFileError(Exception):
    """The entry cannot be added to the key file. The message gives the reason."""


def make_key(tenant: str, key_id: str | None = None) -> tuple[str, dict[str, str]]:
    """Makes a key and its entry in the key file, which has only a digest of the key.

    Raises:
        KeyFileError: the gateway does not accept the name of the tenant or of the key.
    """
    key = f"sk-{secrets.token_urlsafe(_BYTES)}"
    entry = {
        "id": key_id or f"{tenant}-{datetime.now(UTC):%Y-%m-%d}",
        "tenant": tenant,
        "sha256": hashlib.sha256(key.encode()).hexdigest(),
    }
    for name in (entry["tenant"], entry["id"]):
        if not _NAME.fullmatch(name):
            raise KeyFileError(
                f"{name!r} is not a valid name: 1 to 64 letters, digits, '.', '_' and '-'"
            )
    return key, entry


def add_entry(path: Path, entry: dict[str, str]) -> None:
    """Adds an entry to a key file. Creates the file if it does not exist.

    Raises:
        KeyFileError: the file is not a key file, has a key with this id, or cannot be written.
    """
    try:
        content: Any = json.loads(path.read_text()) if path.exists() else {"keys": []}
    except (OSError, ValueError) as error:
        raise KeyFileError(f"{path}: {error}") from None
    keys = content.get("keys") if isinstance(content, dict) else None
    if not isinstance(keys, list):
        raise KeyFileError(f'{path}: the file is not a JSON object with a list "keys"')
    if any(isinstance(key, dict) and key.get("id") == entry["id"] for key in keys):
        raise KeyFileError(
            f"{path}: a key {entry['id']} already exists; choose another name with --id"
        )
    keys.append(entry)
    beside = path.with_name(f".{path.name}.new")
    try:
        beside.write_text(json.dumps(content, indent=1) + "\n")
        if path.exists():
            shutil.copymode(path, beside)
        os.replace(beside, path)
    except OSError as error:
        raise KeyFileError(f"{path}: {error.strerror}") from None
