"""Ten minutes without metrics, at full load: no pod is taken away."""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace

import pytest

from benchmarks.simulation.autoscaler import Autoscaler, Policy, Rule, Trigger
from benchmarks.simulation.cluster import Cluster, Plan
from benchmarks.simulation.policies import cell_policy, cells, decoder_policy, encoder_policy, split
from benchmarks.simulation.requests import Request
from benchmarks.simulation.signals import Signals
from benchmarks.simulation.stages import H200_2B
from tests.cases import first

PLANS = [split(4, 4, encoder=encoder_policy(), decoder=decoder_policy()), cells(4, cell_policy())]
SILENCE_S = (600.0, 1200.0)
END_S = 1500.0


def played(plan: Plan, num_unscraped: int | None = None) -> list[list[int]]:
    """Replicas of each fleet, every five seconds, while four pods are busy with answers to prompts
    with two images.
    """
    rate = 20.0 if len(plan.fleets) > 1 else 13.0
    plan = replace(plan, unscraped=SILENCE_S, num_unscraped=num_unscraped)
    cluster = Cluster(plan, H200_2B, lambda request: None)
    counts: list[list[int]] = [[] for _ in cluster.fleets]

    def arrive(n: int) -> None:
        cluster.submit(Request(n / rate, 3000, 900, (4096, 4096)))
        cluster.clock.at((n + 1) / rate, arrive, n + 1)

    def sample(_: None) -> None:
        for numbers, fleet in zip(counts, cluster.fleets, strict=True):
            numbers.append(fleet.replicas)
        cluster.clock.at(cluster.clock.now + 5, sample)

    cluster.clock.at(0.0, arrive, 0)
    cluster.clock.at(0.0, sample)
    cluster.clock.run(END_S)
    return counts


def as_zero(policy: Policy) -> Policy:
    """The same with queries that end in `or vector(0)`."""
    return replace(policy, triggers=tuple(replace(t, absent=0.0) for t in policy.triggers))


def during(counts: list[int]) -> list[int]:
    """From the last sync with metrics to the end."""
    return counts[int(SILENCE_S[0] / 5) - 1 :]


@pytest.mark.thorough
@pytest.mark.parametrize("plan", first(1, PLANS))
def test_silence_takes_no_pod_away(plan: Plan) -> None:
    fleets = list(map(during, played(plan)))
    for counts in fleets:
        assert counts == sorted(counts)
    assert min(fleets[-1]) >= 4  # full: what follows is no small cluster's


@pytest.mark.thorough
@pytest.mark.parametrize("cell", first(1, [False, True]))
def test_a_zero_for_silence_takes_all_but_one(cell: bool) -> None:
    """What shipped before: the other test can fail."""
    plan = (
        cells(4, as_zero(cell_policy()))
        if cell
        else split(4, 4, encoder=as_zero(encoder_policy()), decoder=as_zero(decoder_policy()))
    )
    decoders = during(played(plan)[-1])
    assert decoders[0] >= 4 and min(decoders) == 1


class _Summed(Signals):
    """As `sum(...)` has it, which shipped before: a silent pod is not there."""

    def scrape(
        self,
        now: float,
        metric: str,
        values: Mapping[Hashable, float],
        silent: Iterable[Hashable] = (),
    ) -> None:
        del silent
        super().scrape(now, metric, values)


@pytest.mark.thorough
@pytest.mark.parametrize("cell", first(1, [False, True]))
@pytest.mark.parametrize("summed", [False, True], ids=["shipped", "summed"])
def test_silent_pods_among_others_take_no_pod_away(
    cell: bool, summed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of each fleet are silent, and work; a mere sum takes pods away."""
    if summed:
        monkeypatch.setattr("benchmarks.simulation.cluster.Signals", _Summed)
    plan = (
        cells(4, cell_policy())
        if cell
        else split(4, 4, encoder=encoder_policy(), decoder=decoder_policy())
    )
    before, *decoders = during(played(plan, num_unscraped=2)[-1])
    assert before >= 4
    assert (min(decoders) < before) == summed


def test_a_metric_that_is_missing_holds_the_others_back_only() -> None:
    quick = Rule(0, 100, 60)
    rows, kv = Trigger("rows", "sum", 10), Trigger("kv", "sum", 0.5)
    scaler = Autoscaler(Policy((rows, kv), quick, quick, fallback_replicas=2))
    values = {rows: 1.0, kv: None}
    assert scaler.sync(0, 4, values.get) == 4
    assert scaler.sync(15, 4, {rows: 60.0, kv: None}.get) == 6
    assert scaler.sync(30, 1, {rows: None, kv: None}.get) == 2
    assert scaler.sync(45, 4, {rows: 1.0, kv: 0.1}.get) == 1
