"""Videos that cost more than they weigh: each is read or refused within a probe's CPU time."""

import os
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from services.common.embeddings.shared_memory import MemoryAddress, create_memory
from services.common.errors import InvalidVideo
from services.encoder.decoding.clips.clip_pool import ClipPool
from services.encoder.decoding.clips.frames import Frames, probe
from services.encoder.decoding.clips.questions import Facts
from tests.attacks import videos
from tests.videos import decoded, index_first, make, segments


@pytest.fixture(scope="module")
def pool() -> Iterator[ClipPool]:
    pool = ClipPool(1, memory_bytes=0)
    yield pool
    pool.close()


def probed(pool: ClipPool, data: bytes) -> Facts:
    """A file's facts, by a process with a probe's limits."""
    fd, name = create_memory(len(data))
    try:
        os.pwrite(fd, data, 0)
        return pool.probe(MemoryAddress(os.getpid(), fd, name, len(data)))
    finally:
        os.close(fd)


@pytest.mark.parametrize("frame_bytes", [None, 100, 1 << 20], ids=["keyframe", "100", "file"])
def test_frames_that_overlap_are_refused(frame_bytes: int | None) -> None:
    """All at once they have 25 MB to 250 GB, of which three are read."""
    with pytest.raises(InvalidVideo, match="overlap in the file"):
        probe(memoryview(videos.piled(frame_bytes=frame_bytes)))


@pytest.mark.parametrize("kind", ["gif", "ivf"])
def test_as_many_frames_as_may_be_are_read_in_time(pool: ClipPool, kind: str) -> None:
    facts = probed(pool, getattr(videos, kind)())
    assert facts.num_frames == videos.MOST_FRAMES
    assert len(facts.frame_digests) == 16 * videos.MOST_FRAMES


@pytest.mark.parametrize("kind", ["gif", "ivf"])
def test_more_frames_are_refused_in_time(pool: ClipPool, kind: str) -> None:
    with pytest.raises(InvalidVideo, match="more than 250000 frames"):
        probed(pool, getattr(videos, kind)(frames=2 * videos.MOST_FRAMES))


def test_a_first_frame_that_cannot_be_decoded_is_given_up_soon(pool: ClipPool) -> None:
    """And is not looked for in 250,000 packets, none of which gives a frame."""
    with pytest.raises(InvalidVideo, match="frame 0 of the video cannot be decoded"):
        probed(pool, videos.piled(frame_bytes=11))


def test_an_edit_list_may_show_a_part_again() -> None:
    """Its packets come once for each time, so that together they have more bytes than the file."""
    data = segments(make(options={"g": "6"}), *[(1500, 0)] * 4)
    shown = decoded(data)
    with closing(Frames(memoryview(data))) as frames:
        assert frames.index.num_frames == len(shown) > 60
        last = frames.frame(len(shown) - 1).to_ndarray(format="rgb24")
    assert np.array_equal(last, shown[-1])


def test_frames_that_were_cut_off_are_no_overlap() -> None:
    data = index_first(make(frames=240, options={"bf": "0"}))
    facts = probe(memoryview(data[: len(data) // 2]))
    assert 60 < facts.num_frames < 240
