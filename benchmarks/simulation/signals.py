"""What Prometheus knows of the pods: samples of each scrape, and the functions of our queries."""

from collections import deque
from collections.abc import Hashable, Mapping

from benchmarks.simulation.autoscaler import Trigger

SCRAPE_S = 15.0
_KEEP_S = 300.0


class Signals:
    """Samples by metric and pod. A pod that is gone leaves instant queries at once, and those over
    a window when its samples leave the window.
    """

    def __init__(self) -> None:
        self._series: dict[str, dict[Hashable, deque[tuple[float, float]]]] = {}
        self._scraped: dict[str, set[Hashable]] = {}

    def scrape(self, now: float, metric: str, values: Mapping[Hashable, float]) -> None:
        """Adds a sample for each pod that there is."""
        series = self._series.setdefault(metric, {})
        self._scraped[metric] = set(values)
        for pod, value in values.items():
            series.setdefault(pod, deque()).append((now, value))
        for pod in list(series):
            samples = series[pod]
            while samples and samples[0][0] < now - _KEEP_S:
                samples.popleft()
            if not samples:
                del series[pod]

    def query(self, now: float, trigger: Trigger) -> float | None:
        """`sum(...)` over the pods; None without series."""
        series = self._series.get(trigger.metric, {})
        assert trigger.function in ("sum", "avg", "rate")
        if trigger.function == "sum":
            values = [series[pod][-1][1] for pod in self._scraped.get(trigger.metric, ())]
        else:
            start = now - trigger.window_s
            windows = [[s for s in samples if s[0] > start] for samples in series.values()]
            if trigger.function == "avg":
                values = [sum(value for _, value in w) / len(w) for w in windows if w]
            else:
                values = [_rate(w, start, now) for w in windows if len(w) > 1]
        return sum(values) if values else None


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
