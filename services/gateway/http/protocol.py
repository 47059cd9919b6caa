"""HTTP/1.1 on one connection: uvicorn's protocol, with a time for heads and stricter framing.

A request head that has not arrived after some seconds ends its connection. A client that closes
only its sending side gets its answer, and is probed until the answer begins. A request with two
lengths is its connection's last. A head with a bare line feed or a folded line is refused: a proxy
in front may read another request in it.
"""

import asyncio
from collections.abc import Iterator
from typing import cast

import h11
from h11._receivebuffer import ReceiveBuffer
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from services.gateway.http.chunked import Channel

HEAD_TIMEOUT_S = 10.0
_TIMEOUT_RESPONSE = (
    b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
)
# Seconds before the first probes of a client that has closed its sending side, and between those
# that follow. Where the client is gone, a probe draws the reset and the next probe finds it.
_FIRST_PROBE_DELAYS_S = (0.02, 0.2)
_PROBE_DELAY_S = 2.0


class _StrictLines(ReceiveBuffer):
    """h11's buffer of what has arrived. Lines of heads and trailers end with CR LF alone, and none
    continues the line before it (RFC 9112, 2.2 and 5.2; h11 0.16 takes a bare LF and joins folded
    lines).
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
    """Made by uvicorn for each connection."""

    _head_timer: asyncio.TimerHandle | None = None
    _checked: RequestResponseCycle | None = None

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
        """Closes the connection after a request with Content-Length and Transfer-Encoding (RFC
        9112, 6.3; h11 0.16 and uvicorn 0.54 do not): a proxy in front may take another part of the
        bytes for the next request.
        """
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if cycle is None or cycle is self._checked:
            return
        self._checked = cycle
        names = {name for name, _ in self.headers}
        if b"transfer-encoding" in names and b"content-length" in names:
            self.headers.append((b"connection", b"close"))  # the request's own word
            cycle.keep_alive = False

    def _watch_head(self) -> None:
        """Starts the time of a head that has begun to arrive; ends that of one that is there."""
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._head_timer is None and self.conn.trailing_data[0]:
            self._expect_head()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keeps the connection for an answer that is still owed.

        A client that has closed both sides looks the same until something is sent to it: its
        machine then resets the connection, which cancels the request. The client may leave at any
        time, so it is probed until its answer begins.
        """
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if cycle is None or cycle.response_complete or cycle.more_body:
            return None
        cycle.keep_alive = False
        if cycle.scope["http_version"] != "1.0":  # which has no interim responses
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
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.write(_TIMEOUT_RESPONSE)
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
