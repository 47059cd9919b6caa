"""Log lines are JSON of one line of ASCII, whatever their fields hold, and none is lost."""

import asyncio
import io
import json
import logging
import threading
from datetime import datetime

import pytest

from services.common.telemetry import _JsonFormatter, _LineHandler, bound_request_id, log_line


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (7, 7), (1.5, 1.5), (None, None), ("a", "a"), ("ü", "ü"), ("\x9b31m", "\x9b31m"),
        ("\ud800", "\ud800"), ({1: 2}, {"1": 2}), (io, str(io)), ([object], None),
    ],
)  # fmt: skip
def test_a_line_holds_any_field(value: object, read: object) -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "%s", ("two\nlines",), None)
    record.fields = {"value": value}
    with bound_request_id("req-1"):
        line = _JsonFormatter("gateway").format(record)
    assert line.isascii()
    assert line.isprintable()
    found = json.loads(line)
    assert found["message"] == "two\nlines"
    assert found["request_id"] == "req-1"
    if read is not None or value is None:
        assert found["value"] == read


class _Writes(io.StringIO):
    """Notes what each write has."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[str] = []

    def write(self, text: str) -> int:
        self.written.append(text)
        return len(text)


def record_of(message: str, level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord("x", level, "", 0, message, None, None)


async def test_the_lines_of_a_turn_are_one_write() -> None:
    stream = _Writes()
    handler = _LineHandler(stream)
    handler.handle(record_of("a"))
    handler.handle(record_of("b"))
    assert stream.written == []
    await asyncio.sleep(0)
    assert stream.written == ["a\nb\n"]
    handler.handle(record_of("c"))
    handler.handle(record_of("d", logging.WARNING))
    assert stream.written[1:] == ["c\nd\n"]  # at once, in their order
    await asyncio.sleep(0)
    handler.handle(record_of("e"))
    thread = threading.Thread(target=handler.handle, args=(record_of("f"),))
    thread.start()
    thread.join()
    assert stream.written[2:] == ["e\nf\n"]
    handler.handle(record_of("g"))
    handler.flush()  # as at the process's exit
    await asyncio.sleep(0)
    assert stream.written[3:] == ["g\n"]


def test_a_line_without_an_event_loop_is_written_at_once() -> None:
    stream = _Writes()
    _LineHandler(stream).handle(record_of("a"))
    assert stream.written == ["a\n"]


def write_to(stream: _Writes, monkeypatch: pytest.MonkeyPatch, *others: logging.Handler) -> None:
    """Sends all records to a stream, and to other handlers."""
    handler = _LineHandler(stream)
    handler.setFormatter(_JsonFormatter("gateway"))
    monkeypatch.setattr(logging.root, "handlers", [handler, *others])


class _Records(logging.Handler):
    """Collects records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def test_a_line_without_a_record_equals_the_line_of_a_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream, fields = _Writes(), {"ms": 1.5, "outcome": "stop"}
    logger = logging.getLogger("x")
    logger.setLevel(logging.INFO)
    write_to(stream, monkeypatch)
    with bound_request_id("req-1"):
        with monkeypatch.context() as patch:
            patch.setattr(logger, "log", None)  # it is not called
            log_line(logger, logging.INFO, "100 %s", fields)
            log_line(logger, logging.DEBUG, "not logged", fields)
        logger.info("%s", "100 %s", extra={"fields": fields})
    found = [json.loads(line) for line in stream.written]
    times = [datetime.fromisoformat(line.pop("time")) for line in found]
    assert found[0] == found[1]
    assert list(found[0]) == list(found[1])
    assert times == sorted(times)
    assert len(found) == 2


@pytest.mark.parametrize("is_own", [False, True], ids=["root", "logger"])
def test_other_handlers_get_a_record(monkeypatch: pytest.MonkeyPatch, is_own: bool) -> None:
    stream, others, logger = _Writes(), _Records(), logging.getLogger("x")
    write_to(stream, monkeypatch, *(() if is_own else (others,)))
    monkeypatch.setattr(logger, "handlers", [others] if is_own else [])
    log_line(logger, logging.WARNING, "100 %s", {"ms": 1.5})
    (record,) = others.records
    assert (record.getMessage(), record.levelname) == ("100 %s", "WARNING")
    assert json.loads(stream.written[0])["ms"] == 1.5
