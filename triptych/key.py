"""`triptych key`: an API key, and its entry in the gateway's key file."""

import hashlib
import json
import secrets
from datetime import UTC, datetime

_BYTES = 32


def make_key(tenant: str, key_id: str | None = None) -> str:
    """Text for a terminal: a new key, which is shown once, and the entry that accepts it."""
    key = f"sk-{secrets.token_urlsafe(_BYTES)}"
    entry = {
        "id": key_id or f"{tenant}-{datetime.now(UTC):%Y-%m-%d}",
        "tenant": tenant,
        "sha256": hashlib.sha256(key.encode()).hexdigest(),
    }
    return f'key, shown once: {key}\nentry for "keys" in the key file: {json.dumps(entry)}'
