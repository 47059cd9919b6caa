"""All routes: requests that generate, and the views beside them.

A new one is its files and a line here. Views translate between HTTP and `ChatService`; errors they
raise become responses in `exchange`.
"""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from starlette.routing import Route

from services.gateway.endpoints.chat_endpoint import ChatEndpoint
from services.gateway.endpoints.endpoint import Endpoint, View
from services.gateway.endpoints.kept_responses import KeptResponses
from services.gateway.endpoints.messages_endpoint import MessagesEndpoint, count_tokens
from services.gateway.endpoints.models import ModelRoutes
from services.gateway.endpoints.operations import Operations
from services.gateway.endpoints.pages import page_routes
from services.gateway.endpoints.responses_endpoint import ResponsesEndpoint
from services.gateway.endpoints.text_completions_endpoint import TextCompletionEndpoint
from services.gateway.endpoints.tokenization import detokenize, tokenize, tokenizer_info
from services.gateway.endpoints.upload_routes import TYPES as UPLOAD_TYPES
from services.gateway.endpoints.upload_routes import delete_upload, upload
from services.gateway.kept import Kept
from services.gateway.metrics import GatewayMetrics
from services.gateway.request.chat import ChatService
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
    models = ModelRoutes(service, other_gateways, int(time.time()))
    operations = Operations(*parts)
    view = partial(View, service, admission)
    return endpoints, [
        *[Route(path, found, methods=["POST"]) for path, found in endpoints.items()],
        Route("/v1/models", models.models),
        Route("/v1/models/{name:path}", models.model),
        Route("/health", operations.health),
        Route("/ping", operations.health),
        Route("/version", operations.version),
        Route("/ready", operations.ready),
        *page_routes(),
        Route("/v1/messages/count_tokens", view(count_tokens), methods=["POST"]),
        Route("/tokenize", view(tokenize), methods=["POST"]),
        Route("/detokenize", view(detokenize), methods=["POST"]),
        Route("/tokenizer_info", partial(tokenizer_info, service, model_directory)),
        Route("/v1/responses/{name}", view(answers.retrieve), methods=["GET"]),
        Route("/v1/responses/{name}", answers.delete, methods=["DELETE"]),
        Route("/v1/responses/{name}/cancel", answers.cancel, methods=["POST"]),
        Route("/v1/media", view(upload, UPLOAD_TYPES), methods=["POST"]),
        Route("/v1/media/{name}", view(delete_upload), methods=["DELETE"]),
        Route("/metrics", operations.metrics),
        Route("/load", operations.load),
        Route("/reset_prefix_cache", operations.reset_prefix_cache, methods=["POST"]),
        Route("/openapi.json", operations.openapi),
    ]
