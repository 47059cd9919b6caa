"""What a draining decoder offers to others, with a clock of the test's."""

import pytest

from services.decoder.front.drain import Drain

GRACE_S = 300.0
TOKEN_S = 0.02


def drained(num_tokens: dict[int, int], token_s: float = TOKEN_S) -> dict[int, float]:
    """When each sequence is offered, in seconds after the drain's start, until all that were not
    offered have ended or the grace is over. One that is offered is continued elsewhere.
    """
    start = 1000.0
    drain, offered, now = Drain(start, GRACE_S), dict[int, float](), start
    running = dict(num_tokens)
    while now < drain.ends_at and running:
        left = {number: tokens * token_s for number, tokens in running.items()}
        for number in drain.due(now, left):
            offered[number] = now - start
            del running[number]
        now += drain.period_s
        for number in list(running):
            running[number] -= round(drain.period_s / token_s)
            if running[number] <= 0:
                del running[number]
    assert not running, "some are cut at the end of the grace"
    return offered


def test_what_fits_into_the_grace_finishes_and_the_rest_moves_before_its_end() -> None:
    fits = round(GRACE_S / TOKEN_S)
    offered = drained({1: 10, 2: fits - 1, 3: fits + 1, 4: 100_000})
    assert offered.keys() == {3, 4}
    assert max(offered.values()) <= 0.9 * GRACE_S


def test_many_move_one_after_the_other_and_those_with_the_most_to_do_first() -> None:
    offered = drained({number: 20_000 + number for number in range(256)})
    assert len(offered) == 256
    assert min(offered.values()) == pytest.approx(GRACE_S / 2)
    at_once = max(list(offered.values()).count(at) for at in set(offered.values()))
    assert at_once <= 4
    assert [offered[n] for n in range(255, -1, -1)] == sorted(offered.values())


def test_what_turns_out_slow_is_offered_late_and_only_once() -> None:
    drain = Drain(0.0, GRACE_S)
    assert drain.due(200.0, {1: 50.0}) == []
    assert drain.due(280.0, {1: 45.0}) == [1]
    assert drain.due(281.0, {1: 45.0}) == []


def test_without_a_grace_nothing_is_offered_in_vain() -> None:
    drain = Drain(5.0, 0.0)
    assert drain.ends_at == 5.0
