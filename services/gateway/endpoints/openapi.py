"""The OpenAPI document, made from the types that check requests and write answers.

`OPERATIONS` says which types an endpoint takes and gives; a test compares it with the routes, and
the document with what is accepted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from inspect import cleandoc
from typing import Any

import msgspec
from msgspec import Struct

from services.gateway.endpoints.adapter_routes import LoadAdapterRequest, UnloadAdapterRequest
from services.gateway.endpoints.examples import BODIES, curls
from services.gateway.endpoints.field_descriptions import description_of
from services.gateway.endpoints.models import ModelCard, ModelList
from services.gateway.endpoints.tokenization import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from services.gateway.endpoints.upload_routes import DeletedUpload, UploadAnswer, UploadRequest
from services.gateway.forms import batches, search
from services.gateway.forms import messages_api as messages
from services.gateway.forms import responses as chat
from services.gateway.forms import responses_api as responses
from services.gateway.forms.error_answers import ErrorAnswer, MessagesErrorAnswer
from services.gateway.forms.hints import BY_OBJECT
from services.gateway.forms.openai import ChatRequest
from services.gateway.forms.text_completions import CompletionRequest, TextCompletion

_PREFIX = "#/components/schemas/"
_HINT = "Accepted without effect."
_NAME = "Name or id of the object, as another answer gave it."
_JSON, _EVENTS = "application/json", "text/event-stream"


@dataclass(frozen=True, slots=True)
class Operation:
    """An endpoint.

    Attributes:
        name: the `operationId`, from which generators of clients make the name of a method.
        summary: description of the endpoint, without a full stop.
        request: type of the JSON body. None if the endpoint takes no body.
        response: type of the JSON answer. None if no type describes the answer.
        event: type of the events of a stream. None if the endpoint never streams.
        media_type: media type of the answer.
    """

    name: str
    summary: str
    request: type[Struct] | None = None
    response: type[Struct] | None = None
    event: Any = None
    media_type: str = _JSON
    error: type[Struct] = ErrorAnswer


OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        "createChatCompletion", "A chat completion, whole or as a stream",
        ChatRequest, chat.ChatCompletion, chat.ChatCompletionChunk,
    ),
    ("POST", "/v1/completions"): Operation(
        "createCompletion", "Text completions, whole or as a stream",
        CompletionRequest, TextCompletion, TextCompletion,
    ),
    ("POST", "/v1/responses"): Operation(
        "createResponse", "A response, whole or as a stream",
        responses.ResponsesRequest, responses.ResponseObject, responses.ResponseEvent,
    ),
    ("GET", "/v1/responses/{name}"): Operation(
        "getResponse", "A stored response", None, responses.ResponseObject
    ),
    ("DELETE", "/v1/responses/{name}"): Operation(
        "deleteResponse", "Deletes a stored response", None, responses.DeletedResponse
    ),
    ("POST", "/v1/responses/{name}/cancel"): Operation(
        "cancelResponse", "400: no response runs in the background"
    ),
    ("POST", "/v1/messages"): Operation(
        "createMessage", "A message, whole or as a stream",
        messages.MessagesRequest, messages.MessageAnswer, messages.MessageEvent,
        error=MessagesErrorAnswer,
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        "countMessageTokens", "Tokens of a message's prompt",
        messages.CountTokensRequest, messages.TokenCount, error=MessagesErrorAnswer,
    ),
    ("POST", "/v1/embeddings"): Operation(
        "createEmbeddings", "Vectors of texts, images and clips", search.EmbeddingRequest,
        search.EmbeddingList,
    ),
    ("POST", "/pooling"): Operation(
        "createTokenVectors", "Vectors of all tokens of texts and images", search.PoolingRequest,
        search.TokenVectorsList,
    ),
    ("POST", "/v1/rerank"): Operation(
        "rerank", "Documents in the order of their relevance", search.RerankRequest, search.Ranking
    ),
    ("POST", "/v2/rerank"): Operation(
        "rerankInVersionTwo",
        "Documents in the order of their relevance, as version 2 of Cohere's API",
        search.RerankRequest, search.Ranking,
    ),
    ("POST", "/v1/score"): Operation(
        "createScores", "Scores of pairs of a query and a document", search.ScoreRequest,
        search.ScoreList,
    ),
    ("GET", "/v1/models"): Operation("listModels", "The served models", None, ModelList),
    ("GET", "/v1/models/{name}"): Operation("getModel", "A served model", None, ModelCard),
    ("POST", "/v1/media"): Operation(
        "uploadMedia", "Stores a file, which later requests can name", UploadRequest, UploadAnswer
    ),
    ("DELETE", "/v1/media/{name}"): Operation(
        "deleteMedia", "Deletes an uploaded file", None, DeletedUpload
    ),
    ("POST", "/v1/files"): Operation(
        "createFile", "Stores the lines of a batch, which come as a form", None, batches.FileObject
    ),
    ("GET", "/v1/files"): Operation("listFiles", "The files of batches", None, batches.FileList),
    ("GET", "/v1/files/{name}"): Operation("getFile", "A file", None, batches.FileObject),
    ("DELETE", "/v1/files/{name}"): Operation(
        "deleteFile", "Deletes a file", None, batches.DeletedFile
    ),
    ("GET", "/v1/files/{name}/content"): Operation(
        "getFileContent", "The lines of a file", media_type="application/octet-stream"
    ),
    ("POST", "/v1/batches"): Operation(
        "createBatch", "Runs the lines of a file in the gaps of other requests",
        batches.BatchRequest, batches.BatchObject,
    ),
    ("GET", "/v1/batches"): Operation("listBatches", "The batches", None, batches.BatchList),
    ("GET", "/v1/batches/{name}"): Operation("getBatch", "A batch", None, batches.BatchObject),
    ("POST", "/v1/batches/{name}/cancel"): Operation(
        "cancelBatch", "Cancels a batch; its results remain", None, batches.BatchObject
    ),
    ("POST", "/tokenize"): Operation(
        "tokenize", "Token ids of text or messages", TokenizeRequest, TokenizeResponse
    ),
    ("POST", "/detokenize"): Operation(
        "detokenize", "Text of token ids", DetokenizeRequest, DetokenizeResponse
    ),
    ("GET", "/tokenizer_info"): Operation(
        "getTokenizerInfo", "tokenizer_config.json and the chat template"
    ),
    ("GET", "/metrics"): Operation("getMetrics", "The gateway's metrics", media_type="text/plain"),
    ("GET", "/load"): Operation("getLoad", "How many requests the gateway serves now"),
    ("POST", "/reset_prefix_cache"): Operation(
        "resetPrefixCache", "Empties the decoders' prefix caches"
    ),
    ("POST", "/v1/load_lora_adapter"): Operation(
        "loadAdapter", "Loads a LoRA adapter on all decoders", LoadAdapterRequest,
        media_type="text/plain",
    ),
    ("POST", "/v1/unload_lora_adapter"): Operation(
        "unloadAdapter", "Unloads a LoRA adapter", UnloadAdapterRequest, media_type="text/plain"
    ),
    ("GET", "/version"): Operation("getVersion", "The version of this software"),
    ("GET", "/health"): Operation("getHealth", "200 while the process answers"),
    ("GET", "/ping"): Operation("ping", "200 while the process answers"),
    ("GET", "/ready"): Operation(
        "getReadiness", "200 while requests are served; 503 at start and end"
    ),
    ("GET", "/openapi.json"): Operation("getDocument", "This document"),
    ("GET", "/docs"): Operation("getApiPage", "This document as a page", media_type="text/html"),
    ("GET", "/"): Operation("getChatPage", "The chat page", media_type="text/html"),
    ("GET", "/static/{name}"): Operation(
        "getStaticFile", "A file of the pages", media_type="text/javascript"
    ),
}  # fmt: skip


@cache
def openapi_document(version: str) -> dict[str, Any]:
    """Returns the OpenAPI 3.1 document."""
    named = ((o.request, o.response, o.event, o.error) for o in OPERATIONS.values())
    types = list(dict.fromkeys(kind for kinds in named for kind in kinds if kind is not None))
    references, components = msgspec.json.schema_components(types, ref_template=_PREFIX + "{name}")
    schema_of = dict(zip(types, references, strict=True))
    for name, schema in components.items():
        _describe(name, schema)
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in OPERATIONS.items():
        found = paths.setdefault(path, {})[method.lower()] = _operation(path, operation, schema_of)
        found["x-codeSamples"] = [
            {"lang": "Shell", "label": name, "source": curl}
            for name, curl in curls(method, path).items()
        ]
    return {
        "openapi": "3.1.0",
        "info": {"title": "Triptych", "version": version},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _describe(name: str, schema: dict[str, Any]) -> None:
    """Describes the fields of an object, and adds its hints: fields without effect, which the type
    of the object lacks.
    """
    properties: dict[str, dict[str, Any]] = schema.get("properties", {})
    for field, described in properties.items():
        described.setdefault("description", description_of(name, field))
    if "description" in schema:  # A docstring, which may list the attributes.
        schema["description"] = cleandoc(schema["description"]).partition("\n\nAttributes:")[0]
    if schema.get("additionalProperties") is not False:  # Only objects of requests have hints.
        return
    for field, values in BY_OBJECT.get(name, {}).items():
        if field in properties:
            continue
        hint: dict[str, Any] = {"description": _HINT, "x-no-effect": True}
        properties[field] = hint if values is None else hint | {"enum": [None, *values]}
    if properties:
        schema["properties"] = properties


def _operation(path: str, operation: Operation, schema_of: Mapping[Any, Any]) -> dict[str, Any]:
    def content(media_type: str, kind: object) -> dict[str, Any]:
        return {media_type: {"schema": schema_of[kind] if kind is not None else {}}}

    answer = content(operation.media_type, operation.response)
    if operation.event is not None:
        answer |= content(_EVENTS, operation.event)
    found: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "responses": {
            "200": {"description": "The answer", "content": answer},
            "default": {"description": "An error", "content": content(_JSON, operation.error)},
        },
    }
    if operation.request is not None:
        body = content(_JSON, operation.request)
        examples = {name: {"value": example} for name, example in BODIES[path].items()}
        body[_JSON]["examples"] = examples
        found["requestBody"] = {"required": True, "content": body}
    if "{name}" in path:
        name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        found["parameters"] = [name | {"description": _NAME}]
    return found
