"""The batcher: it decides which images run together. It knows job ids, ranks and numbers of
patches, but no tensors and no clock.

The front ranks images, so that no tenant waits behind another tenant's queue. Of two images of the
same rank, the earlier comes first. The first image of the queue is always in the next batch. The
images behind it are added in order while the batch's budget of patches lasts; an image that does
not fit is skipped, and a smaller image behind it may be added. An image larger than the budget runs
alone. Still images and pairs of frames do not run together, nor do images of different towers,
which are the model's own and those of adapters. A batch never waits for more images.
The engine's loop is the only thread that uses the batcher.
"""

from bisect import bisect_left, insort
from typing import NamedTuple


class _Entry(NamedTuple):
    """A queued image. Entries are sorted by rank, then by job id."""

    rank: float
    job_id: int
    num_patches: int
    is_pair: bool
    tower: int

    @property
    def kind(self) -> tuple[bool, int]:
        """The images of a batch are of one kind."""
        return self.is_pair, self.tower


class Batcher:
    """The queue of the images that are ready to run.

    The queue itself has no bound: the front admits a bounded number of patches.

    Args:
        max_batch_patches: budget of a batch, in patches before merging.
    """

    def __init__(self, max_batch_patches: int) -> None:
        assert max_batch_patches > 0
        self._max_batch_patches = max_batch_patches
        self._queue: list[_Entry] = []
        self._entries: dict[int, _Entry] = {}  # by job id

    def __len__(self) -> int:
        """Number of queued images."""
        return len(self._queue)

    def add(
        self,
        job_id: int,
        num_patches: int,
        rank: float = 0.0,
        *,
        is_pair: bool = False,
        tower: int = 0,
    ) -> None:
        """Queues an image.

        Args:
            job_id: number of the image's job, which must not be queued already.
            num_patches: number of the image's patches before merging.
            rank: place in the order of the queue, the lowest first.
            is_pair: True if the image is a pair of frames, False if it is a still image.
            tower: index of the tower that encodes the image.
        """
        assert num_patches > 0 and job_id not in self._entries
        self._insert(_Entry(rank, job_id, num_patches, is_pair, tower))

    def remove(self, job_id: int) -> bool:
        """Removes an image from the queue. Returns whether the image was queued."""
        entry = self._entries.pop(job_id, None)
        if entry is None:
            return False
        del self._queue[bisect_left(self._queue, entry)]
        return True

    def move(self, job_id: int, rank: float) -> None:
        """Gives an image another place in the order of the queue, if the image is queued."""
        if (entry := self._entries.get(job_id)) is not None:
            self.remove(job_id)
            self._insert(entry._replace(rank=rank))

    def next_batch(self, most_patches: int | None = None) -> list[int]:
        """Removes the images of the next batch from the queue.

        Args:
            most_patches: budget of this batch if it is less than that of all batches. Larger images
                stay in the queue.

        Returns:
            Job ids of the batch, in the order of the queue. Without `most_patches`, it is empty
            only if the queue is empty.
        """
        chosen: list[_Entry] = []
        patches_left = self._max_batch_patches
        if most_patches is not None:
            patches_left = min(patches_left, most_patches)
        for entry in self._queue:
            is_of_kind = not chosen or entry.kind == chosen[0].kind
            may_be_large = not chosen and most_patches is None
            if is_of_kind and (may_be_large or entry.num_patches <= patches_left):
                chosen.append(entry)
                patches_left -= entry.num_patches
            if patches_left <= 0:
                break
        for entry in chosen:
            self.remove(entry.job_id)
        return [entry.job_id for entry in chosen]

    def _insert(self, entry: _Entry) -> None:
        self._entries[entry.job_id] = entry
        insort(self._queue, entry)
