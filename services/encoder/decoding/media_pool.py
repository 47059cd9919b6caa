"""The processes that decode images and videos. A hostile file can only end its own process.

Threads of the engine ask the pool for the pixels of an image, for the facts of a video or for two
frames of a video. Each thread waits for a process of its own, a fork of the fork server, which
takes milliseconds to start. Processes that have decoded an image are kept for the next image. A
process that has opened a video reads no other file: it is kept while the video is open, so that
frames in rising order are decoded in one pass, and is killed when the video is closed. So videos
never take a process from images, and no fault of a video's decoder reaches another file.

Each task has limits of CPU time and memory (`media_worker`). The memory of its worst case is
reserved from a budget before: images and videos have a budget each, of a share of the pod's memory.
A file that ends its process is reported as an `InvalidImage` or `InvalidVideo`, and the gateway
does not send such a file to further encoders.
"""

import logging
import sys
import threading
from collections import OrderedDict
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import msgspec
import numpy as np

from services.common.embeddings.shared_memory import MemoryAddress
from services.common.errors import InvalidImage, InvalidVideo, Overloaded, from_code
from services.common.geometry import Size
from services.common.images.image_header import MAX_SOURCE_PIXELS, ImageHeader
from services.encoder.decoding.child import Child, ChildLost
from services.encoder.decoding.decode import worst_case_bytes
from services.encoder.decoding.fork_server import ForkServer
from services.encoder.decoding.memory_budget import MemoryBudget
from services.encoder.decoding.tasks import (
    MAX_FRAME_PIXELS,
    TOO_SLOW,
    DecoderLost,
    Facts,
    FramesTask,
    ProbeTask,
    Result,
    StillTask,
    Task,
)

log = logging.getLogger(__name__)

_WORKER = "services.encoder.decoding.media_worker"
_SHARED_BYTES = 3 * MAX_SOURCE_PIXELS  # only pages that are written take memory
_IMAGE_PIXELS = 40_000_000  # more pixels may take longer, in proportion


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of tasks.

    Attributes:
        image_cpu_s: seconds of CPU time for an image of up to 40 million pixels, which take 1 to 3
            s in the slowest format.
        probe_cpu_s: seconds of CPU time for the facts of a video.
        frames_cpu_s: seconds of CPU time for two frames.
        bytes_per_pixel: bytes that a video's decoder may allocate for each pixel of a frame. The
            default suffices for 17 reference frames of 16 bits, the frames of its threads, and RGB.
        base_bytes: bytes that a video's decoder may allocate besides.
    """

    image_cpu_s: float = 10.0
    probe_cpu_s: float = 4.0
    frames_cpu_s: float = 10.0
    bytes_per_pixel: int = 100
    base_bytes: int = 96 << 20

    def cpu_s_of(self, header: ImageHeader) -> float:
        """Returns the seconds of CPU time that decoding an image may take."""
        return self.image_cpu_s * max(1.0, header.width * header.height / _IMAGE_PIXELS)

    def video_bytes(self, num_pixels: int) -> int:
        """Returns the most memory that a video's decoder may use, without the video's file.

        Args:
            num_pixels: number of pixels of a frame.
        """
        return num_pixels * self.bytes_per_pixel + self.base_bytes


DEFAULT_LIMITS = Limits()
PROBE_BYTES = DEFAULT_LIMITS.video_bytes(MAX_FRAME_PIXELS)


@dataclass(slots=True, eq=False)
class _Video:
    """A video that is open in a process, or that a thread is about to open.

    Attributes:
        memory_bytes: memory reserved for the open video.
        worker: the process. None until it is forked.
        is_busy: True while a thread uses the process.
    """

    memory_bytes: int
    worker: Child | None = None
    is_busy: bool = False


class MediaPool:
    """A pool of worker processes, one for each thread that asks and one for each open video.

    Args:
        max_open: most videos that are open. An idle video is closed for another video.
        image_bytes: most memory for all images that are being decoded.
        video_bytes: most memory for all open videos, without those that are being probed. The pool
            always has enough for one video with the largest frames.
        limits: limits of tasks.
        executable: the Python interpreter that runs the fork server.

    Attributes:
        server: the fork server, which is started at once.
        video_bytes: most memory for all open videos.

    Raises:
        OSError: the machine has no memory, processes or descriptors left.
    """

    def __init__(
        self,
        max_open: int,
        *,
        image_bytes: int,
        video_bytes: int,
        limits: Limits = DEFAULT_LIMITS,
        executable: str = sys.executable,
    ) -> None:
        self.server = ForkServer(_WORKER, executable)
        self.video_bytes = max(video_bytes, PROBE_BYTES)
        self._max_open = max_open
        self._limits = limits
        self._images = MemoryBudget(image_bytes)
        # These lists need no lock: an image waits for no thread that opens or closes a video.
        self._workers: list[Child] = []  # all processes, by age
        self._idle: list[Child] = []  # processes for images, by last use
        self._videos: OrderedDict[str, _Video] = OrderedDict()  # by file name and last use
        self._changed = threading.Condition()  # guards the videos
        self._num_waiting = 0

    @property
    def workers(self) -> list[Child]:
        """Worker processes, in the order of their start."""
        return list(self._workers)

    @property
    def open_videos(self) -> dict[str, Child]:
        """Worker processes that have a video open, by the name of the video's file."""
        videos = list(self._videos.items())
        return {name: video.worker for name, video in videos if video.worker is not None}

    @property
    def num_waiting(self) -> int:
        """Number of threads that wait until a video can be opened."""
        return self._num_waiting

    @contextmanager
    def still(self, data: bytes, header: ImageHeader) -> Generator[np.ndarray]:
        """Decodes an image file.

        Args:
            data: the encoded file.
            header: header of the file.

        Yields:
            Upright pixels `[height, width, 3]` uint8, valid inside the `with` block.

        Raises:
            InvalidImage: the file is corrupt, or needs more memory or time than an image may.
            Overloaded: no process can be started.
        """
        memory_bytes = worst_case_bytes(header, len(data))
        task = StillTask(header, memory_bytes, self._limits.cpu_s_of(header))
        with self._images.reserved(memory_bytes):
            try:
                worker, result = self._run(task, self._take_idle(), data)
            except ChildLost as lost:
                log.warning(
                    "an image of %d bytes ended the worker that decoded it: %s", len(data), lost
                )
                raise InvalidImage(
                    "decoding the image takes more time or memory than an image of its size may"
                ) from None
            try:
                _raise_error(result)
                yield worker.pixels(*header.upright_size, 3)
            finally:
                worker.trim()
                self._idle.append(worker)

    def probe(self, file: MemoryAddress) -> Facts:
        """Reads the facts of a video file. The video stays open if there is memory for it, unless
        another video is opened. Callers limit the number of probes (`MAX_PROBES`): a probe waits
        for no memory.

        Raises:
            InvalidVideo: the file is not a video that can be decoded here.
            VideoNotHeld: the front no longer stores the file.
            Overloaded: no process can be started.
        """
        task = ProbeTask(file, PROBE_BYTES, self._limits.probe_cpu_s)
        worker, result = self._run_video(task, None)
        assert result.facts is not None
        size_bytes = self._limits.video_bytes(result.facts.height * result.facts.width)
        with self._changed:
            if file.name in self._videos or not self._has_space(size_bytes):
                self._close(worker)
            else:
                self._videos[file.name] = _Video(size_bytes, worker)
                self._videos.move_to_end(file.name, last=False)  # videos in use stay longer
                self._changed.notify_all()
        return result.facts

    @contextmanager
    def frames(
        self, file: MemoryAddress, size: Size, indices: tuple[int, int]
    ) -> Generator[list[np.ndarray]]:
        """Decodes two frames of a video, which stays open.

        Args:
            file: address of the video file.
            size: height and width of the video's frames, as its facts say.
            indices: numbers of the two frames.

        Yields:
            Two upright frames `[height, width, 3]` uint8, valid inside the `with` block. One frame
            if the indices are equal.

        Raises:
            InvalidVideo: the frames cannot be decoded, or need more time or memory than allowed.
            VideoNotHeld: the front no longer stores the file.
            Overloaded: no process can be started.
        """
        memory_bytes = self._limits.video_bytes(size[0] * size[1])
        task = FramesTask(file, indices, memory_bytes, self._limits.frames_cpu_s)
        with self._taken(file.name, memory_bytes) as video:
            worker, video.worker = video.worker, None
            video.worker, result = self._run_video(task, worker)
            flat = video.worker.pixels(sum(height * width * 3 for height, width in result.sizes))
            ends = np.cumsum([height * width * 3 for height, width in result.sizes])
            try:
                yield [
                    part.reshape(*size, 3)
                    for part, size in zip(np.split(flat, ends[:-1]), result.sizes, strict=True)
                ]
            finally:
                video.worker.trim()

    def close(self) -> None:
        """Ends the processes. No file may be being read."""
        for worker in self.workers:
            self._close(worker)
        self.server.close()

    @contextmanager
    def _taken(self, name: str, memory_bytes: int) -> Generator[_Video]:
        """Reserves a video for this thread, which opens the video if it has no process."""
        with self._changed:
            self._num_waiting += 1
            self._changed.wait_for(lambda: self._may_take(name, memory_bytes))
            self._num_waiting -= 1
            video = self._videos.setdefault(name, _Video(memory_bytes))
            self._videos.move_to_end(name)
            video.is_busy = True
        try:
            yield video
        finally:
            with self._changed:
                video.is_busy = False
                if video.worker is None:  # it could not be opened, or has lost its process
                    del self._videos[name]
                self._changed.notify_all()

    def _may_take(self, name: str, memory_bytes: int) -> bool:
        """Returns whether a thread may use a video now. Closes idle videos if it has to be opened
        and there is no space.
        """
        if (video := self._videos.get(name)) is not None:
            return not video.is_busy
        while not self._has_space(memory_bytes):
            idle = next((name for name, each in self._videos.items() if not each.is_busy), None)
            if idle is None:
                return False
            worker = self._videos.pop(idle).worker
            assert worker is not None
            self._close(worker)
        return True

    def _has_space(self, more_bytes: int) -> bool:
        used_bytes = sum(video.memory_bytes for video in self._videos.values())
        has_memory = used_bytes + more_bytes <= self.video_bytes
        return has_memory and len(self._videos) < self._max_open

    def _take_idle(self) -> Child | None:
        with suppress(IndexError):
            while (worker := self._idle.pop()).has_ended:
                self._close(worker)
            return worker
        return None

    def _run_video(
        self, task: ProbeTask | FramesTask, worker: Child | None
    ) -> tuple[Child, Result]:
        """Gives a task to the process that has the video open, or to a new process. Returns the
        process and the result. If there is an error, it ends the process and raises the error.
        """
        try:
            worker, result = self._run(task, worker)
        except ChildLost as lost:
            log.warning(
                "a video of %d bytes ended the worker that read it: %s", task.file.size_bytes, lost
            )
            raise (InvalidVideo if lost.is_caused_by_work else DecoderLost)(TOO_SLOW) from None
        if result.error_code:
            self._close(worker)
        _raise_error(result)
        return worker, result

    def _run(self, task: Task, worker: Child | None, data: bytes = b"") -> tuple[Child, Result]:
        """Gives a task to a process, or to a new process. Returns the process and the result.

        If the process is killed, a new process gets the task once. When the pod is short of memory,
        the kernel kills these processes first (`prefer_oom_kill`), whichever process uses the
        memory. A process's own limits end it by other signals.

        Raises:
            ChildLost: the task has ended its process.
            Overloaded: no process can be started.
        """
        message = msgspec.msgpack.encode(task)
        for is_last in (False, True):
            if worker is None:
                worker = self._start()
            try:
                answer = worker.ask(message, data, cpu_s=task.cpu_s)
                return worker, msgspec.msgpack.decode(answer, type=Result)
            except ChildLost as lost:
                self._workers.remove(worker)
                worker = None
                if is_last or not lost.is_killed:
                    raise
        raise AssertionError

    def _start(self) -> Child:
        try:
            worker = Child(self.server, _SHARED_BYTES)
        except OSError as error:
            log.error("a worker that decodes files could not be started: %s", error)
            raise Overloaded("the encoder cannot start a worker now", retry_after_s=1) from None
        self._workers.append(worker)
        return worker

    def _close(self, worker: Child) -> None:
        worker.close()
        self._workers.remove(worker)


def _raise_error(result: Result) -> None:
    if result.error_code:
        raise from_code(result.error_code, result.message)
