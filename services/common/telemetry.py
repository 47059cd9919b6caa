"""Logs of a process: JSON lines with the request id.

The entry points call `setup_logging`. Servers bind the request id where a request enters a task.
"""

import asyncio
import json
import logging
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import lru_cache
from typing import TextIO

import msgspec

# Upper bounds in seconds, from a cache lookup to a long generation.
LATENCY_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25),
    *(0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)


_request_id: ContextVar[str] = ContextVar("request_id", default="")


def bind_request_id(request_id: str) -> None:
    """Sets the request id of the running task, and of the tasks that it creates from now on. It is
    meant for tasks with one request.
    """
    _request_id.set(request_id)


@contextmanager
def bound_request_id(request_id: str) -> Generator[None]:
    """Sets the request id within the block. It is meant for tasks with several requests."""
    token = _request_id.set(request_id)
    try:
        yield
    finally:
        _request_id.reset(token)


def current_request_id() -> str:
    """Returns the id of the request that the running task works for. Empty if there is none."""
    return _request_id.get()


_NO_FIELDS: Mapping[str, object] = {}
_encode_fast = msgspec.json.Encoder(enc_hook=str).encode
_encode_any = json.JSONEncoder(default=str).encode


def _encode(entry: Mapping[str, object]) -> str:
    """Returns a line of ASCII, because a terminal may follow control characters beyond ASCII."""
    try:
        line = _encode_fast(entry)
    except (TypeError, ValueError):  # The entry has keys or characters that msgspec refuses.
        return _encode_any(entry)
    return line.decode("ascii") if line.isascii() else _encode_any(entry)


@lru_cache(1)  # Formatting a time takes microseconds, and a second has many lines.
def _second(unix_s: int) -> str:
    """Returns a Unix time in ISO 8601, without a fraction and a time zone."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(unix_s))


class _JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object in one line, with the `request_id` of the running task. The
    record's `extra={"fields": {...}}` is merged into the object.
    """

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", _NO_FIELDS)
        if record.exc_info:
            fields = {**fields, "exception": self.formatException(record.exc_info)}
        level, message = record.levelname, record.getMessage()
        return self.line(record.created, level, record.name, message, fields)

    def line(
        self, at: float, level: str, logger: str, message: str, fields: Mapping[str, object]
    ) -> str:
        """Returns a line.

        Args:
            at: Unix time.
            level: name of the level.
            logger: name of the logger.
        """
        entry = {
            "time": f"{_second(int(at))}.{int(at % 1 * 1000):03d}Z",
            "level": level.lower(),
            "service": self._service,
            "logger": logger,
            "message": message,
        }
        if request_id := _request_id.get():
            entry["request_id"] = request_id
        return _encode({**entry, **fields})


class _LineHandler(logging.StreamHandler[TextIO]):
    """Writes log lines. Those of one turn of an event loop are written together, because each write
    takes some 20 µs, and the end of a request alone has two lines.

    A warning or an error, and a line of a thread without an event loop, is written at once, with
    all lines before it.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.add(self.format(record), record.levelno)
        except Exception:
            self.handleError(record)

    def add(self, line: str, level: int) -> None:
        """Adds a line. The caller holds the handler's lock."""
        self._lines.append(f"{line}\n")
        loop = asyncio._get_running_loop()  # pyright: ignore[reportPrivateUsage] - may be None
        if loop is None or level > logging.INFO:
            self.flush()
        elif len(self._lines) == 1:
            loop.call_soon(self.flush)

    def flush(self) -> None:
        """Writes the lines that wait. `logging` calls the method when the process exits."""
        with self.lock or nullcontext():
            lines, self._lines = self._lines, []
            if lines:
                self.stream.write("".join(lines))
            super().flush()


def log_line(
    logger: logging.Logger, level: int, message: str, fields: Mapping[str, object]
) -> None:
    """Logs a message with fields, as `logger.log(level, message, extra={"fields": fields})` does.

    It is for the lines of each request. If the handler of `setup_logging` is the only handler, the
    line is made without a record, on which `logging` spends half of the time of a line.
    """
    if not logger.isEnabledFor(level):
        return
    handlers = [*logger.handlers, *logging.root.handlers]
    handler = handlers[0] if len(handlers) == 1 else None
    if isinstance(handler, _LineHandler) and isinstance(handler.formatter, _JsonFormatter):
        name = logging.getLevelName(level)
        line = handler.formatter.line(time.time(), name, logger.name, message, fields)
        with handler.lock or nullcontext():
            handler.add(line, level)
    else:
        logger.log(level, "%s", message, extra={"fields": fields})


def setup_logging(service: str, level: str = "INFO") -> None:
    """Writes all log records to standard error as JSON lines.

    Looking up the caller's file, thread and process is turned off, because no line contains them.

    Args:
        service: name of the service, in each line.
        level: lowest level that is logged.
    """
    logging._srcfile = None  # pyright: ignore[reportPrivateUsage] - see logging's "Optimization"
    logging.logThreads = logging.logMultiprocessing = logging.logProcesses = False
    handler = _LineHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(service))
    logging.basicConfig(level=level, handlers=[handler], force=True)
