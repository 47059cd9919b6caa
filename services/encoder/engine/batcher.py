"""Which images run together. Pure: job ids and patch counts, no tensors, no clock.

The oldest image is always in the next batch, so nothing starves: an image waits for at most as many
batches as there are older ones. Behind it, younger images fill the budget in order, and one that
does not fit is passed over. An image larger than the budget runs alone. A batch never waits to be
filled. The engine's loop alone uses it.
"""

from collections import OrderedDict


class Batcher:
    """The images that are ready to run.

    The queue's bound is its caller's: the front admits no more patches than its settings allow.

    Args:
        max_batch_patches: the budget of one batch, in patches before merging.
    """

    def __init__(self, max_batch_patches: int) -> None:
        assert max_batch_patches > 0
        self._max_batch_patches = max_batch_patches
        self._queue: OrderedDict[int, int] = OrderedDict()  # job id → patches, oldest first
        self._queued_patches = 0

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def queued_patches(self) -> int:
        """Patches of all queued images."""
        return self._queued_patches

    def add(self, job_id: int, num_patches: int) -> None:
        """Queues an image behind all others; a job id is queued once."""
        assert num_patches > 0 and job_id not in self._queue
        self._queue[job_id] = num_patches
        self._queued_patches += num_patches

    def remove(self, job_id: int) -> bool:
        """Takes an image out; False: it was not queued (any more)."""
        num_patches = self._queue.pop(job_id, None)
        if num_patches is None:
            return False
        self._queued_patches -= num_patches
        return True

    def next_batch(self) -> list[int]:
        """Takes out the next batch's job ids, oldest first; empty only if nothing is queued."""
        chosen: list[int] = []
        room = self._max_batch_patches
        for job_id, num_patches in self._queue.items():
            if num_patches <= room or not chosen:
                chosen.append(job_id)
                room -= num_patches
            if room <= 0:
                break
        for job_id in chosen:
            self.remove(job_id)
        return chosen
