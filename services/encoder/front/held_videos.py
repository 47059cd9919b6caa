"""The videos that the front keeps for a while: each file once, in memory that the children map.

`Probe` brings files, `Encode` names them by digest. A file that is gone is sent again: an encode
does not wait for room, and a video in work that gives way is a `VideoNotHeld` of the units that are
not decoded yet.
"""

import asyncio
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from blake3 import blake3

from services.common.embeddings.shared_memory import MemoryAddress, create_memory
from services.common.embeddings.shared_task import SharedTask
from services.common.errors import InvalidRequest, InvalidVideo, Overloaded, VideoNotHeld
from services.common.images.image_key import FRAME_DIGEST_BYTES, KEY_BYTES
from services.common.tenancy.tenant_capacity import TenantCapacity
from services.encoder.decoding.clips.clip_pool import DecoderLost
from services.encoder.decoding.clips.questions import Facts
from services.encoder.decoding.source import Video
from services.encoder.front.admission import Share
from services.encoder.front.probe_queue import ProbeQueue

_TTL_S = 120.0  # since the last use
_COPIES = 2  # files that are digested or copied at a time
# A file that was refused is not read again for a while: it would be refused again, and may take
# seconds.
_REFUSED_S, _MAX_REFUSED = 300.0, 4096


@dataclass(slots=True)
class HeldVideo:
    """A file and its facts."""

    digest: bytes
    file: MemoryAddress
    facts: Facts
    expires_at: float  # in the clock's seconds

    @property
    def video(self) -> Video:
        return Video(self.file, (self.facts.height, self.facts.width))

    def frame_digest(self, index: int) -> bytes:
        """Raises InvalidRequest if the video has no such frame."""
        if not 0 <= index < self.facts.num_frames:
            raise InvalidRequest(
                f"the video has {self.facts.num_frames} frames, and no frame {index}"
            )
        return self.facts.frame_digests[FRAME_DIGEST_BYTES * index :][:FRAME_DIGEST_BYTES]


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Why a file was refused, and until when it is refused for that."""

    message: str
    until: float


class HeldVideos:
    """Files by digest. One event loop owns it.

    Args:
        probes: reads the files.
        max_bytes: most bytes of all files that are held, of which the longest unused is dropped
            first, and most bytes of the files that wait to be read. A single file may have more.
        clock: seconds, monotonic.
    """

    def __init__(
        self, probes: ProbeQueue, max_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._probes = probes
        self._max_bytes = max_bytes
        self._clock = clock
        self._held: OrderedDict[bytes, HeldVideo] = OrderedDict()  # by last use
        self._used_bytes = 0
        self._refused: OrderedDict[bytes, _Refusal] = OrderedDict()  # by age
        # By tenant and digest: a file of two tenants is read in the turn of each.
        self._reading: dict[tuple[str, bytes], SharedTask[HeldVideo]] = {}
        self._capacity = TenantCapacity(max_bytes)  # of files that wait
        self._threads = ThreadPoolExecutor(_COPIES, "video")

    def get(self, digest: bytes) -> HeldVideo:
        """A file that is held, for some time from now on.

        Raises:
            VideoNotHeld: the file is not held.
        """
        held = self._renewed(digest)
        if held is None:
            raise VideoNotHeld("the video is not held here")
        return held

    async def take(self, file: bytes, share: Share) -> "asyncio.Future[HeldVideo]":
        """Copies a file, which its caller may drop then, to hold it when it has been read. Equal
        files of a tenant are read once.

        Returns:
            The file when it is held. The future raises InvalidVideo if the file is no video that
            is decoded here, Overloaded if it cannot be read now.

        Raises:
            InvalidVideo: the file was refused lately.
            Overloaded: files that wait have too many bytes.
        """
        loop = asyncio.get_running_loop()
        digest = await loop.run_in_executor(self._threads, _digest, file)
        if (found := self._found(digest, share)) is not None:
            return found
        if self._capacity.used and not self._capacity.allows(share.tenant, len(file)):
            raise Overloaded("videos that wait to be read have too many bytes", retry_after_s=1)
        self._capacity.take(share.tenant, len(file))
        try:
            address = await self._copy(file)
        except BaseException:
            self._capacity.release(share.tenant, len(file))
            raise
        if (found := self._found(digest, share)) is None:  # by another call, meanwhile
            return self._read(digest, address, share).join()
        self._capacity.release(share.tenant, len(file))
        os.close(address.fd)
        return found

    def close(self) -> None:
        """Drops all files and ends the processes."""
        self._threads.shutdown()
        self._probes.close()
        for held in self._held.values():
            os.close(held.file.fd)
        self._held.clear()

    def _found(self, digest: bytes, share: Share) -> "asyncio.Future[HeldVideo] | None":
        """A file that is held, or is being read for this tenant.

        Raises:
            InvalidVideo: the file was refused lately.
        """
        if (held := self._renewed(digest)) is not None:
            found: asyncio.Future[HeldVideo] = asyncio.get_running_loop().create_future()
            found.set_result(held)
            return found
        if (refusal := self._refused.get(digest)) is not None and refusal.until > self._clock():
            raise InvalidVideo(refusal.message)
        reading = self._reading.get((share.tenant, digest))
        return None if reading is None or reading.is_abandoned else reading.join()

    async def _copy(self, file: bytes) -> MemoryAddress:
        copying = self._threads.submit(_copied, file)
        try:
            return await asyncio.wrap_future(copying)
        except asyncio.CancelledError:
            copying.add_done_callback(_close_copy)  # a thread that copies goes on
            raise

    def _read(self, digest: bytes, address: MemoryAddress, share: Share) -> SharedTask[HeldVideo]:
        """Begins to read a copy, whose capacity is released at the end."""
        key = share.tenant, digest

        def end(task: "asyncio.Task[HeldVideo]") -> None:
            if self._reading.get(key) is reading:  # not what began after this was given up
                del self._reading[key]
            self._capacity.release(share.tenant, address.size_bytes)
            if task.cancelled() or task.exception() is not None:
                os.close(address.fd)

        reading = SharedTask(self._hold(digest, address, share))
        reading.task.add_done_callback(end)
        self._reading[key] = reading
        return reading

    async def _hold(self, digest: bytes, address: MemoryAddress, share: Share) -> HeldVideo:
        try:
            facts = await self._probes.probe(address, share)
        except DecoderLost:
            raise
        except InvalidVideo as error:
            self._refuse(digest, error.message)
            raise
        if (held := self._renewed(digest)) is not None:  # read for another tenant, meanwhile
            os.close(address.fd)
            return held
        held = HeldVideo(digest, address, facts, self._clock() + _TTL_S)
        self._held[digest] = held
        self._used_bytes += address.size_bytes
        self._expire()
        return held

    def _refuse(self, digest: bytes, message: str) -> None:
        self._refused.pop(digest, None)
        self._refused[digest] = _Refusal(message, self._clock() + _REFUSED_S)
        if len(self._refused) > _MAX_REFUSED:
            self._refused.popitem(last=False)

    def _renewed(self, digest: bytes) -> HeldVideo | None:
        """A file that is held, for some time from now on."""
        self._expire()
        held = self._held.get(digest)
        if held is not None:
            held.expires_at = self._clock() + _TTL_S
            self._held.move_to_end(digest)
        return held

    def _expire(self) -> None:
        now = self._clock()
        while self._held:
            digest, oldest = next(iter(self._held.items()))
            is_full = self._used_bytes > self._max_bytes and len(self._held) > 1
            if not is_full and oldest.expires_at > now:
                break
            del self._held[digest]
            self._used_bytes -= oldest.file.size_bytes
            os.close(oldest.file.fd)


def _digest(file: bytes) -> bytes:
    return blake3(file).digest(KEY_BYTES)


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
