"""Which images run together. Pure: job ids and patch counts, no tensors, no clock.

Images are in a fair order of their tenants; within a tenant it is that of arrival. The first image
is always in the next batch, so nothing starves: an image waits for at most as many batches as there
are images before it. Behind it, later images fill the budget in order, and one that does not fit is
passed over. An image larger than the budget runs alone. A batch never waits to be filled. On a CPU,
where a large image takes long, small ones of other tenants overtake it. The engine's loop alone
uses it.
"""

from bisect import bisect_left, insort
from typing import NamedTuple

from services.common.tenancy.fair_order import NOBODY, FairOrder, Share

_SMALL = 2  # an image overtakes one with at least twice its patches


class _Image(NamedTuple):
    """A queued image; sorted as the queue is."""

    place: float
    arrival: int
    job_id: int
    num_patches: int
    next_place: float  # of its tenant, once this image is paid for


class Batcher:
    """The images that are ready to run.

    The queue's bound is its caller's: the front admits no more patches than its settings allow.

    Args:
        max_batch_patches: the budget of one batch, in patches before merging.
    """

    def __init__(self, max_batch_patches: int) -> None:
        assert max_batch_patches > 0
        self._max_batch_patches = max_batch_patches
        self._order = FairOrder()
        self._queue: list[_Image] = []
        self._entries: dict[int, _Image] = {}  # by job id
        self._latest: _Image | None = None  # the first of the last batch
        self._arrivals = 0
        self._queued_patches = 0

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def queued_patches(self) -> int:
        """Patches of all queued images."""
        return self._queued_patches

    def add(self, job_id: int, num_patches: int, share: Share = NOBODY) -> None:
        """Queues an image behind all others of its tenant; a job id is queued once."""
        assert num_patches > 0 and job_id not in self._entries
        self._arrivals += 1
        place = self._order.place(share.tenant, weight=share.weight, cost=num_patches)
        next_place = place + num_patches / share.weight
        entry = _Image(place, self._arrivals, job_id, num_patches, next_place)
        self._entries[job_id] = entry
        insort(self._queue, entry)
        self._queued_patches += num_patches

    def remove(self, job_id: int) -> bool:
        """Takes an image out; False: it was not queued (any more)."""
        entry = self._entries.pop(job_id, None)
        if entry is None:
            return False
        del self._queue[bisect_left(self._queue, entry)]
        self._queued_patches -= entry.num_patches
        return True

    def next_batch(self) -> list[int]:
        """Takes out the next batch's job ids, in order; empty only if nothing is queued."""
        chosen: list[int] = []
        room = self._max_batch_patches
        for image in self._queue:
            if image.num_patches <= room or not chosen:
                if not chosen:
                    self._latest = image
                chosen.append(image.job_id)
                self._order.served(image.place)
                room -= image.num_patches
            if room <= 0:
                break
        for job_id in chosen:
            self.remove(job_id)
        return chosen

    def next_overtaking(self) -> int | None:
        """Takes out the next image that may run before the rest of the last batch, which is one
        image: at most half as large, and its tenant's turn comes before that image is paid for. So
        a tenant's small images overtake a large one only until they are as much work together.
        None: there is none.
        """
        large = self._latest
        for image in self._queue:
            if large is None or image.place >= large.next_place:
                break
            if image.num_patches * _SMALL <= large.num_patches:
                self._order.served(image.place)
                self.remove(image.job_id)
                return image.job_id
        return None
