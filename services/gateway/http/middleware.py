"""The ASGI middleware around all routes: request ids, traces, API keys, errors and the access log.

The server calls the middleware, which calls the router. A request with a wrong key gets a 401, and
a request of another site's web page a 403. If a route raises an exception before its response has
started, the middleware answers with an error response. It logs unexpected exceptions.
"""

import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.errors import Forbidden, TriptychError, Unauthorized
from services.common.spans import TRACEPARENT, Span, span
from services.common.telemetry import bind_request_id, log_line
from services.gateway.http.audit_log import AuditLog
from services.gateway.http.exchange import error_response
from services.gateway.http.same_site import SameSite
from services.gateway.tenancy.admission import Admission
from services.gateway.tenancy.leases import Leases
from services.gateway.tenancy.tenants import Keyring, KeyScope, bind_identity

log = logging.getLogger(__name__)

_OPEN_PATHS = frozenset(("/", "/docs", "/openapi.json", "/health", "/ready", "/ping"))
_QUIET_PATHS = frozenset(("/health", "/ready", "/ping"))
_PAGE_FILES = "/static/"  # paths below it are open and quiet, too
_SCOPES: Mapping[str, KeyScope] = {
    "/metrics": "metrics",
    "/load": "metrics",
    "/reset_prefix_cache": "admin",
    "/v1/load_lora_adapter": "admin",
    "/v1/unload_lora_adapter": "admin",
}
_NO_KEY = "a valid API key is needed: Authorization: Bearer <key>"
_PREFLIGHT_AGE_S = 600
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True)
class Middleware:
    """Gives each request an id and a span, checks its API key, answers its errors and logs its
    outcome.

    Attributes:
        app: router of all paths.
        same_site: check of a request's `Host` and `Origin`. None if there is no restriction.
        admission: admission control, which says whether the gateway drains.
        keyring: API keys and their tenants.
        leases: leases of the tenants' limits, for the headers with what is left of a limit.
        audit: the audit log.
        model: name of the model, for the log.
    """

    app: ASGIApp
    same_site: SameSite | None
    admission: Admission
    keyring: Keyring
    leases: Leases
    audit: AuditLog
    model: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        request_id = headers.get(b"x-request-id", b"").decode("latin-1")
        if not _REQUEST_ID.fullmatch(request_id):  # There is none, or it is not safe in logs.
            request_id = f"req-{os.urandom(16).hex()}"
        scope.setdefault("state", {})["request_id"] = request_id
        bind_request_id(request_id)
        is_quiet = scope["path"] in _QUIET_PATHS or scope["path"].startswith(_PAGE_FILES)
        start = time.monotonic()
        traceparent = headers.get(TRACEPARENT.encode(), b"").decode("latin-1")
        about = {"method": scope["method"], "path": scope["path"], "request_id": request_id}
        whole = nullcontext(Span()) if is_quiet else span("http request", traceparent, **about)
        with whole as request_span:
            status = await self._serve(scope, receive, send, headers)
            request_span.set(status=status, **_outcome(scope))
        level = logging.DEBUG if is_quiet else logging.INFO
        fields = {"ms": round((time.monotonic() - start) * 1e3, 1), **self._described(scope)}
        log_line(log, level, f"{scope['method']} {scope['path']} {status}", fields)

    def _described(self, scope: Scope) -> dict[str, Any]:
        """Returns the fields of a request's log line: its tenant if it has a key, and the model,
        the outcome and the numbers of tokens if it generates.
        """
        state: Mapping[str, Any] = scope["state"]
        who = {"tenant": name} if (name := state.get("tenant")) else {}
        if "used" not in state:
            return {**who, **_outcome(scope)}
        used: Mapping[str, int] = state["used"]
        tokens = {name: used[name] for name in ("prompt_tokens", "completion_tokens")}
        return {**who, "model": self.model, **tokens, **_outcome(scope)}

    async def _serve(
        self, scope: Scope, receive: Receive, send: Send, headers: dict[bytes, bytes]
    ) -> int:
        """Serves a request.

        Returns:
            The status of the response: 0 if the response never started, 499 if the client
            disconnected first.
        """
        status = 0
        request_id: str = scope["state"]["request_id"]
        identity = None
        scope["app"] = self.app  # so that routes raise for unknown paths and methods

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                # Anthropic's clients read the second name.
                ids = [(name, request_id.encode()) for name in (b"x-request-id", b"request-id")]
                message["headers"] = [*message.get("headers", ()), *ids]
                if (ignored := scope["state"].get("ignored")) and ignored.names:
                    message["headers"].append(ignored.header())
                if identity is not None:
                    message["headers"] += self.leases.headers(identity.tenant)
                if self.admission.draining:
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        try:
            try:
                if self.same_site is not None:
                    self.same_site.check(headers)
                if scope["path"] not in _OPEN_PATHS and not scope["path"].startswith(_PAGE_FILES):
                    # Anthropic's clients send the key in a header of its own.
                    key = headers.get(b"x-api-key", b"")
                    key = headers.get(b"authorization") or b"Bearer " + key
                    identity = self.keyring.identify(key)
                    if identity is None:
                        raise Unauthorized(_NO_KEY)
                    if scope_of(scope["path"]) not in identity.scopes:
                        raise Forbidden(f"the API key does not open {scope['path']}")
                    bind_identity(identity)
                    scope["state"]["tenant"] = identity.tenant.name
                await self.app(scope, receive, send_with_id)
            finally:
                if identity is not None and "used" in scope["state"]:
                    self.audit.write(identity, scope)
        except ClientDisconnect:
            status = 499
        except Exception as error:
            if status or not isinstance(error, (TriptychError, HTTPException)):
                log.exception("a request failed")
            if not status:
                await error_response(scope, error)(scope, receive, send_with_id)
        return status


def scope_of(path: str) -> KeyScope:
    """Returns the scope that a key needs for a request to a path."""
    return _SCOPES.get(path, "inference")


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Returns the application with CORS for web pages of some origins.

    A preflight request carries no key and is answered without the application. Credentials of the
    browser (cookies) are never allowed, because API keys are headers.

    Args:
        app: the application.
        origins: origins that may call; `*` stands for all. If there are none, the application is
            returned as it is.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after", "x-triptych-ignored"],
        max_age=_PREFLIGHT_AGE_S,
    )


def _outcome(scope: Scope) -> dict[str, str]:
    """Returns the log field with a request's finish reason or error code, because the status of a
    stream is always 200. Empty for a request that generates nothing.
    """
    outcome: str | None = scope["state"].get("outcome")
    return {} if outcome is None else {"outcome": outcome}
