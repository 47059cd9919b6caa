"""Log lines are JSON of one line of ASCII, whatever their fields hold, and none is lost."""

import asyncio
import io
import json
import logging
import threading

import pytest

from services.common.telemetry import _JsonFormatter, _LineHandler, bound_request_id


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
