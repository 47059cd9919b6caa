"""When the host stops waiting for token masks."""

import pytest

from services.decoder.engine.mask_deadline import MaskDeadline


def of_steps(*, step_s: float, launch_s: float, decodes_only: bool = True) -> MaskDeadline:
    """After steps of this time, at 100.0."""
    deadline = MaskDeadline()
    for number in range(40, -1, -1):
        deadline.launched(launch_s)
        deadline.began(100.0 - number * step_s, decodes_only=decodes_only)
    return deadline


def test_the_deadline_leaves_time_to_launch_the_next_step():
    deadline = of_steps(step_s=0.002, launch_s=0.0003)
    assert deadline.at == pytest.approx(100.0 + 0.002 - 0.0003 - 0.00005)


def test_rows_with_masks_wait_for_one_as_long_as_that_costs_less_than_its_miss():
    deadline = of_steps(step_s=0.002, launch_s=0.0003)
    assert deadline.patience_s(1, 64) == pytest.approx(2 * 0.002 / 64)
    assert deadline.patience_s(8, 64) == pytest.approx(0.0002)
    assert deadline.patience_s(1, 2) == pytest.approx(0.0002)


def test_masks_may_always_arrive_in_half_of_a_step():
    assert of_steps(step_s=0.001, launch_s=0.004).at == pytest.approx(100.0005)


def test_prompts_and_idle_devices_have_no_deadline():
    deadline = of_steps(step_s=0.002, launch_s=0.0003)
    deadline.began(100.002, decodes_only=False)
    assert deadline.at is None
    deadline.began(101.0, decodes_only=True)  # the prompts' time tells nothing of decodes
    assert deadline.at == pytest.approx(101.0 + 0.002 - 0.00035, abs=1e-4)
    deadline.idle()
    assert deadline.at is None
    assert of_steps(step_s=0.002, launch_s=0.0003, decodes_only=False).at is None


def test_a_device_that_waited_for_masks_is_not_taken_to_be_slow():
    deadline = of_steps(step_s=0.002, launch_s=0.0003)
    expected = deadline.at - 100.0
    now = 100.0
    for _ in range(20):
        deadline.computed(now + 0.0025)
        now += 0.003
        deadline.began(now, decodes_only=True)
    assert deadline.at - now == pytest.approx(expected)
    deadline.computed(now + 0.0015)
    now += 0.0016
    deadline.began(now, decodes_only=True)
    assert deadline.at - now == pytest.approx(expected - 0.0005)
