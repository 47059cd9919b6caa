"""When a kernel that takes the host longer may serve."""

import pytest

from services.common.nn import launches


def test_launches_are_hidden_in_graphs_and_in_long_steps() -> None:
    assert not launches.are_hidden(1024) and launches.are_hidden(2048)
    with launches.captured():
        assert launches.are_hidden(1)
    assert not launches.are_hidden(1)


def test_a_capture_within_another_does_not_end_it() -> None:
    with launches.captured():
        with launches.captured():
            pass
        assert launches.are_hidden(1)
    assert not launches.are_hidden(1)


def test_they_are_not_hidden_after_a_capture_that_failed() -> None:
    with pytest.raises(ValueError, match="no"), launches.captured():
        raise ValueError("no")
    assert not launches.are_hidden(1)
