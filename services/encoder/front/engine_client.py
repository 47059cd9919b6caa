"""The engine process, as the front's event loop sees it: jobs and their ends.

`Embeddings` submits images and reserves their memory; nothing is known here of keys or callers.
When the engine process ends, all jobs fail: those that it worked on with `EngineLost`, because any
of them may be the cause; those that were only waiting with `Unavailable`.
"""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from services.common.embeddings.shared_task import retrieve_exception
from services.common.errors import EngineLost, Unavailable, from_code
from services.common.geometry import Unit
from services.common.process.channel import ChannelClosed, FrontChannel
from services.common.process.heartbeat import Pong
from services.encoder.engine.messages import (
    CancelImage,
    EncodeImage,
    EngineMessage,
    EngineStats,
    FeatureDone,
    ImageDone,
    InHand,
    PlaceImage,
    Source,
    StageTimes,
)

_LOST = "the encoder's engine ended while it worked on the image"
_ENDED = "the encoder's engine process ended"


@dataclass(slots=True)
class EngineJob:
    """An image given to the engine.

    Attributes:
        rank: among those that wait.
        done: ends when the engine no longer uses the memory.
        on_feature: called with the index of each feature, except the last, once it is written;
            None: the image has no memory yet.
    """

    job_id: int
    rank: float
    done: asyncio.Future[StageTimes]
    on_feature: Callable[[int], None] | None = None


class EngineClient:
    """Gives images to the engine.

    Args:
        on_stats: called with the counters the engine sends after each batch.
    """

    def __init__(
        self, link: FrontChannel[EngineMessage], on_stats: Callable[[EngineStats], None]
    ) -> None:
        self._in_hand: set[int] = set()
        self._link = link
        self._on_stats = on_stats
        self._ids = itertools.count(1)
        self._jobs: dict[int, EngineJob] = {}
        self._died = False

    @property
    def is_busy(self) -> bool:
        return bool(self._jobs)

    def submit(self, source: Source, unit: Unit, rank: float = 0.0, tenant: str = "") -> EngineJob:
        """Starts a job: the image is decoded and then waits for `place`.

        Args:
            rank: of those that wait, the engine takes the lowest next.
            tenant: the tenant whose unit it is; empty for a caller without a key.

        Raises:
            Unavailable: the engine process has ended.
        """
        if self._died:
            raise Unavailable(_ENDED)
        job = EngineJob(next(self._ids), rank, asyncio.get_running_loop().create_future())
        job.done.add_done_callback(retrieve_exception)
        self._jobs[job.job_id] = job
        self._link.send(EncodeImage(job.job_id, source, unit, rank, tenant))
        return job

    def place(self, job: EngineJob, arena_offset: int, on_feature: Callable[[int], None]) -> None:
        """Memory for the embedding is reserved: the image may run. Called once per job."""
        job.on_feature = on_feature
        if job.job_id in self._jobs:
            self._link.send(PlaceImage(job.job_id, arena_offset))

    def cancel(self, job: EngineJob) -> None:
        """Called when no caller waits for the job. Its future still ends, once the engine no longer
        uses the memory.
        """
        if job.job_id in self._jobs:
            self._link.send(CancelImage(job.job_id))

    async def run(self) -> None:
        """Handles messages until the engine process has ended; then all jobs have failed."""
        try:
            while True:
                self._take(await self._link.receive())
        except ChannelClosed:
            pass
        finally:
            self._died = True
            for job_id, job in self._jobs.items():
                if not job.done.done():
                    in_hand = job_id in self._in_hand
                    job.done.set_exception(EngineLost(_LOST) if in_hand else Unavailable(_ENDED))
            self._jobs.clear()

    def _take(self, message: EngineMessage) -> None:
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
                    if job is not None and job.on_feature is not None:
                        job.on_feature(message.feature)
            case InHand():
                self._in_hand = set(message.job_ids)
            case EngineStats():
                self._on_stats(message)
            case Pong():
                pass  # the channel notes its time
            case _:
                raise AssertionError(f"the engine sent {type(message).__name__}")
