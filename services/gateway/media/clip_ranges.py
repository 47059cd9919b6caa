"""The division of a clip's units into ranges that several encoders decode.

A range begins at a key frame, so that an encoder decodes it without the frames before. The bits of
an embedding do not depend on the division.

Each further encoder is sent the whole file and reads all packets to probe it, and its decoders read
the packets before their frames again. Only a long range pays for that time, and other clips could
use the CPU.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np

from services.common.geometry import Int32s, Unit

# Costs in seconds, measured on clips of 720p with H.264 (benchmarks/LOG.md). Only their ratios
# matter: decoding a pixel; reading the packet of a frame; sending, copying and digesting a byte;
# the calls and the opening of the file.
_PIXEL_S, _PACKET_S, _BYTE_S, _START_S = 1.1e-9, 65e-6, 3e-9, 0.03
# Most seconds between two encode calls that an idle encoder accepts.
_CALL_S = 2e-3
# Most segments of a range whose units are called in turn. An encoder with 16 cores decodes eight
# segments of a clip at the same time.
_MAX_TOGETHER = 8


@dataclass(slots=True)
class ClipRanges:
    """The work of decoding a clip.

    Args:
        units: pairs of frames that are encoded, in order.
        key_frames: frames behind frame 0 with which decoding may start, in order.
        num_frames: number of frames of the file.
        num_pixels: number of pixels of a frame, before it is resized.
        num_bytes: size of the file.

    Attributes:
        further_s: seconds that each encoder but the first needs before it decodes.
        unit_s: seconds of decoding for each pair of frames, in one pass over the clip. Frames
            between a sampled frame and the next key frame are not decoded.
    """

    units: Sequence[Unit]
    key_frames: Sequence[int] | Int32s
    num_frames: int
    num_pixels: int
    num_bytes: int
    further_s: float = field(init=False)
    unit_s: dict[tuple[int, int], float] = field(init=False)

    def __post_init__(self) -> None:
        packets_s = 2 * self.num_frames * _PACKET_S
        self.further_s = _START_S + packets_s + self.num_bytes * _BYTE_S
        self.unit_s, last = dict[tuple[int, int], float](), -1
        for unit in self.units:
            num_decoded = 0
            for frame in unit.frames or ():
                num_decoded += max(frame - max(last, self._start(frame) - 1), 0)
                last = max(last, frame)
            self.unit_s[unit.frames or (0, 0)] = num_decoded * self.num_pixels * _PIXEL_S

    @classmethod
    def of(
        cls,
        units: Sequence[Unit],
        key_frames: bytes,
        num_frames: int,
        num_pixels: int,
        num_bytes: int,
    ) -> "ClipRanges":
        """Creates the ranges from a `ProbeResponse`'s fields."""
        frames = np.frombuffer(key_frames, "<i4")
        return cls(units, frames, num_frames, num_pixels, num_bytes)

    def divide(self, units: Sequence[Unit], num_encoders: int, *, num_ready: int = 1) -> list[int]:
        """Divides units into ranges of about equal time.

        The number of ranges is the largest for which the range of each further encoder takes at
        least as long as what the encoder does before (`further_s`). So the encoder spends half of
        its time or more on decoding, and the clip is ready earlier than with one encoder less. The
        range of an encoder that has the file already is longer by `further_s`.

        Args:
            units: units of the clip that are to be encoded, in order.
            num_encoders: most ranges.
            num_ready: number of encoders that have the file, which are the first. At least 1.

        Returns:
            The number of the range of each unit, from 0 and without gaps.
        """
        ends = list(accumulate(self.unit_s[unit.frames or (0, 0)] for unit in units))
        total_s, further_s, count = ends[-1], self.further_s, 1
        while count < num_encoders:
            # Seconds by which the ranges of the encoders that have the file are longer.
            more_s = num_ready * further_s if count >= num_ready else 0.0
            if total_s - more_s < (count + 1) * further_s:
                break
            count += 1
        longer_s = further_s if count > num_ready else 0.0
        starts = [self._start((unit.frames or (0, 0))[0]) for unit in units]
        # Units before which a range may begin, with the seconds before each.
        cuts = [at for at, (a, b) in enumerate(pairwise(starts), 1) if a < b]
        chosen, range_s = set[int](), (total_s - num_ready * longer_s) / count
        for number in range(1, count):
            wanted_s = min(number, num_ready) * longer_s + number * range_s
            nearest = min(cuts, key=lambda at: abs(ends[at - 1] - wanted_s), default=0)
            # A clip with few key frames has fewer ranges.
            if nearest and abs(ends[nearest - 1] - wanted_s) <= range_s / 2:
                chosen.add(nearest)
        return [bisect_right(sorted(chosen), at) for at in range(len(units))]

    def call_order(self, units: Sequence[Unit], ranges: Sequence[int]) -> list[int]:
        """Returns the order of the encode calls for divided units, as indices of the units.

        An encoder decodes several *segments* (the frames from one key frame to the next) at the
        same time, and begins a segment when it has accepted the segment's first call. Therefore
        the first units of several segments are called first, then their second units, and so on.
        The number of these segments is limited, so that the next unit of a segment has come when
        the unit before is decoded. Otherwise the decoder would leave the segment and come back.

        Args:
            units: units of the clip that are to be encoded, in order.
            ranges: number of the range of each unit, as `divide` returns it.
        """
        mean_s = sum(self.unit_s[unit.frames or (0, 0)] for unit in units) / len(units)
        num_together = max(1, min(_MAX_TOGETHER, int(mean_s / _CALL_S)))
        places, segments = list[tuple[int, int, int]](), dict[int, dict[int, int]]()
        for at, (unit, number) in enumerate(zip(units, ranges, strict=True)):
            found = segments.setdefault(number, {})  # number of units of each segment of the range
            start = self._start((unit.frames or (0, 0))[0])
            found[start] = found.get(start, -1) + 1
            places.append(((len(found) - 1) // num_together, found[start], at))
        return [at for _, _, at in sorted(places)]

    def _start(self, frame: int) -> int:
        """Returns the frame from which a frame is decoded."""
        at = int(np.searchsorted(self.key_frames, frame, "right"))
        return int(self.key_frames[at - 1]) if at else 0
