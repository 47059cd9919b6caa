"""The units of videos in the preparation queue: `VideoTurns` decides their order, and which threads
of the pool are free decides how many lanes a video may have.
"""

import threading
from collections.abc import Mapping

from services.encoder.decoding.preprocess import Preprocessor
from services.encoder.decoding.source import Video
from services.encoder.engine.job import Job
from services.encoder.engine.preparation_queue import PreparationQueue
from services.encoder.engine.video_turns import Turn, VideoTurns


class VideoQueue:
    """The entries of videos in the preparation queue. Several threads use it.

    Args:
        queue: the preparation queue.
        jobs: jobs that have not ended, by job id.
        preprocessor: owner of the videos' decoders, which is told when no unit of a video waits.
        max_further: see `VideoTurns`.
    """

    def __init__(
        self,
        queue: PreparationQueue,
        jobs: Mapping[int, Job],
        preprocessor: Preprocessor,
        max_further: int,
    ) -> None:
        self._queue = queue
        self._jobs = jobs
        self._preprocessor = preprocessor
        self._turns = VideoTurns(max_further)
        # Held while a turn is decided and queued, so that no other thread gives the turn another
        # rank in between.
        self._queuing = threading.Lock()

    def add(
        self, video: Video, frames: tuple[int, int], turn: Turn, tenant: str, max_lanes: int
    ) -> None:
        """Queues a unit.

        Args:
            video: video of the unit.
            frames: numbers of the unit's two frames.
            turn: rank and job id of the unit.
            tenant: tenant that has sent the video.
            max_lanes: most lanes of all videos at which a further lane of this video may begin.
        """
        if self._queue.num_free <= 0:
            max_lanes = 1
        name = video.file.name
        with self._queuing:
            added = self._turns.add(name, frames, turn, start=video.start, max_lanes=max_lanes)
            if added is not None:
                self._queue.put(added, tenant)
            else:
                self._move_turns(name)

    def move(self, video: Video, job_id: int, rank: float) -> None:
        """Gives a unit another rank, if the unit waits.

        Args:
            video: video of the unit.
            job_id: job id of the unit.
            rank: the new rank.
        """
        with self._queuing:
            self._turns.move(video.file.name, job_id, rank, start=video.start)
            self._move_turns(video.file.name)

    def take(self, job: Job) -> tuple[Job, int]:
        """Returns the job to prepare when the queue has returned a job of a video, and its lane.

        Several jobs may wait for frames of a lane. The job with the earliest frames is taken.
        """
        job_id, lane = self._turns.take(job.job_id)
        return self._jobs[job_id], lane

    def done(self, video: str, lane: int, tenant: str) -> None:
        """Records that a unit has been decoded. A thread may then take the lane's next unit.

        Args:
            video: name of the video.
            lane: lane of the unit.
            tenant: tenant for which the queue has counted the unit.
        """
        self._queue.done(tenant)
        is_busy = self._queue.num_free < 0
        with self._queuing:
            following = self._turns.done(video, lane, is_busy=is_busy)
            if following is not None:
                self._queue.put(following, self._jobs[following[1]].tenant)
        if following is None and not self._turns.holds(video):
            self._preprocessor.finish_video(video)

    def _move_turns(self, video: str) -> None:
        """Gives the queued turns of a video the ranks of the units that wait for them."""
        for turn, rank in self._turns.moved(video):
            self._queue.move(turn, rank)
