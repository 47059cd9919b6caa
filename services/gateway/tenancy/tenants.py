"""Who a request belongs to: tenants, and the API keys that name them.

Keys are in a file as SHA-256 digests, with their tenants; the file is read again when it changes,
see `watched_files`.

    {"tenants": {"search": {"weight": 2, "max_requests": 64, "tokens_per_minute": 1000000}},
     "keys": [{"id": "search-2026", "tenant": "search", "sha256": "9f86…",
               "expires": "2027-01-31T00:00:00Z", "scopes": ["inference"]}]}

`triptych key` makes a key and its entry.
"""

import hashlib
import hmac
import time
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from services.common.security.watched_files import WatchedFiles
from services.common.settings import SettingsError

KeyScope = Literal["inference", "metrics", "admin"]
Count = Annotated[int, Meta(ge=1)]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
_INFERENCE: frozenset[KeyScope] = frozenset(("inference",))
_ALL_SCOPES: frozenset[KeyScope] = frozenset(("inference", "metrics", "admin"))


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a tenant may use; None: as much as there is.

    Attributes:
        weight: of its share where tenants wait for the same thing.
        max_requests: at a time.
        max_sequences: at a time; a request with `n` has n.
        requests_per_minute: in any 60 seconds, as the others.
        tokens_per_minute: of prompts and completions, images included.
        pixels_per_minute: pixels of images and of frames of videos, resized, or the bytes of the
            videos' files if these are more.
    """

    weight: Annotated[float, Meta(ge=0.001, le=1000)] = 1.0
    max_requests: Count | None = None
    max_sequences: Count | None = None
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    pixels_per_minute: Count | None = None

    @property
    def of_kinds(self) -> tuple[int | None, ...]:
        """In the order of `quota.KINDS`."""
        per_minute = self.requests_per_minute, self.tokens_per_minute, self.pixels_per_minute
        return (*per_minute, self.max_requests, self.max_sequences)


class _Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    id: Name
    tenant: Name
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
    expires: Annotated[datetime, Meta(tz=True)] | None = None
    scopes: frozenset[KeyScope] = frozenset(("inference",))


class _KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    keys: Annotated[list[_Key], Meta(min_length=1)]
    tenants: dict[Name, Limits] = {}
    # Requests find what other tenants' requests left in the caches, and can tell so by their speed.
    share_caches: bool = False


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant of this gateway.

    Attributes:
        name: for limits, metrics and logs; empty: callers without a key.
        shares_caches: cached prefixes and images are found by requests of other tenants.
    """

    name: str
    limits: Limits
    shares_caches: bool

    @property
    def weight(self) -> float:
        """Of its share where tenants wait for the same thing."""
        return self.limits.weight

    def cache_salt(self, given: str) -> bytes:
        """Separates the tenant's cached prefixes and images from others'.

        Args:
            given: the request's own `cache_salt`, which separates further; may be empty.
        """
        if self.shares_caches:
            return given.encode()
        return _salt(self.name, given)


@lru_cache(4096)  # it takes as long as a key's whole check
def _salt(name: str, given: str) -> bytes:
    return hmac.digest(name.encode(), given.encode(), "sha256")


ANONYMOUS = Tenant("", Limits(), shares_caches=True)


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose key a request carries.

    Attributes:
        key_id: of the key, never the key; empty: none was needed.
        scopes: what the key opens.
        expires_at: Unix time; None: never.
    """

    tenant: Tenant
    key_id: str = ""
    scopes: frozenset[KeyScope] = _INFERENCE
    expires_at: float | None = None


class Keyring:
    """Owner of the keys.

    Args:
        keys: accepted as they are; each is a tenant of its own, without limits.
        path: of the key file; None: there is none.
        is_private: without keys, callers are users of this machine, and may do everything.

    Raises:
        SettingsError: the file cannot be read, or two keys are equal.
    """

    def __init__(
        self, keys: Iterable[str] = (), path: Path | None = None, *, is_private: bool = False
    ) -> None:
        self._everybody = Identity(ANONYMOUS, scopes=_ALL_SCOPES if is_private else _INFERENCE)
        digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        # One tenant has nobody to keep its caches from.
        alone = path is None and len(digests) < 2
        self._fixed: dict[bytes, Identity] = {}
        for digest in digests:
            name = f"key-{digest.hex()[:8]}"
            tenant = Tenant(name, Limits(), shares_caches=alone)
            self._fixed[digest] = Identity(tenant, name, _ALL_SCOPES if alone else _INFERENCE)
        self._file: WatchedFiles[dict[bytes, Identity]] | None = None
        if path is not None:
            try:
                self._file = WatchedFiles((path,), self._parse)
            except SettingsError as error:
                raise SettingsError(f"GATEWAY_API_KEYS, {path}: {error}") from None

    @property
    def is_open(self) -> bool:
        return not self._fixed and self._file is None

    def identify(self, authorization: bytes) -> Identity | None:
        """Whose request it is, by its `Authorization` header; None: a key is needed, or it is not
        valid, or it has expired.
        """
        if self.is_open:
            return self._everybody
        known = self._fixed if self._file is None else self._file.current()
        scheme, _, given = authorization.partition(b" ")
        # By the digest: how long the look-up takes says nothing about the keys.
        found = known.get(hashlib.sha256(given.strip()).digest())
        if found is None or scheme.lower() != b"bearer":
            return None
        if found.expires_at is not None and time.time() >= found.expires_at:
            return None
        return found

    def _parse(self, data: Sequence[bytes]) -> dict[bytes, Identity]:
        """All keys, of the file and fixed, by their digests."""
        try:
            content = msgspec.json.decode(data[0], type=_KeyFile)
        except msgspec.DecodeError as error:
            raise ValueError(f"not a key file: {error}") from None
        by_digest = dict(self._fixed)
        tenants = {
            name: Tenant(name, limits, shares_caches=content.share_caches)
            for name, limits in content.tenants.items()
        }
        for key in content.keys:
            tenant = tenants.setdefault(
                key.tenant, Tenant(key.tenant, Limits(), shares_caches=content.share_caches)
            )
            digest = bytes.fromhex(key.sha256)
            if digest in by_digest:
                raise ValueError(f"two keys are equal, the second is {key.id!r}")
            expires = None if key.expires is None else key.expires.timestamp()
            by_digest[digest] = Identity(tenant, key.id, key.scopes, expires)
        return by_digest


_NOBODY = Identity(ANONYMOUS)
_bound: ContextVar[Identity] = ContextVar("identity", default=_NOBODY)


def bind_identity(identity: Identity) -> None:
    """Sets whose work the running task does, and the tasks that it creates from now on."""
    _bound.set(identity)


def bound_tenant() -> Tenant:
    """Whose work the running task does."""
    return _bound.get().tenant
