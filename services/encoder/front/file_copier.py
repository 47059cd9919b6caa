"""Copies the files of videos into memory that the decoding processes can map, in threads."""

import asyncio
import os
from concurrent.futures import Future, ThreadPoolExecutor

from blake3 import blake3

from services.common.embeddings.shared_memory import MemoryAddress, create_memory
from services.common.images.image_key import KEY_BYTES
from services.common.threads import name_thread

_THREADS = 2


class FileCopier:
    """Computes digests and copies of files without blocking the event loop."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "video", name_thread)

    async def digest(self, file: bytes) -> bytes:
        """Returns a file's digest."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, _digest, file)

    async def copy(self, file: bytes) -> MemoryAddress:
        """Copies a file. The caller closes the copy's descriptor. If the call is cancelled, the
        copy is completed and then closed.
        """
        copying = self._threads.submit(self.write, file)
        try:
            return await asyncio.wrap_future(copying)
        except asyncio.CancelledError:
            copying.add_done_callback(_close_copy)
            raise

    def write(self, file: bytes) -> MemoryAddress:
        """Copies a file in the calling thread."""
        fd, name = create_memory(len(file))
        try:
            view = memoryview(file)
            while view:
                view = view[os.write(fd, view) :]
        except BaseException:
            os.close(fd)
            raise
        return MemoryAddress(os.getpid(), fd, name, len(file))

    def close(self) -> None:
        """Waits for the copies that have begun, and ends the threads."""
        self._threads.shutdown()


def _digest(file: bytes) -> bytes:
    return blake3(file).digest(KEY_BYTES)


def _close_copy(copying: Future[MemoryAddress]) -> None:
    """Closes a copy whose caller was cancelled."""
    if not copying.cancelled() and copying.exception() is None:
        os.close(copying.result().fd)
