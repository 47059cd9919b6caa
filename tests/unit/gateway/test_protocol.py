"""Heads that arrive together are parsed a few at a time, tenants in turn."""

import asyncio

import uvicorn
from uvicorn.server import ServerState

from services.gateway.http.protocol import GatewayProtocol, HeadTurns
from services.gateway.tenancy.tenants import Keyring

MANY = 40
PER_PASS = 4


class Server:
    """Protocols without sockets, and the paths of requests that have reached the application."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self._config = uvicorn.Config(
            self._answer, interface="asgi3", lifespan="off", log_config=None
        )
        self._config.load()
        self._heads = HeadTurns(Keyring(("first", "second")))

    async def _answer(self, scope, receive, send) -> None:
        self.paths.append(scope["path"])
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    def connect(self) -> "tuple[GatewayProtocol, Transport]":
        protocol = GatewayProtocol(self._config, ServerState(), {}, heads=self._heads)
        transport = Transport()
        protocol.connection_made(transport)
        return protocol, transport

    def send(self, path: str, key: str, header: str = "Authorization: Bearer"):
        found = self.connect()
        found[0].data_received(
            f"GET {path} HTTP/1.1\r\nHost: here\r\n{header} {key}\r\n\r\n".encode()
        )
        return found

    async def settle(self) -> None:
        """Every head has had its turn, and its request has ended."""
        for _ in range(4 * MANY):
            await asyncio.sleep(0)

    async def until(self, path: str) -> int:
        """Passes of the event loop until a request has reached the application."""
        for passes in range(4 * MANY):
            if path in self.paths:
                return passes
            await asyncio.sleep(0)
        raise AssertionError(f"{path} was never parsed")


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written, self.closed = b"", False

    def write(self, data) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


async def test_few_heads_are_parsed_in_a_pass():
    server = Server()
    for number in range(MANY):
        server.send(f"/{number}", "first")
    seen = [0]
    for _ in range(4 * MANY):
        await asyncio.sleep(0)
        seen.append(len(server.paths))
        assert seen[-1] - seen[-2] <= PER_PASS
    assert server.paths == [f"/{number}" for number in range(MANY)]


async def test_another_tenants_head_does_not_wait_behind_them():
    for header in ("Authorization: Bearer", "x-api-key:"):
        server = Server()
        for number in range(MANY):
            server.send(f"/{number}", "first")
        server.send("/other", "second", header)
        assert await server.until("/other") <= 3
        assert len(server.paths) < MANY // 2
        await server.settle()


async def test_head_of_a_connection_that_is_lost_meanwhile_is_never_parsed():
    server = Server()
    sent = [server.send(f"/{number}", "first") for number in range(MANY)]
    for protocol, _ in sent:
        protocol.connection_lost(None)
    await server.settle()
    assert len(server.paths) <= PER_PASS


async def test_what_arrives_behind_a_head_that_waits_is_read_with_it():
    server = Server()
    for number in range(MANY):
        server.send(f"/{number}", "first")
    protocol, transport = server.connect()
    for piece in (b"GET /split HT", b"TP/1.1\r\nHost: here\r\n", b"\r\n"):
        protocol.data_received(piece)
    assert protocol.eof_received()  # the connection stays for the answer
    await server.settle()
    assert b" 200 " in transport.written


async def test_head_that_waits_at_a_shutdown_is_answered():
    server = Server()
    sent = [server.send(f"/{number}", "first") for number in range(MANY)]
    for protocol, _ in sent:
        protocol.shutdown()
    await server.settle()
    assert all(b" 200 " in transport.written for _, transport in sent)
