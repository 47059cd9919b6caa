"""Layouts of cards under open loops: both stages on each card against cards of their own."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.simulation.cluster import Cluster, FleetPlan, Plan
from benchmarks.simulation.requests import Request
from benchmarks.simulation.results import TPOT_S, TTFT_S
from benchmarks.simulation.stages import StageCosts
from benchmarks.step_frontier import OPEN
from triptych.layout import Ask, Layout, layouts

# Requests a second on two cards, of each open loop of benchmarks/step_frontier.py.
RATES = {"epd4": (8, 12, 18, 24), "img1": (20, 28, 36)}
SECONDS = 10.0
_ANSWERED_S = 120.0
_GATEWAYS = 4  # that `triptych serve` starts on 16 cores or more


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of a row on a layout: requests a second with TTFT <= 2 s and TPOT <= 50 ms, as
    `benchmarks.step_frontier` counts them; times in milliseconds.
    """

    workload: str
    layout: str
    good_per_s: float
    requests_per_s: float
    ttft_ms: tuple[float, float]  # 50th and 99th percentile
    tpot_ms: float


def workloads(cards: int) -> Iterator[tuple[str, float]]:
    """Name and rate of each row, scaled by the cards."""
    for name, rates in RATES.items():
        for rate in rates:
            yield name, rate * cards / 2


def ask_of(name: str) -> Ask:
    """The requests of a row, for the rule of `triptych serve`."""
    row = OPEN[name]
    text = row.prompt_tokens - row.images_per_request * (row.image_edge // 32) ** 2
    return Ask(row.images_per_request, row.image_edge, text, row.output_tokens)


def plan_of(layout: Layout) -> Plan:
    """Of `triptych serve`: one host, whose gateways share nothing."""
    encoders = layout.encoder_cards or layout.decoder_cards
    fleets = (FleetPlan(("encoder",), encoders), FleetPlan(("decoder",), layout.decoder_cards))
    return Plan(fleets, _GATEWAYS, one_host=True, shared_cards=not layout.encoder_cards)


def predict(
    costs: StageCosts, name: str, rate: float, layout: Layout, seconds: float = SECONDS
) -> Outcome:
    """Plays an open loop, with the arrivals of `benchmarks.step_frontier`."""
    row, answered = OPEN[name], list[Request]()
    cluster = Cluster(plan_of(layout), costs, answered.append)
    due = np.cumsum(np.random.default_rng(11).exponential(1 / rate, round(rate * seconds)))
    images = ((row.image_edge // 16) ** 2,) * row.images_per_request
    for at in due:
        request = Request(float(at), row.prompt_tokens, row.output_tokens, images)
        cluster.clock.at(request.arrival, cluster.submit, request)
    cluster.clock.run(seconds + _ANSWERED_S)
    whole = [request for request in answered if not request.refused]
    wall_s = max(r.last_token for r in whole) - min(r.arrival for r in whole)
    good = sum(r.ttft <= TTFT_S and r.tpot <= TPOT_S for r in whole)
    ttft = np.percentile([1e3 * r.ttft for r in whole], (50, 99))
    return Outcome(
        workload=f"{name}@{rate:g}",
        layout=str(layout),
        good_per_s=good / wall_s,
        requests_per_s=len(whole) / wall_s,
        ttft_ms=(float(ttft[0]), float(ttft[1])),
        tpot_ms=1e3 * float(np.median([r.tpot for r in whole])),
    )


def compare(costs: StageCosts, cards: int, seconds: float = SECONDS) -> Sequence[Outcome]:
    """All layouts of so many cards on all rows."""
    return [
        predict(costs, name, rate, layout, seconds)
        for name, rate in workloads(cards)
        for layout in layouts(cards)
    ]


def goodput(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Of each layout: the mean over the rows of its share of the best in the row."""
    best: dict[str, float] = {}
    for outcome in outcomes:
        best[outcome.workload] = max(best.get(outcome.workload, 0.0), outcome.good_per_s)
    shares: dict[str, list[float]] = {}
    for outcome in outcomes:
        share = outcome.good_per_s / best[outcome.workload]
        shares.setdefault(outcome.layout, []).append(share)
    return {layout: float(np.mean(found)) for layout, found in shares.items()}
