"""The autoscaler as Kubernetes' horizontal controller decides, and Prometheus' functions."""

import pytest

from benchmarks.simulation.autoscaler import Autoscaler, Policy, Rule, Trigger
from benchmarks.simulation.signals import Signals

ROWS = Trigger("rows", "sum", 100)
QUICK = Rule(0, 100, 60)


def test_the_sum_over_the_threshold_is_rounded_up() -> None:
    scaler = Autoscaler(Policy((ROWS,), QUICK, QUICK))
    assert scaler.sync(0, 1, lambda _: 340) == 4


@pytest.mark.parametrize(
    ("value", "replicas"), [(219, 2), (221, 3), (181, 2), (179, 2), (100, 1), (0, 1)]
)
def test_within_a_tenth_nothing_changes(value: float, replicas: int) -> None:
    scaler = Autoscaler(Policy((ROWS,), QUICK, QUICK))
    assert scaler.sync(0, 2, lambda _: value) == replicas


def test_the_largest_trigger_wins() -> None:
    other = Trigger("kv", "sum", 0.5)
    scaler = Autoscaler(Policy((ROWS, other), QUICK, QUICK))
    assert scaler.sync(0, 1, lambda trigger: 2.4 if trigger is other else 150) == 5


def test_pods_per_period_bound_the_growth() -> None:
    scaler = Autoscaler(Policy((ROWS,), Rule(0, 2, 60), QUICK))
    pods, seen = 1, []
    for now in range(0, 121, 15):
        pods = scaler.sync(now, pods, lambda _: 900)
        seen.append(pods)
    assert seen == [3, 3, 3, 3, 5, 5, 5, 5, 7]


def test_the_largest_wish_of_the_window_holds_pods_back_from_leaving() -> None:
    scaler = Autoscaler(Policy((ROWS,), QUICK, Rule(300, 1, 120)))
    load = {0: 500, 15: 100}
    pods, seen = 5, {}
    for now in range(0, 700, 15):
        pods = scaler.sync(now, pods, lambda _, now=now: load.get(now, 100))
        seen[now] = pods
    assert {now for now in seen if seen[now] == 5} == set(range(0, 300, 15))
    assert [seen[now] for now in (300, 405, 420, 540, 660)] == [4, 4, 3, 2, 1]


def test_a_window_for_growth_waits_for_the_least_wish() -> None:
    scaler = Autoscaler(Policy((ROWS,), Rule(60, 100, 60), QUICK))
    loads = {0: 100, 15: 500, 30: 300, 45: 500, 60: 500, 75: 500, 90: 500}
    pods, seen = 1, []
    for now, load in loads.items():
        pods = scaler.sync(now, pods, lambda _, load=load: load)
        seen.append(pods)
    assert seen == [1, 1, 1, 1, 3, 3, 5]


def test_bounds() -> None:
    scaler = Autoscaler(Policy((ROWS,), QUICK, QUICK, min_replicas=2, max_replicas=4))
    assert scaler.sync(0, 2, lambda _: 10_000) == 4
    assert scaler.sync(15, 4, lambda _: 0) == 2


def test_a_rate_is_the_slope_of_the_counters() -> None:
    signals = Signals()
    for now in range(0, 301, 15):
        signals.scrape(now, "busy", {"a": 0.5 * now, "b": 0.25 * now})
    rate = Trigger("busy", "rate", 1, 120)
    assert signals.query(301, rate) == pytest.approx(0.75, rel=0.01)
    signals.scrape(315, "busy", {"a": 157.5})
    found = signals.query(315, rate)
    # b is gone and counts no more; its samples are still in the mean.
    assert found == pytest.approx(0.375, rel=0.1)
    for now in range(330, 700, 15):
        signals.scrape(now, "busy", {"a": 0.5 * now})
    assert signals.query(690, rate) == pytest.approx(0.5, rel=0.01)


def test_a_new_pods_rate_counts_for_the_time_that_was_seen() -> None:
    signals = Signals()
    signals.scrape(100, "busy", {"a": 10.0})
    rate = Trigger("busy", "rate", 1, 120)
    assert signals.query(100, rate) is None
    signals.scrape(115, "busy", {"a": 25.0})
    found = signals.query(115, rate)
    assert found is not None and 0.12 < found < 0.25  # a quarter of the window at most


def test_sums_and_averages() -> None:
    signals = Signals()
    for now, value in ((0, 100.0), (15, 0.0), (30, 60.0), (45, 0.0), (60, 0.0)):
        signals.scrape(now, "queue", {"a": value, "b": 10.0})
    assert signals.query(60, Trigger("queue", "sum", 1)) == 10
    assert signals.query(60, Trigger("queue", "avg", 1, 60)) == 15 + 10
    assert signals.query(60, Trigger("unknown", "sum", 1)) is None
    signals.scrape(75, "queue", {"b": 10.0})
    assert signals.query(75, Trigger("queue", "sum", 1)) == 10


@pytest.mark.parametrize("function", ["sum", "avg", "rate"])
def test_a_silent_pod_counts_as_the_others_for_ten_minutes(function: str) -> None:
    signals, trigger = Signals(), Trigger("x", function, 1, 60)

    def value(now: float, load: float) -> float:
        return load * now if function == "rate" else load

    def scrape(now: float, loads: dict[str, float], *silent: str) -> float | None:
        signals.scrape(now, "x", {p: value(now, load) for p, load in loads.items()}, silent)
        return signals.query(now, trigger)

    both = [scrape(now, {"a": 2.0, "b": 4.0}) for now in range(0, 61, 15)]
    assert both[-1] == pytest.approx(6.0, rel=0.05)
    # A starting pod has never reported, and is not counted.
    one = [scrape(now, {"a": 2.0}, "b", "starting") for now in range(75, 180, 15)]
    assert one[-1] == pytest.approx(4.0, rel=0.05)
    assert scrape(180, {}, "a", "b") is None or function != "sum"
    later = [scrape(now, {"a": 2.0}, "b") for now in range(195, 661, 15)]
    assert later[0] != pytest.approx(2.0, rel=0.05)
    assert later[-1] == pytest.approx(2.0, rel=0.05)  # ten minutes after its last sample
    assert scrape(675, {"a": 2.0}) == pytest.approx(2.0, rel=0.05)
