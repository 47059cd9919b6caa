"""Whose a request is and what it may hold, as its way needs to know it; `tenancy` says it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


class Tenant(Protocol):
    """Whose request it is.

    Attributes:
        name: empty: a caller without a key.
        weight: of its share where tenants wait for the same thing.
    """

    @property
    def name(self) -> str: ...
    @property
    def weight(self) -> float: ...

    def cache_salt(self, given: str) -> bytes:
        """The salt of its cached prefixes and images; `given`: the request's own, or empty."""
        ...


class Usage(Protocol):
    """What a request uses of its tenant's limits."""

    async def charge(self, tokens: int = 0, num_choices: int = 0, num_pixels: int = 0) -> None:
        """Raises RateLimited: the tenant has used what it may for now."""
        ...

    def correct(self, used_tokens: Sequence[int]) -> None:
        """Gives back what was not used: prompt and completion tokens, charge by charge."""
        ...


@dataclass(frozen=True, slots=True)
class Slot:
    """A running request's. Valid inside the `with` that made it.

    Attributes:
        hold: counts bytes before they are allocated; raises Overloaded.
    """

    tenant: Tenant
    usage: Usage
    hold: Callable[[int], None]
