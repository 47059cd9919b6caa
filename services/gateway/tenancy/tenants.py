"""Tenants, and the API keys by which requests are assigned to them.

The key file contains the SHA-256 digests of the keys and the keys' tenants. It is read again when
it changes, see `watched_files`. An example:

    {"tenants": {"search": {"weight": 2, "max_requests": 64, "tokens_per_minute": 1000000}},
     "keys": [{"id": "search-2026", "tenant": "search", "sha256": "9f86…",
               "expires": "2027-01-31T00:00:00Z", "scopes": ["inference"]}]}

`triptych key` creates a key and its entry.
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
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}\Z")]
_INFERENCE: frozenset[KeyScope] = frozenset(("inference",))
_ALL_SCOPES: frozenset[KeyScope] = frozenset(("inference", "metrics", "admin"))


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits of a tenant. None for each kind that is not limited.

    Attributes:
        weight: relative share of the tenant where several tenants wait for the same resource.
        max_requests: number of requests at a time.
        max_sequences: number of sequences at a time. A request with `n` has n sequences.
        requests_per_minute: number of requests in any 60 seconds.
        tokens_per_minute: number of prompt and completion tokens in any 60 seconds, image tokens
            included.
        pixels_per_minute: number of pixels of images and frames of videos after resizing in any 60
            seconds. The bytes of a video's file count instead if they are more.
        adapters: names of the adapters that the tenant may use. None for all.
    """

    weight: Annotated[float, Meta(ge=0.001, le=1000)] = 1.0
    max_requests: Count | None = None
    max_sequences: Count | None = None
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    pixels_per_minute: Count | None = None
    adapters: tuple[str, ...] | None = None

    @property
    def by_kind(self) -> tuple[int | None, ...]:
        """The limits in the order of `quota.KINDS`."""
        per_minute = self.requests_per_minute, self.tokens_per_minute, self.pixels_per_minute
        return (*per_minute, self.max_requests, self.max_sequences)


class _Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    id: Name
    tenant: Name
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    expires: Annotated[datetime, Meta(tz=True)] | None = None
    scopes: frozenset[KeyScope] = frozenset(("inference",))


class _KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    keys: Annotated[list[_Key], Meta(min_length=1)]
    tenants: dict[Name, Limits] = {}
    # If set, a request can be answered from cache entries of other tenants, and its speed tells so.
    share_caches: bool = False


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant of this gateway.

    Attributes:
        name: name of the tenant in limits, metrics and logs. Empty for callers without a key.
        limits: limits of the tenant.
        shares_caches: true if other tenants' requests find its cached prefixes and images.
        is_background: true for the lines of the tenant's batches, which run behind all requests.
    """

    name: str
    limits: Limits
    shares_caches: bool
    is_background: bool = False

    @property
    def queue_name(self) -> str:
        """Name under which the other services queue the tenant's work. Batches have their own."""
        return f"{self.name}/batch" if self.is_background else self.name

    @property
    def weight(self) -> float:
        """Relative share of the tenant where several tenants wait for the same resource."""
        return self.limits.weight

    def cache_salt(self, request_salt: str) -> bytes:
        """Returns the salt that separates the tenant's cached prefixes and images from others'.

        Args:
            request_salt: the request's own `cache_salt`, which separates further. May be empty.
        """
        if self.shares_caches:
            return request_salt.encode()
        return _salt(self.name, request_salt)


@lru_cache(4096)  # the digest takes as long as the whole check of a key
def _salt(name: str, request_salt: str) -> bytes:
    return hmac.digest(name.encode(), request_salt.encode(), "sha256")


ANONYMOUS = Tenant("", Limits(), shares_caches=True)


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a caller, from the API key of its request.

    Attributes:
        tenant: tenant of the key.
        key_id: public name of the key. Empty if no key was needed.
        scopes: groups of endpoints that the key may call.
        expires_at: Unix time at which the key expires. None if it does not expire.
    """

    tenant: Tenant
    key_id: str = ""
    scopes: frozenset[KeyScope] = _INFERENCE
    expires_at: float | None = None


class Keyring:
    """Accepted API keys of the gateway.

    Args:
        keys: keys in plain text. Each key is a tenant of its own, without limits.
        path: path of the key file. None if there is no key file.
        is_private: true if only users of this machine reach the gateway. If there are no keys,
            such callers have all scopes.

    Raises:
        SettingsError: the key file cannot be read, or two keys are equal.
    """

    def __init__(
        self, keys: Iterable[str] = (), path: Path | None = None, *, is_private: bool = False
    ) -> None:
        self._everybody = Identity(ANONYMOUS, scopes=_ALL_SCOPES if is_private else _INFERENCE)
        digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        # A single tenant has no other tenant to be separated from.
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
        """True if requests need no key."""
        return not self._fixed and self._file is None

    def identify(self, authorization: bytes) -> Identity | None:
        """Returns the identity of a caller, or None if its key is missing, unknown or expired.

        Args:
            authorization: value of the request's `Authorization` header. May be empty.
        """
        if self.is_open:
            return self._everybody
        known = self._fixed if self._file is None else self._file.current()
        scheme, _, key = authorization.partition(b" ")
        # The look-up is by digest, so its duration reveals nothing about the keys.
        found = known.get(hashlib.sha256(key.strip()).digest())
        if found is None or scheme.lower() != b"bearer":
            return None
        if found.expires_at is not None and time.time() >= found.expires_at:
            return None
        return found

    def of_tenant(self, name: str) -> Identity | None:
        """Returns an identity with a tenant's current limits, for work that outlives the request
        which asked for it. None if no valid key of the tenant may generate any more.

        Args:
            name: name of the tenant. Empty for callers without a key.
        """
        if self.is_open:
            return self._everybody if not name else None
        known = self._fixed if self._file is None else self._file.current()
        for found in known.values():
            is_valid = found.expires_at is None or time.time() < found.expires_at
            if found.tenant.name == name and "inference" in found.scopes and is_valid:
                return found
        return None

    def _parse(self, data: Sequence[bytes]) -> dict[bytes, Identity]:
        """Returns the identities of all keys, those of the file and the fixed keys, by digest."""
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
    """Sets the identity for the running task and for the tasks that it creates from now on."""
    _bound.set(identity)


def bound_tenant() -> Tenant:
    """Returns the tenant for which the running task works."""
    return _bound.get().tenant


def bound_key_id() -> str:
    """Returns the public name of the API key of the running task. Empty if no key was needed."""
    return _bound.get().key_id
