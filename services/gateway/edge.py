"""HTTP around the routes: request ids, keys, limits, and errors in OpenAI's shape."""

import asyncio
import hashlib
import logging
import math
import re
import secrets
import time
import uuid
from collections.abc import Callable, Sequence

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.errors import (
    DeadlineExceeded,
    PayloadTooLarge,
    TriptychError,
)
from services.gateway.admission import Admission
from services.gateway.responses import encode_json, error_body, error_of

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 20
BODY_TIMEOUT_S = 60.0
_OPEN_PATHS = frozenset(("/", "/health", "/ready"))
_QUIET_PATHS = frozenset(("/health", "/ready", "/metrics"))
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


class JsonResponse(Response):
    """A body that msgspec writes."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        """As `Response`."""
        return encode_json(content)


def error_response(error: TriptychError) -> Response:
    """An error as HTTP; a server that is full or lacks a service says when to come back."""
    headers: dict[str, str] = {}
    if error.http_status == 503 or error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s or 1)))
    return JsonResponse(error_of(error), error.http_status, headers)


async def handle_triptych_error(request: Request, error: Exception) -> Response:
    """Starlette's handler for our errors."""
    assert isinstance(error, TriptychError)
    return error_response(error)


async def handle_http_error(request: Request, error: Exception) -> Response:
    """Starlette's handler for its own errors: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    body = error_body(str(error.detail), kind="invalid_request_error", param=None, code=code)
    return JsonResponse(body, error.status_code, dict(error.headers or {}))


async def handle_bug(request: Request, error: Exception) -> Response:
    """Starlette's handler for everything else; the traceback goes to the log, not to the client."""
    body = error_body("internal error", kind="server_error", param=None, code="internal_error")
    return JsonResponse(body, 500)


async def read_body(scope: Scope, receive: Receive, hold: Callable[[int], None]) -> bytes:
    """A request's whole body.

    Args:
        scope: of the request.
        receive: the ASGI channel.
        hold: told of the bytes as they come; may refuse.

    Raises:
        PayloadTooLarge: over the limit, by its own account or by count.
        DeadlineExceeded: it comes too slowly.
        ClientGone: it does not come.
    """
    declared = dict(scope["headers"]).get(b"content-length", b"0")
    if declared.isdigit() and int(declared) > MAX_BODY_BYTES:
        raise PayloadTooLarge(f"the body is larger than {MAX_BODY_BYTES} bytes")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                chunk: bytes = message.get("body", b"")
                if len(body) + len(chunk) > MAX_BODY_BYTES:
                    raise PayloadTooLarge(f"the body is larger than {MAX_BODY_BYTES} bytes")
                hold(len(chunk))
                body += chunk
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise DeadlineExceeded("the body did not arrive in time") from None


class Edge:
    """The outermost layer: gives each request an id, asks for a key, notes how it went.

    Args:
        app: what is inside.
        admission: tells whether the gateway is draining.
        keys: accepted API keys; none: nobody is asked.
        own_path: of requests that the gateway sends itself, which need no key and no line of log.
    """

    def __init__(
        self, app: ASGIApp, admission: Admission, keys: Sequence[str], own_path: str
    ) -> None:
        self._app = app
        self._open_paths = _OPEN_PATHS | {own_path}
        self._quiet_paths = _QUIET_PATHS | {own_path}
        self._admission = admission
        self._key_digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        request_id = _request_id(headers.get(b"x-request-id", b""))
        scope.setdefault("state", {})["request_id"] = request_id
        start = time.monotonic()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()), (b"x-request-id", request_id.encode())
                ]  # fmt: skip
                if self._admission.draining:
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        app = self._app if self._may_pass(scope["path"], headers) else _unauthorized
        try:
            await app(scope, receive, send_with_id)
        except ClientGone:
            status = 499
        finally:
            level = logging.DEBUG if scope["path"] in self._quiet_paths else logging.INFO
            log.log(
                level,
                "%s %s %d",
                scope["method"],
                scope["path"],
                status,
                extra={
                    "fields": {
                        "request_id": request_id,
                        "ms": round((time.monotonic() - start) * 1e3, 1),
                    }
                },
            )

    def _may_pass(self, path: str, headers: dict[bytes, bytes]) -> bool:
        if not self._key_digests or path in self._open_paths:
            return True
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        found = hashlib.sha256(given.strip()).digest()
        # All are compared, so that time tells nothing.
        matches = [secrets.compare_digest(found, digest) for digest in self._key_digests]
        return scheme.lower() == b"bearer" and any(matches)


async def _unauthorized(scope: Scope, receive: Receive, send: Send) -> None:
    message = "a valid API key is needed: Authorization: Bearer <key>"
    body = error_body(message, kind="authentication_error", param=None, code="invalid_api_key")
    await JsonResponse(body, 401, {"www-authenticate": "Bearer"})(scope, receive, send)


def _request_id(given: bytes) -> str:
    """The caller's id if it is one that may stand in logs and metadata, else a new one."""
    text = given.decode("latin-1")
    return text if _REQUEST_ID.fullmatch(text) else f"req-{uuid.uuid4().hex}"
