"""`chunked` writes what uvicorn's own `send` does."""

import asyncio
from collections.abc import Sequence
from typing import Any

import h11
import pytest
import uvicorn
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from services.gateway.http.chunked import chunked

EVENTS = [b"data: {}\n\n", b"", b"x" * 70_000, "data: ü\n\n".encode()]
STREAM = [(b"content-type", b"text/event-stream")]


class Wire(asyncio.Transport):
    """Collects what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        pass


def answering(messages: Sequence[Message]) -> Any:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send({**message})

    return app


def stream(*pieces: bytes, status: int = 200, headers: Any = STREAM) -> list[Message]:
    start = {"type": "http.response.start", "status": status, "headers": headers}
    body = [{"type": "http.response.body", "body": p, "more_body": True} for p in pieces]
    return [start, *body, {"type": "http.response.body", "body": b"data: [DONE]\n\n"}]


async def answer(app: Any, *received: bytes) -> tuple[list[bytes], bool]:
    """What uvicorn writes, and whether it has closed the connection then."""
    config = uvicorn.Config(app, date_header=False, log_config=None, access_log=False)
    state, wire = ServerState(), Wire()
    protocol = H11Protocol(config=config, server_state=state, app_state={})
    protocol.connection_made(wire)
    for data in received:
        protocol.data_received(data)
        await asyncio.sleep(0)
    while state.tasks:
        await asyncio.gather(*state.tasks)
    closed = wire.closed
    protocol.connection_lost(None)
    if protocol.timeout_keep_alive_task is not None:
        protocol.timeout_keep_alive_task.cancel()
    return wire.writes, closed


def get(version: str = "1.1", method: str = "GET", headers: str = "") -> bytes:
    return f"{method} / HTTP/{version}\r\nHost: x\r\n{headers}\r\n".encode()


@pytest.mark.parametrize(
    "request_",
    [
        get(), get("1.0"), get(method="HEAD"), get(headers="Connection: close\r\n"),
        get() + get(),
    ],
    ids=["1.1", "1.0", "HEAD", "close", "pipelined"],
)  # fmt: skip
@pytest.mark.parametrize(
    "messages",
    [
        stream(*EVENTS),
        stream(),
        stream(b"abc", b"de", headers=[(b"content-length", b"19")]),
        stream(b"error", status=500),
        stream(b"a", status=204),
    ],
    ids=["stream", "empty", "length", "500", "204"],
)
async def test_pieces_are_framed_as_by_uvicorn(messages: list[Message], request_: bytes) -> None:
    app = answering(messages)
    writes, closed = await answer(chunked(app), request_)
    written, has_to_close = await answer(app, request_)
    assert (b"".join(writes), closed) == (b"".join(written), has_to_close)


async def test_the_head_goes_with_the_first_piece_and_the_end_with_the_last() -> None:
    writes, _ = await answer(chunked(answering(stream(b"a", b"", b"b"))), get())
    first, second, last = writes
    assert first.startswith(b"HTTP/1.1 200") and first.endswith(b"\r\n\r\n1\r\na\r\n")
    assert second == b"1\r\nb\r\n"
    assert last == b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
    whole = stream(b"abc", headers=[(b"content-length", b"17")])
    writes, _ = await answer(chunked(answering([whole[0], whole[1], whole[2]])), get())
    assert [write[-3:] for write in writes] == [b"abc", b"]\n\n"]


async def test_a_pipelined_request_that_is_wrong_is_answered_behind_the_first() -> None:
    writes, closed = await answer(chunked(answering(stream(b"a"))), get() + b"wrong\r\n\r\n")
    written = b"".join(writes)
    assert 0 < written.index(b"\r\n0\r\n\r\n") < written.index(b"HTTP/1.1 400") and closed


async def test_a_client_that_waits_to_be_asked_for_its_body_is_asked_at_once() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await answering(stream(b"a"))(scope, receive, send)

    head = get(headers="Expect: 100-continue\r\nContent-Length: 1\r\n")
    writes, _ = await answer(chunked(app), head, b"x")
    assert [write[:12] for write in writes] == [b"HTTP/1.1 100", b"HTTP/1.1 200", b"e\r\ndata: [DO"]


async def test_what_an_application_left_undone_is_written_before_the_connection_is_closed() -> None:
    writes, closed = await answer(chunked(answering(stream(b"a")[:1])), get())
    assert b"".join(writes).startswith(b"HTTP/1.1 200") and closed


async def test_h11_sees_only_the_last_piece_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []
    send = h11.Connection.send

    def noting(connection: h11.Connection, event: h11.Event) -> bytes | None:
        if isinstance(event, h11.Data):
            seen.append(bytes(event.data))
        return send(connection, event)

    monkeypatch.setattr(h11.Connection, "send", noting)
    await answer(chunked(answering(stream(*EVENTS))), get())
    assert seen == [b"data: [DONE]\n\n"]


async def test_nothing_is_sent_after_the_end_of_an_answer() -> None:
    messages = [*stream(b"a"), {"type": "http.response.body", "body": b"late", "more_body": True}]
    writes, _ = await answer(chunked(answering(messages)), get())
    assert b"late" not in b"".join(writes)
