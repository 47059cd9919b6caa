"""HTTP requests and their responses: reads bodies, writes JSON and event streams, and constructs
the responses to errors.

Endpoints read and write through this module, which knows nothing of chat. The middleware calls
`error_response` for a request that failed before its response started.
"""

import asyncio
import logging
import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.common.errors import (
    PayloadTooLarge,
    TriptychError,
    Unauthorized,
    UnsupportedMediaType,
)
from services.gateway.bounds import MEMORY_PER_BODY_BYTE, BodyLimits
from services.gateway.forms.error_answers import (
    error_body,
    error_of,
    messages_error,
)
from services.gateway.forms.responses import encode_json
from services.gateway.http.protocol import PIECES, Pieces
from services.gateway.http.unserved_paths import explain
from services.gateway.tenancy.admission import UntilEnded
from services.gateway.tenancy.request_memory import RequestMemory

log = logging.getLogger(__name__)

# A body has to begin to arrive in `BodyLimits.start_s`. Each byte that arrives extends the time, up
# to this number of seconds or one second for each MiB of the largest body, whichever is more.
BODY_TIMEOUT_S = 60.0
_MIN_BODY_RATE = 16 << 10  # bytes a second
_LONG_BODY_BYTES = 256 << 10
_PIECE_BYTES = 64 << 10  # A long answer is sent in pieces of this size.
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
JSON_TYPES = ("application/json",)


class JsonResponse(Response):
    """A JSON response that msgspec serializes. It is sent in pieces, so that a long response waits
    while the client reads too slowly.
    """

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return encode_json(content)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.send_parts([bytes(self.body)], send)

    async def send_parts(self, parts: Sequence[bytes], send: Send) -> None:
        """Sends the parts of the body, which together have the length in the headers."""
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        left = sum(map(len, parts))
        for part in parts:
            for first in range(0, len(part), _PIECE_BYTES):
                body = part[first : first + _PIECE_BYTES]
                left -= len(body)
                await send({"type": "http.response.body", "body": body, "more_body": left > 0})


@dataclass(slots=True)
class Exchange:
    """A request and its response.

    Attributes:
        started: true once the status line is sent. A later error becomes an event of the stream.
        finished: true once the whole answer is written, so that the client may close the connection
            after it has read the answer.
    """

    scope: Scope
    receive: Receive
    send: Send
    started: bool = False
    finished: bool = False
    _pieces: Pieces | None = field(init=False)

    def __post_init__(self) -> None:
        self._pieces = self.scope.get("extensions", {}).get(PIECES)

    @property
    def request_id(self) -> str:
        """The request's id, which the middleware has set."""
        return self.scope["state"]["request_id"]

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Sends a piece of an event stream, and waits while the client reads too slowly.

        Args:
            data: the encoded events.
            last: true if the piece ends the stream.
        """
        if not self.started:
            self.started = True
            start = {"type": "http.response.start", "status": 200, "headers": list(_STREAM_HEADERS)}
            await self.send(start)
        elif data and not last and self.can_write_now():
            self.write_now(data)
            return
        self.finished = self.finished or last
        await self.send({"type": "http.response.body", "body": data, "more_body": not last})

    def can_write_now(self) -> bool:
        """Returns whether `write_now` may be called: the stream has begun and not ended, and the
        client reads fast enough.
        """
        pieces = self._pieces
        return pieces is not None and not self.finished and pieces.can_send()

    def write_now(self, data: bytes) -> None:
        """Sends a piece of an event stream, which must not be empty, without waiting."""
        assert self._pieces is not None
        self._pieces.send(data)

    async def write_json(self, content: object) -> None:
        """Sends a whole answer."""
        self.started = self.finished = True
        await JsonResponse(content)(self.scope, self.receive, self.send)

    async def write_long_json(self, content: object, data: Sequence[bytes]) -> None:
        """Sends a whole answer with a long list, of which no copy is made: that would take a second
        for each GB, and no other request has a turn in that time.

        Args:
            content: the answer, whose `data` is an empty list.
            data: serialized entries of `data`. At least one.
        """
        self.started = self.finished = True
        head, tail = encode_json(content).split(b'"data":[]')
        parts = [head, b'"data":[', data[0]]
        for entry in data[1:]:
            parts += b",", entry
        parts += b"]", tail
        length = {"content-length": str(sum(map(len, parts)))}
        await JsonResponse(None, headers=length).send_parts(parts, self.send)

    @contextmanager
    def while_connected(self) -> Generator[None]:
        """Cancels the block of a `with` when the client disconnects before the answer is finished.

        Raises:
            ClientDisconnect: the client disconnected; the block was cancelled and has ended.
        """
        task = asyncio.current_task()
        assert task is not None
        was_cancelling, is_gone = task.cancelling(), False

        def disconnected(_: object) -> None:
            nonlocal is_gone
            if not self.finished:
                is_gone = True
                task.cancel()

        watch = asyncio.create_task(_wait_for_disconnect(self.receive))
        watch.add_done_callback(disconnected)
        try:
            yield
        except asyncio.CancelledError:
            # If the task was also cancelled by somebody else, the cancellation goes on, as in
            # `asyncio.timeout`.
            if is_gone and task.uncancel() <= was_cancelling:
                raise ClientDisconnect from None
            raise
        finally:
            watch.remove_done_callback(disconnected)
            watch.cancel()


async def _wait_for_disconnect(receive: Receive) -> None:
    with suppress(Exception):  # a lost connection may raise
        while (await receive())["type"] != "http.disconnect":
            pass


async def read_body(
    scope: Scope,
    receive: Receive,
    memory: RequestMemory,
    limits: BodyLimits,
    deadline: UntilEnded,
    types: Sequence[str] = JSON_TYPES,
) -> bytes | bytearray:
    """Reads the whole body of a request.

    A web page can send a body to another origin without asking first (CORS) if the body has the
    type of an HTML form or no type at all. So a body of an unexpected type is refused, and so is a
    body without a type if the request has an `Origin`, which browsers add. Programs may omit the
    type.

    Args:
        scope: ASGI scope of the request.
        receive: ASGI channel from which the body is read.
        memory: memory of the request, in which bytes are reserved while the body arrives.
        limits: limits of the body's size and of its time.
        deadline: the block in which the body is read, which ends in `limits.start_s`. It is
            extended here while the body arrives.
        types: prefixes of the content types that are accepted.

    Raises:
        UnsupportedMediaType: the content type is not accepted, or a web page has named none.
        PayloadTooLarge: the body is larger than the limit, by its Content-Length or by count.
        ClientDisconnect: the client disconnected.
    """
    headers = dict(scope["headers"])
    content_type = headers.get(b"content-type", types[0].encode()).partition(b";")[0]
    if not content_type.strip().lower().decode("latin-1").startswith(tuple(types)):
        raise _unsupported(types)
    needs_type = b"origin" in headers and b"content-type" not in headers
    declared = headers.get(b"content-length", b"0")
    if declared.isdigit() and int(declared) > limits.max_bytes:
        raise _too_large(limits.max_bytes)
    body, max_bytes = bytearray(), limits.max_bytes
    timeout_s = max(BODY_TIMEOUT_S, max_bytes / (1 << 20))
    start = asyncio.get_running_loop().time()
    try:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            chunk: bytes = message.get("body", b"")
            if chunk and needs_type:
                raise _unsupported(types)
            if len(body) + len(chunk) > max_bytes:
                raise _too_large(max_bytes)
            memory.add(len(chunk) * MEMORY_PER_BODY_BYTE)
            body += chunk
            if not message.get("more_body", False):
                return body if len(body) > _LONG_BODY_BYTES else bytes(body)
            time_s = min(limits.start_s + len(body) / _MIN_BODY_RATE, timeout_s)
            deadline.extend(start + time_s)
    except BaseException:
        body.clear()  # The error's traceback may hold this function's variables for long.
        raise


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body is larger than {max_bytes} bytes (GATEWAY_MAX_BODY_BYTES)")


def _unsupported(types: Sequence[str]) -> UnsupportedMediaType:
    return UnsupportedMediaType(f"the body's Content-Type must be {', '.join(types)}")


def error_response(scope: Scope, error: Exception) -> JsonResponse:
    """Returns the response to a request that ended with an error, in the form of the client's API:
    Anthropic's on `/v1/messages` and for each client that names Anthropic's version, else OpenAI's.

    Args:
        scope: ASGI scope of the request.
        error: a `TriptychError`, an `HTTPException` of a route, or an unexpected exception, about
            which the client learns nothing. Its references to the request are dropped.
    """
    headers: dict[str, str] = {}
    match error:
        case TriptychError():
            error.without_frames()
            status, body = error.http_status, error_of(error)
            if isinstance(error, Unauthorized):
                headers["www-authenticate"] = "Bearer"
            if status == 503 or error.retry_after_s is not None:
                headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s or 1)))
        case HTTPException(status_code=status):
            code = {404: "not_found", 405: "method_not_allowed"}.get(status, "http_error")
            message = explain(scope["path"]) if status == 404 else error.detail
            body = error_body(message, kind="invalid_request_error", code=code)
            headers |= error.headers or {}
        case _:
            status = 500
            body = error_body("internal error", kind="server_error", code="internal_error")
    is_anthropic = scope["path"].startswith("/v1/messages") or any(
        name == b"anthropic-version" for name, _ in scope["headers"]
    )
    return JsonResponse(messages_error(status, body) if is_anthropic else body, status, headers)
