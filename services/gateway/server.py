"""The HTTP server: uvicorn, which ends connections that read nothing and drains at a shutdown.

`__main__` runs it with what `create_gateway` returned; it knows no routes. A port that is taken
ends the process.
"""

import asyncio
import logging
import signal
import socket
from types import FrameType
from typing import Any, cast

import uvicorn

from services.gateway.app import Gateway
from services.gateway.http.chunked import chunked
from services.gateway.http.protocol import GatewayProtocol
from services.gateway.settings import GatewaySettings

log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 64 << 10
_KEEP_ALIVE_S = 65
_CLOSE_S = 3
_BACKLOG = 2048
# After so long without a byte that its client takes, a connection ends, whatever waits on it.
_UNREAD_S = 300
# How long clients that keep connections are still served after a signal: a part of the grace.
_MAX_LEAVING_S, _LEAVING = 5.0, 0.05
_POLL_S = 0.02


class GatewayServer(uvicorn.Server):
    """Serves one gateway.

    After the first SIGTERM or SIGINT it drains: `/ready` is a 503, and each response closes its
    connection. For a few seconds requests are served nevertheless, because clients keep connections
    open and nothing tells them but a response; then idle connections are closed and new requests
    get a 503, until the running requests have ended or the grace period is over. Those that still
    run then, or at the second signal, end with an error of their own. The third signal stops it at
    once.
    """

    def __init__(
        self, gateway: Gateway, settings: GatewaySettings, shared_port: int | None = None
    ) -> None:
        super().__init__(
            uvicorn.Config(
                chunked(gateway.app),
                host=settings.host,
                port=settings.port,
                http=GatewayProtocol,
                ws="none",
                proxy_headers=False,
                lifespan="on",
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
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
            for each in server.sockets:  # connections inherit it
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_S * 1000)

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
        """Starts draining. Call from the event loop."""
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        over = asyncio.ensure_future(self._grace_over.wait())
        drained = asyncio.ensure_future(self._leave())
        await asyncio.wait((over, drained), return_when=asyncio.FIRST_COMPLETED)
        if drained.done() and drained.result():
            log.info("drained")
        else:
            log.info("the grace period is over; ending %d requests", self._admission.num_running)
            self._grace_over.set()
        self._admission.end_all()  # those whose bodies still arrive, too
        await self._admission.drain(_CLOSE_S)
        over.cancel()
        drained.cancel()
        self.should_exit = True

    async def _leave(self) -> bool:
        """Lets clients and their requests go; whether all had gone within the grace."""
        self._admission.draining = True
        loop = asyncio.get_running_loop()
        start = loop.time()
        last_at = start + min(_MAX_LEAVING_S, _LEAVING * self._grace_s)
        while loop.time() < last_at and self.server_state.connections:  # noqa: ASYNC110 - uvicorn's
            await asyncio.sleep(_POLL_S)
        for connection in list(self.server_state.connections):
            # An idle one now, another one after its response. The first request of a new one may be
            # on its way.
            if cast("Any", connection).cycle is not None:
                connection.shutdown()
        return await self._admission.drain(max(0.0, self._grace_s - (loop.time() - start)))


def _listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A listening socket; with `shared`, several processes can listen on the same port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG, reuse_port=shared)
