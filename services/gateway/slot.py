"""Whose a request is and what it may hold, as its way needs to know it; `tenancy` says it."""

from collections.abc import Awaitable, Callable, Sequence
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


@dataclass(frozen=True, slots=True)
class Slot:
    """A running request's. Valid inside the `with` that made it.

    Attributes:
        charge: takes tokens, choices and pixels of the tenant's limits; raises RateLimited: it has
            used what it may for now.
        charge_file: takes the bytes of a video's file of the tenant's pixels, before the file is
            read; what `charge` takes next covers them. Raises RateLimited.
        correct: gives back what was not used: prompt and completion tokens, charge by charge.
        hold: counts bytes before they are allocated; raises Overloaded.
    """

    tenant: Tenant
    charge: Callable[[int, int, int], Awaitable[None]]
    charge_file: Callable[[int], Awaitable[None]]
    correct: Callable[[Sequence[int]], None]
    hold: Callable[[int], None]
