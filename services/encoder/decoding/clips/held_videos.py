"""The videos that the front keeps for a while: each file once, in memory that the children map.

`Probe` brings them, `Encode` names them by digest. One that is gone is sent again: nobody waits for
room, and a video in work that gives way is a `VideoNotHeld` of its units that are not decoded yet.
"""

import asyncio
import os
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from blake3 import blake3

from services.common.embeddings.shared_memory import MemoryAddress, create_memory
from services.common.embeddings.single_flight import InFlight
from services.common.errors import InvalidRequest, VideoNotHeld
from services.common.images.image_key import FRAME_DIGEST_BYTES, KEY_BYTES
from services.encoder.decoding.clips.clip_pool import ClipPool
from services.encoder.decoding.clips.questions import Facts
from services.encoder.engine.messages import Video

_TTL_S = 120.0  # since the last use
_THREADS = 2  # files that are read at a time


@dataclass(slots=True)
class HeldVideo:
    """A file and its facts."""

    digest: bytes
    file: MemoryAddress
    facts: Facts
    expires_at: float  # time.monotonic()

    @property
    def video(self) -> Video:
        return Video(self.file, (self.facts.height, self.facts.width))

    def frame_digest(self, index: int) -> bytes:
        """Raises InvalidRequest: there is no such frame."""
        if not 0 <= index < self.facts.num_frames:
            raise InvalidRequest(f"the video has {self.facts.num_frames} frames, none of {index}")
        return self.facts.frame_digests[FRAME_DIGEST_BYTES * index :][:FRAME_DIGEST_BYTES]


class HeldVideos:
    """Files by digest. One event loop owns it.

    Args:
        max_bytes: of all files; the longest unused is dropped first.
    """

    def __init__(self, pool: ClipPool, max_bytes: int) -> None:
        self._pool = pool
        self._max_bytes = max_bytes
        self._held: OrderedDict[bytes, HeldVideo] = OrderedDict()  # by last use
        self._used_bytes = 0
        self._probes: dict[bytes, InFlight[HeldVideo]] = {}
        self._threads = ThreadPoolExecutor(_THREADS, "probe")

    def get(self, digest: bytes) -> HeldVideo:
        """A file that is held, for some time from now on.

        Raises:
            VideoNotHeld: it is not.
        """
        held = self._renewed(digest)
        if held is None:
            raise VideoNotHeld("the video is not held here")
        return held

    async def probe(self, file: bytes) -> HeldVideo:
        """Holds a file and reads it; equal ones are read once.

        Raises:
            InvalidVideo: it is none that is decoded here.
        """
        loop = asyncio.get_running_loop()
        digest = await loop.run_in_executor(self._threads, lambda: blake3(file).digest(KEY_BYTES))
        if (held := self._renewed(digest)) is not None:
            return held
        flight = self._probes.get(digest) or self._started(digest, file)
        return await flight.join()

    def close(self) -> None:
        """Drops all files and ends the processes."""
        self._threads.shutdown()
        self._pool.close()
        for held in self._held.values():
            os.close(held.file.fd)
        self._held.clear()

    def _started(self, digest: bytes, file: bytes) -> InFlight[HeldVideo]:
        def forget() -> None:
            if self._probes.get(digest) is flight:  # not one that began after this was given up
                del self._probes[digest]

        flight = InFlight(self._read(digest, file), on_end=lambda _: forget(), on_abandoned=forget)
        self._probes[digest] = flight
        return flight

    async def _read(self, digest: bytes, file: bytes) -> HeldVideo:
        loop = asyncio.get_running_loop()
        copying = self._threads.submit(_copied, file)
        try:
            address = await asyncio.wrap_future(copying)
        except asyncio.CancelledError:
            copying.add_done_callback(_close_copy)  # a thread that copies goes on
            raise
        try:
            facts = await loop.run_in_executor(self._threads, self._pool.probe, address)
        except BaseException:
            os.close(address.fd)
            raise
        self._drop(digest)  # a probe that was given up may have left it
        held = HeldVideo(digest, address, facts, time.monotonic() + _TTL_S)
        self._held[digest] = held
        self._used_bytes += address.size_bytes
        self._expire()
        return held

    def _renewed(self, digest: bytes) -> HeldVideo | None:
        """A file that is held, for some time from now on."""
        self._expire()
        held = self._held.get(digest)
        if held is not None:
            held.expires_at = time.monotonic() + _TTL_S
            self._held.move_to_end(digest)
        return held

    def _expire(self) -> None:
        now = time.monotonic()
        while self._held:
            digest, oldest = next(iter(self._held.items()))
            is_full = self._used_bytes > self._max_bytes and len(self._held) > 1
            if not is_full and oldest.expires_at > now:
                break
            self._drop(digest)

    def _drop(self, digest: bytes) -> None:
        if (held := self._held.pop(digest, None)) is not None:
            self._used_bytes -= held.file.size_bytes
            os.close(held.file.fd)


def _copied(file: bytes) -> MemoryAddress:
    fd, name = create_memory(len(file))
    try:
        view = memoryview(file)
        while view:
            view = view[os.write(fd, view) :]
    except BaseException:
        os.close(fd)
        raise
    return MemoryAddress(os.getpid(), fd, name, len(file))


def _close_copy(copying: Future[MemoryAddress]) -> None:
    """Called when a copy that nobody waits for any more has ended."""
    if not copying.cancelled() and copying.exception() is None:
        os.close(copying.result().fd)
