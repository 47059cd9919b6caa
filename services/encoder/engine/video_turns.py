"""The order in which the units of a video are decoded, and its division among threads.

A *segment* is the part of a video from one key frame to the next. A *lane* is a thread with a
decoder of its own that has the video open. A lane decodes the units of one segment in the order of
their frames, even if a later unit of the segment has a lower rank, and then takes another segment.
The lane's turn has the lowest rank of the units that wait for the lane: the unit with this rank
waits for earlier units of the segment. A video has one lane, and further lanes only while threads
and memory are free. Between two units of a lane, images and other videos have their turns.
"""

import threading
from collections.abc import Hashable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

Turn = tuple[float, int]  # rank and job id of an entry of the preparation queue
_Waiting = tuple[tuple[int, int], int, float]  # frames, job id and rank of a unit


class LaneUnit(NamedTuple):
    """A unit that a lane decodes.

    Attributes:
        job_id: job id of the unit.
        lane: number of the lane, from 0. Units of one lane are decoded by the same decoder.
    """

    job_id: int
    lane: int


@dataclass(slots=True)
class _Video:
    """The units of a video that wait, and its lanes.

    Attributes:
        segments: waiting units by segment, which is named by its first frame. Units are a heap.
        lanes: segment of each lane that has a turn or is decoding.
        last: last segment of each lane. Its decoder continues there without a step back.
        turns: turn of each lane that is not decoding.
        may_move: True if a rank has changed since `VideoTurns.moved`, or if a unit was added whose
            rank is lower than that of a turn.
    """

    segments: dict[int, list[_Waiting]] = field(default_factory=dict[int, list[_Waiting]])
    lanes: dict[int, int] = field(default_factory=dict[int, int])
    last: dict[int, int] = field(default_factory=dict[int, int])
    turns: dict[int, Turn] = field(default_factory=dict[int, Turn])
    may_move: bool = False

    def lowest_rank(self, lane: int) -> float:
        """Returns the lowest rank of the units of the lane's segment and of segments without a
        lane.
        """
        others = {segment for other, segment in self.lanes.items() if other != lane}
        return min(
            rank
            for segment, units in self.segments.items()
            if segment not in others
            for _, _, rank in units
        )

    def unclaimed(self) -> int | None:
        """Returns the first segment with waiting units that no lane has. None if there is none."""
        return min(self.segments.keys() - set(self.lanes.values()), default=None)

    def free_lane(self, segment: int) -> int:
        """Returns the number of a new lane: the one whose decoder is closest before the segment,
        or an unused number.
        """
        used = [lane for lane in self.last if lane not in self.lanes and self.last[lane] <= segment]
        if used:
            return max(used, key=lambda lane: self.last[lane])
        return next(lane for lane in range(len(self.lanes) + 1) if lane not in self.lanes)


class VideoTurns:
    """The waiting units of each video. Each lane of a video either has one turn in the preparation
    queue or is decoding a unit. Several threads use it.

    Args:
        max_further: most lanes of all videos together in addition to the first lane of each.
    """

    def __init__(self, max_further: int = 0) -> None:
        self._max_further = max_further
        self._lock = threading.Lock()
        self._videos: dict[Hashable, _Video] = {}
        # Video and lane of each queued turn, by the turn's job id.
        self._turns: dict[int, tuple[Hashable, int]] = {}

    def add(
        self,
        video: Hashable,
        frames: tuple[int, int],
        turn: Turn,
        *,
        start: int = 0,
        max_lanes: int = 1,
    ) -> Turn | None:
        """Adds a unit.

        Args:
            video: name of the unit's video.
            frames: numbers of the unit's two frames.
            turn: rank and job id of the unit.
            start: first frame of the unit's segment.
            max_lanes: most lanes of all videos at which a further lane of this video may begin. 1
                if no thread is free.

        Returns:
            The turn to queue. None if the lanes of the video will decode the unit. Their turns may
            then have other ranks, see `moved`.
        """
        rank, job_id = turn
        with self._lock:
            found = self._videos.setdefault(video, _Video())
            heappush(found.segments.setdefault(start, []), (frames, job_id, rank))
            num_lanes = sum(len(each.lanes) for each in self._videos.values())
            num_further = num_lanes - sum(1 for each in self._videos.values() if each.lanes)
            if found.lanes and (
                start in found.lanes.values()
                or num_lanes >= max_lanes
                or num_further >= self._max_further
            ):
                found.may_move |= any(rank < queued for queued, _ in found.turns.values())
                return None
            return self._begin(video, found, found.free_lane(start), start)

    def move(self, video: Hashable, job_id: int, rank: float, *, start: int = 0) -> None:
        """Gives a unit another rank, if the unit waits. Turns of its video may then have other
        ranks, see `moved`.

        Args:
            video: name of the unit's video.
            job_id: job id of the unit.
            rank: the new rank.
            start: first frame of the unit's segment.
        """
        with self._lock:
            if (found := self._videos.get(video)) is None:
                return
            units = found.segments.get(start, [])
            for index, (frames, other, _) in enumerate(units):
                if other == job_id:  # The heap's order does not depend on ranks.
                    units[index] = frames, job_id, rank
                    found.may_move = True

    def moved(self, video: Hashable) -> list[tuple[Turn, float]]:
        """Returns the queued turns of a video whose ranks have changed, each with its new rank. The
        turns have these ranks from now on.
        """
        changed = list[tuple[Turn, float]]()
        with self._lock:
            found = self._videos.get(video)
            if found is not None and found.may_move:
                found.may_move = False
                for lane, turn in found.turns.items():
                    if (rank := found.lowest_rank(lane)) != turn[0]:
                        found.turns[lane] = rank, turn[1]
                        changed.append((turn, rank))
        return changed

    def take(self, job_id: int) -> LaneUnit:
        """Returns the unit to decode, when the turn with this job id has come."""
        with self._lock:
            video, lane = self._turns.pop(job_id)
            found = self._videos[video]
            del found.turns[lane]
            segment = found.lanes[lane]
            units = found.segments[segment]
            _, first, _ = heappop(units)
            if not units:
                del found.segments[segment]
            return LaneUnit(first, lane)

    def done(self, video: Hashable, lane: int = 0, *, is_busy: bool = False) -> Turn | None:
        """Records that a lane has decoded its unit.

        Args:
            video: name of the video.
            lane: number of the lane.
            is_busy: True if other work waits for a thread. Further lanes then end with their
                segments.

        Returns:
            The turn to queue. None if the lane has ended.
        """
        with self._lock:
            found = self._videos[video]
            segment = found.lanes.pop(lane)
            if segment not in found.segments:
                following = found.unclaimed()
                if following is None or (is_busy and found.lanes):
                    if not found.lanes:
                        del self._videos[video]
                    return None
                segment = following
            return self._begin(video, found, lane, segment)

    def holds(self, video: Hashable) -> bool:
        """Returns whether units of a video wait or are being decoded."""
        with self._lock:
            return video in self._videos

    def _begin(self, video: Hashable, found: _Video, lane: int, segment: int) -> Turn:
        """Gives a lane a segment, and returns the lane's next turn."""
        found.lanes[lane] = found.last[lane] = segment
        _, job_id, _ = found.segments[segment][0]
        turn = found.turns[lane] = found.lowest_rank(lane), job_id
        self._turns[job_id] = video, lane
        return turn
