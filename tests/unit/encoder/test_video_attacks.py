"""Videos that cost more than they weigh: each is read or refused within a probe's CPU time."""

import time
from collections.abc import Generator
from contextlib import closing, contextmanager

import numpy as np
import pytest

from services.common.errors import InvalidVideo
from services.encoder.decoding.clips.frames import Frames, probe
from tests.attacks import videos
from tests.videos import decoded, index_first, make, segments

CPU_S = 4.0  # that a probe has


@contextmanager
def in_time() -> Generator[None]:
    """The block takes no more CPU time than a probe has."""
    start = time.process_time()
    yield
    assert time.process_time() - start < CPU_S


@pytest.mark.parametrize("frame_bytes", [None, 100, 1 << 20], ids=["keyframe", "100", "file"])
def test_frames_that_overlap_are_refused(frame_bytes: int | None) -> None:
    """All at once they have 25 MB to 250 GB, of which three are read."""
    with pytest.raises(InvalidVideo, match="overlap in the file"):
        probe(memoryview(videos.piled(frame_bytes=frame_bytes)))


@pytest.mark.parametrize("kind", ["gif", "ivf"])
def test_as_many_frames_as_may_be_are_read_in_time(kind: str) -> None:
    data = getattr(videos, kind)()
    with in_time():
        facts = probe(memoryview(data))
    assert facts.num_frames == videos.MOST_FRAMES
    assert len(facts.frame_digests) == 16 * videos.MOST_FRAMES


@pytest.mark.parametrize("kind", ["gif", "ivf"])
def test_more_frames_are_refused_in_time(kind: str) -> None:
    data = getattr(videos, kind)(frames=2 * videos.MOST_FRAMES)
    with in_time(), pytest.raises(InvalidVideo, match="more than 250000 frames"):
        probe(memoryview(data))


def test_a_first_frame_that_cannot_be_decoded_is_given_up_soon() -> None:
    """And is not looked for in 250,000 packets, none of which gives a frame."""
    data = videos.piled(frame_bytes=11)
    with in_time(), pytest.raises(InvalidVideo, match="frame 0 of the video cannot be decoded"):
        probe(memoryview(data))


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
