"""The client of the engine process in the front's event loop: jobs and their results.

`TowerTier` submits images and reserves their memory. When the engine process ends, all jobs fail.
Jobs that the engine worked on fail with `EngineLost`, because any of them may be the cause. Jobs
that were only waiting fail with `Unavailable`.
"""

import asyncio
import itertools
from dataclasses import dataclass

from services.common.embeddings.embedding_write import EmbeddingWrite
from services.common.embeddings.shared_task import retrieve_exception
from services.common.errors import EngineLost, Unavailable, from_code
from services.common.geometry import Unit
from services.common.process.channel import ChannelClosed, FrontChannel
from services.common.process.heartbeat import Pong
from services.encoder.engine.messages import (
    ActiveJobs,
    CancelImage,
    EncodeImage,
    EngineMessage,
    EngineStats,
    FeatureDone,
    ImageDone,
    MoveImage,
    PlaceImage,
    Source,
    StageTimes,
)
from services.encoder.metrics import EncoderMetrics

_LOST = "the encoder's engine ended while it worked on the image"
_ENDED = "the encoder's engine process ended"


@dataclass(slots=True)
class EngineJob:
    """An image that the engine has to encode.

    Attributes:
        job_id: number of the job in messages.
        done: future of the stage times, done when the engine no longer uses the memory.
        write: the writing of the embedding. None until `EngineClient.place`.
    """

    job_id: int
    done: asyncio.Future[StageTimes]
    write: EmbeddingWrite | None = None


class EngineClient:
    """Sends images to the engine.

    Args:
        link: the channel to the engine.
        metrics: metrics, which get the engine's counters after each batch.
        min_streamed_bytes: smallest size of an embedding whose features are offered to readers one
            by one. The messages for the features of a smaller embedding would cost more time than
            they hide.
    """

    def __init__(
        self,
        link: FrontChannel[EngineMessage],
        metrics: EncoderMetrics,
        *,
        min_streamed_bytes: int = 8 << 20,
    ) -> None:
        self._active: set[int] = set()  # jobs that the engine works on
        self._link = link
        self._metrics = metrics
        self._min_streamed_bytes = min_streamed_bytes
        self._ids = itertools.count(1)
        self._jobs: dict[int, EngineJob] = {}
        self._died = False

    @property
    def is_busy(self) -> bool:
        """Returns whether the engine has jobs."""
        return bool(self._jobs)

    def submit(
        self, source: Source, unit: Unit, rank: float = 0.0, tenant: str = "", tower: int = 0
    ) -> EngineJob:
        """Starts a job: the image is decoded and then waits for `place`.

        Args:
            source: the files that the embedding is made from.
            unit: the grid of the image or pair of frames.
            rank: place among the images that wait; the engine takes the lowest next.
            tenant: tenant that wants the unit. Empty for a caller without a key.
            tower: index of the tower that encodes the unit, see `EncodeImage.tower`.

        Raises:
            Unavailable: the engine process has ended.
        """
        if self._died:
            raise Unavailable(_ENDED)
        job = EngineJob(next(self._ids), asyncio.get_running_loop().create_future())
        job.done.add_done_callback(retrieve_exception)
        self._jobs[job.job_id] = job
        self._link.send(EncodeImage(job.job_id, source, unit, rank, tenant, tower))
        return job

    def place(self, job: EngineJob, write: EmbeddingWrite) -> None:
        """Gives a job the memory for its embedding, so that it may run. Called once per job."""
        job.write = write
        if job.job_id in self._jobs:
            self._link.send(PlaceImage(job.job_id, write.entry.offset))

    def move(self, job: EngineJob, rank: float) -> None:
        """Gives a job another place among the images that wait. Has no effect if the job runs."""
        if job.job_id in self._jobs:
            self._link.send(MoveImage(job.job_id, rank))

    def cancel(self, job: EngineJob) -> None:
        """Cancels a job that no caller waits for.

        The job's future still ends, once the engine no longer uses the memory.
        """
        if job.job_id in self._jobs:
            self._link.send(CancelImage(job.job_id))

    async def run(self) -> None:
        """Handles messages until the engine process has ended, and fails all jobs then."""
        try:
            while True:
                self._take(await self._link.receive())
        except ChannelClosed:
            pass
        finally:
            self._died = True
            for job_id, job in self._jobs.items():
                if not job.done.done():
                    is_active = job_id in self._active
                    job.done.set_exception(EngineLost(_LOST) if is_active else Unavailable(_ENDED))
            self._jobs.clear()

    def _take(self, message: EngineMessage) -> None:
        """Handles one message of the engine."""
        match message:
            case ImageDone():
                job = self._jobs.pop(message.job_id)
                if message.error_code:
                    job.done.set_exception(from_code(message.error_code, message.message))
                else:
                    job.done.set_result(message.times)
            case FeatureDone():
                for job_id in message.job_ids:
                    job = self._jobs.get(job_id)  # the end of a job may overtake its features
                    if job is not None and job.write is not None:
                        self._offer(job.write, message.feature)
            case ActiveJobs():
                self._active = set(message.job_ids)
            case EngineStats():
                self._metrics.observe_batch(message)
            case Pong():
                pass  # the channel has noted the time
            case _:
                raise AssertionError(f"the engine sent {type(message).__name__}")

    def _offer(self, write: EmbeddingWrite, feature: int) -> None:
        """Offers a written feature to readers if the embedding is large; others will follow."""
        spec = write.entry.spec
        if spec.size_bytes >= self._min_streamed_bytes:
            size = spec.size_bytes // spec.num_features
            write.offer(feature * size, (feature + 1) * size)
