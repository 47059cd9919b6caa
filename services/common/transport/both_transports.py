"""One port for calls with TLS and without, while an installation turns `mtls` on or off.

gRPC's server speaks one of the two on a port. So it listens on two Unix sockets here, and each
connection is passed to the one that its first byte asks for: a TLS handshake begins with 0x16, an
HTTP/2 preface with `P`. Bytes are copied once more than usual, for as long as the change takes.
"""

import asyncio
import shutil
import tempfile

import grpc.aio

from services.common.security.credentials import Credentials
from services.common.security.rpc_credentials import PeerCheck

_HANDSHAKE = b"\x16"
_FIRST_BYTE_S = 5.0
_CHUNK_BYTES = 256 << 10


async def listen(
    server: grpc.aio.Server, check: PeerCheck, credentials: Credentials, address: str
) -> "tuple[int, BothTransports | None]":
    """Listens for what these credentials accept; the port, and what to close after the server.

    Args:
        server: has not been started yet.
        address: `host:port` or `unix:path`.
    """
    host, _, port = address.rpartition(":")
    one = credentials.certificates is None or credentials.stage == "required"
    if one or host == "unix":
        return check.add_port(server, address), None
    both = await BothTransports.open(server, check, host.strip("[]"), int(port))
    return both.port, both


class BothTransports:
    """Owner of the port and of the sockets behind it. Close it with `close`."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(
        cls, server: grpc.aio.Server, check: PeerCheck, host: str, port: int
    ) -> "BothTransports":
        self = cls(tempfile.mkdtemp(prefix="triptych-"))  # of mode 0700
        server.add_insecure_port(f"unix:{self._path('plain')}")
        check.add_port(server, f"unix:{self._path('tls')}")
        self._server = await asyncio.start_server(self._accept, host, port)
        return self

    @property
    def port(self) -> int:
        """The port; another than asked for if that was 0."""
        assert self._server is not None
        return self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Takes no connection any more, and ends those that there are."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _path(self, transport: str) -> str:
        return f"{self._directory}/{transport}"

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        to_server: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(_FIRST_BYTE_S):
                first = await reader.read(1)
            path = self._path("tls" if first == _HANDSHAKE else "plain")
            from_server, to_server = await asyncio.open_unix_connection(path)
            to_server.write(first)
            async with asyncio.TaskGroup() as group:
                group.create_task(_copy(reader, to_server))
                group.create_task(_copy(from_server, writer))
        except* (OSError, TimeoutError):
            pass  # one side is gone; the other learns it by the end of its connection
        finally:
            self._connections.discard(task)
            writer.close()
            if to_server is not None:
                to_server.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    if not writer.is_closing():
        writer.write_eof()
