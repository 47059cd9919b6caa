"""Which unit of a video is decoded next. Pure; the engine's pool of threads uses it.

A video is decoded in one pass, forward, so one thread at a time decodes it and takes the unit
whose frames come first, whichever is first in the queue. Between two units others have their turn.
"""

import threading
from collections.abc import Hashable
from heapq import heappop, heappush

Turn = tuple[float, int]  # rank, job id: an item of the pool's queue
_Place = tuple[tuple[int, int], int, float]  # frames, job id, rank


class VideoTurns:
    """The units that wait, by video. Each video with units that wait has one turn in the queue, or
    is in work.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, list[_Place]] = {}

    def add(self, video: Hashable, frames: tuple[int, int], turn: Turn) -> Turn | None:
        """A unit waits. Returns the turn to queue; None: its video has one, or is in work."""
        rank, job_id = turn
        with self._lock:
            places = self._waiting.get(video)
            if places is not None:
                heappush(places, (frames, job_id, rank))
                return None
            self._waiting[video] = [(frames, job_id, rank)]
            return turn

    def take(self, video: Hashable) -> int:
        """The turn has come: the job to work on."""
        with self._lock:
            return heappop(self._waiting[video])[1]

    def done(self, video: Hashable) -> Turn | None:
        """The work has ended. Returns the turn to queue; None: nothing waits."""
        with self._lock:
            places = self._waiting[video]
            if not places:
                del self._waiting[video]
                return None
            _, job_id, rank = places[0]
            return rank, job_id
