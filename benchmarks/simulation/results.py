"""What a simulation says: shares of requests within their objectives, and GPU hours."""

import gc
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from benchmarks.simulation.cluster import Cluster, Plan
from benchmarks.simulation.requests import Request
from benchmarks.simulation.stages import StageCosts
from benchmarks.simulation.traces import Trace

TTFT_S = 2.0
TPOT_S = 0.05
_SAMPLE_S = 60.0
_LONGEST_ANSWER_S = 600.0


@dataclass(frozen=True, slots=True)
class Result:
    """One simulation.

    Attributes:
        attained: share of all requests with TTFT <= 2 s and TPOT <= 50 ms.
        attained_by_kind: the same of each kind.
        refused: share that found no pod with room.
        ttft_p50, ttft_p99, tpot_p99: seconds, of those that were answered.
        gpu_hours: from each pod's creation to its end, start-up and drain included.
        gpu_hours_by_fleet, pods: by the fleet's stages; pods at each minute.
        minutes: share of requests that arrived in each minute and attained; NaN without any.
    """

    name: str
    num_requests: int
    attained: float
    attained_by_kind: dict[str, float]
    refused: float
    ttft_p50: float
    ttft_p99: float
    tpot_p99: float
    gpu_hours: float
    gpu_hours_by_fleet: dict[str, float]
    pods: dict[str, list[int]]
    minutes: np.ndarray
    num_preemptions: int


def simulate(
    trace: Trace, plan: Plan, costs: StageCosts, *, name: str = "", seed: int = 0,
    progress: Callable[[float], None] = lambda share: None,
) -> Result:  # fmt: skip
    """Plays a trace to a cluster."""
    arrived, ttft, tpot = array("d"), array("d"), array("d")
    kinds = array("b")

    def finished(request: Request) -> None:
        arrived.append(request.arrival)
        kinds.append(request.kind)
        ttft.append(float("inf") if request.refused else request.ttft)
        tpot.append(0.0 if request.refused else request.tpot)

    cluster = Cluster(plan, costs, finished, seed)
    clock = cluster.clock
    requests = trace.requests()
    pods: dict[str, list[int]] = {"+".join(f.plan.stages): [] for f in cluster.fleets}

    def arrive(request: Request) -> None:
        cluster.submit(request)
        if (following := next(requests, None)) is not None:
            clock.at(following.arrival, arrive, following)

    def sample(_: None) -> None:
        for counts, fleet in zip(pods.values(), cluster.fleets, strict=True):
            counts.append(len(fleet.pods))
        progress(min(1.0, clock.now / trace.duration_s))
        clock.at(clock.now + _SAMPLE_S, sample)

    if (first := next(requests, None)) is not None:
        clock.at(first.arrival, arrive, first)
    clock.at(0.0, sample)
    with _without_collector():
        clock.run(trace.duration_s)
    hours = {name: f.gpu_seconds() / 3600 for name, f in zip(pods, cluster.fleets, strict=True)}
    counts = {name: list(numbers) for name, numbers in pods.items()}
    end = trace.duration_s
    while len(arrived) < len(trace) and end < trace.duration_s + _LONGEST_ANSWER_S:
        end += _SAMPLE_S
        clock.run(end)
    lost = len(trace) - len(arrived)  # still unanswered: beyond the time of a request
    times = (np.array(arrived), np.array(ttft), np.array(tpot), np.array(kinds))
    preemptions = sum(
        p.decoder.num_preemptions for f in cluster.fleets for p in f.pods if p.decoder
    )
    return _result(name, trace, times, lost, hours, counts, preemptions)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Requests make no cycles; looking for them takes a tenth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _result(
    name: str, trace: Trace, times: tuple[np.ndarray, ...], lost: int, hours: dict[str, float],
    pods: dict[str, list[int]], preemptions: int,
) -> Result:  # fmt: skip
    arrived, ttft, tpot, kinds = times
    good = (ttft <= TTFT_S) & (tpot <= TPOT_S)
    answered = np.isfinite(ttft)
    total = len(good) + lost
    minutes = np.floor(arrived / _SAMPLE_S).astype(int)
    size = int(trace.duration_s // _SAMPLE_S) + 1
    with np.errstate(invalid="ignore"):
        by_minute = np.bincount(minutes, good, size) / np.bincount(minutes, minlength=size)

    def percentile(values: np.ndarray, q: float) -> float:
        return float(np.percentile(values[answered], q)) if answered.any() else float("nan")

    return Result(
        name=name,
        num_requests=total,
        attained=float(good.sum()) / max(1, total),
        attained_by_kind={
            kind: float(good[kinds == i].mean())
            for i, kind in enumerate(trace.kinds)
            if (kinds == i).any()
        },
        refused=float((~answered).sum() + lost) / max(1, total),
        ttft_p50=percentile(ttft, 50),
        ttft_p99=percentile(ttft, 99),
        tpot_p99=percentile(tpot, 99),
        gpu_hours=sum(hours.values()),
        gpu_hours_by_fleet=hours,
        pods=pods,
        minutes=by_minute,
        num_preemptions=preemptions,
    )
