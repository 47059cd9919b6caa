"""The figures of `benchmarks.imposed`: which requests count, and which tokens."""

import pytest

from benchmarks.client import Sample
from benchmarks.imposed import staggered, steady


def sample(start: float, first: float, last: float, tokens: int) -> Sample:
    return Sample(start=start, first=first, last=last, end=last, completion_tokens=tokens)


def test_the_first_answers_end_at_different_times() -> None:
    assert staggered(160, 16) == [10 * (1 + place) for place in range(16)]
    assert staggered(160, 1) == [160]
    assert staggered(2, 4) == [1, 1, 2, 2]


def test_the_steady_part_leaves_the_first_requests_out() -> None:
    # Two streams, 10 tokens a second each. The first two requests begin together.
    samples = [
        sample(4.0, 5.0, 9.0, 40), sample(0.0, 1.0, 2.0, 10), sample(0.0, 1.0, 4.0, 30),
        sample(2.0, 2.5, 6.5, 40), sample(6.5, 7.5, 9.5, 20),
    ]  # fmt: skip
    found = steady(samples, 2)
    assert found.waits_ms == pytest.approx([500.0, 1000.0, 1000.0])
    assert found.gaps_ms == pytest.approx([4e3 / 39, 4e3 / 39, 2e3 / 19])
    # From 2 to 6.5 s: 20 tokens of the second, 40 of the third, and 15 of the fourth.
    assert found.tokens_s == pytest.approx(75 / 4.5)
