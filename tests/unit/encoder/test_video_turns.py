"""A lane of a video decodes the units of a segment in the order of their frames, and then another
segment. Each unit is decoded once, and no segment by two lanes at the same time.
"""

import random

from services.encoder.engine.video_turns import LaneUnit, Turn, VideoTurns


def test_units_of_a_video_are_taken_in_the_order_of_their_frames() -> None:
    turns = VideoTurns()
    assert turns.add("a", (8, 9), (1.0, 10)) == (1.0, 10)
    assert turns.add("a", (0, 1), (2.0, 11)) is None
    assert turns.add("b", (4, 5), (1.5, 12)) == (1.5, 12)
    assert turns.take(10) == LaneUnit(11, 0)
    assert turns.add("a", (4, 5), (3.0, 13), start=3, max_lanes=9) is None  # no further lane
    assert turns.done("a") == (1.0, 10)
    assert turns.take(10) == LaneUnit(10, 0)
    assert turns.done("a") == (3.0, 13)
    assert turns.take(13) == LaneUnit(13, 0)
    assert turns.holds("a")
    assert turns.done("a") is None
    assert not turns.holds("a") and turns.holds("b")
    assert turns.take(12) == LaneUnit(12, 0) and turns.done("b") is None
    assert turns.add("a", (2, 3), (4.0, 14)) == (4.0, 14)


def test_lanes_take_segments_in_order_and_continue_where_their_decoder_is() -> None:
    turns = VideoTurns(max_further=1)
    firsts = [(frame, frame + 1) for frame in range(0, 12, 2)]
    added = [
        turns.add("a", frames, (0.0, job_id), start=4 * (job_id // 2), max_lanes=2)
        for job_id, frames in enumerate(firsts)
    ]
    assert added == [(0.0, 0), None, (0.0, 2), None, None, None]
    assert turns.take(2) == LaneUnit(2, 1) and turns.take(0) == LaneUnit(0, 0)
    assert turns.done("a", 1) == (0.0, 3) and turns.take(3) == LaneUnit(3, 1)
    assert turns.done("a", 1) == (0.0, 4) and turns.take(4) == LaneUnit(4, 1)
    assert turns.done("a", 0) == (0.0, 1) and turns.take(1) == LaneUnit(1, 0)
    assert turns.done("a", 0) is None  # the last segment has a lane
    # A unit of the first segment is decoded by the lane that has decoded its other units.
    assert turns.add("a", (3, 3), (0.0, 6), start=0, max_lanes=2) == (0.0, 6)
    assert turns.take(6) == LaneUnit(6, 0) and turns.done("a", 0) is None
    assert turns.done("a", 1) == (0.0, 5) and turns.take(5) == LaneUnit(5, 1)
    assert turns.done("a", 1) is None


def test_a_further_lane_ends_with_its_segment_while_others_wait_for_threads() -> None:
    turns = VideoTurns(max_further=2)
    for job_id in range(3):
        turns.add("a", (job_id, job_id), (0.0, job_id), start=job_id, max_lanes=2)
    assert turns.take(0).lane == 0 and turns.take(1).lane == 1
    assert turns.done("a", 1, is_busy=True) is None
    assert turns.done("a", 0, is_busy=True) == (0.0, 2)
    assert turns.take(2) == LaneUnit(2, 0) and turns.done("a", 0, is_busy=True) is None


def test_a_lane_has_the_lowest_rank_of_the_units_that_wait_for_it() -> None:
    turns = VideoTurns()
    assert turns.add("a", (0, 1), (5.0, 1)) == (5.0, 1) and turns.moved("a") == []
    assert turns.add("a", (2, 3), (6.0, 2)) is None and turns.moved("a") == []
    assert turns.add("a", (4, 5), (4.0, 3)) is None
    assert turns.moved("a") == [((5.0, 1), 4.0)] and turns.moved("a") == []
    assert turns.add("a", (9, 9), (3.0, 4), start=8) is None  # a segment without a lane
    assert turns.moved("a") == [((4.0, 1), 3.0)]
    turns.move("a", 2, 1.0)
    assert turns.moved("a") == [((3.0, 1), 1.0)]
    assert turns.take(1) == LaneUnit(1, 0)
    turns.move("a", 3, 0.0)
    turns.move("a", 1, 0.0)  # is being decoded
    turns.move("b", 7, 0.0)
    assert turns.moved("a") == turns.moved("b") == []  # the lane has no turn now
    assert turns.done("a") == (0.0, 2) and turns.take(2) == LaneUnit(2, 0)
    assert turns.done("a") == (0.0, 3) and turns.take(3) == LaneUnit(3, 0)
    assert turns.done("a") == (3.0, 4) and turns.take(4) == LaneUnit(4, 0)
    assert turns.done("a") is None


def test_each_unit_is_taken_once_whatever_the_order_of_threads() -> None:
    rng = random.Random(0)
    for _ in range(200):
        most = rng.randint(0, 3)
        turns, queued = VideoTurns(max_further=most), list[tuple[str, Turn]]()
        running, taken = list[tuple[str, LaneUnit]](), list[int]()
        starts = dict[int, tuple[str, int]]()
        waiting = list(range(rng.randint(1, 40)))
        while waiting or queued or running:
            step = rng.random()
            if waiting and step < 0.4:
                job_id, video = waiting.pop(0), rng.choice("ab")
                frame = rng.randrange(30)
                starts[job_id] = video, frame // 10 * 10
                turn = turns.add(
                    video,
                    (frame, frame),
                    (rng.random(), job_id),
                    start=starts[job_id][1],
                    max_lanes=rng.choice((1, 4)),
                )
                queued += [(video, turn)] if turn else []
            elif queued and step < 0.7:
                video, turn = queued.pop(rng.randrange(len(queued)))
                unit = turns.take(turn[1])
                running.append((video, unit))
                taken.append(unit.job_id)
                segments = [starts[each.job_id] for _, each in running]
                assert len(segments) == len(set(segments)) <= 2 + most
                lanes = [(name, each.lane) for name, each in running]
                assert len(lanes) == len(set(lanes)) and unit.lane <= most
            elif running:
                video, unit = running.pop(rng.randrange(len(running)))
                following = turns.done(video, unit.lane, is_busy=rng.random() < 0.3)
                queued += [(video, following)] if following else []
            if rng.random() < 0.3:  # ranks of units do not decide who takes them
                video = rng.choice("ab")
                turns.move(video, rng.randrange(40), rng.random(), start=rng.choice((0, 10, 20)))
                moved = dict(turns.moved(video))
                assert len(moved) <= 1 + most and not turns.moved(video)
                assert set(moved) <= {turn for name, turn in queued if name == video}
                queued = [
                    (name, (moved.get(turn, turn[0]), turn[1]) if name == video else turn)
                    for name, turn in queued
                ]
        assert sorted(taken) == sorted(starts)
