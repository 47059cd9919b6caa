"""Admission: bounds the images in work, and orders them fairly among tenants."""

from dataclasses import dataclass

from services.common.tenancy.fair_order import FairOrder
from services.common.tenancy.tenant_capacity import TenantCapacity


@dataclass(frozen=True, slots=True)
class Share:
    """A tenant, the weight of the tenant's share, and whether its image is background work."""

    tenant: str = ""
    weight: float = 1.0
    background: bool = False


NOBODY = Share()  # callers without a key


class Admission:
    """Counts the images in work, and ranks the images that wait. One event loop uses it.

    Args:
        max_patches: the most patches of all images in work, before merging.
    """

    def __init__(self, max_patches: int) -> None:
        self._capacity = TenantCapacity(max_patches)
        self._order = FairOrder()

    @property
    def num_patches(self) -> int:
        """Number of patches of the images in work, before merging."""
        return self._capacity.used

    def enter(self, share: Share, num_patches: int) -> float | None:
        """Admits an image, and returns its rank; the lowest rank is next.

        Returns None if too many patches are in work.
        """
        if not self._capacity.allows(share.tenant, num_patches):
            return None
        self._capacity.take(share.tenant, num_patches)
        return self._order.place(
            share.tenant, weight=share.weight, cost=num_patches, background=share.background
        )

    def ran(self, rank: float) -> None:
        """Notes that the engine has finished an image of this rank."""
        self._order.served(rank)

    def leave(self, share: Share, num_patches: int) -> None:
        """Notes that an admitted image is no longer in work."""
        self._capacity.release(share.tenant, num_patches)
