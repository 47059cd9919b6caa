"""The encoder's engine in a thread, with a fake runner, preprocessor and front."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from services.common.errors import InvalidImage, InvalidVideo
from services.common.geometry import Unit
from services.common.process.channel import EngineChannel, create_socket_pair
from services.common.process.device_turns import NO_TURNS, Turns
from services.common.process.heartbeat import Pong
from services.encoder.decoding.source import Source, Video
from services.encoder.engine.engine import Engine
from services.encoder.engine.job import Job
from services.encoder.engine.messages import (
    ActiveJobs,
    EncodeImage,
    EngineMessage,
    EngineStats,
    FeatureDone,
    FrontMessage,
    ImageDone,
    PlaceImage,
    Shutdown,
)
from services.encoder.engine.runner import LaunchedBatch
from tests.noise import PATIENCE_S

GRID, LARGE = (1, 4, 4), (1, 8, 8)
BAD_FRAMES = (2, 3)
SMALL_BATCH = 48  # patches of the largest batch that is small
VERY_LARGE_BATCH = 256  # patches of the smallest batch that is throttled and has no turn


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class FakeRunner:
    """Records batches; fails those with a poisoned image, or with more than `room` patches."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.poisoned: set[int] = set()
        self.not_finite: set[int] = set()
        self.room = 1 << 30
        self.may_run = threading.Event()
        self.may_run.set()
        self.recovered = 0
        self.device_done = threading.Event()  # cleared: batches are in flight
        self.device_done.set()
        self.features: list[int] = []  # that come before a batch is done

    def launch(self, images: Sequence[Job]) -> LaunchedBatch:
        self.may_run.wait(PATIENCE_S)
        if sum(image.unit.num_patches for image in images) > self.room:
            raise torch.OutOfMemoryError("no room")
        if any(image.job_id in self.poisoned for image in images):
            raise ValueError("poisoned")
        self.batches.append([image.job_id for image in images])
        return LaunchedBatch(list(images), torch.zeros(1, 1), None, [])

    def wait(self, batch: LaunchedBatch) -> Iterator[int]:
        yield from self.features
        self.device_done.wait(PATIENCE_S)

    def is_done(self, batch: LaunchedBatch) -> bool:
        return self.device_done.is_set()

    def finish(self, batch: LaunchedBatch) -> list[bool]:
        return [image.job_id not in self.not_finite for image in batch.images]

    def recover(self) -> None:
        self.recovered += 1

    def needs_turn(self, images: Sequence[Job]) -> bool:
        return SMALL_BATCH < sum(image.unit.num_patches for image in images) < VERY_LARGE_BATCH

    def most_patches_without_turn(self, most: int) -> int:
        return min(most, SMALL_BATCH)

    @property
    def kernel_calls(self) -> dict[str, int]:
        return {"rotary=plain": len(self.batches)}


class FakeTurns:
    """Turns on a GPU that others leave while `is_free`. Attributes as those of `Turns`."""

    def __init__(self) -> None:
        self.num_turns, self.waited_s = 0, 0.0
        self.is_waiting = self.is_mine = self.is_due = False
        self.is_free = False

    def try_take(self) -> bool:
        assert not self.is_mine, "a turn within a turn"
        self.is_mine = self.is_free
        self.is_waiting = not self.is_mine
        self.num_turns += self.is_mine
        return self.is_mine

    def release(self) -> None:
        self.is_mine = self.is_waiting = False


class Front:
    """The test's end of the channel."""

    def __init__(self, end: socket.socket) -> None:
        self._channel: EngineChannel[EngineMessage] = EngineChannel(end, EngineMessage)
        self.stats = EngineStats(0, 0)
        self.done: dict[int, ImageDone] = {}
        self.features: list[tuple[list[int], int]] = []
        self.active: list[list[int]] = []
        self.num_pongs = 0

    def send(self, *messages: FrontMessage) -> None:
        for message in messages:
            self._channel.send(message)

    def encode(self, *job_ids: int, grid: tuple[int, int, int] = GRID, rank: float = 0.0) -> None:
        for job_id in job_ids:
            image = EncodeImage(job_id, Source(b"%d" % job_id), Unit(grid), rank)
            self.send(image, PlaceImage(job_id, 0))

    def receive_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            messages = self._channel.receive(PATIENCE_S)
            assert messages, "the engine said nothing for too long"
            for message in messages:
                match message:
                    case ImageDone():
                        assert message.job_id not in self.done, "a job ended twice"
                        self.done[message.job_id] = message
                    case FeatureDone():
                        self.features.append((message.job_ids, message.feature))
                    case EngineStats():
                        self.stats = message
                    case ActiveJobs():
                        self.active.append(message.job_ids)
                    case Pong():
                        self.num_pongs += 1

    def codes(self, *job_ids: int) -> list[str]:
        self.receive_until(lambda: set(job_ids) <= set(self.done))
        return [self.done[job_id].error_code for job_id in job_ids]


class FakePreprocessor:
    """Makes pixels when the test allows it.

    Attributes:
        may_prepare: set while images are prepared and frames resized.
        may_decode: set while frames of videos are decoded.
        blocked: the image whose thread waits for `release`.
        release: set when the blocked image may be prepared.
        prepared: images that were prepared, empty for frames of videos.
        decoded: frames of videos whose decoding has begun.
        lanes: lane of each of them.
        finished: videos of which no unit waited any more.
    """

    def __init__(self) -> None:
        self.may_prepare = threading.Event()
        self.may_prepare.set()
        self.may_decode = threading.Event()
        self.may_decode.set()
        self.blocked = b"none"
        self.release = threading.Event()
        self.prepared: list[bytes] = []
        self.decoded: list[tuple[int, int]] = []
        self.lanes: dict[tuple[int, int], int] = {}
        self.finished: list[str] = []

    def prepare(self, source: Source, unit: Unit) -> torch.Tensor:
        (self.release if source.image == self.blocked else self.may_prepare).wait(PATIENCE_S)
        self.prepared.append(source.image)
        if source.image == b"666":
            raise InvalidImage("the image is truncated or corrupt")
        if source.image == b"667":
            raise RuntimeError("a bug")
        return torch.zeros(unit.grid[1] * 16, unit.grid[2] * 16, 3, dtype=torch.uint8)

    def max_decoders(self, video: Video) -> int:
        return 4

    def finish_video(self, name: str) -> None:
        self.finished.append(name)

    def decode_video(self, video: Video, unit: Unit, lane: int = 0) -> list[torch.Tensor]:
        assert unit.frames is not None
        self.decoded.append(unit.frames)
        self.lanes[unit.frames] = lane
        self.may_decode.wait(PATIENCE_S)
        if unit.frames == BAD_FRAMES:
            raise InvalidVideo("the frames cannot be decoded")
        return [torch.zeros(*video.size, 3, dtype=torch.uint8)] * 2

    def resize_frames(self, frames: list[torch.Tensor], unit: Unit) -> torch.Tensor:
        return self.prepare(Source(), unit)

    def release_all(self) -> None:
        self.may_prepare.set()
        self.may_decode.set()
        self.release.set()


class FakeClock:
    """The engine's clock, which stands still until the test moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Running:
    """An engine in a thread."""

    def __init__(
        self,
        workers: int = 2,
        preprocessor: FakePreprocessor | None = None,
        turns: Turns = NO_TURNS,
    ) -> None:
        self.clock = FakeClock()
        front_end, engine_end = create_socket_pair()
        self.ends = (front_end, engine_end)
        self.runner = FakeRunner()
        self.preprocessor = preprocessor or FakePreprocessor()
        self.front = Front(front_end)
        self.engine = Engine(
            EngineChannel(engine_end, FrontMessage),
            self.runner,  # type: ignore[arg-type]
            self.preprocessor,  # type: ignore[arg-type]
            max_batch_patches=64,
            workers=workers,
            turns=turns,
            clock=self.clock,
        )
        self.thread = threading.Thread(target=self.engine.run)
        self.thread.start()

    def waiting_jobs(self) -> list[int]:
        """Returns the jobs that are prepared and have no place."""
        jobs = list(self.engine.jobs.items())
        return sorted(job_id for job_id, job in jobs if job.waits_for_place)

    def stop(self) -> None:
        self.preprocessor.release_all()
        self.runner.may_run.set()
        self.runner.device_done.set()
        self.front.send(Shutdown())
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        self.ends[0].shutdown(socket.SHUT_RDWR)
        for thread in threading.enumerate():
            if thread.name in ("receiver", "waiter"):
                thread.join(PATIENCE_S)
        for end in self.ends:
            end.close()
