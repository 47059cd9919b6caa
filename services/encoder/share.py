"""Whose work something is, where tenants share a service."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """A tenant, and the weight of its share."""

    tenant: str = ""
    weight: float = 1.0


NOBODY = Share()  # callers without a key
