"""Files of videos are held for a while, bounded, and read once."""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator

import pytest

from services.common.embeddings.shared_memory import ForeignMemory, MemoryAddress, NotReadable
from services.common.errors import InvalidRequest, InvalidVideo, VideoNotHeld
from services.encoder.decoding.clips import held_videos
from services.encoder.decoding.clips.held_videos import HeldVideo, HeldVideos
from services.encoder.decoding.clips.questions import Facts


class Reader:
    """In place of `ClipPool`."""

    def __init__(self) -> None:
        self.read: list[bytes] = []

    def probe(self, file: MemoryAddress) -> Facts:
        data = bytes(ForeignMemory(file).view(0, file.size_bytes))
        self.read.append(data)
        if data == b"bad":
            raise InvalidVideo("the video is truncated or corrupt")
        return Facts(2, 24.0, 48, 64, 1.0, b"a" * 16 + b"b" * 16)

    def close(self) -> None:
        pass


@pytest.fixture
def reader() -> Reader:
    return Reader()


@pytest.fixture
async def videos(reader: Reader) -> AsyncIterator[HeldVideos]:
    videos = HeldVideos(reader, max_bytes=100)  # type: ignore[arg-type]
    yield videos
    videos.close()


async def test_a_file_is_read_once_and_named_by_its_digest(
    videos: HeldVideos, reader: Reader
) -> None:
    first, *others = await asyncio.gather(*(videos.probe(b"clip") for _ in range(5)))
    assert all(other is first for other in others) and reader.read == [b"clip"]
    assert await videos.probe(b"clip") is first and videos.get(first.digest) is first
    assert first.video.size == (48, 64)
    assert (first.frame_digest(0), first.frame_digest(1)) == (b"a" * 16, b"b" * 16)
    for index in (2, -1):
        with pytest.raises(InvalidRequest):
            first.frame_digest(index)


async def test_the_longest_unused_gives_way(videos: HeldVideos) -> None:
    first, second = await videos.probe(b"1" * 40), await videos.probe(b"2" * 40)
    videos.get(first.digest)
    third = await videos.probe(b"3" * 40)
    assert videos.get(first.digest) is first and videos.get(third.digest) is third
    with pytest.raises(VideoNotHeld):
        videos.get(second.digest)
    with pytest.raises(NotReadable):
        ForeignMemory(second.file)
    large = await videos.probe(b"4" * 400)  # held alone, until another comes
    assert videos.get(large.digest) is large
    await videos.probe(b"5")
    with pytest.raises(VideoNotHeld):
        videos.get(large.digest)


async def test_a_file_that_has_expired_is_read_again(videos: HeldVideos, reader: Reader) -> None:
    held = await videos.probe(b"clip")
    held.expires_at = time.monotonic() - 1.0
    with pytest.raises(VideoNotHeld):
        videos.get(held.digest)
    again = await videos.probe(b"clip")
    assert again is not held and videos.get(held.digest) is again
    assert reader.read == [b"clip"] * 2


async def test_the_end_of_a_probe_that_was_given_up_is_not_that_of_the_next(
    videos: HeldVideos, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which begins before the first one's task has ended, and which others join."""
    begun, cancelled, go_on, read = asyncio.Event(), asyncio.Event(), asyncio.Event(), videos._read

    async def slow(digest: bytes, file: bytes) -> HeldVideo:
        begun.set()
        try:
            await go_on.wait()
        except asyncio.CancelledError:
            await cancelled.wait()
            raise
        return await read(digest, file)

    monkeypatch.setattr(videos, "_read", slow)
    given_up = asyncio.create_task(videos.probe(b"clip"))
    await begun.wait()
    (first,) = videos._probes.values()
    given_up.cancel()
    begun.clear()
    second = asyncio.create_task(videos.probe(b"clip"))
    await begun.wait()
    cancelled.set()
    await asyncio.wait({first.task})
    third = asyncio.create_task(videos.probe(b"clip"))
    await asyncio.sleep(0.05)
    go_on.set()
    assert await third is await second and reader.read == [b"clip"]


async def test_a_copy_that_nobody_waits_for_is_closed(
    videos: HeldVideos, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies, go_on = threading.Event(), threading.Event()
    copied = held_videos._copied

    def slow(file: bytes) -> MemoryAddress:
        copies.set()
        assert go_on.wait(10)
        return copied(file)

    await videos.probe(b"clip")  # starts what is started once
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(held_videos, "_copied", slow)
    probe = asyncio.create_task(videos.probe(b"another clip"))
    assert await asyncio.to_thread(copies.wait, 10)
    probe.cancel()
    await asyncio.gather(probe, return_exceptions=True)
    go_on.set()
    await asyncio.to_thread(videos._threads.shutdown)
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_bad_file_is_not_held(videos: HeldVideos, reader: Reader) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        with pytest.raises(InvalidVideo):
            await videos.probe(b"bad")
    assert reader.read == [b"bad"] * 2
    assert len(os.listdir("/proc/self/fd")) == before
