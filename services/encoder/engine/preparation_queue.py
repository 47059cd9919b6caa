"""The queue of the images and videos that wait for a thread of the preprocessing pool.

The lowest rank is first. Decoding a unit of a video may occupy a thread for seconds and cannot be
interrupted. Therefore the videos of one tenant never occupy all threads. One thread is left
for images and for the videos of the remaining tenants. The queue has neither threads nor a clock.
"""

import threading
from collections import Counter
from heapq import heapify, heappop, heappush

from services.encoder.engine.video_turns import Turn


class PreparationQueue:
    """A queue of turns in order of rank. Several threads use it.

    Args:
        max_videos: most threads that work on videos of one tenant at the same time.
    """

    def __init__(self, max_videos: int) -> None:
        self._max_videos = max_videos
        self._changed = threading.Condition()
        self._images: list[Turn] = []
        self._videos: dict[str, list[Turn]] = {}  # by tenant
        self._running: Counter[str] = Counter()  # videos being decoded, by tenant
        self._num_idle = 0  # threads that wait for a turn
        self._is_closed = False

    @property
    def num_free(self) -> int:
        """Number of threads that wait for more turns than there are. Negative if turns wait."""
        with self._changed:
            return self._num_idle - self._num_turns()

    def __len__(self) -> int:
        """Number of turns that wait."""
        with self._changed:
            return self._num_turns()

    def put(self, turn: Turn, tenant: str | None = None) -> None:
        """Adds a turn.

        Args:
            turn: rank and job id of an image, or of a video's next unit.
            tenant: tenant that sent the video. None if the turn is an image's.
        """
        with self._changed:
            heappush(self._images if tenant is None else self._videos.setdefault(tenant, []), turn)
            self._changed.notify()

    def move(self, turn: Turn, rank: float) -> None:
        """Gives a turn another rank. Has no effect if a thread has taken the turn."""
        with self._changed:
            for turns in (self._images, *self._videos.values()):
                if turn in turns:
                    turns[turns.index(turn)] = rank, turn[1]
                    heapify(turns)
                    return

    def get(self) -> tuple[int, str | None] | None:
        """Waits for a turn and removes it from the queue.

        Returns:
            The job id of the turn, and the tenant if it is a video's turn, for which the caller
            calls `done` later. None if the queue was closed.
        """
        with self._changed:
            while not self._is_closed:
                tenant, turns = self._next()
                if turns:
                    _, job_id = heappop(turns)
                    if tenant is not None:
                        self._running[tenant] += 1
                        if not turns:
                            del self._videos[tenant]
                    return job_id, tenant
                self._num_idle += 1
                self._changed.wait()
                self._num_idle -= 1
        return None

    def done(self, tenant: str) -> None:
        """Records that a thread no longer works on a video of the tenant."""
        with self._changed:
            self._running -= Counter((tenant,))
            self._changed.notify()

    def close(self) -> None:
        """Closes the queue. All calls of `get` return None."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _num_turns(self) -> int:
        return len(self._images) + sum(map(len, self._videos.values()))

    def _next(self) -> tuple[str | None, list[Turn]]:
        """Returns the heap whose first turn is next, and its tenant if it is a heap of videos."""
        tenant, turns = None, self._images
        for other, waiting in self._videos.items():
            is_allowed = self._running[other] < self._max_videos
            if is_allowed and (not turns or waiting[0] < turns[0]):
                tenant, turns = other, waiting
        return tenant, turns
