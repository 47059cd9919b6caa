"""Which images an encoder takes, and in which order: bounded, and fair among tenants."""

from dataclasses import dataclass

from services.common.tenancy.fair_order import FairOrder
from services.common.tenancy.tenant_room import TenantRoom


@dataclass(frozen=True, slots=True)
class Share:
    """Whose work an image is: a tenant, and the weight of its share."""

    tenant: str = ""
    weight: float = 1.0


NOBODY = Share()  # callers without a key


class Admission:
    """Counts the images in work and ranks those that wait; for one event loop.

    Args:
        max_patches: images beyond this in work are refused, before merging.
    """

    def __init__(self, max_patches: int) -> None:
        self._room = TenantRoom(max_patches)
        self._order = FairOrder()

    @property
    def num_patches(self) -> int:
        """Of the images in work, before merging."""
        return self._room.held

    def enter(self, share: Share, num_patches: int) -> float | None:
        """An image's rank among those that wait, of which the lowest is next; None: no room."""
        if not self._room.has_room(share.tenant, num_patches):
            return None
        self._room.take(share.tenant, num_patches)
        return self._order.place(share.tenant, weight=share.weight, cost=num_patches)

    def ran(self, rank: float) -> None:
        """The engine has done with an image of this rank."""
        self._order.served(rank)

    def leave(self, share: Share, num_patches: int) -> None:
        """The image that has entered is in work no more."""
        self._room.give_back(share.tenant, num_patches)
