"""Connections of the HTTP client that fetches images: what a peer sends waits in the kernel.

`WebMedia` makes them through httpcore's interface. httpcore's own (AnyIO 4) let the event loop
read: uvloop takes up to 8 MiB at a time from a fast peer, before anything has counted a byte of it.
Here a connection is read when its reader asks, once.
"""

import asyncio
import ssl
from typing import cast

import httpcore2

SocketOption = (
    tuple[int, int, int] | tuple[int, int, bytes | bytearray] | tuple[int, int, None, int]
)
_Parameter = float | None


class PacedStream(asyncio.Protocol, httpcore2.AsyncNetworkStream):
    """One connection, with at most one read of the loop in memory: 256 KiB with uvloop."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._data = b""
        self._ended = False
        self._changed = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()

    # What httpcore calls.

    async def read(self, max_bytes: int, timeout: _Parameter = None) -> bytes:  # noqa: ASYNC109
        """The next bytes; none at the end.

        Raises:
            ReadTimeout: nothing came in time.
        """
        if not self._data and not self._ended:
            self._changed.clear()
            self._live().resume_reading()
            try:
                async with asyncio.timeout(timeout):
                    await self._changed.wait()
            except TimeoutError:
                raise httpcore2.ReadTimeout from None
        found, self._data = self._data[:max_bytes], self._data[max_bytes:]
        return found

    async def write(self, buffer: bytes, timeout: _Parameter = None) -> None:  # noqa: ASYNC109
        """Sends bytes; waits while many have not been taken.

        Raises:
            WriteTimeout: they were not taken in time.
        """
        self._live().write(buffer)
        try:
            async with asyncio.timeout(timeout):
                await self._writable.wait()
        except TimeoutError:
            raise httpcore2.WriteTimeout from None

    async def aclose(self) -> None:
        """Closes the connection at once, and forgets what it has read."""
        self._data = b""
        if self._transport is not None:
            self._transport.abort()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: _Parameter = None,  # noqa: ASYNC109 - httpcore's interface
    ) -> httpcore2.AsyncNetworkStream:
        """The same connection, encrypted from now on.

        Raises:
            ConnectError: the peer's certificate is not valid, or it has none.
        """
        plain = self._live()
        plain.resume_reading()  # the handshake reads
        try:
            async with asyncio.timeout(timeout):
                self._transport = await asyncio.get_running_loop().start_tls(
                    plain, self, ssl_context, server_hostname=server_hostname
                )
        except TimeoutError:
            raise httpcore2.ConnectTimeout from None
        except OSError as error:  # SSLError among them
            raise httpcore2.ConnectError from error
        self._live().pause_reading()
        return self

    def get_extra_info(self, info: str) -> object:
        """As httpcore has it."""
        if info == "is_readable":
            return bool(self._data) or self._ended
        names = {"ssl_object": "ssl_object", "client_addr": "sockname", "server_addr": "peername"}
        return self._transport and self._transport.get_extra_info(names.get(info, info))

    # What the loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        self._data += data
        self._live().pause_reading()
        self._changed.set()

    def eof_received(self) -> None:
        self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def _end(self) -> None:
        self._ended = True
        self._changed.set()
        self._writable.set()

    def _live(self) -> asyncio.Transport:
        if self._transport is None or self._transport.is_closing():
            raise httpcore2.ReadError("the connection is closed")
        return self._transport


async def connect(address: str, port: int, timeout_s: float | None) -> PacedStream:
    """A connection to a literal address.

    Raises:
        ConnectError: there is none.
        ConnectTimeout: it was not made in time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            _, stream = await asyncio.get_running_loop().create_connection(
                PacedStream, address, port
            )
    except TimeoutError:
        raise httpcore2.ConnectTimeout from None
    except OSError as error:
        raise httpcore2.ConnectError from error
    return stream
