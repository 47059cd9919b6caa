"""`triptych key`: an API key, and its entry in the gateway's key file."""

import hashlib
import json
import os
import secrets
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_BYTES = 32


class KeyFileError(Exception):
    """The key file cannot take the entry; the message says why."""


def make_key(tenant: str, key_id: str | None = None) -> tuple[str, dict[str, str]]:
    """A new key, which nobody can read again, and the entry that accepts it."""
    key = f"sk-{secrets.token_urlsafe(_BYTES)}"
    entry = {
        "id": key_id or f"{tenant}-{datetime.now(UTC):%Y-%m-%d}",
        "tenant": tenant,
        "sha256": hashlib.sha256(key.encode()).hexdigest(),
    }
    return key, entry


def add_entry(path: Path, entry: dict[str, str]) -> None:
    """Adds an entry to a key file, which is made if there is none.

    Raises:
        KeyFileError: the file holds something else, or a key of this id.
    """
    try:
        content: Any = json.loads(path.read_text()) if path.exists() else {"keys": []}
    except (OSError, ValueError) as error:
        raise KeyFileError(f"{path}: {error}") from None
    keys = content.get("keys") if isinstance(content, dict) else None
    if not isinstance(keys, list):
        raise KeyFileError(f'{path}: no object with a list "keys"')
    if any(isinstance(key, dict) and key.get("id") == entry["id"] for key in keys):
        raise KeyFileError(f"{path}: there is a key {entry['id']} already; name another with --id")
    keys.append(entry)
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(beside, path)
