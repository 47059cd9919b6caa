"""Which images an encoder takes, and in which order: bounded, and fair among tenants."""

from services.common.tenancy.fair_order import FairOrder
from services.common.tenancy.tenant_room import TenantRoom
from services.encoder.share import Share


class Admission:
    """`embeddings.AdmissionPolicy` by weight; for one event loop.

    Args:
        max_patches: images beyond this in work are refused, before merging.
    """

    def __init__(self, max_patches: int) -> None:
        self._room = TenantRoom(max_patches)
        self._order = FairOrder()

    @property
    def num_patches(self) -> int:
        return self._room.held

    def enter(self, share: Share, num_patches: int) -> float | None:
        if not self._room.has_room(share.tenant, num_patches):
            return None
        self._room.take(share.tenant, num_patches)
        return self._order.place(share.tenant, weight=share.weight, cost=num_patches)

    def ran(self, rank: float) -> None:
        self._order.served(rank)

    def leave(self, share: Share, num_patches: int) -> None:
        self._room.give_back(share.tenant, num_patches)
