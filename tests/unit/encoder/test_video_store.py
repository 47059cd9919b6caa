"""Files of videos are held for a while, bounded, and read once."""

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from services.common.embeddings.shared_memory import ForeignMemory, MemoryAddress, NotReadable
from services.common.errors import InvalidRequest, InvalidVideo, Overloaded, VideoNotHeld
from services.encoder.decoding.clips.clip_pool import DecoderLost
from services.encoder.front import video_store
from services.encoder.front.admission import NOBODY, Share
from services.encoder.front.file_copier import FileCopier
from services.encoder.front.probe_queue import ProbeQueue
from services.encoder.front.video_store import StoredVideo, VideoStore
from tests.descriptors import num_memories
from tests.fake_clips import FACTS, FakeClips
from tests.noise import PATIENCE_S


class Clock:
    """Seconds as a test sets them."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def clips() -> FakeClips:
    return FakeClips()


@pytest.fixture
async def videos(clips: FakeClips, clock: Clock) -> AsyncIterator[VideoStore]:
    videos = VideoStore(ProbeQueue(clips, 2), max_bytes=100, clock=clock)  # type: ignore[arg-type]
    yield videos
    await asyncio.to_thread(videos.close)


async def held(videos: VideoStore, file: bytes, share: Share = NOBODY) -> StoredVideo:
    return await (await videos.take(file, share))


async def test_a_file_is_read_once_and_named_by_its_digest(
    videos: VideoStore, clips: FakeClips
) -> None:
    first, *others = await asyncio.gather(*(held(videos, b"clip") for _ in range(5)))
    assert all(other is first for other in others) and clips.read == [b"clip"]
    assert await held(videos, b"clip") is first and videos.get(first.digest) is first
    assert first.video().size == (48, 64)
    assert (first.frame_digest(0), first.frame_digest(1)) == (b"a" * 16, b"b" * 16)
    for index in (2, -1):
        with pytest.raises(InvalidRequest):
            first.frame_digest(index)


async def test_the_longest_unused_gives_way(videos: VideoStore) -> None:
    first, second = await held(videos, b"1" * 40), await held(videos, b"2" * 40)
    videos.get(first.digest)
    third = await held(videos, b"3" * 40)
    assert videos.get(first.digest) is first and videos.get(third.digest) is third
    with pytest.raises(VideoNotHeld):
        videos.get(second.digest)
    with pytest.raises(NotReadable):
        ForeignMemory(second.file)
    large = await held(videos, b"4" * 400)  # held alone, until another comes
    assert videos.get(large.digest) is large
    await held(videos, b"5")
    with pytest.raises(VideoNotHeld):
        videos.get(large.digest)


async def test_the_index_of_a_file_is_stored_and_freed_with_it(
    videos: VideoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.fake_clips.FACTS", replace(FACTS, index=b"i" * 30))
    before = num_memories()
    first, second = await held(videos, b"1" * 20), await held(videos, b"2" * 20)
    index = second.video().index
    assert index is not None and not second.facts.index
    assert bytes(ForeignMemory(index).view(0, 30)) == b"i" * 30
    assert num_memories() == before + 4
    await held(videos, b"3")  # the two files before have 100 bytes with their indexes
    with pytest.raises(VideoNotHeld):
        videos.get(first.digest)
    assert num_memories() == before + 4


async def test_a_file_that_has_expired_is_read_again(
    videos: VideoStore, clips: FakeClips, clock: Clock
) -> None:
    first = await held(videos, b"clip")
    clock.now_s += 119.0
    assert videos.get(first.digest) is first  # whose time begins anew
    clock.now_s += 119.0
    assert videos.get(first.digest) is first
    clock.now_s += 121.0
    with pytest.raises(VideoNotHeld):
        videos.get(first.digest)
    again = await held(videos, b"clip")
    assert again is not first and videos.get(first.digest) is again
    assert clips.read == [b"clip"] * 2


async def test_the_end_of_a_probe_that_was_given_up_is_not_that_of_the_next() -> None:
    """Which begins while the first one's file is still being read, and which others join."""
    clips = FakeClips(waits=True)
    videos = VideoStore(ProbeQueue(clips, 2), max_bytes=100)  # type: ignore[arg-type]
    given_up = await videos.take(b"clip", NOBODY)
    assert await asyncio.to_thread(clips.begun.get, timeout=PATIENCE_S) == b"clip"
    given_up.cancel()
    await asyncio.wait((given_up,))
    await asyncio.sleep(0)
    second = await videos.take(b"clip", NOBODY)
    assert await asyncio.to_thread(clips.begun.get, timeout=PATIENCE_S) == b"clip"
    third = await videos.take(b"clip", NOBODY)
    for _ in range(2):
        clips.finish(b"clip")
    assert await third is await second and videos.get((await third).digest) is await third
    await asyncio.to_thread(videos.close)
    assert clips.read == [b"clip"] * 2 and clips.begun.empty()


class SlowCopier(FileCopier):
    """Copies files while `go_on` is set. `copies` is set when a copy begins."""

    def __init__(self) -> None:
        super().__init__()
        self.copies, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def write(self, file: bytes) -> MemoryAddress:
        self.copies.set()
        assert self.go_on.wait(PATIENCE_S)
        return super().write(file)


async def test_a_copy_that_nobody_waits_for_is_closed(clips: FakeClips) -> None:
    copier = SlowCopier()
    probes = ProbeQueue(clips, 2)  # type: ignore[arg-type]
    videos = VideoStore(probes, max_bytes=100, copier=copier)
    await held(videos, b"clip")  # starts what is started once
    before = num_memories()
    copier.copies.clear()
    copier.go_on.clear()
    probe = asyncio.create_task(videos.take(b"another clip", NOBODY))
    assert await asyncio.to_thread(copier.copies.wait, PATIENCE_S)
    probe.cancel()
    await asyncio.gather(probe, return_exceptions=True)
    copier.go_on.set()
    await asyncio.to_thread(copier.close)
    assert num_memories() == before
    await asyncio.to_thread(videos.close)


async def test_a_file_that_was_refused_is_not_read_again_for_a_while(
    videos: VideoStore, clips: FakeClips, clock: Clock
) -> None:
    """Whoever sends it: a file that takes too long would take as long again."""
    await held(videos, b"clip")
    before = num_memories()
    for share in (NOBODY, NOBODY, Share("another")):
        with pytest.raises(InvalidVideo, match="corrupt"):
            await held(videos, b"bad", share)
    assert clips.read == [b"clip", b"bad"] and num_memories() == before
    clock.now_s += 301.0
    with pytest.raises(InvalidVideo, match="corrupt"):
        await held(videos, b"bad")
    assert clips.read == [b"clip", b"bad", b"bad"]


@pytest.mark.parametrize(
    "error", [DecoderLost("too long"), Overloaded("no process"), VideoNotHeld("gone")], ids=repr
)
async def test_what_says_nothing_of_a_file_is_not_remembered(
    videos: VideoStore, clips: FakeClips, error: Exception
) -> None:
    clips.errors[b"clip"] = error
    with pytest.raises(type(error)):
        await held(videos, b"clip")
    del clips.errors[b"clip"]
    assert (await held(videos, b"clip")).facts.num_frames == 2


async def test_refusals_that_are_remembered_are_bounded(
    videos: VideoStore, clips: FakeClips, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(video_store, "_MAX_REFUSED", 64)
    files = [b"%d" % number for number in range(64 + 2)]
    clips.errors |= dict.fromkeys(files, InvalidVideo("too long"))
    for file in files:
        with pytest.raises(InvalidVideo):
            await held(videos, file)
    clips.read.clear()
    for file in (files[-1], files[0]):
        with pytest.raises(InvalidVideo):
            await held(videos, file)
    assert clips.read == [files[0]]


async def test_files_of_a_tenant_that_wait_leave_room_for_others() -> None:
    clips = FakeClips(waits=True)
    videos = VideoStore(ProbeQueue(clips, 2), max_bytes=100)  # type: ignore[arg-type]
    crowd, guest = Share("crowd"), Share("guest")
    waiting = [await videos.take(b"%d" % number * 25, crowd) for number in range(3)]
    with pytest.raises(Overloaded, match="too many bytes"):
        await videos.take(b"3" * 25, crowd)
    file = b"a clip of the guest's"
    taken = await videos.take(file, guest)
    clips.finish(file)
    assert (await taken).facts.num_frames == 2
    for number, call in enumerate(waiting):
        clips.finish(b"%d" % number * 25)
        await call
    waiting = [await videos.take(b"3" * 25, crowd)]  # there is room again
    clips.finish(b"3" * 25)
    await waiting[0]
    await asyncio.to_thread(videos.close)


async def test_a_file_of_two_tenants_is_read_in_the_turn_of_each() -> None:
    """A tenant does not wait behind another's files because that has sent the same one."""
    clips = FakeClips(waits=True)
    videos = VideoStore(ProbeQueue(clips, 2), max_bytes=100)  # type: ignore[arg-type]
    crowd, guest = Share("crowd"), Share("guest")
    before = num_memories()
    slow, last = await videos.take(b"slow", crowd), await videos.take(b"clip", crowd)
    taken = await videos.take(b"clip", guest)
    clips.finish(b"clip")
    found = await taken
    for name in (b"slow", b"clip"):
        clips.finish(name)
    assert await last is found and (await slow) is not found
    assert num_memories() == before + 2
    await asyncio.to_thread(videos.close)


async def test_calls_that_leave_give_their_room_back() -> None:
    """While their files wait, and while these are being read."""
    clips = FakeClips(waits=True)
    videos = VideoStore(ProbeQueue(clips, 1), max_bytes=100)  # type: ignore[arg-type]
    files = [b"%d" % number * 60 for number in range(4)]
    for file in files[:3]:
        taken = await videos.take(file, Share("a"))
        taken.cancel()
        await asyncio.wait((taken,))
        await asyncio.sleep(0)
    taken = await videos.take(files[3], Share("a"))
    for file in files:
        clips.finish(file)
    assert (await taken).file.size_bytes == 60
    await asyncio.to_thread(videos.close)
