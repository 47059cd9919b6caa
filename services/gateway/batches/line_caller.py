"""Calls the gateway's own endpoints for the lines of batches.

A line runs through the same endpoint as a request over HTTP, and has the same answer. The tenant
is charged for the line. The line holds an admission slot, and is marked as background work, which
encoders and decoders do behind all other work.
"""

import asyncio
import logging
from dataclasses import dataclass, replace
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from services.common.errors import InternalError, TriptychError
from services.common.spans import span
from services.common.telemetry import bind_request_id
from services.gateway.forms.error_answers import error_of
from services.gateway.forms.responses import encode_json
from services.gateway.http.middleware import AuditLog
from services.gateway.tenancy.tenants import Identity, bind_identity

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """The answer to a line.

    Attributes:
        status: HTTP status.
        body: body of the answer, which is JSON.
        error: the error if the line has failed. None if it was answered.
    """

    status: int
    body: bytes
    error: TriptychError | None = None


class LineCaller:
    """Calls endpoints for lines of batches.

    Args:
        app: router of the gateway's paths.
        audit: the audit log, which also counts the use of each tenant.
    """

    def __init__(self, app: ASGIApp, audit: AuditLog) -> None:
        self._app = app
        self._audit = audit

    async def call(self, identity: Identity, path: str, body: bytes, request_id: str) -> LineAnswer:
        """Runs a line in the calling task, which must run nothing else.

        Args:
            identity: tenant of the batch, and the key that has created the batch.
            path: path of the endpoint.
            body: JSON of the request.
            request_id: id of the line, for logs and traces.
        """
        bind_identity(replace(identity, tenant=replace(identity.tenant, is_background=True)))
        bind_request_id(request_id)
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "state": {"request_id": request_id},
        }
        exchange = _Exchange(body)
        with span("batch line", "", path=path, request_id=request_id):
            try:
                await self._app(scope, exchange.receive, exchange.send)
            except TriptychError as error:
                return _failed(error.without_frames())
            except Exception:
                log.exception("a line of a batch failed")
                return _failed(InternalError("internal error"))
            finally:
                self._note(identity, scope)
        return LineAnswer(exchange.status, b"".join(exchange.pieces))

    def _note(self, identity: Identity, scope: Scope) -> None:
        if "used" in scope["state"]:
            self._audit.write(identity, scope)


def _failed(error: TriptychError) -> LineAnswer:
    return LineAnswer(error.http_status, encode_json(error_of(error)), error)


class _Exchange:
    """The channels of a request whose client waits for the whole answer."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self.status = 500
        self.pieces: list[bytes] = []

    async def receive(self) -> Message:
        if self._body is None:
            await asyncio.Event().wait()  # The client never disconnects.
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.pieces.append(bytes(message.get("body", b"")))
