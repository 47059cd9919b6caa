"""HTTP/1.1 on one connection: uvicorn's protocol with a timeout for request heads and with stricter
framing.

If a request head has not arrived after some seconds, the connection ends. A client that closes only
its sending side gets its answer, and is probed until the answer begins. A connection ends after a
request that has both Content-Length and Transfer-Encoding. A head with a bare line feed or a folded
line is refused, because a proxy in front may read a different request in it.
"""

import asyncio
from collections.abc import Iterator
from typing import Any, cast

import h11
from h11._receivebuffer import ReceiveBuffer
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from services.gateway.http.chunked import Channel

HEAD_TIMEOUT_S = 10.0
_TIMEOUT_RESPONSE = (
    b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
)
# Seconds before the first probes of a client that has closed its sending side, and between the
# later probes. If the client is gone, its machine answers a probe with a reset, and the next probe
# fails.
_FIRST_PROBE_DELAYS_S = (0.02, 0.2)
_PROBE_DELAY_S = 2.0


class _StrictLines(ReceiveBuffer):
    """h11's buffer of received bytes, which refuses heads and trailers with a line that ends with a
    bare LF or continues the line before it (RFC 9112, 2.2 and 5.2). h11 0.16 itself accepts both.
    """

    def maybe_extract_lines(self) -> list[bytearray] | None:
        num_before = len(self)
        lines = super().maybe_extract_lines()
        if lines is not None and num_before - len(self) != 2 + sum(len(line) + 2 for line in lines):
            raise h11.RemoteProtocolError("a bare line feed in a request head")
        if lines is not None and any(line.startswith((b" ", b"\t")) for line in lines):
            raise h11.RemoteProtocolError("a folded line in a request head")
        return lines


class GatewayProtocol(H11Protocol):
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
        self._checked: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.conn._receive_buffer = _StrictLines()  # pyright: ignore[reportPrivateUsage]
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._check_lengths()
        self._watch_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._check_lengths()
        self._watch_head()

    def _check_lengths(self) -> None:
        """Closes the connection after a request with both Content-Length and Transfer-Encoding (RFC
        9112, 6.3), because a proxy in front may divide the bytes into other requests. h11 0.16 and
        uvicorn 0.54 leave such a connection open.
        """
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if cycle is None or cycle is self._checked:
            return
        self._checked = cycle
        names = {name for name, _ in self.headers}
        if b"transfer-encoding" in names and b"content-length" in names:
            self.headers.append((b"connection", b"close"))  # as if the client had sent it
            cycle.keep_alive = False

    def _watch_head(self) -> None:
        """Starts the timer when a head begins to arrive, and stops the timer when the head is
        complete.
        """
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._head_timer is None and self.conn.trailing_data[0]:
            self._expect_head()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keeps the connection open for the answer to a request that has arrived.

        A client that has closed its sending side and one that has closed both sides look the same
        until something is sent to them. In the second case, the client's machine then resets the
        connection, which cancels the request. The client is probed until the answer begins, because
        it may leave at any time.
        """
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if cycle is None or cycle.response_complete or cycle.more_body:
            return None
        cycle.keep_alive = False
        if cycle.scope["http_version"] != "1.0":  # HTTP/1.0 has no interim responses
            self._probe_later(cycle, iter(_FIRST_PROBE_DELAYS_S))
        return True

    def _probe_later(self, cycle: RequestResponseCycle, delays_s: Iterator[float]) -> None:
        self.loop.call_later(next(delays_s, _PROBE_DELAY_S), self._probe, cycle, delays_s)

    def _probe(self, cycle: RequestResponseCycle, delays_s: Iterator[float]) -> None:
        if cycle.response_started or self.transport.is_closing():
            return
        channel = cast("Channel | asyncio.Transport", cycle.transport)
        if isinstance(channel, Channel):  # else the application has not been called yet
            channel.probe()
        self._probe_later(cycle, delays_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self._head_timeout_s, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.write(_TIMEOUT_RESPONSE)
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
