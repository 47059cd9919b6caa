"""The lines of a batch: a request for each line of a JSONL file, in OpenAI's form.

For example:

    {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", …}}
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable
from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct

from services.gateway.batches.batch_store import LineError

MAX_LINES = 50_000
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MAX_LINE_BYTES = 32 << 20
_MAX_FAULTS = 100
_TURN_LINES = 64  # Lines that are read before other tasks of the gateway have a turn.


class BatchLine(Struct):
    """A line. Further fields are ignored."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: str
    url: str
    body: Raw


class _Body(Struct):
    stream: bool | None = None


class _Result(Struct):
    id: str
    custom_id: str
    response: "_Response | None"
    error: "_Error | None"


class _Response(Struct):
    status_code: int
    request_id: str
    body: Raw


class _Error(Struct):
    code: str
    message: str


_decode_line = msgspec.json.Decoder(BatchLine).decode
_decode_body = msgspec.json.Decoder(_Body).decode


async def lines_of(pieces: AsyncIterable[bytes]) -> AsyncGenerator[bytes]:
    """Yields the lines of a file that are not empty, without their ends.

    Other tasks of the gateway have a turn between some lines, and after each piece.
    """
    rest = b""
    async for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        for number, line in enumerate(whole, 1):
            if line := line.strip():
                yield line
            if number % _TURN_LINES == 0:
                await asyncio.sleep(0)
        await asyncio.sleep(0)
    if rest := rest.strip():
        yield rest


def parse_line(line: bytes) -> BatchLine:
    """Parses a line that `check_lines` has found valid."""
    return _decode_line(line)


async def check_lines(lines: AsyncIterable[bytes], endpoint: str) -> tuple[int, list[LineError]]:
    """Checks all lines of a batch.

    Args:
        lines: the lines.
        endpoint: path to which each line has to be sent.

    Returns:
        The number of lines, and what is wrong with some of them. A batch with a wrong line fails.
    """
    faults: list[LineError] = []
    ids: set[str] = set()
    number = 0
    async for line in lines:
        number += 1
        if number > MAX_LINES:
            fault = f"a batch has at most {MAX_LINES} lines"
            return number, [LineError("too_many_tasks", fault)]
        if (fault := _fault(line, endpoint, ids)) is not None:
            fault.line = number
            faults.append(fault)
            if len(faults) == _MAX_FAULTS:
                break
    if not number:
        faults.append(LineError("empty_file", "the file has no line"))
    return number, faults


def _fault(line: bytes, endpoint: str, ids: set[str]) -> LineError | None:
    """Returns the fault of a line, and adds the id of the line to `ids`."""
    if len(line) > MAX_LINE_BYTES:
        return LineError("line_too_long", f"a line has at most {MAX_LINE_BYTES} bytes")
    try:
        found = _decode_line(line)
        stream = _decode_body(found.body).stream
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return LineError("invalid_json_line", f"the line is not a request: {error}"[:300])
    if found.custom_id in ids:
        message = f"the custom_id {found.custom_id[:100]!r} is another line's, too"
        return LineError("duplicate_custom_id", message, "custom_id")
    ids.add(found.custom_id)
    if found.method != "POST":
        return LineError("invalid_method", "the method of a line is POST", "method")
    if found.url != endpoint:
        message = f"the url of a line is the batch's endpoint, {endpoint}, not {found.url[:100]!r}"
        return LineError("mismatched_url", message, "url")
    if stream:
        return LineError("invalid_request", "a line of a batch cannot stream", "body.stream")
    return None


def result_of(line_id: str, custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """Returns the line of results for an answer, or for an HTTP error."""
    response = _Response(status, request_id, Raw(body))
    return msgspec.json.encode(_Result(line_id, custom_id, response, None)) + b"\n"


def result_without_answer(line_id: str, custom_id: str, code: str, message: str) -> bytes:
    """Returns the line of results for a request that was given up."""
    return msgspec.json.encode(_Result(line_id, custom_id, None, _Error(code, message))) + b"\n"
