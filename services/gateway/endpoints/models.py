"""GET /v1/models: this gateway's model, and the models of other gateways behind the same address.

A gateway serves one model. A router in front of several gateways sends a request to the gateway of
the request's model, and `/v1/models` to any of them. That gateway asks the others with the
client's API key, so that the client sees all models that its key opens. A gateway that does not
answer is left out.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

import httpx2
import msgspec
from msgspec import Raw, Struct
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.clients.served_adapters import known_adapters
from services.gateway.http.exchange import JsonResponse
from services.gateway.request.chat import ChatService

log = logging.getLogger(__name__)

# Header of a request from another gateway, which is answered with this gateway's model alone.
_ASKED_BY_A_GATEWAY = "x-triptych-own-models"
_PASSED_ON = ("authorization", "x-api-key", "x-request-id")
_TIMEOUT_S = 2.0


class ModelCard(Struct):
    """A served model, or an adapter, whose `parent` is the model that it changes. The fields are
    those that OpenAI's, vLLM's and Anthropic's clients read. `can_switch_thinking` is true if
    `enable_thinking` of a request switches the reasoning.
    """

    id: str
    created: int
    max_model_len: int | None
    input_modalities: list[str]
    can_switch_thinking: bool
    root: str
    display_name: str
    created_at: datetime
    type: Literal["model"] = "model"
    lifecycle: Literal["active"] = "active"
    object: Literal["model"] = "model"
    owned_by: str = "triptych"
    parent: str | None = None


class ModelList(Struct):
    """The answer of /v1/models."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class _Model(Struct):
    id: str


class _Models(Struct):
    data: list[Raw]


@dataclass(frozen=True, slots=True)
class ModelRoutes:
    """The routes that list models: this gateway's, and those of other gateways.

    Args:
        _service: service that answers chat requests for this gateway's model.
        _others: URLs of the other gateways.
        _created: Unix time of this gateway's start.
    """

    _service: ChatService
    _others: Sequence[str]
    _created: int
    _silent: set[str] = field(default_factory=set[str])  # URLs of gateways that do not answer

    async def models(self, request: Request) -> Response:
        """Lists all models. The names of this gateway's model come first."""
        others = await self._of_others(request)
        own = self._names()
        found = [*map(self._own, own), *(raw for name, raw in others.items() if name not in own)]
        return JsonResponse({"object": "list", "data": found})

    async def model(self, request: Request) -> Response:
        """Describes one model."""
        name: str = request.path_params["name"]
        if name not in self._names():
            others = await self._of_others(request)
            if name in others:
                return Response(bytes(others[name]), media_type="application/json")
            self._service.check_model(name)
        return JsonResponse(self._own(name))

    def _names(self) -> Sequence[str]:
        """Returns the names of this gateway's model and of its adapters. As the model, an adapter
        is listed also while the decoders that have it restart.
        """
        return [*self._service.model_names, *known_adapters(self._service.decoders)]

    def _own(self, name: str) -> ModelCard:
        """Describes this gateway's model under one of its names, or one of its adapters."""
        service = self._service
        parent = None if name in service.model_names else service.model_name
        return ModelCard(
            name,
            self._created,
            service.max_model_len(),
            service.input_modalities,
            service.drafts.conversations.can_switch_thinking,
            root=name if parent else service.model_name,
            display_name=name,
            created_at=datetime.fromtimestamp(self._created, UTC),
            parent=parent,
        )

    async def _of_others(self, request: Request) -> Mapping[str, Raw]:
        """Returns the models of other gateways by name, in the order of the setting."""
        if not self._others or _ASKED_BY_A_GATEWAY in request.headers:
            return {}
        headers = {n: value for n in _PASSED_ON if (value := request.headers.get(n))}
        headers[_ASKED_BY_A_GATEWAY] = "1"
        # Each call opens new connections, because calls are rare.
        async with httpx2.AsyncClient(trust_env=False, timeout=_TIMEOUT_S) as client:
            lists = await asyncio.gather(
                *(self.models_of(client, url, headers) for url in self._others)
            )
        return {name: raw for each in lists for name, raw in each.items()}

    async def models_of(
        self, client: httpx2.AsyncClient, url: str, headers: Mapping[str, str]
    ) -> dict[str, Raw]:
        """Asks another gateway for its models.

        Args:
            client: client that sends the request.
            url: URL of the gateway, without the path.
            headers: headers of the request, with the caller's API key.

        Returns:
            The JSON objects of the models, by name. Empty if the gateway does not answer or does
            not accept the key.
        """
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                answer = await client.get(f"{url.rstrip('/')}/v1/models", headers=dict(headers))
            if answer.status_code in (401, 403):
                return {}
            answer.raise_for_status()
            models = msgspec.json.decode(answer.content, type=_Models).data
            found = {msgspec.json.decode(raw, type=_Model).id: raw for raw in models}
        except (TimeoutError, httpx2.HTTPError, msgspec.DecodeError) as error:
            if url not in self._silent:
                log.warning(
                    "the gateway %s did not list its models: %s", url, error or type(error).__name__
                )
            self._silent.add(url)
            return {}
        self._silent.discard(url)
        return found
