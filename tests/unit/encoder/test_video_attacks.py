"""Videos that cost more than they weigh: each is read or refused within a probe's CPU time."""

import time
from contextlib import closing

import numpy as np
import pytest

from services.common.errors import InvalidVideo
from services.encoder.decoding.clips.container import opened, packets_of, read_index
from services.encoder.decoding.clips.frames import Frames, probe
from tests.attacks import videos
from tests.cases import first
from tests.noise import least
from tests.videos import decoded, index_first, make, segments

# A tenth of the frames is read at most three times as fast, frame by frame. What grows with the
# square of the frames would differ by ten.
_PARTS, _SLACK = 10, 3.0
pytestmark = pytest.mark.thorough
KINDS = first(1, ["ivf", "gif"])


def _read_s(data: bytes) -> float:
    """Returns the CPU seconds in which `probe` reads a file."""
    start = time.process_time()
    probe(memoryview(data))
    return time.process_time() - start


@pytest.mark.parametrize("frame_bytes", [None, 100, 1 << 20], ids=["keyframe", "100", "file"])
def test_frames_that_overlap_are_refused(frame_bytes: int | None) -> None:
    """All at once they have 25 MB to 250 GB, of which three are read."""
    with pytest.raises(InvalidVideo, match="overlap in the file"):
        probe(memoryview(videos.piled(frame_bytes=frame_bytes)))


@pytest.mark.parametrize("kind", KINDS)
def test_as_many_frames_as_may_be_are_read_in_proportional_time(kind: str) -> None:
    make_video = getattr(videos, kind)
    data = make_video()
    facts = probe(memoryview(data))
    assert facts.num_frames == videos.MOST_FRAMES
    assert len(facts.frame_digests) == 16 * videos.MOST_FRAMES
    part = make_video(frames=videos.MOST_FRAMES // _PARTS)
    bound_s = _SLACK * _PARTS * _read_s(part)
    assert least(lambda: _read_s(data), bound_s) <= bound_s


@pytest.mark.parametrize("kind", KINDS)
def test_more_frames_are_refused_when_the_first_of_them_is_met(kind: str) -> None:
    """The rest of the file is not read."""
    data = getattr(videos, kind)(frames=videos.MOST_FRAMES + 1000)
    with opened(memoryview(data)) as (container, stream):
        read = 0
        with pytest.raises(InvalidVideo, match="more than 250000 frames"):
            for _ in packets_of(container, stream):
                read += 1
    assert read <= videos.MOST_FRAMES


def test_a_first_frame_that_cannot_be_decoded_is_given_up_soon() -> None:
    """And is not looked for in 100,000 packets, none of which gives a frame: that would take eight
    times as long as it takes to read them.
    """
    data = memoryview(videos.piled(frames=100_000, frame_bytes=11))
    start = time.process_time()
    with opened(data) as (container, stream):
        read_index(container, stream, len(data))
    bound_s = _SLACK * (time.process_time() - start)

    def given_up_s() -> float:
        start = time.process_time()
        with pytest.raises(InvalidVideo, match="frame 0 of the video cannot be decoded"):
            probe(data)
        return time.process_time() - start

    assert least(given_up_s, bound_s) <= bound_s


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
