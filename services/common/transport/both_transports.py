"""Listens with and without TLS on one port, while an installation turns `mtls` on or off.

A port of gRPC's server has either TLS or plaintext. So the server listens on two Unix sockets, and
each connection is forwarded by its first byte: a TLS handshake begins with 0x16, an
HTTP/2 preface with `P`. All bytes are copied once more than usual while the change lasts.
"""

import asyncio
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import grpc.aio

from services.common.security.credentials import Credentials
from services.common.security.rpc_credentials import PeerCheck

_HANDSHAKE = b"\x16"
_FIRST_BYTE_S = 5.0
_CHUNK_BYTES = 256 << 10


@asynccontextmanager
async def listening(
    server: grpc.aio.Server, check: PeerCheck, credentials: Credentials, address: str
) -> AsyncGenerator[int]:
    """Makes a server listen for the connections that the credentials accept, and yields the port.

    The block must end after the server has stopped.

    Args:
        server: the server, which has not been started yet.
        check: check of the callers' credentials, which adds the port with TLS.
        credentials: credentials of this service.
        address: `host:port` or `unix:path`.
    """
    host, _, port = address.rpartition(":")
    if credentials.certificates is None or credentials.stage == "required" or host == "unix":
        yield check.add_port(server, address)
        return
    connections: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        task.add_done_callback(connections.discard)
        await _forward(directory, reader, writer)

    with tempfile.TemporaryDirectory(  # the directory has mode 0700
        prefix="triptych-", ignore_cleanup_errors=True
    ) as directory:
        server.add_insecure_port(f"unix:{directory}/plain")
        check.add_port(server, f"unix:{directory}/tls")
        listener = await asyncio.start_server(accept, host.strip("[]"), int(port))
        try:
            yield listener.sockets[0].getsockname()[1]
        finally:
            listener.close()
            for task in connections:
                task.cancel()
            await asyncio.gather(*connections, return_exceptions=True)


async def _forward(
    directory: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Forwards a connection to one of the sockets in the directory, until either side ends."""
    to_server: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(_FIRST_BYTE_S):
            first = await reader.read(1)
        path = f"{directory}/{'tls' if first == _HANDSHAKE else 'plain'}"
        from_server, to_server = await asyncio.open_unix_connection(path)
        to_server.write(first)
        async with asyncio.TaskGroup() as group:
            group.create_task(_copy(reader, to_server))
            group.create_task(_copy(from_server, writer))
    except* (OSError, TimeoutError):
        pass  # one side has ended; the other side sees the end of its connection
    finally:
        writer.close()
        if to_server is not None:
            to_server.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    if not writer.is_closing():
        writer.write_eof()
