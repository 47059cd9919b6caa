"""Logs and metrics of a process: JSON lines with the request id, and the metrics port.

The entry points call `setup_logging`; servers bind the id where a request enters a task.
"""

import json
import logging
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

from prometheus_client import CollectorRegistry, start_http_server

from services.common.settings import SettingsError

# Seconds. From a cache lookup to a long generation.
LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip


_request_id: ContextVar[str] = ContextVar("request_id", default="")


def bind_request_id(request_id: str) -> None:
    """Sets the id for the running task and the tasks that it creates from now on: for a task that
    serves one request.
    """
    _request_id.set(request_id)


@contextmanager
def bound_request_id(request_id: str) -> Generator[None]:
    """Sets the id for the block: for a task that serves several requests in turn."""
    token = _request_id.set(request_id)
    try:
        yield
    finally:
        _request_id.reset(token)


def current_request_id() -> str:
    """The id of the request that the running task works for; empty: none."""
    return _request_id.get()


_encode = json.JSONEncoder(default=str).encode  # `json.dumps` makes an encoder for each line


class _JsonFormatter(logging.Formatter):
    """One JSON object per line, with the `request_id` of the running task; a record's
    `extra={"fields": {...}}` is merged in.
    """

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
            **({"request_id": _request_id.get()} if _request_id.get() else {}),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return _encode(entry)


def setup_logging(service: str, level: str = "INFO") -> None:
    """Sends all logging to standard error as JSON lines.

    What no line says is not looked up for each: the caller's place, its thread and its process.
    """
    logging._srcfile = None  # pyright: ignore[reportPrivateUsage] - see logging's "Optimization"
    logging.logThreads = logging.logMultiprocessing = logging.logProcesses = False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(service))
    logging.basicConfig(level=level, handlers=[handler], force=True)


def serve_metrics(registry: CollectorRegistry, host: str, port: int) -> None:
    """Serves `/metrics` from a thread of this process; port 0 means no metrics endpoint."""
    if port:
        try:
            start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise SettingsError(f"no metrics on {host}:{port}: {error.strerror}") from error
