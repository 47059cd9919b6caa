"""Memory that one process owns and others on the same machine read.

`Arena` creates it in an encoder; a decoder's fetcher opens it, and falls back to gRPC on
`NotReadable`.

The owner's memory is a memfd with a random name and a sealed size. A reader that knows its address
opens it through `/proc`, read-only. The random name detects a pid or descriptor that the kernel has
reused meanwhile. The sealed size makes reading safe: mapped memory cannot be truncated. A mapped
memory outlives its owner.
"""

import fcntl
import mmap
import os
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3

PAGE_BYTES = 4096
_PREFIX = "triptych-"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
# Safe even if the descriptor is a pipe or a terminal by now: neither blocks nor attaches to it.
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_TOUCH_BYTES = 16 << 20


class NotReadable(Exception):
    """This process may not open the memory, or the memory no longer exists."""


@dataclass(frozen=True, slots=True)
class MemoryAddress:
    """Where a memory is found on its owner's machine."""

    pid: int
    fd: int
    name: str
    size_bytes: int


def host_identity() -> bytes:
    """Equal in processes that can probably open each other's memory: same boot of the same machine,
    same pid namespace, same user. Empty where that is unknown.
    """
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text()
        pid_namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return b""
    return blake3(f"{boot_id}/{pid_namespace}/{os.geteuid()}".encode()).digest(16)


def create_memory(size_bytes: int) -> tuple[int, str]:
    """A new zeroed memory of a sealed size: its descriptor and its name."""
    name = _PREFIX + secrets.token_hex(16)
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd, name


class ForeignMemory:
    """Another process's memory, mapped read-only for as long as this object or a view lives."""

    def __init__(self, address: MemoryAddress) -> None:
        """Opens it.

        Raises:
            NotReadable: it does not exist, is not readable, or is not what the address says.
        """
        self.address = address
        fd = _open(address)
        try:
            self._memory = mmap.mmap(fd, address.size_bytes, prot=mmap.PROT_READ)
            self._resident = list(_resident_ranges(fd, address.size_bytes))
        except (OSError, ValueError) as error:
            raise NotReadable(f"it cannot be mapped: {error}") from None
        finally:
            os.close(fd)  # the mapping keeps the memory

    def prefault(self) -> None:
        """Prefaults the pages that existed when it was opened; run it in a thread."""
        _touch(self._memory, self._resident)

    def view(self, offset: int, size_bytes: int) -> memoryview:
        """Bytes of it; `offset + size_bytes` is at most the address's size."""
        return memoryview(self._memory)[offset : offset + size_bytes]


def prefault(fd: int, memory: mmap.mmap) -> None:
    """Maps the pages that exist already into this process, because a page fault costs more than
    copying the page. Allocates no pages. Takes about 0.1 s per GiB.
    """
    _touch(memory, _resident_ranges(fd, len(memory)))


def _touch(memory: mmap.mmap, ranges: Iterable[tuple[int, int]]) -> None:
    for start, stop in ranges:
        for first in range(start, stop, _TOUCH_BYTES):
            size = min(_TOUCH_BYTES, stop - first)
            # numpy, because it releases the interpreter lock; a fault maps neighbouring pages, too.
            np.frombuffer(memory, np.uint8, size, first)[::PAGE_BYTES].max()


def _open(address: MemoryAddress) -> int:
    path, name = f"/proc/{address.pid}/fd/{address.fd}", f"/memfd:{address.name} (deleted)"
    try:
        if os.readlink(path) != name:
            raise NotReadable(f"{path} is another file")
        fd = os.open(path, _OPEN_FLAGS)
    except OSError as error:
        raise NotReadable(f"{path}: {error.strerror}") from None
    try:
        # Checks the opened file, because the path may have been reused since.
        if (
            not address.name.startswith(_PREFIX)
            or os.readlink(f"/proc/self/fd/{fd}") != name
            or os.fstat(fd).st_size != address.size_bytes
            or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS
        ):
            raise OSError
    except OSError:  # only a memfd has seals
        os.close(fd)
        raise NotReadable(f"{path} is not a memory of that name and size") from None
    return fd


def _resident_ranges(fd: int, size_bytes: int) -> Iterator[tuple[int, int]]:
    stop = 0
    while stop < size_bytes:
        try:
            start = os.lseek(fd, stop, os.SEEK_DATA)
        except OSError:  # only holes follow
            return
        stop = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, stop
