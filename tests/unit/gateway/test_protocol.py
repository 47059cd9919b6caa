"""`GatewayProtocol` frames responses as HTTP asks, and answers requests in their order."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import h11
import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message, Receive, Scope, Send
from uvicorn.server import ServerState

from services.gateway.http.protocol import MAX_HEAD_BYTES, PIECES, GatewayProtocol

EVENTS = [b"data: {}\n\n", b"", b"x" * 70_000, "data: ü\n\n".encode()]
STREAM = [(b"content-type", b"text/event-stream")]
LENGTH = [(b"content-length", b"19")]
BAD = b"wrong\r\n\r\n"


class Wire(asyncio.Transport):
    """Collects what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.num_writes = 0
        self.closed = False

    def write(self, data: Any) -> None:
        assert not self.closed
        self.written += data
        self.num_writes += 1

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


class Client:
    """A connection to an application; `with` ends it."""

    def __init__(self, app: Any, **options: Any) -> None:
        config = uvicorn.Config(app, date_header=False, log_config=None, ws="none", **options)
        self.state, self.wire = ServerState(), Wire()
        self.protocol = GatewayProtocol(config, self.state, {})
        self.protocol.connection_made(self.wire)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        if self.protocol.parser is not None:
            self.protocol.connection_lost(None)

    async def send(self, *pieces: bytes) -> bytes:
        """Returns all that is written once nothing more happens."""
        for piece in pieces:
            if not self.wire.closed:
                self.protocol.data_received(piece)
            await settled()
        return self.wire.written


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def answering(messages: Sequence[Message], seen: list[Scope] | None = None) -> Any:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if seen is not None:
            seen.append(scope)
        while (await receive()).get("more_body"):
            pass
        for message in messages:
            await send({**message})

    return app


def stream(*pieces: bytes, status: int = 200, headers: Any = STREAM) -> list[Message]:
    start = {"type": "http.response.start", "status": status, "headers": headers}
    body = [{"type": "http.response.body", "body": p, "more_body": True} for p in pieces]
    return [start, *body, {"type": "http.response.body", "body": b"data: [DONE]\n\n"}]


def get(version: str = "1.1", method: str = "GET", headers: str = "") -> bytes:
    return f"{method} / HTTP/{version}\r\nHost: x\r\n{headers}\r\n".encode()


def read(written: bytes, method: str, version: str, *, closed: bool) -> tuple[Any, bytes]:
    """The first response and its body, as another implementation of HTTP reads them."""
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
    client.send(h11.EndOfMessage())
    client.receive_data(written)
    if closed:
        client.receive_data(b"")
    response = client.next_event()
    assert isinstance(response, h11.Response)
    body = b""
    while isinstance(event := client.next_event(), h11.Data):
        body += event.data
    assert isinstance(event, h11.EndOfMessage)
    assert version == "1.1" or b"transfer-encoding" not in dict(response.headers)
    return response, body


@pytest.mark.parametrize(
    ("version", "method", "headers", "is_kept"),
    [
        ("1.1", "GET", "", True), ("1.1", "HEAD", "", True),
        ("1.1", "GET", "Connection: close\r\n", False), ("1.0", "GET", "", False),
        ("1.0", "GET", "Connection: keep-alive\r\n", False), ("1.0", "HEAD", "", False),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    ("messages", "body"),
    [
        (stream(*EVENTS), b"".join(EVENTS) + b"data: [DONE]\n\n"),
        (stream(), b"data: [DONE]\n\n"),
        (stream(b"abc", b"de", headers=LENGTH), b"abcdedata: [DONE]\n\n"),
        (stream(b"error", status=500), b"errordata: [DONE]\n\n"),
    ],
    ids=["stream", "empty", "length", "500"],
)
async def test_a_response_is_framed_as_its_client_reads_it(
    messages: list[Message], body: bytes, version: str, method: str, headers: str, is_kept: bool
) -> None:
    with Client(answering(messages)) as client:
        written = await client.send(get(version, method, headers))
        response, found = read(written, method, version, closed=client.wire.closed)
        assert response.status_code == messages[0]["status"]
        assert found == (b"" if method == "HEAD" else body)
        assert client.wire.closed != is_kept
        assert ((b"connection", b"close") in response.headers) != is_kept


@pytest.mark.parametrize(
    ("version", "method", "headers", "can_send"),
    [
        ("1.1", "GET", STREAM, True), ("1.1", "GET", LENGTH, False), ("1.0", "GET", STREAM, False),
        ("1.1", "HEAD", STREAM, False),
    ],
)  # fmt: skip
async def test_pieces_are_sent_without_waiting_in_a_body_of_chunks(
    version: str, method: str, headers: Any, can_send: bool
) -> None:
    found: list[bool] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        pieces = scope["extensions"][PIECES]
        start, first, second, last = stream(b"abc", b"de", headers=headers)
        found.append(pieces.can_send())
        await send(start)
        found.append(pieces.can_send())
        await send(first)
        found.append(pieces.can_send())
        if pieces.can_send():
            pieces.send(second["body"])
        else:
            await send(second)
        await send(last)

    with Client(app) as client:
        written = await client.send(get(version, method))
        _, body = read(written, method, version, closed=client.wire.closed)
        assert body == (b"" if method == "HEAD" else b"abcdedata: [DONE]\n\n")
        assert found == [False, False, can_send]


async def test_no_piece_is_sent_past_a_full_buffer_or_to_a_client_that_is_gone() -> None:
    released = asyncio.Event()
    found: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found.append(scope["extensions"][PIECES])
        for message in stream(b"first")[:2]:
            await send(message)
        await released.wait()

    with Client(app) as client:
        await client.send(get())
        (pieces,) = found
        assert pieces.can_send()
        client.protocol.pause_writing()
        assert not pieces.can_send()
        client.protocol.resume_writing()
        assert pieces.can_send()
        client.wire.close()
        assert not pieces.can_send()
        released.set()
        await settled()


async def test_a_pipelined_request_that_is_wrong_is_answered_behind_the_first() -> None:
    with Client(answering(stream(b"a"))) as client:
        written = await client.send(get() + BAD)
        assert 0 < written.index(b"\r\n0\r\n\r\n") < written.index(b"HTTP/1.1 400")
        assert client.wire.closed


async def test_an_answer_goes_on_when_a_wrong_request_arrives() -> None:
    released = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        start, piece, last = stream(b"first")
        await send(start)
        await send(piece)
        await released.wait()
        await send(last)

    with Client(app) as client:
        written = await client.send(get(), BAD, get())
        assert written.endswith(b"5\r\nfirst\r\n") and not client.wire.closed
        released.set()
        await settled()
        assert client.wire.written.count(b"HTTP/1.1 ") == 2 and client.wire.closed
        assert client.wire.written.index(b"[DONE]") < client.wire.written.index(b"HTTP/1.1 400")


@pytest.mark.parametrize("is_started", [False, True])
async def test_a_body_that_breaks_off_has_one_answer(is_started: bool) -> None:
    received: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if is_started:
            await send(stream()[0])
        while received.append((message := await receive())["type"]) or message.get("more_body"):
            pass

    with Client(app) as client:
        head = get(method="POST", headers="Transfer-Encoding: chunked\r\n")
        written = await client.send(head, b"1\r\nx\r\n", b"wrong\r\n")
        assert written.startswith(b"HTTP/1.1 200" if is_started else b"HTTP/1.1 400")
        assert written.count(b"HTTP/1.1 ") == 1 and client.wire.closed
        assert received[-1] == "http.disconnect"


async def test_a_wrong_body_behind_an_answer_under_way_is_refused_in_its_turn() -> None:
    with Client(answering(stream(b"a"))) as client:
        head = get(method="POST", headers="Transfer-Encoding: chunked\r\n")
        written = await client.send(get() + get() + head + b"wrong\r\n")
        assert [written.count(b"HTTP/1.1 %d" % status) for status in (200, 400)] == [2, 1]
        assert written.endswith(b"Invalid HTTP request received.") and client.wire.closed


async def test_no_more_than_some_requests_wait_for_answers() -> None:
    seen: list[Scope] = []
    with Client(answering(stream(b"a"), seen)) as client:
        await client.send(get() * 1000)
        while client.state.tasks:
            await asyncio.wait(client.state.tasks)
        written = client.wire.written
        assert 20 < len(seen) < 100
        assert written.count(b"HTTP/1.1 200") == len(seen)
        assert written.count(b"HTTP/1.1 400") == 1 and client.wire.closed


async def test_every_request_of_a_lost_connection_is_told() -> None:
    received: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while received.append(await receive()) or received[-1]["type"] != "http.disconnect":
            pass

    with Client(app) as client:
        await client.send(get() + get())
    await settled()
    assert [message["type"] for message in received] == ["http.request", "http.disconnect"]
    assert not client.state.tasks


async def test_a_client_that_waits_to_be_asked_for_its_body_is_asked_at_once() -> None:
    for version in ("1.1", "1.0"):  # which knows no interim response
        with Client(answering(stream(b"a"))) as client:
            head = get(version, "POST", "Expect: 100-continue\r\nContent-Length: 1\r\n")
            written = await client.send(head)
            assert written == (b"HTTP/1.1 100 Continue\r\n\r\n" if version == "1.1" else b"")
            written = await client.send(b"x")
            assert written.count(b"HTTP/1.1 200") == 1


async def test_what_an_application_left_undone_is_written_before_the_connection_is_closed() -> None:
    with Client(answering(stream(b"a")[:1])) as client:
        assert (await client.send(get())).startswith(b"HTTP/1.1 200") and client.wire.closed


async def test_nothing_is_sent_after_the_end_of_an_answer() -> None:
    messages = [*stream(b"a"), {"type": "http.response.body", "body": b"late", "more_body": True}]
    with Client(answering(messages)) as client:
        assert b"late" not in await client.send(get())


async def test_trailers_are_no_headers() -> None:
    seen: list[Scope] = []
    with Client(answering(stream(), seen)) as client:
        head = get(method="POST", headers="Transfer-Encoding: chunked\r\n")
        await client.send(head + b"2\r\n{}\r\n0\r\nAuthorization: x\r\nHost: evil\r\n\r\n")
        assert seen[0]["headers"] == [(b"host", b"x"), (b"transfer-encoding", b"chunked")]


async def test_blanks_around_a_value_are_not_part_of_it() -> None:
    seen: list[Scope] = []
    with Client(answering(stream(), seen)) as client:
        await client.send(get(headers="A: \t b c\t \r\nB: \r\n"))
        assert seen[0]["headers"][1:] == [(b"a", b"b c"), (b"b", b"")]


@pytest.mark.parametrize("rest", ["whole", "body later", "next request in the body"])
async def test_a_request_that_offers_another_protocol_keeps_its_body(rest: str) -> None:
    body = get() if rest.startswith("next") else b"{}"
    bodies: list[bytes] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert b"upgrade" not in dict(scope["headers"])
        message = await receive()
        while message["more_body"]:
            more = await receive()
            message = {**more, "body": message["body"] + more["body"]}
        bodies.append(message["body"])
        for message in stream():
            await send(message)

    offer = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"
    head = get(method="POST", headers=f"{offer}Content-Length: {len(body)}\r\n")
    with Client(app) as client:
        if rest == "whole":
            await client.send(head + body + get())
        else:
            await client.send(head, body, get())
        assert bodies == [body, b""] and not client.wire.closed


@pytest.mark.parametrize(
    "drip",
    [b"X: yyyy\r\n", b"x" * 10, b"POST / HTTP/1.1\r\nHost: x\r\nA: ", b"\r\n"],
    ids=["headers", "line", "value", "blank lines"],
)
async def test_a_head_without_end_is_refused(drip: bytes) -> None:
    with Client(answering(stream())) as client:
        await client.send(*[get()[:-2], drip * 100] if drip == b"X: yyyy\r\n" else [drip])
        count = 0
        while not client.wire.closed:
            client.protocol.data_received(drip[-10:] * 100)
            count += 1
        assert count * 200 <= 2 * MAX_HEAD_BYTES
        assert client.wire.written.startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("after", [b"0\r\n", b"1;"], ids=["trailers", "extension of a chunk"])
async def test_what_is_no_body_has_a_limit_too(after: bytes) -> None:
    with Client(answering(stream())) as client:
        head = get(method="POST", headers="Transfer-Encoding: chunked\r\n")
        await client.send(head, b"2\r\n{}\r\n" + after + b"a: b" if after == b"0\r\n" else after)
        for _ in range(MAX_HEAD_BYTES // 1000 + 2):
            if not client.wire.closed:
                client.protocol.data_received(b"c" * 1000)
        assert client.wire.closed and client.wire.written.startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("size", [MAX_HEAD_BYTES, MAX_HEAD_BYTES + 100])
async def test_a_head_that_arrives_whole_has_the_same_limit(size: int) -> None:
    with Client(answering(stream())) as client:
        written = await client.send(get(headers=f"A: {'b' * (size - 50)}\r\n"))
        assert (b" 200 " in written) == (size == MAX_HEAD_BYTES)


async def test_a_client_that_ends_no_body_is_not_kept_after_its_answer() -> None:
    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        for message in stream(status=413):
            await send(message)

    with Client(refuse, timeout_keep_alive=0) as client:
        head = get(method="POST", headers="Content-Length: 1000\r\n")
        assert b" 413 " in await client.send(head)
        await client.send(b"x")
        await asyncio.sleep(0.01)
        assert client.wire.closed


REQUESTS = (
    get()
    + get(method="POST", headers="Transfer-Encoding: chunked\r\n")
    + b"2;a=b\r\n{}\r\n0\r\nA: b\r\n\r\n"
    + get(method="POST", headers="Connection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 5\r\n")
    + b"GET /"
    + get("1.0", headers="A: b\r\n")
)


@given(cuts=st.lists(st.integers(1, len(REQUESTS) - 1), unique=True, max_size=20))
async def test_no_cut_of_the_bytes_changes_an_answer(cuts: list[int]) -> None:
    bounds = [0, *sorted(cuts), len(REQUESTS)]
    pieces = [REQUESTS[a:b] for a, b in pairwise(bounds)]
    seen: list[Scope] = []
    with Client(answering(stream(b"a", headers=STREAM), seen)) as client:
        written = await client.send(*pieces)
        assert [scope["http_version"] for scope in seen] == ["1.1", "1.1", "1.1", "1.0"]
        assert written.count(b"HTTP/1.1 200") == 4 and b" 400 " not in written
        assert client.wire.closed


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_a_head_and_the_first_piece_of_its_body_are_one_write(method: str) -> None:
    with Client(answering(stream(b"first", b"second"))) as client:
        for number in range(2):
            before = client.wire.num_writes
            await client.send(get(method=method))
            assert client.wire.num_writes - before == (3 if method == "GET" else 1), number


async def test_a_head_without_a_body_that_follows_is_sent_when_the_connection_ends() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(stream()[0])
        raise RuntimeError

    with Client(app) as client:
        assert (await client.send(get())).startswith(b"HTTP/1.1 200")
        assert client.wire.closed
