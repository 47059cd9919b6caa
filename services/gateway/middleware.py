"""ASGI middleware around all routes: request ids, API keys and the access log."""

import hashlib
import logging
import re
import secrets
import time
import uuid
from collections.abc import Sequence
from contextlib import nullcontext

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.telemetry import bind_request_id
from services.common.tracing import Span, span
from services.gateway.admission import Admission
from services.gateway.exchange import JsonResponse
from services.gateway.responses import error_body

log = logging.getLogger(__name__)

_OPEN_PATHS = frozenset(("/", "/health", "/ready"))
_QUIET_PATHS = frozenset(("/health", "/ready", "/metrics"))
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Middleware:
    """Gives each request an id, checks its API key, and logs its outcome.

    Args:
        app: the routes.
        admission: says whether the gateway is draining.
        keys: accepted API keys; empty: requests need none.
        warm_up_path: of the gateway's own requests, which need no key and no line in the log.
    """

    def __init__(
        self, app: ASGIApp, admission: Admission, keys: Sequence[str], warm_up_path: str
    ) -> None:
        self._app = app
        self._open_paths = _OPEN_PATHS | {warm_up_path}
        self._quiet_paths = _QUIET_PATHS | {warm_up_path}
        self._admission = admission
        self._key_digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        request_id = _request_id(headers.get(b"x-request-id", b""))
        scope.setdefault("state", {})["request_id"] = request_id
        bind_request_id(request_id)
        if scope["path"] in self._quiet_paths:
            tracing = nullcontext(Span())
        else:
            parent = headers.get(b"traceparent", b"").decode("latin-1")
            tracing = span(
                "http request", parent,
                method=scope["method"], path=scope["path"], request_id=request_id,
            )  # fmt: skip
        with tracing as current:
            current.set(status=await self._serve(scope, receive, send, headers))

    async def _serve(
        self, scope: Scope, receive: Receive, send: Send, headers: dict[bytes, bytes]
    ) -> int:
        """Serves one request and logs it; the HTTP status, 499 if the client has disconnected."""
        request_id: str = scope["state"]["request_id"]
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

        app = self._app if self._is_authorized(scope["path"], headers) else _unauthorized
        try:
            await app(scope, receive, send_with_id)
        except ClientDisconnect:
            status = 499
        except Exception:
            # Starlette raises the error again after its handler has answered with a 500.
            log.exception("a request failed")
        finally:
            level = logging.DEBUG if scope["path"] in self._quiet_paths else logging.INFO
            elapsed_ms = round((time.monotonic() - start) * 1e3, 1)
            log.log(
                level, "%s %s %d", scope["method"], scope["path"], status,
                extra={"fields": {"ms": elapsed_ms}},
            )  # fmt: skip
        return status

    def _is_authorized(self, path: str, headers: dict[bytes, bytes]) -> bool:
        if not self._key_digests or path in self._open_paths:
            return True
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        found = hashlib.sha256(given.strip()).digest()
        # Compares with all keys, so that the time does not depend on which one matches.
        matches = [secrets.compare_digest(found, digest) for digest in self._key_digests]
        return scheme.lower() == b"bearer" and any(matches)


async def _unauthorized(scope: Scope, receive: Receive, send: Send) -> None:
    message = "a valid API key is needed: Authorization: Bearer <key>"
    body = error_body(message, kind="authentication_error", param=None, code="invalid_api_key")
    await JsonResponse(body, 401, {"www-authenticate": "Bearer"})(scope, receive, send)


def _request_id(given: bytes) -> str:
    """The client's id if it is safe in logs and metadata, else a new one."""
    text = given.decode("latin-1")
    return text if _REQUEST_ID.fullmatch(text) else f"req-{uuid.uuid4().hex}"
