"""The routes beside chat."""

import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.common.errors import InvalidRequest, TriptychError
from services.gateway.admission import Admission
from services.gateway.chat import ChatService
from services.gateway.chat_endpoint import ChatEndpoint
from services.gateway.edge import JsonResponse, read_body
from services.gateway.metrics import GatewayMetrics
from services.gateway.openai import MAX_MESSAGES, ChatRequest, Message, decode_json
from services.gateway.rehearsal import Rehearsal

View = Callable[[Request], Coroutine[Any, Any, Response]]

# The page holds its own script and style and loads nothing from elsewhere.
_PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)


class TokenizeRequest(Struct, forbid_unknown_fields=True):
    """POST /tokenize: plain text, or messages as the chat template renders them."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None


_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)


class Routes:
    """The views, over what they serve."""

    def __init__(
        self,
        service: ChatService,
        rehearsal: Rehearsal,
        admission: Admission,
        metrics: GatewayMetrics,
    ) -> None:
        self._service = service
        self._rehearsal = rehearsal
        self._admission = admission
        self._metrics = metrics
        self._created = int(time.time())
        self._page = (Path(__file__).parent / "static" / "index.html").read_bytes()

    def table(self) -> list[Route]:
        """All there is to call."""
        chat = ChatEndpoint(self._service, self._admission, self._metrics)
        return [
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/", self.page, methods=["GET"]),
        ]

    async def models(self, request: Request) -> Response:
        """The one model."""
        return JsonResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """One model by name."""
        self._service.check_model(request.path_params["name"])
        return JsonResponse(self._model())

    async def tokenize(self, request: Request) -> Response:
        """Token ids, with all those of the pictures in messages."""
        with self._admission.slot() as slot:
            body = await read_body(request.scope, request.receive, slot.hold)
            asked = decode_json(_tokenize_decoder, body)
            if (asked.prompt is None) == (asked.messages is None):
                raise InvalidRequest("give either prompt or messages", param="prompt")
            if asked.model is not None:
                self._service.check_model(asked.model)
            if asked.prompt is not None:
                tokens = await self._service.tokenize_text(asked.prompt)
            else:
                chat = ChatRequest(self._service.model_name, asked.messages or [])
                tokens = await self._service.tokenize(chat, slot.hold)
        return JsonResponse(
            {
                "count": len(tokens),
                "max_model_len": self._service.max_model_len(),
                "tokens": tokens,
            }
        )

    async def health(self, request: Request) -> Response:
        """Liveness: this process answers."""
        return JsonResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Readiness: an encoder and a decoder that fit each other are there, we have rehearsed
        with them, and we stay.
        """
        if self._admission.draining:
            return JsonResponse({"status": "draining"}, 503)
        if not self._service.ready():
            return JsonResponse({"status": "waiting for an encoder and a decoder"}, 503)
        if not self._rehearsal.over:
            return JsonResponse({"status": "rehearsing"}, 503)
        return JsonResponse({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        """For Prometheus."""
        data = generate_latest(self._metrics.registry)
        return Response(data, media_type=CONTENT_TYPE_LATEST)

    async def page(self, request: Request) -> Response:
        """The chat page."""
        headers = {
            "content-security-policy": _PAGE_POLICY,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
        }
        return Response(self._page, media_type="text/html", headers=headers)

    def _model(self) -> dict[str, object]:
        return {
            "id": self._service.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "triptych",
            "max_model_len": self._service.max_model_len(),
        }


__all__ = ["Routes", "TriptychError"]
