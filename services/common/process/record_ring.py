"""A ring of records in shared memory: one process writes, each of several others reads all.

The memory is a memfd that the readers inherit. Head and tails are counts of bytes since the start.
A record is written before the head moves, and read in pieces, so that one may be longer than the
ring. Each piece has a checksum of its bytes and its place: what another processor sees of it too
early, or what was overwritten, is not taken for a piece.
"""

import mmap
import struct
import time
import zlib

CAPACITY = 4 << 20  # bytes; many times a step of decodes, so that they stay in a processor's cache
_HEADER_BYTES = 4096
_LINE = 8  # words of a cache line, of which each process writes its own
_TAIL, _BEATS = 0, 1  # in a reader's line
_PIECE = struct.Struct("<IIII")  # bytes, whether more follow, checksum, unused
_ALIGNMENT = 16
_PAUSE_S = 0.0001


class RingError(Exception):
    """The other side has stopped, or the ring's bytes are wrong."""


def ring_bytes(capacity: int = CAPACITY) -> int:
    """Size of the memory of a ring."""
    return _HEADER_BYTES + capacity


class _Ring:
    """Both sides' view."""

    def __init__(self, memory: mmap.mmap) -> None:
        view = memoryview(memory)
        self._words = view[:_HEADER_BYTES].cast("Q")
        self._data = view[_HEADER_BYTES:]
        self._capacity = len(self._data)
        self._longest = self._capacity // 4 - _PIECE.size  # of a piece

    def close(self) -> None:
        """Releases the memory, so that it may be unmapped."""
        self._words.release()
        self._data.release()

    def _put(self, place: int, data: bytes | memoryview) -> None:
        start = place % self._capacity
        first = min(len(data), self._capacity - start)
        self._data[start : start + first] = data[:first]
        self._data[: len(data) - first] = data[first:]

    def _take(self, place: int, count: int) -> bytes:
        start = place % self._capacity
        first = min(count, self._capacity - start)
        return bytes(self._data[start : start + first]) + bytes(self._data[: count - first])


def _checksum(place: int, size: int, more: int, data: bytes | memoryview) -> int:
    return zlib.crc32(data, zlib.crc32(struct.pack("<QII", place, size, more)))


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class RingWriter(_Ring):
    """The one writer.

    Args:
        memory: of `ring_bytes`, zeroed.
        num_readers: at most 500.
    """

    def __init__(self, memory: mmap.mmap, num_readers: int) -> None:
        super().__init__(memory)
        self._num_readers = num_readers
        self._head = 0

    def write(self, record: bytes, timeout_s: float) -> None:
        """Waits for room.

        Raises:
            RingError: a reader makes no room for `timeout_s`.
        """
        rest, more = memoryview(record), 1
        while more:
            piece, rest = rest[: self._longest], rest[self._longest :]
            more = int(len(rest) > 0)
            size = _PIECE.size + _padded(len(piece))
            self._wait_for_room(size, timeout_s)
            checksum = _checksum(self._head, len(piece), more, piece)
            self._put(self._head + _PIECE.size, piece)
            self._put(self._head, _PIECE.pack(len(piece), more, checksum, 0))
            self._head += size
            self._words[0] = self._head

    def beats(self, reader: int) -> int:
        """Changes while the reader is alive."""
        return self._words[_LINE * (1 + reader) + _BEATS]

    def _wait_for_room(self, size: int, timeout_s: float) -> None:
        last, deadline = -1, 0.0
        while self._head + size - (tail := self._slowest()) > self._capacity:
            now = time.monotonic()
            if tail != last:
                last, deadline = tail, now + timeout_s
            elif now > deadline:
                raise RingError(f"a reader has not read for {timeout_s:g} s")
            time.sleep(_PAUSE_S)

    def _slowest(self) -> int:
        return min(self._words[_LINE * (1 + n) + _TAIL] for n in range(self._num_readers))


class RingReader(_Ring):
    """One of the readers.

    Args:
        number: of the reader, from 0.
    """

    def __init__(self, memory: mmap.mmap, number: int) -> None:
        super().__init__(memory)
        self._line = _LINE * (1 + number)
        self._tail = 0
        self._pieces: list[bytes] = []

    def beat(self) -> None:
        """Shows the writer that this process is alive."""
        self._words[self._line + _BEATS] += 1

    def read(self, timeout_s: float) -> bytes | None:
        """The next record, if it is complete; None: there is none yet.

        Args:
            timeout_s: how long a piece may be incomplete that the writer says is there.

        Raises:
            RingError: it stays so.
        """
        deadline = 0.0
        while (head := self._words[0]) > self._tail:
            if head - self._tail > self._capacity:
                raise RingError("the writer has overwritten what was not read")
            size, more, checksum, _ = _PIECE.unpack(self._take(self._tail, _PIECE.size))
            if size <= self._longest:
                piece = self._take(self._tail + _PIECE.size, size)
                if _checksum(self._tail, size, more, piece) == checksum:
                    self._pieces.append(piece)
                    self._tail += _PIECE.size + _padded(size)
                    self._words[self._line + _TAIL] = self._tail
                    deadline = 0.0
                    if not more:
                        pieces, self._pieces = self._pieces, []
                        return b"".join(pieces)
                    continue
            now = time.monotonic()
            deadline = deadline or now + timeout_s
            if now > deadline:
                raise RingError(f"a record is incomplete for {timeout_s:g} s")
        return None
