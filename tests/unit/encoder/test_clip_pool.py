"""Videos are decoded in processes: limits for each, one pass, and a bad video ends no other."""

import os
import resource
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from services.common.embeddings.shared_memory import MemoryAddress, create_memory
from services.common.errors import InvalidVideo, Overloaded, VideoNotHeld
from services.encoder.decoding import child
from services.encoder.decoding.child import ChildLost
from services.encoder.decoding.clips.clip_pool import PROBE_BYTES, ClipPool, FrameLimits
from tests.in_process_clips import frame_pixels
from tests.noise import PATIENCE_S
from tests.videos import index_first, make
from tests.worker_pids import worker_pids

SIZE = (48, 64)


@pytest.fixture(scope="module")
def pool() -> Iterator[ClipPool]:
    pool = ClipPool(2, memory_bytes=4 << 30)
    yield pool
    pool.close()


@pytest.fixture
def held() -> Iterator["Held"]:
    held = Held()
    yield held
    held.close()


def resident_bytes(pid: int) -> int:
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


class Held:
    """Files in this process's memory."""

    def __init__(self) -> None:
        self._fds: list[int] = []

    def put(self, data: bytes) -> MemoryAddress:
        fd, name = create_memory(len(data))
        os.pwrite(fd, data, 0)
        self._fds.append(fd)
        return MemoryAddress(os.getpid(), fd, name, len(data))

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()


def frames(pool: ClipPool, file: MemoryAddress, *indices: int) -> list[np.ndarray]:
    first, second = indices
    with pool.frames(file, SIZE, (first, second)) as found:
        return [pixels.copy() for pixels in found]


def test_facts_and_pixels_are_those_of_the_twin(pool: ClipPool, held: Held) -> None:
    data = make("webm")
    file = held.put(data)
    facts = pool.probe(file)
    assert (facts.num_frames, facts.height, facts.width) == (24, *SIZE)
    for pair in ((0, 1), (1, 7), (23, 23), (2, 3)):
        found, expected = frames(pool, file, *pair), frame_pixels(data, tuple(dict.fromkeys(pair)))
        assert len(found) == len(expected)
        assert all(np.array_equal(*both) for both in zip(found, expected, strict=True))


def test_a_video_that_is_asked_for_again_is_still_open(pool: ClipPool, held: Held) -> None:
    """Two videos by turns: each has its own worker, and neither is opened again."""
    files = [held.put(make(frames=20)), held.put(make("webm", frames=20))]
    for file in files:
        frames(pool, file, 0, 1)
    before = worker_pids(pool)
    held.close()  # what is open needs its file no more
    for file in files:
        frames(pool, file, 2, 3)
    assert worker_pids(pool) == before
    with pytest.raises(VideoNotHeld):
        pool.probe(MemoryAddress(os.getpid(), files[0].fd, "triptych-0", 100))


@pytest.mark.parametrize("kind", ["mp4", "webm"])
def test_pixels_do_not_depend_on_the_division_among_lanes(
    pool: ClipPool, held: Held, kind: str
) -> None:
    data = make(kind, frames=60, options={"g": "15", "keyint_min": "15"})
    file = held.put(data)
    keys = np.frombuffer(pool.probe(file).key_frames, "<i4")
    assert len(keys) >= 3
    pairs = [(frame, frame + 4) for frame in range(0, 56, 5)]
    expected = frame_pixels(data, tuple(index for pair in pairs for index in pair))
    lanes = [int(np.searchsorted(keys, first, "right")) % 2 for first, _ in pairs]
    found = dict[tuple[int, int], list[np.ndarray]]()
    # The last segment of each lane comes first, so that a decoder also steps back.
    order = sorted(range(len(pairs)), key=lambda at: (pairs[at][0] < keys[-2], at))
    for at in order:
        with pool.frames(file, SIZE, pairs[at], lanes[at]) as pixels:
            found[pairs[at]] = [each.copy() for each in pixels]
    assert {file.name, f"{file.name}/1"} <= set(pool.open_videos)
    pixels = [each for pair in pairs for each in found[pair]]
    assert all(np.array_equal(*both) for both in zip(pixels, expected, strict=True))


def test_memory_bounds_the_lanes() -> None:
    pool = ClipPool(8, memory_bytes=2 << 30)
    assert pool.max_open((1080, 1920)) == 6 and pool.max_open(SIZE) == 8
    assert pool.max_open((2304, 4096)) == 2
    pool.close()


def test_a_worker_is_started_ahead_of_each_video(held: Held) -> None:
    pool = ClipPool(2, memory_bytes=4 << 30)
    try:
        frames(pool, held.put(make()), 0, 1)
        first, spare = worker_pids(pool)
        second = held.put(make("webm"))
        frames(pool, second, 0, 1)
        assert worker_pids(pool) == [first, spare]  # no third: two are the most
        assert pool.open_videos[second.name].pid == spare
    finally:
        pool.close()


def test_lanes_take_workers_of_finished_videos_before_one_is_started(held: Held) -> None:
    """Otherwise each clip waits for new processes until there are as many as there may be."""
    pool = ClipPool(9, memory_bytes=4 << 30)

    def decode(file: MemoryAddress) -> None:
        for lane in range(3):
            with pool.frames(file, SIZE, (lane, lane), lane) as found:
                assert len(found) == 1

    try:
        files = [held.put(make(frames=20)) for _ in range(3)]
        decode(files[0])
        assert len(worker_pids(pool)) == 4  # with the one that is started ahead
        used = {child.pid for child in pool.open_videos.values()}
        pool.finish(files[0].name)
        decode(files[1])
        assert len(worker_pids(pool)) == 4
        # Those whose memory is mapped come before the one that was started ahead.
        assert {child.pid for child in pool.open_videos.values()} == used and len(used) == 3
        decode(files[2])  # while frames of the second are wanted, which stays open
        assert len(worker_pids(pool)) == 7
        assert {files[1].name, f"{files[1].name}/2", f"{files[2].name}/2"} <= set(pool.open_videos)
    finally:
        pool.close()


def test_a_video_whose_frames_are_wanted_again_keeps_its_worker(held: Held) -> None:
    """Another thread may take the video's next frames before `finish` is called."""
    pool = ClipPool(2, memory_bytes=4 << 30)
    try:
        wanted = held.put(make(frames=20))
        with pool.frames(wanted, SIZE, (0, 0)):
            pool.finish(wanted.name)
        assert not any(slot.is_finished for slot in pool._slots)
        pool.finish(wanted.name)
        assert [slot.is_finished for slot in pool._slots if slot.name] == [True]
    finally:
        pool.close()


class Interpreter:
    """A Python interpreter that a test can disable, so that no process is started with it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "python"
        self.path.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        self.enable()

    def enable(self) -> None:
        self.path.chmod(0o755)

    def disable(self) -> None:
        """Lets each start of a process fail. Processes that are starting can read on."""
        self.path.chmod(0o644)


@pytest.fixture
def interpreter(tmp_path: Path) -> Interpreter:
    return Interpreter(tmp_path)


def test_a_worker_that_cannot_be_started_ahead_costs_no_video(
    held: Held, interpreter: Interpreter
) -> None:
    pool = ClipPool(3, memory_bytes=4 << 30, executable=str(interpreter.path))
    try:
        assert len(frames(pool, held.put(make()), 0, 1)) == 2
        before = worker_pids(pool)
        assert len(before) == 2  # the second worker is for the next video
        file = held.put(make("webm"))
        interpreter.disable()
        for pair in ((0, 1), (2, 3)):
            assert len(frames(pool, file, *pair)) == 2
        assert sorted(worker_pids(pool)) == sorted(before)
        interpreter.enable()
        assert len(frames(pool, file, 4, 5)) == 2
        assert len(pool.workers) == 3
    finally:
        pool.close()


def test_a_video_whose_worker_cannot_be_started_is_for_another_encoder(
    held: Held, interpreter: Interpreter
) -> None:
    pool = ClipPool(1, memory_bytes=0, executable=str(interpreter.path))
    try:
        file = held.put(make())
        interpreter.disable()
        with pytest.raises(Overloaded):
            frames(pool, file, 0, 1)
        interpreter.enable()
        assert len(frames(pool, file, 0, 1)) == 2
        (pid,) = worker_pids(pool)
        os.kill(pid, signal.SIGKILL)
        interpreter.disable()
        with pytest.raises(Overloaded):
            frames(pool, file, 2, 3)
        interpreter.enable()
        assert len(frames(pool, file, 2, 3)) == 2
    finally:
        pool.close()


def test_a_bad_video_ends_no_worker(pool: ClipPool, held: Held) -> None:
    frames(pool, held.put(make()), 0, 1)
    before = worker_pids(pool)
    for data in (b"", b"#EXTM3U\nfile:///etc/passwd\n", make()[:400], os.urandom(1000)):
        with pytest.raises(InvalidVideo):
            pool.probe(held.put(data or b"\0"))
    with pytest.raises(InvalidVideo, match="no frame 24"):
        frames(pool, held.put(make()), 24, 24)
    assert set(worker_pids(pool)) & set(before)


def test_a_worker_that_dies_is_replaced(held: Held) -> None:
    pool = ClipPool(1, memory_bytes=0)
    try:
        file = held.put(make())
        frames(pool, file, 0, 1)
        (pid,) = worker_pids(pool)
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert len(frames(pool, file, 2, 3)) == 2
    finally:
        pool.close()


def test_a_video_that_takes_too_long_is_refused(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel ends its worker; another takes its place."""
    monkeypatch.setattr(child, "_WALL_FACTOR", PATIENCE_S / 0.05)  # the CPU time alone is short
    pool = ClipPool(1, memory_bytes=0, limits=FrameLimits(cpu_s=0.05))
    try:
        slow = held.put(make("lossless", frames=60, size=(720, 1280), options={"g": "600"}))
        with (
            pytest.raises(InvalidVideo, match="too long") as refusal,
            pool.frames(slow, (720, 1280), (59, 59)),
        ):
            pass
        assert type(refusal.value) is InvalidVideo  # no `DecoderLost`
        assert len(frames(pool, held.put(make()), 0, 1)) == 2
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("how", "is_certain"),
    [("SIGPROF", True), ("SIGSEGV", True), ("status 1", True), ("SIGKILL", False),
     ("no answer in time", False)],
)  # fmt: skip
def test_a_worker_may_be_lost_without_its_video_s_fault(how: str, is_certain: bool) -> None:
    assert ChildLost(how).is_caused_by_work is is_certain


def test_a_bomb_of_frames_is_refused_before_they_are_decoded(pool: ClipPool, held: Held) -> None:
    """2,100 frames of two million pixels, of which each changes a few."""
    data = make("gif", frames=3, size=(1080, 1920), still=True)
    control = b"\x21\xf9\x04"
    last = data.rindex(control)
    bomb = data[:last] + data[last:-1] * 2100 + b";"
    with pytest.raises(InvalidVideo, match="pixels in all"):
        pool.probe(held.put(bomb))


def test_memory_is_limited(held: Held) -> None:
    """A video of 30 MB a frame is refused where a process may take 100 MB; a small one is not."""
    limits = FrameLimits(bytes_per_pixel=0, base_bytes=0)
    pool = ClipPool(1, memory_bytes=0, limits=limits)
    try:
        large = held.put(make("lossless", frames=2, size=(2300, 4000)))
        assert pool.probe(large).num_frames == 2
        before = worker_pids(pool)
        with pytest.raises(InvalidVideo), pool.frames(large, (2300, 4000), (0, 1)):
            pass
        assert len(frames(pool, held.put(make()), 0, 1)) == 2
        assert worker_pids(pool) == before
    finally:
        pool.close()


def test_memory_does_not_grow_with_the_frames_that_are_asked_for(held: Held) -> None:
    """PyAV's frames refer to themselves: 60 of 1.4 MB would stay."""
    size = (720, 1280)
    file, pool = held.put(make(frames=80, size=size)), ClipPool(1, memory_bytes=0)
    resident: list[int] = []
    try:
        for index in range(0, 80, 2):
            with pool.frames(file, size, (index, index + 1)):
                pass
            resident.append(resident_bytes(worker_pids(pool)[0]))
    finally:
        pool.close()
    assert resident[-1] - resident[9] < 20 << 20


def test_videos_that_nobody_asks_for_give_way(held: Held) -> None:
    """Room for one of the largest: a second one waits for the first, which is closed then."""
    pool = ClipPool(4, memory_bytes=0)
    assert pool.memory_bytes == PROBE_BYTES
    large = (2304, 4096)  # as facts may say
    files = [held.put(make()), held.put(make("webm"))]

    def count(file: MemoryAddress) -> int:
        with pool.frames(file, large, (0, 1)) as found:
            return len(found)

    with ThreadPoolExecutor(1) as threads:
        with pool.frames(files[0], large, (0, 0)):
            waiting = threads.submit(count, files[1])
            while not pool.num_waiting:
                assert not waiting.done()
            assert len(worker_pids(pool)) == 1
        assert waiting.result(PATIENCE_S) == 2
        assert count(files[0]) == 2 and len(worker_pids(pool)) == 1
    pool.close()


def test_an_mp4_with_its_index_first(pool: ClipPool, held: Held) -> None:
    assert pool.probe(held.put(index_first(make()))).num_frames == 24


def test_workers_decode_with_an_index_that_is_stored_beside_the_file(
    pool: ClipPool, held: Held
) -> None:
    data = make("mp4", options={"g": "6"})
    facts, file = pool.probe(held.put(data)), held.put(data)
    index = held.put(facts.index)
    with pool.frames(file, SIZE, (7, 13), 0, index) as found:
        expected = frame_pixels(data, (7, 13))
        assert all(np.array_equal(*both) for both in zip(found, expected, strict=True))
    # The worker reads this index instead of the file's packets.
    damaged = held.put(facts.index[:-1])
    with pytest.raises(InvalidVideo), pool.frames(held.put(data), SIZE, (7, 13), 0, damaged):
        pass
    held.close()
    with pool.frames(file, SIZE, (14, 15), 0, index) as found:  # the worker has both mapped
        assert np.array_equal(found[0], frame_pixels(data, (14,))[0])
    with pytest.raises(VideoNotHeld), pool.frames(file, SIZE, (0, 1), 1, index):
        pass
