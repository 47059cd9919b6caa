"""HTTP/1.1 on one connection: uvicorn's protocol, with five things that it lacks.

A request head that has not arrived after some seconds ends its connection. A client that closes
only its sending side gets its answer. A request with two lengths is its connection's last. A head
with a bare line feed is refused: a proxy in front may read another request in it. A few
heads are parsed in each pass of the event loop, tenants in turn: hundreds that arrive at once would
keep it for a tenth of a second.
"""

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Any, cast

import h11
from h11._receivebuffer import ReceiveBuffer
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from services.gateway.tenancy.tenants import Keyring
from services.gateway.tenancy.turns import STRANGERS, Turnstile

HEAD_TIMEOUT_S = 10.0
_HEADS_PER_PASS = 4  # half a millisecond
_MAX_WAITING_BYTES = 64 << 10
_AUTHORIZATION = re.compile(
    rb"\r?\n(?:authorization:[ \t]{0,16}([^\r\n]{1,512})|x-api-key:[ \t]{0,16}([^\r\n]{1,512}))",
    re.IGNORECASE,
)
_TIMEOUT_RESPONSE = (
    b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
)
# An interim response, which every client skips.
_PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
# Seconds between probes. The first draws the reset, the next finds it; some clients accept five.
_PROBE_DELAYS_S = (0.02, 0.2, 2.0)


class _StrictLines(ReceiveBuffer):
    """h11's buffer of what has arrived; lines of heads and trailers end with CR LF alone (RFC 9112,
    2.2; h11 0.16 also takes a bare LF).
    """

    _are_lines = False

    def maybe_extract_lines(self) -> list[bytearray] | None:
        self._are_lines = True
        try:
            return super().maybe_extract_lines()
        finally:
            self._are_lines = False

    def _extract(self, count: int) -> bytearray:
        found = super()._extract(count)
        if self._are_lines and found.count(b"\n") != found.count(b"\r\n"):
            raise h11.RemoteProtocolError("a bare line feed in a request head")
        return found


class HeadTurns:
    """Which heads are parsed in this pass of the event loop; one for all connections.

    Args:
        keyring: says whose a head is.
    """

    def __init__(self, keyring: Keyring) -> None:
        self._keyring = keyring
        self._turnstile = Turnstile(_HEADS_PER_PASS, for_all=True)

    def try_begin(self) -> bool:
        """Whether a head may be parsed now; if so, it counts as parsed."""
        return self._turnstile.try_begin()

    def wait(self, head: bytes, call: Callable[[object], None]) -> "asyncio.Future[None]":
        """Has `call` called in the turn of the head's tenant, unless the future is cancelled."""
        found = _AUTHORIZATION.search(head)
        key = found and (found[1] or b"Bearer " + found[2])
        identity = self._keyring.identify(key or b"")
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter.add_done_callback(call)
        self._turnstile.complete(waiter, STRANGERS if identity is None else identity.tenant)
        return waiter


class GatewayProtocol(H11Protocol):
    """Made by uvicorn for each connection.

    Args:
        config, server_state, app_state, _loop: uvicorn's.
        heads: says when this connection's are parsed.
    """

    _head_timer: asyncio.TimerHandle | None = None
    _checked: RequestResponseCycle | None = None
    # Of a head whose turn has not come: what has arrived, and whether that is all.
    _waiter: "asyncio.Future[None] | None" = None
    _waiting = b""
    _ended = False

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        heads: HeadTurns,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn._receive_buffer = _StrictLines()  # pyright: ignore[reportPrivateUsage]
        self._heads = heads

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        if self._waiter is not None:
            self._waiting += data
            if len(self._waiting) > _MAX_WAITING_BYTES:
                self.flow.pause_reading()
        elif self._is_head() and not self._heads.try_begin():
            self._unset_keepalive_if_required()
            self._waiting = data
            self._waiter = self._heads.wait(data, self._take_turn)
        else:
            self._parse(data)

    def _is_head(self) -> bool:
        """Whether what arrives now begins a request."""
        return self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]

    def _take_turn(self, _: object = None) -> None:
        """Parses what waits, if the connection is still there."""
        if self._waiter is None:
            return
        data, self._waiter, self._waiting = self._waiting, None, b""
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        self._parse(data)
        if self._ended and not self.eof_received():
            self.transport.close()

    def _parse(self, data: bytes) -> None:
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
        machine then resets the connection, which cancels the request.
        """
        if self._waiter is not None:
            self._ended = True
            return True
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if cycle is None or cycle.response_complete or cycle.more_body:
            return None
        cycle.keep_alive = False
        self._probe(cycle, _PROBE_DELAYS_S)
        return True

    def _probe(self, cycle: RequestResponseCycle, delays_s: Sequence[float]) -> None:
        if cycle.response_started or self.transport.is_closing():
            return
        self.transport.write(_PROBE)
        if delays_s:
            self.loop.call_later(delays_s[0], self._probe, cycle, delays_s[1:])

    def shutdown(self) -> None:
        """What has arrived is answered, as any request that runs."""
        self._take_turn()
        super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._waiter is not None:
            self._waiter.cancel()
            self._waiter, self._waiting = None, b""
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
