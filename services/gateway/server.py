"""The HTTP server: uvicorn, which ends the connections of clients that do not read, and drains at a
shutdown.

`__main__` runs it with the gateway that `create_gateway` returned. The server knows no routes. If
its port is taken, the process ends.
"""

import asyncio
import logging
import signal
import socket
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, cast

import uvicorn

from services.gateway.app import Gateway
from services.gateway.http.protocol import HEAD_TIMEOUT_S, GatewayProtocol
from services.gateway.settings import GatewaySettings

log = logging.getLogger(__name__)

_KEEP_ALIVE_S = 65
_CLOSE_S = 3
_BACKLOG = 2048
# Clients with open connections are still served for this part of the grace period, or for this
# many seconds if that is less.
_GOODBYE_PART, _MAX_GOODBYE_S = 0.05, 5.0
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class ConnectionTimeouts:
    """The times after which the server ends a connection.

    Attributes:
        head_s: seconds in which the head of a request has to arrive.
        unread_s: seconds after which a connection ends if its client takes no byte of the data that
            is sent to it.
    """

    head_s: float = HEAD_TIMEOUT_S
    unread_s: float = 300.0


class GatewayServer(uvicorn.Server):
    """The server of one gateway.

    The first SIGTERM or SIGINT starts draining: `/ready` answers 503, and each response closes its
    connection. For a few seconds, requests are still served, because clients keep connections open
    and learn of the shutdown from a response alone. Then the server closes idle connections and
    answers new requests with 503, until the running requests have ended or the grace period is
    over. Requests that still run then, or at a second signal, end with an error. A third signal
    stops the server at once.

    Args:
        gateway: the application and its admission control.
        settings: settings with the address, the port and the grace period.
        shared_port: second port, on which several gateways of one machine listen. None if there is
            no such port.
        timeouts: times after which the server ends a connection.
    """

    def __init__(
        self,
        gateway: Gateway,
        settings: GatewaySettings,
        shared_port: int | None = None,
        timeouts: ConnectionTimeouts | None = None,
    ) -> None:
        self._timeouts = timeouts = timeouts or ConnectionTimeouts()
        protocol = partial(GatewayProtocol, head_timeout_s=timeouts.head_s)
        super().__init__(
            uvicorn.Config(
                gateway.app,
                host=settings.host,
                port=settings.port,
                http=cast("type[asyncio.Protocol]", protocol),
                ws="none",
                proxy_headers=False,
                lifespan="on",
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_CLOSE_S,
                access_log=False,
                log_config=None,
                server_header=False,
            )
        )
        self._settings = settings
        self._shared_port = shared_port
        self._admission = gateway.admission
        self._grace_s = settings.shutdown_grace_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._grace_over = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        if self._shared_port is not None:
            sockets = [
                _listen(self._settings.host, self._settings.port),
                _listen(self._settings.host, self._shared_port, shared=True),
            ]
        await super().startup(sockets)
        for server in self.servers:
            for each in server.sockets:  # connections inherit the option
                unread_ms = round(self._timeouts.unread_s * 1000)
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unread_ms)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is None or self._grace_over.is_set():
            self.force_exit = self.should_exit
            self.should_exit = True
        elif self._draining is not None:
            self._loop.call_soon_threadsafe(self._grace_over.set)
        else:
            log.info("draining after %s", signal.Signals(sig).name)
            self._loop.call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        """Starts draining. Must be called in the event loop's thread."""
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        over = asyncio.ensure_future(self._grace_over.wait())
        drained = asyncio.ensure_future(self._close_idle_and_wait())
        await asyncio.wait((over, drained), return_when=asyncio.FIRST_COMPLETED)
        if drained.done() and drained.result():
            log.info("drained")
        else:
            log.info(
                "the grace period is over: ending the %d requests that still run",
                self._admission.num_running,
            )
            self._grace_over.set()
        self._admission.end_all()  # also ends requests whose bodies still arrive
        await self._admission.drain(_CLOSE_S)
        over.cancel()
        drained.cancel()
        self.should_exit = True

    async def _close_idle_and_wait(self) -> bool:
        """Closes idle connections and waits for the running requests. Returns whether all requests
        ended within the grace period.
        """
        self._admission.draining = True
        loop = asyncio.get_running_loop()
        start = loop.time()
        last_at = start + min(_MAX_GOODBYE_S, _GOODBYE_PART * self._grace_s)
        while loop.time() < last_at and self.server_state.connections:  # noqa: ASYNC110 - uvicorn's
            await asyncio.sleep(_POLL_S)
        for connection in list(self.server_state.connections):
            # An idle connection closes now, a busy one after its response. A new connection has no
            # cycle yet and stays open, because its first request may be on its way.
            if cast("Any", connection).cycle is not None:
                connection.shutdown()
        return await self._admission.drain(max(0.0, self._grace_s - (loop.time() - start)))


def _listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Returns a listening socket. If it is `shared`, several processes can listen on its port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG, reuse_port=shared)
