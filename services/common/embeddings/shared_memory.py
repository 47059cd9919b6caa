"""Memory of one process, which other processes on the same machine read.

`Arena` creates such memory in an encoder. A decoder's fetcher opens it, and falls back to gRPC when
it gets `NotReadable`.

The owner's memory is a memfd with a random name and a sealed size. A reader with its address
opens the memory through `/proc`, read-only. The random name detects a pid or a descriptor that the
kernel has reused. The sealed size makes reading safe, because mapped memory cannot be truncated. A
mapping outlives the owner.
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
# With these flags opening neither blocks on a pipe nor attaches to a terminal, if the descriptor
# has become one.
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_TOUCH_BYTES = 16 << 20


class NotReadable(Exception):
    """Raised when this process may not open the memory, or the memory no longer exists."""


@dataclass(frozen=True, slots=True)
class MemoryAddress:
    """Address of a memory on its owner's machine.

    Attributes:
        pid: process that owns the memory.
        fd: descriptor of the memory in that process.
        name: random name of the memfd.
        size_bytes: sealed size of the memory.
    """

    pid: int
    fd: int
    name: str
    size_bytes: int


def host_identity() -> bytes:
    """Returns bytes that are equal in processes which can probably open each other's memory: on the
    same boot of the same machine, in the same pid namespace, of the same user. They are empty if
    that is unknown.
    """
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text()
        pid_namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return b""
    return blake3(f"{boot_id}/{pid_namespace}/{os.geteuid()}".encode()).digest(16)


def create_memory(size_bytes: int) -> tuple[int, str]:
    """Creates a zeroed memory of a sealed size, and returns its descriptor and its name."""
    name = _PREFIX + secrets.token_hex(16)
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd, name


class ForeignMemory:
    """Another process's memory, mapped read-only for as long as this object or a view lives."""

    def __init__(self, address: MemoryAddress) -> None:
        """Opens and maps the memory.

        Raises:
            NotReadable: the memory does not exist or is not readable, or its name or size is not
                that of the address.
        """
        self.address = address
        fd = _open(address)
        try:
            self._memory = mmap.mmap(fd, address.size_bytes, prot=mmap.PROT_READ)
            self._resident = list(_resident_ranges(fd, address.size_bytes))
        except (OSError, ValueError) as error:
            raise NotReadable(f"the memory cannot be mapped: {error}") from None
        finally:
            os.close(fd)  # the mapping keeps the memory

    def prefault(self) -> None:
        """Maps the pages that existed when the memory was opened. It should run in a thread."""
        _touch(self._memory, self._resident)

    def view(self, offset: int, size_bytes: int) -> memoryview:
        """Returns a view of some bytes. `offset + size_bytes` is at most the address's size."""
        return memoryview(self._memory)[offset : offset + size_bytes]


def prefault(fd: int, memory: mmap.mmap) -> None:
    """Maps the pages that exist already into this process, because a page fault costs more than
    copying the page. It allocates no pages and takes about 0.1 s per GiB.
    """
    _touch(memory, _resident_ranges(fd, len(memory)))


def _touch(memory: mmap.mmap, ranges: Iterable[tuple[int, int]]) -> None:
    for start, stop in ranges:
        for first in range(start, stop, _TOUCH_BYTES):
            size = min(_TOUCH_BYTES, stop - first)
            # numpy releases the interpreter lock. A page fault maps neighbouring pages, too.
            np.frombuffer(memory, np.uint8, size, first)[::PAGE_BYTES].max()


def _open(address: MemoryAddress) -> int:
    path, name = f"/proc/{address.pid}/fd/{address.fd}", f"/memfd:{address.name} (deleted)"
    try:
        if os.readlink(path) != name:
            raise NotReadable(f"{path} is a different file")
        fd = os.open(path, _OPEN_FLAGS)
    except OSError as error:
        raise NotReadable(f"{path}: {error.strerror}") from None
    try:
        # Checks the opened file, because the path may have been reused meanwhile.
        if (
            not address.name.startswith(_PREFIX)
            or os.readlink(f"/proc/self/fd/{fd}") != name
            or os.fstat(fd).st_size != address.size_bytes
            or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS
        ):
            raise OSError
    except OSError:  # only a memfd has seals
        os.close(fd)
        raise NotReadable(f"{path} is not a memfd of the expected name and size") from None
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
