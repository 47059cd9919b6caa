"""Stores the video files that clients have sent, so that `Encode` calls can name them by digest.

A `Probe` call sends the file, which is stored once and for a limited time, in memory that the
decoding processes map. If the store is full, the least recently used file is dropped. An `Encode`
call for a dropped file fails with `VideoNotHeld`, as do the units of the video that are not decoded
yet, and the gateway sends the file again.
"""

import asyncio
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from services.common.embeddings.shared_memory import MemoryAddress
from services.common.embeddings.shared_task import SharedTask
from services.common.errors import InvalidRequest, InvalidVideo, Overloaded, VideoNotHeld
from services.common.images.image_key import FRAME_DIGEST_BYTES
from services.common.tenancy.tenant_capacity import TenantCapacity
from services.encoder.decoding.clips.clip_pool import DecoderLost
from services.encoder.decoding.clips.questions import Facts
from services.encoder.decoding.source import Video
from services.encoder.front.admission import Share
from services.encoder.front.file_copier import FileCopier
from services.encoder.front.probe_queue import ProbeQueue

_TTL_S = 120.0  # seconds since the last use
# A refused file is not read again for a while, because it would be refused again after some seconds
# of CPU time.
_REFUSED_S = 300.0
_MAX_REFUSED = 4096


@dataclass(slots=True)
class StoredVideo:
    """A stored file and its facts.

    Attributes:
        digest: digest of the file.
        file: address of the file's copy.
        facts: facts of the video, without its index.
        expires_at: time of the clock at which the file is dropped.
        index: address of the encoded `Index` of the file. None if there is none.
    """

    digest: bytes
    file: MemoryAddress
    facts: Facts
    expires_at: float
    index: MemoryAddress | None = None

    @property
    def size_bytes(self) -> int:
        """Number of bytes of the file and its index."""
        return self.file.size_bytes + (self.index.size_bytes if self.index else 0)

    def close(self) -> None:
        """Frees the memory, unless a process has mapped it."""
        os.close(self.file.fd)
        if self.index is not None:
            os.close(self.index.fd)

    def video(self, frame: int = 0) -> Video:
        """Returns the video as the source of a unit, by the unit's first frame."""
        keys = np.frombuffer(self.facts.key_frames, "<i4")
        at = int(np.searchsorted(keys, frame, "right"))
        start = int(keys[at - 1]) if at else 0
        return Video(self.file, (self.facts.height, self.facts.width), start, self.index)

    def frame_digest(self, index: int) -> bytes:
        """Returns the digest of a frame.

        Raises:
            InvalidRequest: the video has no frame of this number.
        """
        if not 0 <= index < self.facts.num_frames:
            raise InvalidRequest(
                f"the video has {self.facts.num_frames} frames, and no frame {index}"
            )
        return self.facts.frame_digests[FRAME_DIGEST_BYTES * index :][:FRAME_DIGEST_BYTES]


@dataclass(frozen=True, slots=True)
class _Refusal:
    """The refusal of a file.

    Attributes:
        message: reason of the refusal.
        until: time of the clock until which the file is refused without being read.
    """

    message: str
    until: float


class VideoStore:
    """The stored files, by digest. One event loop uses it.

    Args:
        probes: reads the facts of the files.
        max_bytes: most bytes of all stored files, and most bytes of the files that wait to be read.
            A single file may have more.
        clock: function that returns monotonic seconds.
        copier: copies the files. The store closes it. Created if None.
    """

    def __init__(
        self,
        probes: ProbeQueue,
        max_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        copier: FileCopier | None = None,
    ) -> None:
        self._probes = probes
        self._copier = copier or FileCopier()
        self._max_bytes = max_bytes
        self._clock = clock
        self._stored: OrderedDict[bytes, StoredVideo] = OrderedDict()  # by last use
        self._used_bytes = 0
        self._refused: OrderedDict[bytes, _Refusal] = OrderedDict()  # by age
        # By tenant and digest: if two tenants send the same file, it is read once for each.
        self._reading: dict[tuple[str, bytes], SharedTask[StoredVideo]] = {}
        self._capacity = TenantCapacity(max_bytes)  # bytes of the files that wait to be read

    def get(self, digest: bytes) -> StoredVideo:
        """Returns a stored file, and extends the time for which it is stored.

        Raises:
            VideoNotHeld: the file is not stored.
        """
        stored = self._renewed(digest)
        if stored is None:
            raise VideoNotHeld("the video is not held here")
        return stored

    async def take(self, file: bytes, share: Share) -> "asyncio.Future[StoredVideo]":
        """Copies a file, and queues the copy to be read and stored. The caller may then drop the
        file. Equal files of a tenant are read once.

        Args:
            file: the video file.
            share: tenant that has sent the file.

        Returns:
            The file, when it is stored. The future raises InvalidVideo if the file is not a video
            that can be decoded here, and Overloaded if it cannot be read now.

        Raises:
            InvalidVideo: the file was refused recently.
            Overloaded: the files that wait to be read have too many bytes.
        """
        digest = await self._copier.digest(file)
        if (found := self._found(digest, share)) is not None:
            return found
        if self._capacity.used and not self._capacity.allows(share.tenant, len(file)):
            raise Overloaded("too many bytes of videos wait to be read", retry_after_s=1)
        self._capacity.take(share.tenant, len(file))
        try:
            address = await self._copier.copy(file)
        except BaseException:
            self._capacity.release(share.tenant, len(file))
            raise
        if (found := self._found(digest, share)) is None:  # another call may have begun
            return self._read(digest, address, share).join()
        self._capacity.release(share.tenant, len(file))
        os.close(address.fd)
        return found

    def close(self) -> None:
        """Drops all files and ends the processes."""
        self._copier.close()
        self._probes.close()
        for stored in self._stored.values():
            stored.close()
        self._stored.clear()

    def _found(self, digest: bytes, share: Share) -> "asyncio.Future[StoredVideo] | None":
        """Returns a file that is stored, or that is being read for this tenant.

        Raises:
            InvalidVideo: the file was refused recently.
        """
        if (stored := self._renewed(digest)) is not None:
            found: asyncio.Future[StoredVideo] = asyncio.get_running_loop().create_future()
            found.set_result(stored)
            return found
        if (refusal := self._refused.get(digest)) is not None and refusal.until > self._clock():
            raise InvalidVideo(refusal.message)
        reading = self._reading.get((share.tenant, digest))
        return None if reading is None or reading.is_abandoned else reading.join()

    def _read(self, digest: bytes, address: MemoryAddress, share: Share) -> SharedTask[StoredVideo]:
        """Starts to read a copy. Its bytes are released from the capacity at the end."""
        key = share.tenant, digest
        reading = SharedTask(self._store(digest, address, share))
        reading.task.add_done_callback(partial(self._end_reading, key, address, reading))
        self._reading[key] = reading
        return reading

    def _end_reading(
        self,
        key: tuple[str, bytes],
        address: MemoryAddress,
        reading: SharedTask[StoredVideo],
        task: "asyncio.Task[StoredVideo]",
    ) -> None:
        if self._reading.get(key) is reading:  # a later reading may have replaced an abandoned task
            del self._reading[key]
        self._capacity.release(key[0], address.size_bytes)
        if task.cancelled() or task.exception() is not None:
            os.close(address.fd)

    async def _store(self, digest: bytes, address: MemoryAddress, share: Share) -> StoredVideo:
        try:
            facts = await self._probes.probe(address, share)
        except DecoderLost:
            raise
        except InvalidVideo as error:
            self._refuse(digest, error.message)
            raise
        index = await self._copier.copy(facts.index) if facts.index else None
        expires_at = self._clock() + _TTL_S
        read = StoredVideo(digest, address, replace(facts, index=b""), expires_at, index)
        if (stored := self._renewed(digest)) is not None:  # the file of another tenant was faster
            read.close()
            return stored
        self._stored[digest] = stored = read
        self._used_bytes += stored.size_bytes
        self._drop_files()
        return stored

    def _refuse(self, digest: bytes, message: str) -> None:
        self._refused.pop(digest, None)
        self._refused[digest] = _Refusal(message, self._clock() + _REFUSED_S)
        if len(self._refused) > _MAX_REFUSED:
            self._refused.popitem(last=False)

    def _renewed(self, digest: bytes) -> StoredVideo | None:
        """Returns a file if it is stored, and extends the time for which it is stored."""
        self._drop_files()
        stored = self._stored.get(digest)
        if stored is not None:
            stored.expires_at = self._clock() + _TTL_S
            self._stored.move_to_end(digest)
        return stored

    def _drop_files(self) -> None:
        """Drops the files whose time is over, and the least recently used if all are too large."""
        now = self._clock()
        while self._stored:
            digest, oldest = next(iter(self._stored.items()))
            is_full = self._used_bytes > self._max_bytes and len(self._stored) > 1
            if not is_full and oldest.expires_at > now:
                break
            del self._stored[digest]
            self._used_bytes -= oldest.size_bytes
            oldest.close()
