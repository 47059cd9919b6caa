"""The drafts of the model's own layer, on a simulated device that has the times of an H200."""

from functools import cache

import pytest

from services.decoder.engine.schedule.draft_pace import DraftPace
from tests.timed_device import HEAD_MS, LAUNCH_MS, NUM_DRAFTS, Timed, simulate, step_ms

# With three drafts, an accepted length of 3.2 tokens.
RIGHT = 0.866


class Constant(DraftPace):
    """Drafts behind every step, or behind none."""

    def __init__(self, drafts: bool) -> None:
        super().__init__()
        self._drafts = drafts

    def drafts(self, tokens: float) -> bool:
        return self._drafts


@cache
def without_drafts(count: int, num_prompt: int = 16) -> Timed:
    """Returns what several tests compare with."""
    return simulate(count, num_prompt=num_prompt)


@pytest.mark.parametrize(("count", "least"), [(1, 2.5), (4, 2.3), (16, 2.2)])
@pytest.mark.parametrize("num_prompt", [16, 250])
def test_nearly_every_step_verifies_right_drafts(count: int, least: float, num_prompt: int) -> None:
    plain = without_drafts(count, num_prompt)
    found = simulate(count, (RIGHT,), num_prompt=num_prompt)
    assert plain.ms / found.ms > least
    with_drafts = [drafts for drafts in found.drafted if drafts]
    assert len(with_drafts) >= 0.95 * len(found.drafted)
    # All sequences verify drafts in the first steps, and in the same steps as long as all run.
    assert min(found.drafted[:3]) >= 0.9 * NUM_DRAFTS * count
    assert len(found.drafted) < 0.4 * len(plain.drafted)


@pytest.mark.parametrize("count", [1, 4, 16, 30, 40])
def test_wrong_drafts_cost_at_most_a_fiftieth(count: int) -> None:
    plain, found = without_drafts(count), simulate(count, (0.0,))
    assert plain.ms / found.ms > 0.98
    assert 0 < found.num_head_steps < 12


def test_a_pace_that_never_changes_loses() -> None:
    """A control of both tests above."""
    plain = without_drafts(16).ms
    assert plain / simulate(16, (0.0,), pace=Constant(True)).ms < 0.92
    assert plain / simulate(16, (RIGHT,), pace=Constant(False)).ms < 1.01


@pytest.mark.parametrize("count", [1, 16])
def test_the_device_does_not_wait_for_the_host_between_steps_with_drafts(count: int) -> None:
    found = simulate(count, (RIGHT,))
    full = [drafts for drafts in found.drafted if drafts == NUM_DRAFTS * count]
    assert len(full) > 0.6 * len(found.drafted)
    device_ms = step_ms(count, NUM_DRAFTS * count) + HEAD_MS
    assert found.ms / len(found.drafted) < device_ms + 0.5 * LAUNCH_MS


@pytest.mark.parametrize("share", [0.2, 0.3, 0.4, 0.5])
def test_drafts_that_hardly_pay_lose_little(share: float) -> None:
    plain = without_drafts(16, 250)
    assert plain.ms / simulate(16, (share,), num_prompt=250).ms > 0.95


def test_sequences_with_wrong_drafts_leave_the_others_theirs() -> None:
    plain, found = without_drafts(16), simulate(16, (RIGHT, 0.0))
    assert plain.ms / found.ms > 1.3
    both = sum(found.drafted[:50]) / 50
    assert both < 0.6 * NUM_DRAFTS * 16, "sequences with wrong drafts verify as many as others"


@pytest.mark.parametrize("count", [1, 16])
def test_a_first_step_with_drafts_that_takes_long_is_forgotten(count: int) -> None:
    found = simulate(count, (RIGHT,), first_draft_ms=300.0)
    assert sum(drafts > 0 for drafts in found.drafted) > 0.75 * len(found.drafted)
    assert len(found.drafted) < 70
