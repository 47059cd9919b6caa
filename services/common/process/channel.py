"""Channels of typed messages between a front process and its engine process.

A channel is a Unix socket pair. A frame on it is a length of 4 bytes, little-endian, and a
MessagePack body, which msgspec decodes into one of a closed set of structs. The services define the
structs. Nothing is pickled, so a frame cannot create any other object. When a process ends, its
peer gets `ChannelClosed`.

For example, the struct `Ping` (tag "ping") is the frame `0b 00 00 00 81 a4 "type" a4 "ping"`.
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
_RETRY_S = 0.01  # time between two attempts to send what the peer did not accept

Incoming = TypeVar("Incoming")


class ChannelClosed(Exception):
    """Raised when the other process has ended or has closed the channel."""


def create_socket_pair() -> tuple[socket.socket, socket.socket]:
    """Creates a connected pair with buffers so large that neither side blocks in normal work."""
    pair = socket.socketpair()
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    return pair


class EngineChannel(Generic[Incoming]):
    """The engine's end of a channel, which is synchronous and is polled once per step.

    An engine has a channel to its front, and may have channels to other processes as well, which it
    includes in the first: after `front.include(masks)`, `front.receive` returns the messages of
    both channels.

    Args:
        end: a socket of `create_socket_pair`.
        incoming: union of the message structs that the front may send.
    """

    def __init__(self, end: socket.socket, incoming: Any) -> None:  # noqa: ANN401 - a type form
        self._socket = end
        self._decoder: msgspec.msgpack.Decoder[Incoming] = msgspec.msgpack.Decoder(incoming)
        self._encoder = msgspec.msgpack.Encoder()
        self._buffer = bytearray()
        self._unsent = bytearray()
        self._included: list[EngineChannel[Incoming]] = []

    def include(self, channel: "EngineChannel[Incoming]") -> None:
        """Makes `receive` return another channel's messages, too, until that channel is closed."""
        self._included.append(channel)

    def receive(self, timeout_s: float | None, *, awake_s: float = 0.0) -> list[Incoming]:
        """Returns all complete messages that have arrived. Those of one channel are in order.

        Args:
            timeout_s: seconds to wait for the first message. 0 polls; None waits without a limit.
            awake_s: seconds to poll without sleeping before that, see
                docs/adr/0014-grpc-without-its-event-engine.md.

        Raises:
            ChannelClosed: the front has closed the channel.
        """
        messages = self._split()
        for channel in self._included:
            if channel._unsent:
                with suppress(ChannelClosed):  # the loop below reads and removes such a channel
                    channel._flush()
                timeout_s = _RETRY_S if timeout_s is None else min(timeout_s, _RETRY_S)
        if messages:
            timeout_s = 0.0
        elif awake_s:
            self._spin(awake_s)
        while ready := select.select([self, *self._included], [], [], timeout_s)[0]:
            for channel in ready:
                try:
                    messages += channel._read()
                except (ChannelClosed, OSError, msgspec.MsgspecError):
                    if channel is self:
                        raise
                    self._included.remove(channel)
                    channel.close()
            timeout_s = 0.0 if messages else timeout_s
        return messages

    def has_messages(self) -> bool:
        """Returns whether something has arrived on this channel, included channels left out, that
        `receive` has not read.
        """
        return bool(select.select([self], [], [], 0.0)[0])

    def send(self, message: msgspec.Struct) -> None:
        """Sends one message and blocks while the socket's buffer is full.

        Raises:
            ChannelClosed: the front has closed the channel.
        """
        body = self._encoder.encode(message)
        try:
            self._socket.sendall(_LENGTH.pack(len(body)) + body)
        except OSError as error:
            raise ChannelClosed from error

    def send_nowait(self, message: msgspec.Struct) -> None:
        """Sends one message without blocking. Bytes that the socket's buffer has no space for are
        sent with the next message, or by `receive`.

        Raises:
            ChannelClosed: the other end has closed the channel, or has not read for so long that
                more than 8 MiB are unsent.
        """
        body = self._encoder.encode(message)
        self._unsent += _LENGTH.pack(len(body)) + body
        self._flush()
        if len(self._unsent) > _BUFFER_BYTES:
            raise ChannelClosed

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()

    def shutdown(self) -> None:
        """Ends the connection at both ends. The socket stays open, because `receive` may wait for
        it; the next `receive` removes an included channel and closes the socket.
        """
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
        """Returns the socket's descriptor, which `select` waits for."""
        return self._socket.fileno()

    def _spin(self, duration_s: float) -> None:
        end, channels = time.monotonic() + duration_s, [self, *self._included]
        while time.monotonic() < end and not select.select(channels, [], [], 0.0)[0]:
            pass

    def _read(self) -> list[Incoming]:
        try:
            data = self._socket.recv(_READ_BYTES)
        except ConnectionResetError:  # the peer ended before it had read all messages
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
    """The front's end of a channel, which is asynchronous. `send` never waits.

    Attributes:
        received_at: time of the last message, by `time.monotonic()`.
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
        """Wraps one socket of `create_socket_pair` for the running event loop.

        Args:
            incoming: union of the message structs that the engine may send.
        """
        reader, writer = await asyncio.open_connection(sock=end, limit=_BUFFER_BYTES)
        return cls(reader, writer, incoming)

    async def receive(self) -> Incoming:
        """Returns the next message.

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
        """Queues messages in order. They are dropped once the engine has ended, which `receive`
        reports.
        """
        if not self._writer.is_closing():  # uvloop raises for a transport that is closing
            bodies = map(self._encoder.encode, messages)
            frames = [part for body in bodies for part in (_LENGTH.pack(len(body)), body)]
            self._writer.write(b"".join(frames))

    def close(self) -> None:
        """Closes the socket. The engine's next `receive` raises `ChannelClosed`."""
        self._writer.close()
