"""The comparisons and the sweep behind docs/autoscaling.md."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from benchmarks.simulation.autoscaler import Policy
from benchmarks.simulation.cluster import Plan
from benchmarks.simulation.policies import (
    cell_policy,
    cells,
    decoder_policy,
    encoder_policy,
    shipped,
    split,
)
from benchmarks.simulation.results import Result, simulate
from benchmarks.simulation.stages import StageCosts
from benchmarks.simulation.traces import Trace, bursts, day, flash_crowd

Progress = Callable[[str, float], None]


def silent(name: str, share: float) -> None:
    """Shows no progress."""


def compare(
    trace: Trace, costs: StageCosts, *, seed: int = 0, start_s: float = 60.0,
    progress: Progress = silent,
) -> list[Result]:  # fmt: skip
    """The shipped policy, then what it is compared with.

    Fixed for the peak: the most pods of each stage that the shipped policy ever had. Too small: a
    control with half of its mean.
    """

    def run(name: str, plan: Plan) -> Result:
        return simulate(
            trace, plan, costs, name=name, seed=seed, progress=lambda s: progress(name, s)
        )

    first = run("shipped", shipped(2, 2, start_s))
    peak = [max(pods) for pods in first.pods.values()]
    half = [max(1, round(fmean(pods) / 2)) for pods in first.pods.values()]
    return [
        first,
        run("replicas of both", cells(4, cell_policy(), start_s)),
        run("fixed for the peak", split(*peak)),
        run("fixed, too small", split(*half)),
    ]


@dataclass(frozen=True, slots=True)
class Point:
    """A point of the sweep: the traces of `sweep` with one value unlike the shipped one.

    Attributes:
        threshold: which value; `replicas`: the rows of pods that hold both stages.
        gpu_hours: of all traces together, as the other figures are.
        ttft_p99: seconds, in the worst trace.
    """

    threshold: str
    value: float
    attained: float
    refused: float
    ttft_p99: float
    gpu_hours: float


def sweep(
    costs: StageCosts, *, seed: int = 0, scale: float = 1.0, only: Sequence[str] = (),
    progress: Progress = silent,
) -> list[Point]:  # fmt: skip
    """Each value around the shipped one, on a morning, a burst of images and a flash crowd."""
    traces = (
        day(scale, seed, hours=3, first_hour=7),
        bursts(scale, seed, hours=1),
        flash_crowd(scale, seed, hours=1),
    )
    points: list[Point] = []
    plans = [c for c in _candidates() if not only or c[0] in only]
    for number, (threshold, value, plan) in enumerate(plans):
        progress("sweep", number / len(plans))
        results = [simulate(trace, plan, costs, seed=seed) for trace in traces]
        points.append(_point(threshold, value, results))
    progress("sweep", 1.0)
    return points


def _point(threshold: str, value: float, results: Sequence[Result]) -> Point:
    total = sum(r.num_requests for r in results)
    return Point(
        threshold=threshold,
        value=value,
        attained=sum(r.attained * r.num_requests for r in results) / total,
        refused=sum(r.refused * r.num_requests for r in results) / total,
        ttft_p99=max(r.ttft_p99 for r in results),
        gpu_hours=sum(r.gpu_hours for r in results),
    )


_ROWS = "triptych_decoder_sequences_running"
_DECODER = {
    "rows": (_ROWS, (12, 20, 32, 64)),
    "waiting": ('triptych_decoder_sequences_waiting{for="engine"}', (2, 8, 32)),
}
_ENCODER = {
    "backlog": ("triptych_encoder_backlog_seconds", (0.25, 0.5, 1.0, 2.0)),
    "busy": ("triptych_encoder_busy_seconds_total", (0.5, 0.7, 0.9)),
}


def _candidates() -> Iterator[tuple[str, float, Plan]]:
    encoder, decoder, cell = encoder_policy(), decoder_policy(), cell_policy()
    for threshold, (metric, values) in _DECODER.items():
        for value in values:
            changed = _with(decoder, metric, value)
            yield threshold, value, split(2, 3, encoder=encoder, decoder=changed)
    for threshold, (metric, values) in _ENCODER.items():
        for value in values:
            changed = _with(encoder, metric, value)
            yield threshold, value, split(2, 3, encoder=changed, decoder=decoder)
    for pods in (1, 2, 4, 8):
        policies = [replace(p, up=replace(p.up, pods=pods)) for p in (encoder, decoder)]
        yield "up", pods, split(2, 3, encoder=policies[0], decoder=policies[1])
    for start_s in (20, 60, 180, 300):
        yield "start", start_s, shipped(2, 3, start_s)
    for value in (6, 8, 12, 16, 32):
        yield "replicas", value, cells(4, _with(cell, _ROWS, value))


def _with(policy: Policy, metric: str, threshold: float) -> Policy:
    """The policy with another threshold for a metric that it has."""
    assert any(trigger.metric == metric for trigger in policy.triggers)
    triggers = tuple(
        replace(t, threshold=threshold) if t.metric == metric else t for t in policy.triggers
    )
    return replace(policy, triggers=triggers)
