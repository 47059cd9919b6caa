"""The order in which the units of a video are decoded.

A video is decoded in one forward pass. Therefore a video occupies at most one thread, which
takes the waiting unit with the earliest frames, even if a later unit of the video has a lower rank.
Between two units of a video, images and other videos have their turns.
"""

import threading
from collections.abc import Hashable
from heapq import heappop, heappush

Turn = tuple[float, int]  # rank and job id of an entry of the preparation queue
_Waiting = tuple[tuple[int, int], int, float]  # frames, job id and rank of a unit


class VideoTurns:
    """The waiting units of each video. A video with waiting units either has one turn in the
    preparation queue or is being decoded. Several threads use it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, list[_Waiting]] = {}

    def add(self, video: Hashable, frames: tuple[int, int], turn: Turn) -> Turn | None:
        """Adds a unit.

        Args:
            video: name of the unit's video.
            frames: numbers of the unit's two frames.
            turn: rank and job id of the unit.

        Returns:
            The turn to queue. None if the video already has a turn or is being decoded.
        """
        rank, job_id = turn
        with self._lock:
            units = self._waiting.get(video)
            if units is not None:
                heappush(units, (frames, job_id, rank))
                return None
            self._waiting[video] = [(frames, job_id, rank)]
            return turn

    def take(self, video: Hashable) -> int:
        """Returns the job id of the unit to decode, when the video's turn has come."""
        with self._lock:
            return heappop(self._waiting[video])[1]

    def done(self, video: Hashable) -> Turn | None:
        """Records that a unit of the video has been decoded.

        Returns:
            The turn to queue. None if no unit of the video waits.
        """
        with self._lock:
            units = self._waiting[video]
            if not units:
                del self._waiting[video]
                return None
            _, job_id, rank = units[0]
            return rank, job_id
