"""A service's registry of metrics, and the metrics that all services have.

Names begin with `triptych_`, so that they collide with no other program's in a shared Prometheus.
Until release 0.4 each metric is also exported under its former name, without that prefix.
"""

import platform
from collections.abc import Iterator
from importlib import metadata

from prometheus_client import (
    CollectorRegistry,
    Gauge,
    ProcessCollector,
    disable_created_metrics,
    start_http_server,
)
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from services.common.settings import SettingsError

PREFIX = "triptych_"
_BUILD_INFO = f"{PREFIX}build_info"

# Without this, each counter and histogram has a twin with the time of its creation.
disable_created_metrics()


def new_registry(service: str) -> CollectorRegistry:
    """Returns a registry with the metrics that all services have: `triptych_build_info`, and CPU
    time, memory and open files of the process (`process_…`).

    Args:
        service: `gateway`, `encoder` or `decoder`.
    """
    registry = CollectorRegistry()
    text = "The value is 1; the labels name the service, its version and the version of Python."
    labels = ["service", "version", "python"]
    build = Gauge(_BUILD_INFO, text, labels, registry=registry)
    build.labels(service, package_version(), platform.python_version()).set(1)
    ProcessCollector(registry=registry)
    return registry


def package_version() -> str:
    """Returns the version of the installed package `triptych`. "unknown" if it is not installed."""
    try:
        return metadata.version("triptych")
    except metadata.PackageNotFoundError:
        return "unknown"


class _BothNames(Collector):
    """Exports the metrics of a registry, and those whose names begin with `triptych_` a second time
    under their former names.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics under both names."""
        for metric in self._registry.collect():
            yield metric
            if metric.name.startswith(PREFIX) and metric.name != _BUILD_INFO:
                text = f"Former name of {metric.name}."
                former = Metric(metric.name.removeprefix(PREFIX), text, metric.type)
                former.samples = [
                    sample._replace(name=sample.name.removeprefix(PREFIX))
                    for sample in metric.samples
                ]
                yield former


def exported(registry: CollectorRegistry) -> CollectorRegistry:
    """Returns the registry that endpoints show: the metrics of `registry` under both names."""
    shown = CollectorRegistry()
    shown.register(_BothNames(registry))
    return shown


def serve_metrics(registry: CollectorRegistry, host: str, port: int) -> None:
    """Serves `/metrics` from a thread of this process.

    Args:
        port: port to listen on. 0 disables the endpoint.

    Raises:
        SettingsError: the port cannot be used.
    """
    if port:
        try:
            start_http_server(port, addr=host, registry=exported(registry))
        except OSError as error:
            raise SettingsError(f"no metrics on {host}:{port}: {error.strerror}") from error
