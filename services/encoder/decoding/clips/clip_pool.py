"""Processes that decode videos: one that takes too long or too much loses only itself.

The front's threads ask for a file's facts, the engine's for frames. A worker keeps its video open,
and whoever asks for more of it gets the same worker, so that frames in rising order are decoded in
one pass. Before a video is opened its worst case is taken from a budget; videos that nobody asks
for give way. Processes start when the first video comes, and each before its video. A video that
ends its worker is an `InvalidVideo`, so that no other encoder gets it.
"""

import logging
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
_PROBE_CPU_S, _FRAMES_CPU_S = 4.0, 10.0
# Bytes a pixel that a decoder may hold: 17 reference frames of 16 bits, those of its threads, RGB.
_BYTES_PER_PIXEL = 100
_BASE_BYTES = 96 << 20


class DecoderLost(InvalidVideo):
    """A video's decoder was ended twice, or did not answer in time; perhaps not because of the
    video. No other encoder gets the video, and its client may send it again.
    """


def worst_case_bytes(num_pixels: int) -> int:
    """Memory that decoding a video with such frames may take, its file not included."""
    return num_pixels * _BYTES_PER_PIXEL + _BASE_BYTES


PROBE_BYTES = worst_case_bytes(MAX_FRAME_PIXELS)


@dataclass(slots=True, eq=False)
class _Slot:
    """A worker, and the name of the video that it has open; empty: of none."""

    child: Child
    name: str = ""
    memory_bytes: int = 0
    is_busy: bool = False


class ClipPool:
    """Worker processes. Its users' threads wait for a free one.

    Args:
        memory_bytes: of all videos that are open, and at least one of the largest.
    """

    def __init__(self, max_workers: int, *, memory_bytes: int) -> None:
        self._max_workers = max_workers
        self._memory_bytes = max(memory_bytes, PROBE_BYTES)
        self._slots: list[_Slot] = []  # by last use
        self._changed = threading.Condition()

    def probe(self, file: MemoryAddress) -> Facts:
        """A file's facts.

        Raises:
            InvalidVideo: it is none that is decoded here.
            VideoNotHeld: the file is gone.
            Overloaded: no worker can be started.
        """
        with self._taken(file.name, PROBE_BYTES) as slot:
            question = Question(file, None, PROBE_BYTES, _PROBE_CPU_S)
            facts = _ask(slot, question).facts
            slot.name = ""  # it keeps none open
        assert facts is not None
        return facts

    @contextmanager
    def frames(
        self, file: MemoryAddress, size: Size, indices: tuple[int, int]
    ) -> Generator[list[np.ndarray]]:
        """Two upright frames `[height, width, 3]` uint8, valid inside the `with`; one if the
        indices are equal.

        Args:
            size: of its frames, as its facts say.

        Raises:
            InvalidVideo: it cannot be decoded, or takes too much.
            VideoNotHeld: the file is gone.
            Overloaded: no worker can be started.
        """
        memory_bytes = worst_case_bytes(size[0] * size[1])
        with self._taken(file.name, memory_bytes) as slot:
            sizes = _ask(slot, Question(file, indices, memory_bytes, _FRAMES_CPU_S)).sizes
            flat = slot.child.pixels(sum(height * width * 3 for height, width in sizes))
            ends = np.cumsum([height * width * 3 for height, width in sizes])
            try:
                yield [
                    part.reshape(*size, 3)
                    for part, size in zip(np.split(flat, ends[:-1]), sizes, strict=True)
                ]
            finally:
                slot.child.trim()

    def close(self) -> None:
        """Ends the processes. No video may be in work."""
        for slot in self._slots:
            slot.child.close()
        self._slots.clear()

    @contextmanager
    def _taken(self, name: str, memory_bytes: int) -> Generator[_Slot]:
        with self._changed:
            try:
                while (slot := self._choose(name, memory_bytes)) is None:
                    self._changed.wait()
            except OSError as error:
                raise not_started(error) from None
            self._slots.remove(slot)
            self._slots.append(slot)
            slot.name, slot.memory_bytes, slot.is_busy = name, memory_bytes, True
            with suppress(OSError):  # as where a pod may have no more processes: later, then
                self._keep_spare(memory_bytes)
        try:
            yield slot
        finally:
            with self._changed:
                slot.is_busy = False
                slot.memory_bytes = slot.memory_bytes if slot.name else 0
                self._changed.notify_all()

    def _choose(self, name: str, memory_bytes: int) -> _Slot | None:
        """The worker that has the video open, or one for it; None: there is no room yet."""
        mine = next((slot for slot in self._slots if slot.name == name), None)
        if mine is not None:
            return None if mine.is_busy else mine
        idle = [slot for slot in self._slots if not slot.is_busy]
        spare = next((slot for slot in idle if not slot.name), None)
        others = [slot for slot in idle if slot.name]
        while not self._has_room(memory_bytes) or (spare is None and self._is_full):
            if not others:
                return None
            slot = others.pop(0)
            if self._has_room(memory_bytes - slot.memory_bytes):
                return slot  # whose video gives way
            slot.child.close()
            self._slots.remove(slot)
        return spare or self._started()

    def _keep_spare(self, memory_bytes: int) -> None:
        """Starts a worker ahead of the next video of this size, which would wait for imports."""
        has_spare = any(not slot.name for slot in self._slots)
        if not has_spare and not self._is_full and self._has_room(memory_bytes):
            self._started()

    @property
    def _is_full(self) -> bool:
        return len(self._slots) >= self._max_workers

    def _has_room(self, more_bytes: int) -> bool:
        return sum(slot.memory_bytes for slot in self._slots) + more_bytes <= self._memory_bytes

    def _started(self) -> _Slot:
        slot = _Slot(Child(_WORKER, 2 * 3 * MAX_FRAME_PIXELS))
        self._slots.append(slot)
        return slot


def _ask(slot: _Slot, question: Question) -> Answer:
    try:
        data = slot.child.ask(msgspec.msgpack.encode(question), cpu_s=question.cpu_s)
    except ChildLost as lost:
        slot.name = ""
        log.warning("a video of %d bytes ended its decoder: %s", question.file.size_bytes, lost)
        raise (InvalidVideo if lost.is_of_its_work else DecoderLost)(TOO_SLOW) from None
    answer = msgspec.msgpack.decode(data, type=Answer)
    if answer.error_code:
        slot.name = ""
        raise from_code(answer.error_code, answer.message)
    return answer
