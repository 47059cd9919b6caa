"""The division of a clip among encoders: where ranges begin, and when a clip is not divided."""

import random
from itertools import pairwise

import pytest

from services.common.geometry import Unit
from services.gateway.media.clip_ranges import ClipRanges

HD, SD = 1920 * 1080, 640 * 360


def clip(
    num_frames: int, *, gop: int = 30, apart: int = 15, num_pixels: int = HD, num_bytes: int = 1000
) -> ClipRanges:
    """A clip with a key frame each `gop` frames, of which each `apart`-th frame is sampled."""
    frames = range(0, num_frames - apart, 2 * apart)
    units = [Unit((1, 2, 2), (first, first + apart)) for first in frames]
    keys = range(gop, num_frames, gop)
    return ClipRanges(units, keys, num_frames, num_pixels, num_bytes)


def seconds(ranges: ClipRanges, numbers: list[int]) -> list[float]:
    """Decoding time of each range."""
    found = [0.0] * (max(numbers) + 1)
    for number, unit in zip(numbers, ranges.units, strict=True):
        found[number] += ranges.unit_s[unit.frames or (0, 0)]
    return found


def test_ranges_begin_at_key_frames_and_take_about_equal_time() -> None:
    ranges = clip(1800)
    for count in (2, 3, 4):
        numbers = ranges.divide(ranges.units, count)
        assert numbers == sorted(numbers) and set(numbers) == set(range(count))
        for unit, (before, number) in zip(ranges.units[1:], pairwise(numbers), strict=True):
            assert unit.frames and (before == number or unit.frames[0] % 30 == 0)
        first, *others = seconds(ranges, numbers)
        # The others begin later. A key frame may lie half its distance from the best cut, at
        # either end of a range.
        key_s = 30 * HD * 1.1e-9
        for other in others:
            assert abs(first - ranges.further_s - other) <= key_s


def test_encoders_that_have_the_file_get_equal_ranges() -> None:
    # A minute with a key frame each 250 frames, as x264 writes it by default.
    ranges = clip(1800, gop=250, num_bytes=7 << 20)
    numbers = ranges.divide(ranges.units, 2, num_ready=2)
    assert [unit.frames[0] for unit in ranges.units if unit.frames][numbers.index(1)] == 1020
    # Of three encoders, the last begins later.
    ranges = clip(1800)
    for count, num_ready in ((2, 2), (3, 2), (4, 2), (4, 4)):
        found = seconds(ranges, ranges.divide(ranges.units, count, num_ready=num_ready))
        assert len(found) == count
        later_s = [ranges.further_s if at >= num_ready else 0.0 for at in range(count)]
        ends = [own + later for own, later in zip(found, later_s, strict=True)]
        assert max(ends) - min(ends) <= 2 * 30 * HD * 1.1e-9
    # What is ready but would decode for less time than the file takes to read, gets no range.
    short = clip(100, num_bytes=60 << 20)
    assert set(short.divide(short.units, 2, num_ready=2)) == {0}


def test_decoding_of_all_units_is_that_of_one_pass() -> None:
    ranges = clip(1800, gop=10_000)
    last = max(frame for unit in ranges.units for frame in unit.frames or ())
    assert sum(ranges.unit_s.values()) == pytest.approx((last + 1) * HD * 1.1e-9)
    # Of frames 50 apart, only those from the key frame before each are decoded: 0; 30 to 50; 90 to
    # 100; 150; and so on.
    sparse = clip(600, apart=50)
    assert sum(sparse.unit_s.values()) == pytest.approx(4 * (1 + 21 + 11) * HD * 1.1e-9)


@pytest.mark.parametrize(
    "ranges",
    [
        clip(30), clip(1800, num_pixels=64 * 48), clip(1800, num_pixels=SD),
        clip(1800, gop=10_000), clip(100, num_bytes=60 << 20),
    ],
    ids=["short", "tiny frames", "small frames", "no key frames", "a large file"],
)  # fmt: skip
def test_what_does_not_pay_is_not_divided(ranges: ClipRanges) -> None:
    assert set(ranges.divide(ranges.units, 4)) == {0}


def test_a_range_pays_for_its_encoder() -> None:
    """The number of ranges grows with the clip, and each takes as long as its file's reading."""
    counts = []
    for num_frames in (100, 150, 300, 600, 1800):
        ranges = clip(num_frames, num_pixels=1280 * 720, apart=14)
        found = seconds(ranges, ranges.divide(ranges.units, 8))
        counts.append(len(found))
        assert all(each >= 0.5 * ranges.further_s for each in found[1:])
    assert counts == sorted(counts) and counts[0] == 1 and counts[-1] >= 4


def test_units_that_are_known_are_left_out() -> None:
    ranges = clip(1800)
    new = ranges.units[20:]
    numbers = ranges.divide(new, 2)
    assert len(numbers) == len(new) and set(numbers) == {0, 1}
    assert set(ranges.divide(ranges.units[-1:], 4)) == {0}


def test_no_division_takes_longer_than_one_encoder() -> None:
    rng = random.Random(0)
    for _ in range(300):
        num_frames = rng.randint(2, 3000)
        keys = sorted(rng.sample(range(1, num_frames), rng.randint(0, min(20, num_frames - 1))))
        frames = sorted(rng.choices(range(num_frames), k=2 * rng.randint(1, 60)))
        units = [
            Unit((1, 2, 2), pair) for pair in sorted({*zip(frames[::2], frames[1::2], strict=True)})
        ]
        ranges = ClipRanges(units, keys, num_frames, rng.choice((HD, SD)), rng.randrange(1 << 26))
        numbers = ranges.divide(units, rng.randint(1, 8))
        assert numbers == sorted(numbers) and set(numbers) == set(range(numbers[-1] + 1))
        first, *others = seconds(ranges, numbers)
        whole = sum(ranges.unit_s.values()) + 1e-9
        assert max([first, *(ranges.further_s + other for other in others)]) <= whole


def called(ranges: ClipRanges, numbers: list[int]) -> list[tuple[int, int]]:
    """Range and first frame of each unit, in the order of the calls."""
    order = ranges.call_order(ranges.units, numbers)
    assert sorted(order) == list(range(len(ranges.units)))
    return [(numbers[at], (ranges.units[at].frames or (0, 0))[0]) for at in order]


def test_the_first_units_of_segments_that_take_long_are_called_first() -> None:
    ranges = clip(1800, gop=250)
    numbers = ranges.divide(ranges.units, 2, num_ready=2)
    found = called(ranges, numbers)
    # The first unit of each of the eight segments, of both encoders.
    first = [0, 270, 510, 750, 1020, 1260, 1500, 1770]
    assert found[:8] == [(int(frame >= 1020), frame) for frame in first]
    for start, stop in pairwise([0, 250, 500, 750, 1000, 1250, 1500, 1750, 1800]):
        of_segment = [frame for _, frame in found if start <= frame < stop]
        assert of_segment == sorted(of_segment)


def test_units_that_are_decoded_faster_than_calls_come_keep_their_order() -> None:
    tiny = clip(1800, gop=250, num_pixels=64 * 48)
    assert tiny.call_order(tiny.units, [0] * len(tiny.units)) == list(range(len(tiny.units)))
    # 30 frames of 640 x 360 take as long as three calls, so that three segments are interleaved.
    small = clip(720, gop=120, num_pixels=SD)
    frames = [frame for _, frame in called(small, [0] * len(small.units))]
    assert frames[:12] == [0, 120, 240, 30, 150, 270, 60, 180, 300, 90, 210, 330]
    assert frames[12:15] == [360, 480, 600]
    assert small.call_order(small.units[-1:], [0]) == [0]


def test_no_more_segments_are_begun_early_than_an_encoder_decodes_together() -> None:
    ranges = clip(1800, gop=120)
    frames = [frame for _, frame in called(ranges, [0] * len(ranges.units))]
    assert frames[:9] == [*range(0, 960, 120), 30]
    assert max(frames[:32]) < 960 <= min(frames[32:])
