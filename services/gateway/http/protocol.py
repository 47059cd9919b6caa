"""HTTP/1.1 on one connection: uvicorn's httptools protocol with the limits and rules that it lacks.

httptools itself refuses bare line feeds, folded lines, two lengths and other ambiguous framing. The
protocol adds a limit and a timeout of request heads, exactly one `Host`, errors that wait for the
answers in front of them, trailers that never become headers, requests that offer another protocol,
responses to HTTP/1.0, pieces of streams that are sent without waiting, and answers to clients that
have closed their sending side.
"""

import asyncio
import logging
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import httptools
from starlette.types import Message
from uvicorn import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

log = logging.getLogger(__name__)

PIECES = "triptych.pieces"
HEAD_TIMEOUT_S = 10.0
# Most bytes of a head, of trailers, or of sizes and extensions of chunks without data.
MAX_HEAD_BYTES = 64 << 10
# Most requests that wait for the answers to earlier requests of their connection.
_MAX_PIPELINED = 64
_BAD_REQUEST = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: 30\r\nconnection: close\r\n\r\nInvalid HTTP request received."
)
_TIMEOUT = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
# The beginning and the end of an interim response, which every client of HTTP/1.1 skips.
_INTERIM = b"HTTP/1.1 100 Continue\r\nx-triptych-waits: "
_INTERIM_END = b"\r\n\r\n"
# Seconds before the first probes of a client that has closed its sending side, and between the
# later probes. If the client is gone, its machine answers a probe with a reset, and the next probe
# fails.
_FIRST_PROBE_DELAYS_S = (0.02, 0.2)
_PROBE_DELAY_S = 2.0


class GatewayProtocol(HttpToolsProtocol):
    """The protocol of one connection, which uvicorn constructs.

    Args:
        config: configuration of the server.
        server_state: connections and tasks of the server.
        app_state: state that the application's start has returned.
        _loop: event loop of the connection. Defaults to the running one.
        head_timeout_s: seconds in which the head of a request has to arrive.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        head_timeout_s: float = HEAD_TIMEOUT_S,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._head_timeout_s = head_timeout_s
        self._head_timer: asyncio.TimerHandle | None = None
        self._in_head = True
        self._num_unread = 0  # bytes since a head or a piece of a body was last complete
        # The request that is being answered. `cycle` is the last request whose head has arrived.
        self._current: RequestResponseCycle | None = None
        self._last_response: bytes | None = None  # response with which the connection has to end

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        if self._last_response is not None:
            return
        self._num_unread += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._read_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            log.info("a request is malformed: %s", error.__context__ or error)
            self._end(_BAD_REQUEST)
        else:
            if self._num_unread > MAX_HEAD_BYTES:
                self._end(_BAD_REQUEST)
            self._watch_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_unread = self._num_unread or 1  # 0 if this data also ended the last request

    def on_headers_complete(self) -> None:
        version = self.parser.get_http_version()
        self._check_head(version)
        if self.parser.should_upgrade():
            return
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None
        super().on_headers_complete()
        pieces = Pieces(self.flow, self.transport)
        cast("Any", self.scope)["extensions"] = {PIECES: pieces}
        cast("Any", self.cycle).transport = _JoinedHead(self.cycle, pieces)
        self._in_head, self._num_unread = False, 0
        self.headers = []  # httptools reports trailers as further headers
        if not self.pipeline:
            self._current = self.cycle
        if version == "1.0":
            self.cycle.waiting_for_100_continue = False
            self.cycle.chunked_encoding = False
            cast("Any", self.cycle).send = partial(_send_to_the_end, self.cycle)

    def on_body(self, body: bytes) -> None:
        self._num_unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            self._in_head, self._num_unread = True, 0
            super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._current is not None:
            _send_head(self._current)  # the response may have no body
        if self.pipeline:
            self._current = self.pipeline[-1][0]
        super().on_response_complete()
        self._end_if_answered()
        self._watch_head()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keeps the connection open for the answers to requests that have arrived.

        A client that has closed its sending side and one that has closed both sides look the same
        until something is sent to them. In the second case, the client's machine then resets the
        connection, which cancels the request. The client is probed until the answer begins, because
        it may leave at any time.
        """
        cycle = self._current
        if cycle is None or cycle.response_complete or cycle.more_body:
            return None
        (cycle if self.cycle.more_body else self.cycle).keep_alive = False
        if cycle.scope["http_version"] != "1.0":  # HTTP/1.0 has no interim responses
            self._probe_later(iter(_FIRST_PROBE_DELAYS_S))
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._current is not None:
            _disconnect(self._current)
        super().connection_lost(exc)

    def _check_head(self, version: str) -> None:
        """Checks the head of a request beyond its form, and strips its values.

        Raises:
            HttpParserError: the head is refused.
        """
        headers = self.headers
        headers[:] = [(name, value.rstrip(b" \t")) for name, value in headers]
        names = [name for name, _ in headers]
        codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in headers)
        if size > MAX_HEAD_BYTES:
            raise httptools.HttpParserError("the head is too long")
        if version not in ("1.0", "1.1"):
            raise httptools.HttpParserError(f"HTTP/{version} is not served")
        if names.count(b"host") > 1 or (version == "1.1" and b"host" not in names):
            raise httptools.HttpParserError("a request needs one Host")
        if codings and codings != [b"chunked"]:
            raise httptools.HttpParserError("no transfer coding but chunked is served")
        if len(self.pipeline) >= _MAX_PIPELINED:
            raise httptools.HttpParserError("too many requests wait for earlier answers")

    def _read_without_upgrade(self, rest: bytes) -> None:
        """Reads a request again as if it had not offered another protocol, which a server may
        ignore (RFC 9110, 7.8). httptools takes the body of such a request for the other protocol.

        Args:
            rest: bytes behind the head.
        """
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        headers = [(name, value) for name, value in self.headers if name != b"upgrade"]
        if len(headers) == len(self.headers):  # The request is a CONNECT, without `Upgrade`.
            self._end(_BAD_REQUEST)
            return
        first = b"%b %b HTTP/%b" % (method, self.url, version)
        lines = [first, *map(b": ".join, headers), b"", b""]
        self.parser = httptools.HttpRequestParser(self)
        self._num_unread = 0
        self.data_received(b"\r\n".join(lines) + rest)

    def _end(self, response: bytes) -> None:
        """Ends the connection behind the answers to the requests that have arrived.

        Args:
            response: last response of the connection. It is left out if it would be the second
                response to one request.
        """
        self._last_response = response
        if not self._in_head:
            self._last_response = b"" if self.cycle.response_started else response
            _send_head(self.cycle)
            _disconnect(self.cycle)
        self._end_if_answered()

    def _end_if_answered(self) -> None:
        if self._last_response is not None and self._is_idle() and not self.transport.is_closing():
            self.transport.write(self._last_response)
            self.transport.close()

    def _is_idle(self) -> bool:
        cycle = self._current
        return cycle is None or cycle.response_complete or cycle.disconnected

    def _watch_head(self) -> None:
        """Starts the timer when a head begins to arrive and all requests are answered, and stops
        the timer when the head is complete.
        """
        if not (self._in_head and self._num_unread and self._is_idle()):
            self._stop_timer()
        elif self._head_timer is None:
            self._expect_head()

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self._head_timeout_s, self._end, _TIMEOUT)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _probe_later(self, delays_s: Iterator[float]) -> None:
        self.loop.call_later(next(delays_s, _PROBE_DELAY_S), self._probe, delays_s)

    def _probe(self, delays_s: Iterator[float]) -> None:
        if self.transport.is_closing() or self._current is None:
            return
        if not self._current.response_started:
            transport = cast("_JoinedHead | _InterimResponse", self._current.transport)
            if not isinstance(transport, _InterimResponse):
                transport = _InterimResponse(self._current, self.transport)
            transport.grow()
        self._probe_later(delays_s)


class Pieces:
    """Sends pieces of a response's body where the caller cannot wait. The protocol adds it to the
    scope of a request as the extension `PIECES`.

    Args:
        flow: state of the connection's send buffer.
        transport: transport of the connection.

    Attributes:
        is_open: True once the head of a response in chunks has been sent.
    """

    __slots__ = ("_flow", "_transport", "is_open")

    def __init__(self, flow: FlowControl, transport: asyncio.Transport) -> None:
        self._flow = flow
        self._transport = transport
        self.is_open = False

    def can_send(self) -> bool:
        """Returns whether `send` may be called. If not, the piece has to be sent as a message."""
        return self.is_open and not (self._flow.write_paused or self._transport.is_closing())

    def send(self, data: bytes) -> None:
        """Sends a piece, which must not be empty, of a response that has not ended."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class _JoinedHead:
    """Sends the head of a response together with the first piece of its body, because each write to
    a socket takes some 20 µs.

    It stands in the place of the request's transport until then.

    Args:
        cycle: the request. Its response has not begun.
        pieces: sender of pieces, which is opened once the head is sent.
    """

    def __init__(self, cycle: RequestResponseCycle, pieces: Pieces) -> None:
        self._cycle = cycle
        self._pieces = pieces
        self._transport = cycle.transport
        self._head: bytes | None = None
        self.is_closing = self._transport.is_closing

    def write(self, data: bytes) -> None:
        if not self._cycle.response_started:  # The data is an interim response.
            self._transport.write(data)
        elif self._head is None:
            self._head = data
        else:
            self._head += data
            self.flush()

    def flush(self) -> None:
        self._cycle.transport = self._transport
        if self._head is not None:
            self._transport.write(self._head)
            self._pieces.is_open = bool(self._cycle.chunked_encoding)

    def close(self) -> None:
        self.flush()
        self._transport.close()


class _InterimResponse:
    """Probes a client with one interim response, whose header grows by a byte for each probe,
    because some clients accept only five interim responses.

    It stands in the place of the request's transport and ends the interim response when the
    response begins.

    Args:
        cycle: the request. Its response has not begun.
        transport: the transport of the connection.
    """

    def __init__(self, cycle: RequestResponseCycle, transport: asyncio.Transport) -> None:
        self._cycle = cycle
        self._transport = transport
        self._next = _INTERIM
        self.is_closing = self._transport.is_closing
        cast("Any", cycle).transport = self

    def grow(self) -> None:
        self._transport.write(self._next)
        self._next = b"."

    def write(self, data: bytes) -> None:
        self._cycle.transport = self._transport
        self._transport.write(_INTERIM_END + data)


async def _send_to_the_end(cycle: RequestResponseCycle, message: Message) -> None:
    """Sends a part of a response to HTTP/1.0, which knows no chunks: the end of the connection ends
    the body.
    """
    if message["type"] == "http.response.body":
        cycle.expected_content_length = len(message.get("body", b""))
    await RequestResponseCycle.send(cycle, cast("Any", message))


def _send_head(cycle: RequestResponseCycle) -> None:
    """Sends the head of a response if it waits for the body."""
    if isinstance(transport := cast("Any", cycle.transport), _JoinedHead):
        transport.flush()


def _disconnect(cycle: RequestResponseCycle) -> None:
    """Tells the application that the client of an unfinished request is gone."""
    if not cycle.response_complete:
        cycle.disconnected = True
        cycle.message_event.set()
