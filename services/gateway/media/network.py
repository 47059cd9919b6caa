"""Connections of the HTTP client that fetches images, which hold little of what a peer sends.

`WebMedia` makes them through httpcore's interface. httpcore's own (AnyIO 4) let the event loop
read: uvloop takes up to 8 MiB at a time from a fast peer, before anything has counted a byte of it.
asyncio's streams stop reading behind the first piece of 256 KiB.
"""

import asyncio
import ssl

import httpcore2

SocketOption = (
    tuple[int, int, int] | tuple[int, int, bytes | bytearray] | tuple[int, int, None, int]
)
_Timeout = float | None


class PacedStream(httpcore2.AsyncNetworkStream):
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self, max_bytes: int, timeout: _Timeout = None) -> bytes:  # noqa: ASYNC109
        """The next bytes; none at the end.

        Raises:
            ReadTimeout: nothing came in time.
            ReadError: the connection broke.
        """
        try:
            async with asyncio.timeout(timeout):
                return await self._reader.read(max_bytes)
        except TimeoutError:
            raise httpcore2.ReadTimeout from None
        except OSError as error:
            raise httpcore2.ReadError from error

    async def write(self, buffer: bytes, timeout: _Timeout = None) -> None:  # noqa: ASYNC109
        """Sends bytes; waits while many have not been taken.

        Raises:
            WriteTimeout: they were not taken in time.
            WriteError: the connection broke.
        """
        try:
            self._writer.write(buffer)
            async with asyncio.timeout(timeout):
                await self._writer.drain()
        except TimeoutError:
            raise httpcore2.WriteTimeout from None
        except OSError as error:
            raise httpcore2.WriteError from error

    async def aclose(self) -> None:
        self._writer.transport.abort()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: _Timeout = None,  # noqa: ASYNC109 - httpcore's interface
    ) -> httpcore2.AsyncNetworkStream:
        """The same connection, encrypted from now on.

        Raises:
            ConnectError: the peer's certificate is not valid, or it has none.
        """
        try:
            async with asyncio.timeout(timeout):
                await self._writer.start_tls(ssl_context, server_hostname=server_hostname)
        except TimeoutError:
            raise httpcore2.ConnectTimeout from None
        except OSError as error:  # SSLError among them
            raise httpcore2.ConnectError from error
        return self

    def get_extra_info(self, info: str) -> object:
        return self._writer.get_extra_info(info)


async def connect(address: str, port: int, timeout_s: float | None) -> PacedStream:
    """A connection to a literal address.

    Raises:
        ConnectError: there is none.
        ConnectTimeout: it was not made in time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return PacedStream(*await asyncio.open_connection(address, port))
    except TimeoutError:
        raise httpcore2.ConnectTimeout from None
    except OSError as error:
        raise httpcore2.ConnectError from error
