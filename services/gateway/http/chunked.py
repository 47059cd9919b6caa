"""Pieces of a streamed answer, framed without uvicorn's HTTP parser.

h11, which frames everything else and is the plain twin, takes a sixth of all that the gateway does
for a token; the bytes are the same. `server` puts `chunked` around the application.
"""

from collections.abc import Mapping
from types import MethodType
from typing import Any, cast

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.h11_impl import RequestResponseCycle


def chunked(app: ASGIApp) -> ASGIApp:
    """The application under uvicorn, with a cheaper `send`."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            cycle = cast("MethodType", send).__self__
            send = _cheaper(cast("RequestResponseCycle", cycle))
        await app(scope, receive, send)

    return call


def _cheaper(cycle: RequestResponseCycle) -> Send:
    """The end of one request's channel, in place of its cycle's `send`."""
    is_chunked = False

    async def send(message: Message) -> None:
        nonlocal is_chunked
        if not (is_chunked and message.get("more_body")):
            # False after the last piece: what follows is an error, and uvicorn's to raise.
            starts = message["type"] == "http.response.start"
            is_chunked = starts and _is_chunked(cycle.scope, message)
            await cycle.send(cast("ASGISendEvent", message))
            return
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        body: bytes = message.get("body", b"")
        if body and not cycle.disconnected:  # an empty one would end the answer
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))

    return send


def _is_chunked(scope: Mapping[str, Any], start: Message) -> bool:
    """Whether the body has chunked transfer coding, by RFC 9112, 6.3, and by h11."""
    return (
        scope["http_version"] == "1.1"
        and scope["method"] != "HEAD"
        and start["status"] == 200
        and all(name != b"content-length" for name, _ in start["headers"])
    )
