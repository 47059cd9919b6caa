"""The routes of the gateway: each path with the endpoint that serves it.

A new path is a handler in a file of its own and a line here. Handlers translate between HTTP and
`ChatService`. The middleware turns the errors that they raise into responses.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from starlette.routing import Route

from services.gateway.batches.batch_runner import BatchRunner
from services.gateway.clients.pods import PodTimes
from services.gateway.endpoints import adapter_routes
from services.gateway.endpoints.batch_routes import BatchRoutes
from services.gateway.endpoints.chat_endpoint import chat_completions
from services.gateway.endpoints.endpoint import (
    GenerationEndpoint,
    GenerationHandler,
    UtilityEndpoint,
)
from services.gateway.endpoints.file_routes import FileRoutes
from services.gateway.endpoints.messages_endpoint import count_tokens, messages
from services.gateway.endpoints.models import ModelRoutes
from services.gateway.endpoints.operations import Operations
from services.gateway.endpoints.pages import page_routes
from services.gateway.endpoints.request_context import RequestContext
from services.gateway.endpoints.responses_endpoint import responses
from services.gateway.endpoints.search_endpoints import (
    embeddings,
    pooling,
    rerank,
    score,
    wrong_task,
)
from services.gateway.endpoints.stored_responses import StoredResponses
from services.gateway.endpoints.text_completions_endpoint import text_completions
from services.gateway.endpoints.tokenization import (
    TokenizerInfo,
    detokenize,
    tokenize,
    tokenizer_info,
)
from services.gateway.endpoints.upload_routes import TYPES as UPLOAD_TYPES
from services.gateway.endpoints.upload_routes import delete_upload, upload
from services.gateway.entry_store import EntryStore
from services.gateway.forms.json_body import Body
from services.gateway.http.multipart import FORM_TYPE
from services.gateway.metrics import GatewayMetrics
from services.gateway.request.chat import ChatService
from services.gateway.request.search import SearchService
from services.gateway.tenancy.admission import Admission

# Answers a request for search with the service of the model.
SearchHandler = Callable[[SearchService, RequestContext, Body], Awaitable[None]]


def create_routes(
    service: ChatService,
    admission: Admission,
    metrics: GatewayMetrics,
    tokenizer: TokenizerInfo,
    store: EntryStore,
    other_gateways: Sequence[str] = (),
    times: PodTimes | None = None,
    search: SearchService | None = None,
    runner: BatchRunner | None = None,
) -> list[Route]:
    """Returns all routes of the gateway. The first ones are looked up first, so they are the paths
    that generate.

    Args:
        service: service that prepares and answers chat requests.
        admission: owner of the admission slots.
        metrics: metrics of the gateway.
        tokenizer: description of the model's tokenizer.
        store: store of the responses that later requests continue.
        other_gateways: URLs of gateways whose models `/v1/models` lists, too.
        times: times of the pods, which decide when absent services count as scaled to zero.
        search: service of a model for search. None if the model generates text.
        runner: runner of batches. None if batches are switched off.
    """
    answers = StoredResponses(service, store)
    serve = partial(GenerationEndpoint, service, admission, metrics)

    def generation(handler: GenerationHandler) -> GenerationEndpoint:
        return serve(handler if search is None else partial(wrong_task, search.task))

    def searching(handler: SearchHandler) -> GenerationEndpoint:
        return serve(
            partial(wrong_task, "generate") if search is None else partial(handler, search)
        )

    files = FileRoutes(None if runner is None else runner.store)
    batches = BatchRoutes(runner, "generate" if search is None else search.task)
    utility = partial(UtilityEndpoint, service, admission)
    models = ModelRoutes(service, other_gateways, int(time.time()))
    operations = Operations(service, admission, metrics, (times or PodTimes()).absent_s)
    return [
        Route("/v1/chat/completions", generation(chat_completions), methods=["POST"]),
        Route("/v1/completions", generation(text_completions), methods=["POST"]),
        Route("/v1/responses", generation(partial(responses, answers)), methods=["POST"]),
        Route("/v1/messages", generation(messages), methods=["POST"]),
        Route("/v1/embeddings", searching(embeddings), methods=["POST"]),
        Route("/pooling", searching(pooling), methods=["POST"]),
        Route("/v1/rerank", searching(partial(rerank, "1")), methods=["POST"]),
        Route("/v2/rerank", searching(partial(rerank, "2")), methods=["POST"]),
        Route("/v1/score", searching(score), methods=["POST"]),
        Route("/v1/models", models.models),
        Route("/v1/models/{name:path}", models.model),
        Route("/health", operations.health),
        Route("/ping", operations.health),
        Route("/version", operations.version),
        Route("/ready", operations.ready),
        *page_routes(),
        Route("/v1/messages/count_tokens", utility(count_tokens), methods=["POST"]),
        Route("/tokenize", utility(tokenize), methods=["POST"]),
        Route("/detokenize", utility(detokenize), methods=["POST"]),
        Route("/tokenizer_info", partial(tokenizer_info, service, tokenizer)),
        Route("/v1/responses/{name}", utility(answers.retrieve), methods=["GET"]),
        Route("/v1/responses/{name}", answers.delete, methods=["DELETE"]),
        Route("/v1/responses/{name}/cancel", answers.cancel, methods=["POST"]),
        Route("/v1/media", utility(upload, UPLOAD_TYPES), methods=["POST"]),
        Route("/v1/media/{name}", utility(delete_upload), methods=["DELETE"]),
        Route("/v1/files", utility(files.upload, (FORM_TYPE,)), methods=["POST"]),
        Route("/v1/files", files.files),
        Route("/v1/files/{name}", files.file),
        Route("/v1/files/{name}", files.delete, methods=["DELETE"]),
        Route("/v1/files/{name}/content", files.content),
        Route("/v1/batches", utility(batches.create), methods=["POST"]),
        Route("/v1/batches", batches.batches),
        Route("/v1/batches/{name}", batches.batch),
        Route("/v1/batches/{name}/cancel", batches.cancel, methods=["POST"]),
        Route("/metrics", operations.metrics),
        Route("/load", operations.load),
        Route("/reset_prefix_cache", operations.reset_prefix_cache, methods=["POST"]),
        Route("/v1/load_lora_adapter", utility(adapter_routes.load), methods=["POST"]),
        Route("/v1/unload_lora_adapter", utility(adapter_routes.unload), methods=["POST"]),
        Route("/openapi.json", operations.openapi),
    ]
