"""What Prometheus knows of the pods: samples of each scrape, and the functions of our queries."""

from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from statistics import fmean

from benchmarks.simulation.autoscaler import Trigger

SCRAPE_S = 15.0
# A pod that is there counts for so long after its last sample.
_KNOWN_S = 600.0


class Signals:
    """Samples by metric and pod. A query is the mean of the pods that report, times those that are
    there and have reported: a pod that is gone leaves it at once, one that is silent counts as the
    others do.
    """

    def __init__(self) -> None:
        self._series: dict[str, dict[Hashable, deque[tuple[float, float]]]] = {}
        self._there: dict[str, set[Hashable]] = {}
        self._scraped: dict[str, set[Hashable]] = {}

    def scrape(
        self,
        now: float,
        metric: str,
        values: Mapping[Hashable, float],
        silent: Iterable[Hashable] = (),
    ) -> None:
        """Adds a sample for each pod that reports; `silent` are there, too."""
        series = self._series.setdefault(metric, {})
        self._scraped[metric] = set(values)
        self._there[metric] = {*values, *silent}
        for pod, value in values.items():
            series.setdefault(pod, deque()).append((now, value))
        for pod in list(series):
            samples = series[pod]
            while samples and samples[0][0] <= now - _KNOWN_S:
                samples.popleft()
            if not samples:
                del series[pod]

    def query(self, now: float, trigger: Trigger) -> float | None:
        """Summed over the pods, as above; None: no pod reports."""
        series = self._series.get(trigger.metric, {})
        assert trigger.function in ("sum", "avg", "rate")
        least = 2 if trigger.function == "rate" else 1  # samples
        if trigger.function == "sum":
            values = [series[pod][-1][1] for pod in self._scraped.get(trigger.metric, ())]
        else:
            start = now - trigger.window_s
            windows = [[s for s in samples if s[0] > start] for samples in series.values()]
            if trigger.function == "avg":
                values = [sum(value for _, value in w) / len(w) for w in windows if w]
            else:
                values = [_rate(w, start, now) for w in windows if len(w) >= least]
        known = [p for p in self._there.get(trigger.metric, ()) if len(series.get(p, ())) >= least]
        return fmean(values) * len(known) if values and known else None


def _rate(samples: list[tuple[float, float]], start: float, end: float) -> float:
    """As Prometheus: extrapolated to the window's ends where the samples reach near to them."""
    (first, low), (last, high) = samples[0], samples[-1]
    covered = last - first
    mean_gap = covered / (len(samples) - 1)
    before, after = first - start, end - last
    reach = covered
    reach += before if before < 1.1 * mean_gap else mean_gap / 2
    reach += after if after < 1.1 * mean_gap else mean_gap / 2
    return (high - low) * reach / covered / (end - start)
