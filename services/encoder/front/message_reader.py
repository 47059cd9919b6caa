"""Reads the messages of calls, and bounds the bytes that all calls together have in transit.

A message may hold an image file or a video of tens of MiB. The bytes of a message are therefore
counted before gRPC reads the message from the connection, and the bytes of a file before the file
is sent.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TypeVar, cast

import grpc.aio
from google.protobuf.message import Message

from services.common.errors import DeadlineExceeded, InvalidRequest, Overloaded
from services.common.transport.rpc import message_bytes

_MESSAGE_TIMEOUT_S = 30.0

Request = TypeVar("Request", bound=Message)


class MessageReader:
    """Reader of calls' messages, and counter of the bytes in transit.

    Args:
        max_bytes: the most bytes that may be in transit at the same time. A single message may have
            more.

    Attributes:
        num_bytes: bytes of the messages that arrive or are handled now, and of the files that are
            sent now.
    """

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes

    @asynccontextmanager
    async def read(
        self, context: grpc.aio.ServicerContext, kind: type[Request]
    ) -> AsyncGenerator[Request]:
        """Reads the message of a call, and counts its bytes until the block ends.

        Raises:
            Overloaded: too many bytes are in transit.
            DeadlineExceeded: the message does not arrive in time.
            InvalidRequest: there is no message, or it is longer than its caller has announced.
        """
        num_bytes = message_bytes(context)
        self.count(num_bytes)
        try:
            yield await _read(context, num_bytes, kind)
        finally:
            self.uncount(num_bytes)

    def count(self, num_bytes: int) -> None:
        """Counts bytes as in transit, until `uncount` is called with the same number.

        Raises:
            Overloaded: too many bytes are in transit already.
        """
        if self.num_bytes and self.num_bytes + num_bytes > self._max_bytes:
            raise Overloaded("running calls have too many bytes in transit", retry_after_s=1)
        self.num_bytes += num_bytes

    def uncount(self, num_bytes: int) -> None:
        """Ends what `count` has begun: the bytes are no longer in transit."""
        self.num_bytes -= num_bytes


async def _read(context: grpc.aio.ServicerContext, max_bytes: int, kind: type[Request]) -> Request:
    try:
        async with asyncio.timeout(_MESSAGE_TIMEOUT_S):
            request = cast("object", await context.read())
    except TimeoutError:
        raise DeadlineExceeded("the call's message did not arrive in time") from None
    if not isinstance(request, kind):  # the end of the stream
        raise InvalidRequest("the call has no message")
    if request.ByteSize() > max_bytes:
        raise InvalidRequest("the message is longer than its caller said")
    return request
