"""Connections of the HTTP client that fetches images, which hold little of what a peer sends.

`WebMedia` makes them through httpcore's interface. httpcore's own (AnyIO 4) let the event loop
read: uvloop takes up to 8 MiB at a time from a fast peer, before anything has counted a byte of it.
asyncio's streams stop reading behind the first piece of 256 KiB.
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import httpcore2

_Timeout = float | None


@asynccontextmanager
async def _raising(
    late: type[httpcore2.TimeoutException], broken: type[httpcore2.NetworkError], limit_s: _Timeout
) -> AsyncGenerator[None]:
    """Raises httpcore's errors in place of asyncio's, of a block that takes no longer than that."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        raise late from None
    except OSError as error:  # SSLError among them
        raise broken from error


class PacedStream(httpcore2.AsyncNetworkStream):
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self, max_bytes: int, timeout: _Timeout = None) -> bytes:  # noqa: ASYNC109
        async with _raising(httpcore2.ReadTimeout, httpcore2.ReadError, timeout):
            return await self._reader.read(max_bytes)

    async def write(self, buffer: bytes, timeout: _Timeout = None) -> None:  # noqa: ASYNC109
        async with _raising(httpcore2.WriteTimeout, httpcore2.WriteError, timeout):
            self._writer.write(buffer)
            await self._writer.drain()

    async def aclose(self) -> None:
        self._writer.transport.abort()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: _Timeout = None,  # noqa: ASYNC109 - httpcore's interface
    ) -> httpcore2.AsyncNetworkStream:
        async with _raising(httpcore2.ConnectTimeout, httpcore2.ConnectError, timeout):
            await self._writer.start_tls(ssl_context, server_hostname=server_hostname)
        return self

    def get_extra_info(self, info: str) -> object:
        return self._writer.get_extra_info(info)


async def connect(address: str, port: int, timeout_s: float | None) -> PacedStream:
    """A connection to a literal address.

    Raises:
        ConnectError: there is none.
        ConnectTimeout: it was not made in time.
    """
    async with _raising(httpcore2.ConnectTimeout, httpcore2.ConnectError, timeout_s):
        return PacedStream(*await asyncio.open_connection(address, port))
