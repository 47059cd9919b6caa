"""What the API has beside chat: other requests that generate, and views of the tokenizer and types.

`app` makes them and hands them to `Routes`, which knows none of them. A new one is its files and a
line here.
"""

from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.gateway.chat import ChatService
from services.gateway.endpoints.endpoint import Endpoint
from services.gateway.endpoints.kept_responses import KeptResponses
from services.gateway.endpoints.messages_endpoint import MessagesEndpoint, TokenCounter
from services.gateway.endpoints.openapi import openapi_document
from services.gateway.endpoints.operations import Operations
from services.gateway.endpoints.responses_endpoint import ResponsesEndpoint
from services.gateway.endpoints.routes import package_version
from services.gateway.endpoints.text_completions_endpoint import TextCompletionEndpoint
from services.gateway.endpoints.tokenization import TokenizationRoutes
from services.gateway.endpoints.upload_routes import UploadRoutes
from services.gateway.http.exchange import JsonResponse
from services.gateway.kept import Kept
from services.gateway.metrics import GatewayMetrics
from services.gateway.tenancy.admission import Admission


@dataclass(frozen=True, slots=True)
class Surfaces:
    """For `Routes`.

    Attributes:
        endpoints: those that generate, by their paths.
        routes: all others.
    """

    endpoints: dict[str, Endpoint]
    routes: list[Route]


def create_surfaces(
    service: ChatService,
    admission: Admission,
    metrics: GatewayMetrics,
    model_directory: Path,
    kept: Kept,
) -> Surfaces:
    """All that this gateway serves."""
    answers = KeptResponses(service, kept)
    parts = service, admission, metrics
    counter = TokenCounter(service, admission)
    return Surfaces(
        {
            "/v1/completions": TextCompletionEndpoint(*parts),
            "/v1/responses": ResponsesEndpoint(*parts, answers),
            "/v1/messages": MessagesEndpoint(*parts),
        },
        [
            Route("/v1/messages/count_tokens", counter.count, methods=["POST"]),
            *TokenizationRoutes(service, admission, model_directory).table(),
            *answers.table(),
            *UploadRoutes(service, admission).table(),
            *Operations(service, admission, metrics).table(),
            Route("/openapi.json", _openapi, methods=["GET"]),
        ],
    )


async def _openapi(request: Request) -> Response:
    """The OpenAPI document."""
    return JsonResponse(openapi_document(package_version()))
