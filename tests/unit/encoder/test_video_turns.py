"""One thread at a time works on a video, and takes the unit whose frames come first."""

from services.encoder.engine.video_turns import VideoTurns


def test_units_of_a_video_are_taken_in_the_order_of_their_frames() -> None:
    turns = VideoTurns()
    assert turns.add("a", (8, 9), (1.0, 10)) == (1.0, 10)
    assert turns.add("a", (0, 1), (2.0, 11)) is None
    assert turns.add("b", (4, 5), (1.5, 12)) == (1.5, 12)
    assert turns.take("a") == 11
    assert turns.add("a", (4, 5), (3.0, 13)) is None  # in work: no second thread
    assert turns.done("a") == (3.0, 13)
    assert turns.take("a") == 13
    assert turns.done("a") == (1.0, 10)
    assert turns.take("a") == 10
    assert turns.done("a") is None
    assert turns.take("b") == 12 and turns.done("b") is None
    assert turns.add("a", (2, 3), (4.0, 14)) == (4.0, 14)
