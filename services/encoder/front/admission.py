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


@dataclass(slots=True, eq=False)
class AdmittedImage:
    """An image in work.

    Attributes:
        share: the share that the image is charged to.
        num_patches: number of the image's patches, before merging.
        rank: place among the images that wait; the lowest is next.
        has_run: True if the tower has computed the image.
        is_refunded: True if the image's cost was given back.
        has_moved: True if the image was charged to another share before.
    """

    share: Share
    num_patches: int
    rank: float
    has_run: bool = False
    is_refunded: bool = False
    has_moved: bool = False


class Admission:
    """Counts the images in work, and ranks the images that wait. One event loop uses it.

    A tenant is charged for the images that the tower computes: for each image when it enters. The
    cost of an image that leaves before it is computed is given back, for example because Redis has
    the embedding.

    Args:
        max_patches: the most patches of all images in work, before merging.
    """

    def __init__(self, max_patches: int) -> None:
        self._capacity = TenantCapacity(max_patches)
        self._order = FairOrder()
        self._images: set[AdmittedImage] = set()  # in work

    @property
    def num_patches(self) -> int:
        """Number of patches of the images in work, before merging."""
        return self._capacity.used

    def enter(self, share: Share, num_patches: int) -> AdmittedImage | None:
        """Admits an image. Returns None if too many patches are in work."""
        if not self._capacity.allows(share.tenant, num_patches):
            return None
        self._capacity.take(share.tenant, num_patches)
        image = AdmittedImage(share, num_patches, self._place(share, num_patches))
        self._images.add(image)
        return image

    def ran(self, image: AdmittedImage) -> None:
        """Records that the tower has computed an image. The image may have left already, because
        the tower completes an image that it has begun.
        """
        image.has_run = True
        place = image.rank
        if image.has_moved:
            # The tower may have begun the image at its former place, before images that wait.
            waiting = (other.rank for other in self._images if not other.has_run)
            place = min(place, min(waiting, default=place))
        self._order.served(place)
        if image.is_refunded:
            image.is_refunded = False
            share = image.share
            self._order.charge(
                share.tenant, image.rank, weight=share.weight, cost=image.num_patches
            )

    def move(self, image: AdmittedImage, share: Share) -> None:
        """Charges an image in work to another share, and places it anew."""
        self._capacity.release(image.share.tenant, image.num_patches)
        self._capacity.take(share.tenant, image.num_patches)
        if not image.has_run:
            self._refund(image)
            image.rank = self._place(share, image.num_patches)
            image.has_moved = True
        image.share = share

    def leave(self, image: AdmittedImage) -> None:
        """Records that an image is no longer in work. Called once for each image."""
        self._images.discard(image)
        self._capacity.release(image.share.tenant, image.num_patches)
        if not image.has_run:
            image.is_refunded = True
            self._refund(image)

    def _place(self, share: Share, num_patches: int) -> float:
        return self._order.place(
            share.tenant, weight=share.weight, cost=num_patches, background=share.background
        )

    def _refund(self, image: AdmittedImage) -> None:
        share = image.share
        self._order.refund(share.tenant, image.rank, weight=share.weight, cost=image.num_patches)
