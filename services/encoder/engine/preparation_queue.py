"""The images and videos that wait for a thread of the engine's pool, the lowest rank first.

A unit of a video may take a thread for seconds, and is not interrupted. So the videos of one tenant
never have all threads: an image, or another tenant's video, waits for none of them. Pure but for
its lock.
"""

import threading
from collections import Counter
from heapq import heappop, heappush

from services.encoder.engine.video_turns import Turn


class PreparationQueue:
    """Turns in order of rank; several threads use it.

    Args:
        max_videos: the most threads that work on videos of one tenant at a time.
    """

    def __init__(self, max_videos: int) -> None:
        self._max_videos = max_videos
        self._changed = threading.Condition()
        self._images: list[Turn] = []
        self._videos: dict[str, list[Turn]] = {}  # by tenant
        self._running: Counter[str] = Counter()  # videos in work, by tenant
        self._is_closed = False

    def __len__(self) -> int:
        """Turns that wait."""
        with self._changed:
            return len(self._images) + sum(map(len, self._videos.values()))

    def put(self, turn: Turn, tenant: str | None = None) -> None:
        """Adds a turn.

        Args:
            tenant: the tenant whose video it is. None for an image.
        """
        with self._changed:
            heappush(self._images if tenant is None else self._videos.setdefault(tenant, []), turn)
            self._changed.notify()

    def get(self) -> tuple[int, str | None] | None:
        """Waits for a turn. Returns its job's id and, for a video, its tenant, whose `done` has to
        be called then. None if the queue was closed.
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
                self._changed.wait()
        return None

    def done(self, tenant: str) -> None:
        """A thread has done its work on a video of the tenant."""
        with self._changed:
            self._running -= Counter((tenant,))
            self._changed.notify()

    def close(self) -> None:
        """Ends all that wait in `get`."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _next(self) -> tuple[str | None, list[Turn]]:
        """The turns of which the first is next, and the tenant if they are of videos."""
        tenant, turns = None, self._images
        for other, waiting in self._videos.items():
            is_allowed = self._running[other] < self._max_videos
            if is_allowed and (not turns or waiting[0] < turns[0]):
                tenant, turns = other, waiting
        return tenant, turns
