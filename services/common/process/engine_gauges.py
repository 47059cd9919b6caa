"""Gauges of what an engine process last said about itself.

While it is silent they are left out: a value of an engine that hangs would read as its state.
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Gauge, Metric

# Above the period of pings to an engine without work, and the time after which one that hangs with
# work is ended.
MAX_SILENCE_S = 30.0


class EngineGauges:
    """Owner of one engine's gauges; a collector of `registry`.

    Args:
        registry: where they are exported, with `{service}_engine_silence_seconds`.
        refresh: called at each scrape, before these and later metrics of `registry` are read.

    Attributes:
        silence_s: seconds since the engine last showed that it works.
    """

    def __init__(
        self, service: str, registry: CollectorRegistry, refresh: Callable[[], None] = lambda: None
    ) -> None:
        self.silence_s: Callable[[], float] = lambda: 0.0
        self._service = service
        self._refresh = refresh
        self._gauges: list[Gauge] = []
        silence = Gauge(
            f"{service}_engine_silence_seconds",
            "Time since the engine last showed that it works.",
            registry=registry,
        )
        silence.set_function(lambda: self.silence_s())
        registry.register(self)

    @property
    def is_silent(self) -> bool:
        """Whether what the engine said last is of no use."""
        return self.silence_s() > MAX_SILENCE_S

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        """Another gauge, `{service}_{name}`."""
        gauge = Gauge(f"{self._service}_{name}", text, labels, registry=None)
        self._gauges.append(gauge)
        return gauge

    def collect(self) -> Iterator[Metric]:
        self._refresh()
        if not self.is_silent:
            for gauge in self._gauges:
                yield from gauge.collect()
