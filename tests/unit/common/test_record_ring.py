"""The ring of records: whatever is written arrives once and in order, or somebody is told."""

import mmap
import os
import struct
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.process.record_ring import (
    CAPACITY,
    RingError,
    RingReader,
    RingWriter,
    ring_bytes,
)

SMALL = 512


def make(num_readers: int = 1, capacity: int = SMALL) -> tuple[RingWriter, list[RingReader]]:
    memory = mmap.mmap(-1, ring_bytes(capacity))
    return RingWriter(memory, num_readers), [RingReader(memory, n) for n in range(num_readers)]


records = st.lists(st.binary(max_size=3 * SMALL), max_size=12)
turns = st.lists(st.integers(0, 2), min_size=1, max_size=80)


@settings(max_examples=200, deadline=None)
@given(records=records, turns=turns)
def test_readers_get_all_records_in_order(records: list[bytes], turns: list[int]) -> None:
    """The writer is a thread, which waits for room; readers take turns as they come, and some read
    nothing for long.
    """
    writer, readers = make(2)
    thread = threading.Thread(target=lambda: [writer.write(each, 60.0) for each in records])
    thread.start()
    found: list[list[bytes]] = [[], []]
    turn = 0
    while min(map(len, found)) < len(records):
        number = turns[turn % len(turns)] % 2 if turn < len(turns) else turn % 2
        turn += 1
        record = readers[number].read(60.0)
        if record is not None:
            found[number].append(record)
    thread.join()
    assert found == [records, records]
    assert all(reader.read(0.0) is None for reader in readers)


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_what_is_torn_is_not_a_record(data: st.DataObject) -> None:
    """A byte of a piece, of its bytes or its header, is as another processor may see it: old."""
    memory = mmap.mmap(-1, ring_bytes(SMALL))
    writer, reader = RingWriter(memory, 1), RingReader(memory, 0)
    for number in range(data.draw(st.integers(0, 6))):  # so that the ring holds old records
        writer.write(bytes([number]) * 40, 1.0)
        assert reader.read(1.0) is not None
    before = bytes(memory)
    writer.write(data.draw(st.binary(min_size=1, max_size=80)), 1.0)
    after = bytes(memory)
    # The last word of a header is unused, as are the bytes that align a piece.
    changed = [
        i for i, (a, b) in enumerate(zip(before, after, strict=True)) if i >= 4096 and a != b
    ]
    place = data.draw(st.sampled_from(changed))
    memory[place] = before[place]
    with pytest.raises(RingError, match="incomplete"):
        reader.read(0.0)
    memory[place] = after[place]
    assert reader.read(1.0) is not None


def test_a_reader_waits_for_a_piece_that_comes_late() -> None:
    memory = mmap.mmap(-1, ring_bytes(SMALL))
    writer, reader = RingWriter(memory, 1), RingReader(memory, 0)
    writer.write(b"late", 1.0)
    place = 4096 + 16
    memory[place] = 0
    timer = threading.Timer(0.02, memory.__setitem__, (place, b"l"[0]))
    timer.start()
    assert reader.read(60.0) == b"late"
    timer.join()


def test_a_dead_writer_leaves_nothing_to_read() -> None:
    """It died before the head moved."""
    memory = mmap.mmap(-1, ring_bytes(SMALL))
    writer, reader = RingWriter(memory, 1), RingReader(memory, 0)
    writer.write(b"first", 1.0)
    head = memory[:8]
    writer.write(b"second", 1.0)
    memory[:8] = head
    assert reader.read(0.0) == b"first"
    assert reader.read(0.0) is None


def test_a_reader_that_does_not_read_is_an_error() -> None:
    writer, (first, _) = make(2)
    with pytest.raises(RingError, match="has not read"):
        while True:
            writer.write(b"x" * 100, 0.02)
            assert first.read(1.0) is not None


def test_what_was_overwritten_is_an_error() -> None:
    memory = mmap.mmap(-1, ring_bytes(SMALL))
    reader = RingReader(memory, 0)
    memory[:8] = struct.pack("<Q", SMALL + 1)
    with pytest.raises(RingError, match="overwritten"):
        reader.read(0.0)


def test_beats_are_seen() -> None:
    writer, readers = make(2)
    readers[1].beat()
    readers[1].beat()
    assert [writer.beats(number) for number in range(2)] == [0, 2]


def test_another_process_reads() -> None:
    """The mapping of an inherited descriptor, as ranks have it."""
    fd = os.memfd_create("ring")
    os.ftruncate(fd, ring_bytes())
    writer = RingWriter(mmap.mmap(fd, ring_bytes()), 1)
    large = os.urandom(3 * CAPACITY)
    source, sink = os.pipe()
    if (child := os.fork()) == 0:
        reader, found = RingReader(mmap.mmap(fd, ring_bytes()), 0), None
        while found is None:
            found = reader.read(60.0)
        os.write(sink, b"y" if found == large else b"n")
        os._exit(0)
    writer.write(large, 60.0)
    assert os.read(source, 1) == b"y"
    os.waitpid(child, 0)
    for each in (fd, source, sink):
        os.close(each)
