"""Log lines are JSON of one line of ASCII, whatever their fields hold."""

import io
import json
import logging

import pytest

from services.common.telemetry import _JsonFormatter, bound_request_id


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
