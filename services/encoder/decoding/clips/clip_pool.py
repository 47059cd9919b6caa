"""Processes that decode videos. A hostile video can only end its own decoder.

The front's threads ask for the facts of a file, and the engine's threads ask for frames. A worker
keeps its video open between two questions, and further questions about the video go to the same
worker. Frames that are requested in rising order are thus decoded in one pass. The caller may have
several workers decode different parts of a video, which it numbers as *lanes*. When the caller
needs no further frames (`finish`), the workers of a video take other videos, before a further
process is started, which takes as long as decoding some hundred frames. Before a video is
opened, the memory of its worst case is reserved from a budget. If the budget is used up, idle
videos are closed. Processes are started when the first video comes; later processes are started
before they are needed. A video that ends its worker is reported as an `InvalidVideo`, and
the gateway does not send such a video to further encoders.
"""

import logging
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import msgspec
import numpy as np

from services.common.embeddings.shared_memory import MemoryAddress
from services.common.errors import InvalidVideo, from_code
from services.common.geometry import Size
from services.encoder.decoding.child import Child, ChildLost, not_started
from services.encoder.decoding.clips.questions import (
    MAX_FRAME_PIXELS,
    TOO_SLOW,
    Answer,
    Facts,
    Question,
)

log = logging.getLogger(__name__)

_WORKER = "services.encoder.decoding.clips.clip_worker"
# As many frames as a file may have take up to 4.3 s on a core whose other thread is busy.
_PROBE_CPU_S = 8.0


class DecoderLost(InvalidVideo):
    """The video's decoder was killed twice, or did not answer in time, possibly for another reason
    than the video. The gateway does not send the video to another encoder, but the client may send
    it again.
    """


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """The limits of decoding two frames of a video.

    Attributes:
        cpu_s: seconds of CPU time.
        bytes_per_pixel: bytes that a decoder may allocate for each pixel of a frame. The default
            suffices for 17 reference frames of 16 bits, the frames of its threads, and RGB.
        base_bytes: bytes that a decoder may allocate besides.
    """

    cpu_s: float = 10.0
    bytes_per_pixel: int = 100
    base_bytes: int = 96 << 20

    def worst_case_bytes(self, num_pixels: int) -> int:
        """Returns the most memory that decoding may use, without the video's file.

        Args:
            num_pixels: number of pixels of a frame.
        """
        return num_pixels * self.bytes_per_pixel + self.base_bytes


PROBE_BYTES = FrameLimits().worst_case_bytes(MAX_FRAME_PIXELS)


@dataclass(slots=True, eq=False)
class _Slot:
    """A worker process.

    Attributes:
        child: the process.
        name: name and lane of the video that the worker has open. Empty if no video is open.
        memory_bytes: memory reserved for the open video.
        is_busy: True while the worker answers a question.
        is_finished: True if no further frames of the open video are wanted at present.
    """

    child: Child
    name: str = ""
    memory_bytes: int = 0
    is_busy: bool = False
    is_finished: bool = False


class ClipPool:
    """A pool of worker processes. A thread waits until a worker is free for its video.

    Args:
        max_workers: most worker processes.
        memory_bytes: most memory for all open videos. The pool always has enough for one video with
            the largest frames.
        limits: limits of decoding two frames.
        executable: the Python interpreter that runs the workers.

    Attributes:
        memory_bytes: most memory for all open videos.
    """

    def __init__(
        self,
        max_workers: int,
        *,
        memory_bytes: int,
        limits: FrameLimits = FrameLimits(),
        executable: str = sys.executable,
    ) -> None:
        self.memory_bytes = max(memory_bytes, PROBE_BYTES)
        self._max_workers = max_workers
        self._limits = limits
        self._executable = executable
        self._slots: list[_Slot] = []  # by last use
        self._num_waiting = 0
        self._changed = threading.Condition()

    @property
    def workers(self) -> list[Child]:
        """Worker processes, the least recently used first."""
        return [slot.child for slot in self._slots]

    @property
    def open_videos(self) -> dict[str, Child]:
        """Worker processes that have a video open, by the video's name. The name of a further lane
        ends with its number.
        """
        return {slot.name: slot.child for slot in self._slots if slot.name}

    @property
    def num_waiting(self) -> int:
        """Number of threads that wait for a worker."""
        return self._num_waiting

    def probe(self, file: MemoryAddress) -> Facts:
        """Reads the facts of a video file.

        Raises:
            InvalidVideo: the file is not a video that can be decoded here.
            VideoNotHeld: the front no longer stores the file.
            Overloaded: no worker can be started.
        """
        with self._taken(file.name, PROBE_BYTES) as slot:
            question = Question(file, None, PROBE_BYTES, _PROBE_CPU_S)
            facts = _ask(slot, question).facts
            slot.name = ""  # the worker closes the video after a probe
        assert facts is not None
        return facts

    def max_open(self, size: Size) -> int:
        """Returns how many workers may have videos of this size open at the same time."""
        memory_bytes = self._limits.worst_case_bytes(size[0] * size[1])
        return min(self._max_workers, self.memory_bytes // memory_bytes)

    @contextmanager
    def frames(
        self,
        file: MemoryAddress,
        size: Size,
        indices: tuple[int, int],
        lane: int = 0,
        index: MemoryAddress | None = None,
    ) -> Generator[list[np.ndarray]]:
        """Decodes two frames of a video.

        Args:
            file: address of the video file.
            size: height and width of the video's frames, as its facts say.
            indices: numbers of the two frames.
            lane: number of the worker among those that decode this video.
            index: address of the file's encoded `Index`. None if a worker that opens the file has
                to read all of its packets.

        Yields:
            Two upright frames `[height, width, 3]` uint8, valid inside the `with` block. One frame
            if the indices are equal.

        Raises:
            InvalidVideo: the frames cannot be decoded, or need more time or memory than allowed.
            VideoNotHeld: the front no longer stores the file.
            Overloaded: no worker can be started.
        """
        memory_bytes = self._limits.worst_case_bytes(size[0] * size[1])
        name = f"{file.name}/{lane}" if lane else file.name
        with self._taken(name, memory_bytes) as slot:
            question = Question(file, indices, memory_bytes, self._limits.cpu_s, index)
            sizes = _ask(slot, question).sizes
            flat = slot.child.pixels(sum(height * width * 3 for height, width in sizes))
            ends = np.cumsum([height * width * 3 for height, width in sizes])
            try:
                yield [
                    part.reshape(*size, 3)
                    for part, size in zip(np.split(flat, ends[:-1]), sizes, strict=True)
                ]
            finally:
                slot.child.trim()

    def finish(self, name: str) -> None:
        """Notes that no further frames of a video are wanted at present. Its workers keep the
        video open until other work needs them. A worker that decodes frames of the video at present
        stays with the video, because further frames were wanted meanwhile.

        Args:
            name: name of the video's file.
        """
        with self._changed:
            for slot in self._slots:
                is_of_video = name in (slot.name, slot.name.rpartition("/")[0])
                slot.is_finished |= is_of_video and not slot.is_busy

    def close(self) -> None:
        """Ends the processes. No video may be being decoded."""
        for slot in self._slots:
            slot.child.close()
        self._slots.clear()

    @contextmanager
    def _taken(self, name: str, memory_bytes: int) -> Generator[_Slot]:
        with self._changed:
            self._num_waiting += 1
            try:
                while (slot := self._choose(name, memory_bytes)) is None:
                    self._changed.wait()
            except OSError as error:
                raise not_started(error) from None
            finally:
                self._num_waiting -= 1
            self._slots.remove(slot)
            self._slots.append(slot)
            slot.name, slot.memory_bytes, slot.is_busy = name, memory_bytes, True
            slot.is_finished = False
            with suppress(OSError):  # the pod may start no more processes now
                self._start_spare(memory_bytes)
        try:
            yield slot
        finally:
            with self._changed:
                slot.is_busy = False
                slot.memory_bytes = slot.memory_bytes if slot.name else 0
                self._changed.notify_all()

    def _choose(self, name: str, memory_bytes: int) -> _Slot | None:
        """Returns the worker where the video is open, or a free worker. None if the thread
        has to wait until a worker or memory is free.
        """
        same_video = next((slot for slot in self._slots if slot.name == name), None)
        if same_video is not None:
            return None if same_video.is_busy else same_video
        idle = [slot for slot in self._slots if not slot.is_busy]
        spare = next((slot for slot in idle if not slot.name), None)
        others = [slot for slot in idle if slot.name]
        # A worker that has decoded before comes first, because its memory is mapped already.
        for slot in others:
            if slot.is_finished and self._has_memory(memory_bytes - slot.memory_bytes):
                return slot
        while not self._has_memory(memory_bytes) or (spare is None and self._is_full):
            if not others:
                return None
            slot = others.pop(0)
            if self._has_memory(memory_bytes - slot.memory_bytes):
                return slot  # the worker closes its idle video before it opens the new one
            slot.child.close()
            self._slots.remove(slot)
        return spare or self._start_worker()

    def _start_spare(self, memory_bytes: int) -> None:
        """Starts a worker for the next video of this size, which then does not wait for imports."""
        has_spare = any(not slot.name or slot.is_finished for slot in self._slots)
        if not has_spare and not self._is_full and self._has_memory(memory_bytes):
            self._start_worker()

    @property
    def _is_full(self) -> bool:
        return len(self._slots) >= self._max_workers

    def _has_memory(self, more_bytes: int) -> bool:
        return sum(slot.memory_bytes for slot in self._slots) + more_bytes <= self.memory_bytes

    def _start_worker(self) -> _Slot:
        slot = _Slot(Child(_WORKER, 2 * 3 * MAX_FRAME_PIXELS, self._executable))
        self._slots.append(slot)
        return slot


def _ask(slot: _Slot, question: Question) -> Answer:
    try:
        data = slot.child.ask(msgspec.msgpack.encode(question), cpu_s=question.cpu_s)
    except ChildLost as lost:
        slot.name = ""
        log.warning(
            "a video of %d bytes ended the worker that read it: %s", question.file.size_bytes, lost
        )
        raise (InvalidVideo if lost.is_caused_by_work else DecoderLost)(TOO_SLOW) from None
    answer = msgspec.msgpack.decode(data, type=Answer)
    if answer.error_code:
        slot.name = ""
        raise from_code(answer.error_code, answer.message)
    return answer
