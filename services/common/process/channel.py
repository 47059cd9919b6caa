"""Typed messages between a front process and its engine process.

Frames on a Unix socket pair: a 4-byte little-endian length, then a MessagePack body that msgspec
decodes into one of a closed set of structs. No pickle: a frame can only ever become one of them.
The services define the structs. A process that ends shows as `ChannelClosed` at the other end.
"""

import asyncio
import select
import socket
import struct
import time
from contextlib import suppress
from typing import Any, Generic, TypeVar

import msgspec

_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 20
_BUFFER_BYTES = 8 << 20
_UNSENT_S = 0.01  # between two attempts to send

Incoming = TypeVar("Incoming")


class ChannelClosed(Exception):
    """The other process has ended or closed the channel."""


def create_socket_pair() -> tuple[socket.socket, socket.socket]:
    """A connected pair whose buffers are large enough that neither side blocks in normal work."""
    pair = socket.socketpair()
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    return pair


class EngineChannel(Generic[Incoming]):
    """The engine's end: synchronous, polled once a step.

    Args:
        incoming: union of the message structs the front may send.
    """

    def __init__(self, end: socket.socket, incoming: Any) -> None:  # noqa: ANN401 - a type form
        self._socket = end
        self._decoder: msgspec.msgpack.Decoder[Incoming] = msgspec.msgpack.Decoder(incoming)
        self._encoder = msgspec.msgpack.Encoder()
        self._buffer = bytearray()
        self._unsent = bytearray()
        self._others: list[EngineChannel[Incoming]] = []

    def join(self, other: "EngineChannel[Incoming]") -> None:
        """Has `receive` return another channel's messages, too, until that one is closed."""
        self._others.append(other)

    def receive(self, timeout_s: float | None, *, awake_s: float = 0.0) -> list[Incoming]:
        """All complete messages that have arrived, those of a channel in order.

        Args:
            timeout_s: how long to wait for the first; 0 polls, None waits without a limit.
            awake_s: before that, poll this long without yielding the core; see
                docs/adr/0015-an-engine-stays-awake.md.

        Raises:
            ChannelClosed: the front has closed the channel.
        """
        messages = self._split()
        for other in self._others:
            if other._unsent:
                with suppress(ChannelClosed):  # which reading finds
                    other._flush()
                timeout_s = _UNSENT_S if timeout_s is None else min(timeout_s, _UNSENT_S)
        if messages:
            timeout_s = 0.0
        elif awake_s:
            self._watch(awake_s)
        while ready := select.select([self, *self._others], [], [], timeout_s)[0]:
            for channel in ready:
                try:
                    messages += channel._read()
                except (ChannelClosed, OSError, msgspec.MsgspecError):
                    if channel is self:
                        raise
                    self._others.remove(channel)
                    channel.close()
            timeout_s = 0.0 if messages else timeout_s
        return messages

    def send(self, message: msgspec.Struct) -> None:
        """Sends one message; blocks while the socket's buffer is full.

        Raises:
            ChannelClosed: the front has closed the channel.
        """
        body = self._encoder.encode(message)
        try:
            self._socket.sendall(_LENGTH.pack(len(body)) + body)
        except OSError as error:
            raise ChannelClosed from error

    def offer(self, message: msgspec.Struct) -> None:
        """Sends one message without ever blocking: what the other end does not take now is sent
        with the next one, or by `receive`.

        Raises:
            ChannelClosed: the other end has closed the channel, or reads nothing.
        """
        body = self._encoder.encode(message)
        self._unsent += _LENGTH.pack(len(body)) + body
        self._flush()
        if len(self._unsent) > _BUFFER_BYTES:
            raise ChannelClosed

    def close(self) -> None:
        """Closes this end."""
        self._socket.close()

    def shut(self) -> None:
        """Has `receive`, in which it still takes part, find it closed; so does the other end."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _flush(self) -> None:
        try:
            while self._unsent:
                count = self._socket.send(self._unsent, socket.MSG_DONTWAIT)
                del self._unsent[:count]
        except BlockingIOError:
            pass
        except OSError as error:
            raise ChannelClosed from error

    def fileno(self) -> int:
        """Of the socket, to wait for."""
        return self._socket.fileno()

    def _watch(self, duration_s: float) -> None:
        end, channels = time.monotonic() + duration_s, [self, *self._others]
        while time.monotonic() < end and not select.select(channels, [], [], 0.0)[0]:
            pass

    def _read(self) -> list[Incoming]:
        try:
            data = self._socket.recv(_READ_BYTES)
        except ConnectionResetError:  # it ended with messages unread
            data = b""
        if not data:
            raise ChannelClosed
        self._buffer += data
        return self._split()

    def _split(self) -> list[Incoming]:
        messages: list[Incoming] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages.append(self._decoder.decode(memoryview(self._buffer)[start + 4 : end]))
            start = end
        if start:
            del self._buffer[:start]
        return messages


class FrontChannel(Generic[Incoming]):
    """The front's end: asynchronous. `send` never waits; `receive` yields message by message.

    Attributes:
        received_at: when the last message came, as `time.monotonic()`.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        incoming: Any,  # noqa: ANN401 - a type form
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder: msgspec.msgpack.Decoder[Incoming] = msgspec.msgpack.Decoder(incoming)
        self._encoder = msgspec.msgpack.Encoder()
        self.received_at = time.monotonic()

    @classmethod
    async def open(cls, end: socket.socket, incoming: Any) -> "FrontChannel[Incoming]":  # noqa: ANN401
        """Wraps one end of `create_socket_pair` for the running event loop."""
        reader, writer = await asyncio.open_connection(sock=end, limit=_BUFFER_BYTES)
        return cls(reader, writer, incoming)

    async def receive(self) -> Incoming:
        """The next message.

        Raises:
            ChannelClosed: the engine process has ended.
        """
        try:
            head = await self._reader.readexactly(_LENGTH.size)
            body = await self._reader.readexactly(_LENGTH.unpack(head)[0])
        except (asyncio.IncompleteReadError, OSError) as error:
            raise ChannelClosed from error
        self.received_at = time.monotonic()
        return self._decoder.decode(body)

    def send(self, *messages: msgspec.Struct) -> None:
        """Queues messages in order; drops them once the engine has ended (`receive` says so)."""
        if not self._writer.is_closing():  # uvloop would raise
            bodies = map(self._encoder.encode, messages)
            frames = [part for body in bodies for part in (_LENGTH.pack(len(body)), body)]
            self._writer.write(b"".join(frames))

    def close(self) -> None:
        """Closes this end; the engine's next `receive` raises `ChannelClosed`."""
        self._writer.close()
