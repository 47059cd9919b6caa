"""Which images run together. Pure: job ids, ranks and patch counts, no tensors, no clock.

The front ranks images, so that no tenant waits behind another's queue; of equal ranks the earlier
image is first. The first image is always in the next batch. Behind it, others fill the budget in
order, and one that does not fit is passed over. An image larger than the budget runs alone. Still
images and pairs of frames do not run together. A batch never waits to be filled. The engine's loop
alone uses it.
"""

from bisect import bisect_left, insort

_Place = tuple[float, int, int, bool]  # rank, job id, patches, is a pair of frames


class Batcher:
    """The images that are ready to run.

    The queue's bound is its caller's: the front admits no more patches than its settings allow.

    Args:
        max_batch_patches: the budget of one batch, in patches before merging.
    """

    def __init__(self, max_batch_patches: int) -> None:
        assert max_batch_patches > 0
        self._max_batch_patches = max_batch_patches
        self._queue: list[_Place] = []
        self._places: dict[int, _Place] = {}  # by job id

    def __len__(self) -> int:
        return len(self._queue)

    def add(
        self, job_id: int, num_patches: int, rank: float = 0.0, *, is_pair: bool = False
    ) -> None:
        """Queues an image; a job id is queued once."""
        assert num_patches > 0 and job_id not in self._places
        place = (rank, job_id, num_patches, is_pair)
        self._places[job_id] = place
        insort(self._queue, place)

    def remove(self, job_id: int) -> bool:
        """Takes an image out; False: it was not queued (any more)."""
        place = self._places.pop(job_id, None)
        if place is None:
            return False
        del self._queue[bisect_left(self._queue, place)]
        return True

    def next_batch(self) -> list[int]:
        """Takes out the next batch's job ids, in order; empty only if nothing is queued."""
        chosen: list[int] = []
        room = self._max_batch_patches
        kind = bool(self._queue) and self._queue[0][3]
        for _, job_id, num_patches, is_pair in self._queue:
            if (is_pair == kind and num_patches <= room) or not chosen:
                chosen.append(job_id)
                room -= num_patches
            if room <= 0:
                break
        for job_id in chosen:
            self.remove(job_id)
        return chosen
