"""All routes: requests that generate, and the views beside them.

A new one is its files and a line here. Views translate between HTTP and `ChatService`; errors they
raise become responses in `exchange`.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.gateway.chat import ChatService
from services.gateway.endpoints.chat_endpoint import ChatEndpoint
from services.gateway.endpoints.endpoint import Endpoint
from services.gateway.endpoints.kept_responses import KeptResponses
from services.gateway.endpoints.messages_endpoint import MessagesEndpoint, TokenCounter
from services.gateway.endpoints.models import ModelRoutes
from services.gateway.endpoints.openapi import openapi_document
from services.gateway.endpoints.operations import Operations
from services.gateway.endpoints.pages import page_routes
from services.gateway.endpoints.responses_endpoint import ResponsesEndpoint
from services.gateway.endpoints.routes import Routes, package_version
from services.gateway.endpoints.text_completions_endpoint import TextCompletionEndpoint
from services.gateway.endpoints.tokenization import TokenizationRoutes
from services.gateway.endpoints.upload_routes import UploadRoutes
from services.gateway.http.exchange import JsonResponse
from services.gateway.kept import Kept
from services.gateway.metrics import GatewayMetrics
from services.gateway.tenancy.admission import Admission


def create_surfaces(
    service: ChatService,
    admission: Admission,
    metrics: GatewayMetrics,
    model_directory: Path,
    kept: Kept,
    other_gateways: Sequence[str] = (),
) -> tuple[dict[str, Endpoint], list[Route]]:
    """All that this gateway serves: what generates, by its paths, and all routes."""
    answers = KeptResponses(service, kept)
    parts = service, admission, metrics
    endpoints: dict[str, Endpoint] = {
        "/v1/chat/completions": ChatEndpoint(*parts),
        "/v1/completions": TextCompletionEndpoint(*parts),
        "/v1/responses": ResponsesEndpoint(*parts, answers),
        "/v1/messages": MessagesEndpoint(*parts),
    }
    counter = TokenCounter(service, admission)
    return endpoints, [
        *[Route(path, found, methods=["POST"]) for path, found in endpoints.items()],
        *ModelRoutes(service, other_gateways, int(time.time())).table(),
        *Routes(service, lambda: admission.draining).table(),
        *page_routes(),
        Route("/v1/messages/count_tokens", counter.count, methods=["POST"]),
        *TokenizationRoutes(service, admission, model_directory).table(),
        *answers.table(),
        *UploadRoutes(service, admission).table(),
        *Operations(service, admission, metrics).table(),
        Route("/openapi.json", _openapi, methods=["GET"]),
    ]


async def _openapi(request: Request) -> Response:
    """The OpenAPI document."""
    return JsonResponse(openapi_document(package_version()))
