"""Wiring: settings to the objects that serve, and these to one ASGI application."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from services.common.errors import TriptychError
from services.common.families import read_spec
from services.gateway.admission import Admission
from services.gateway.chat import ChatService
from services.gateway.chat_endpoint import ChatEndpoint
from services.gateway.clients.decoders import DecoderPool
from services.gateway.clients.encoders import EncoderPool
from services.gateway.edge import Edge, handle_bug, handle_http_error, handle_triptych_error
from services.gateway.images import ImageReader
from services.gateway.media import MediaLoader
from services.gateway.metrics import GatewayMetrics
from services.gateway.prompt import PromptBuilder
from services.gateway.rehearsal import Rehearsal
from services.gateway.routes import Routes
from services.gateway.sampling import SamplingDefaults
from services.gateway.settings import GatewaySettings
from services.gateway.tokenizer import ModelTokenizer
from services.gateway.web_media import WebMedia

# The interpreter has learnt most of a path's code after so many calls.
REHEARSALS = 8


@dataclass(frozen=True, slots=True)
class Gateway:
    """The application and what its server must reach."""

    app: ASGIApp
    admission: Admission
    service: ChatService
    metrics: GatewayMetrics
    rehearsal: Rehearsal


def create_gateway(settings: GatewaySettings, *, rehearsals: int = REHEARSALS) -> Gateway:
    """Builds everything; connects nothing before the application starts.

    Args:
        settings: of the service.
        rehearsals: see `Rehearsal`.

    Raises:
        ModelSpecError: the model directory cannot be served.
    """
    config = read_spec(settings.model)
    tokenizer = ModelTokenizer.from_directory(config.directory)
    web = WebMedia(settings.max_image_bytes, allow_private=settings.allow_private_media_hosts)
    loader = MediaLoader(settings.max_image_bytes, web, settings.allowed_media_dir)
    metrics = GatewayMetrics()
    encoders, decoders = EncoderPool(settings.encoders), DecoderPool(settings.decoders)
    metrics.healthy_pods.labels("encoder").set_function(encoders.num_healthy)
    metrics.healthy_pods.labels("decoder").set_function(decoders.num_healthy)
    service = ChatService(
        model_name=settings.served_model_name or config.name,
        tokenizer=tokenizer,
        prompts=PromptBuilder.from_directory(config, tokenizer),
        images=ImageReader(loader, config.vision_part.limits, settings.max_source_pixels),
        defaults=SamplingDefaults.of_model(config),
        encoders=encoders,
        decoders=decoders,
        metrics=metrics,
        max_images=settings.max_images_per_request,
        request_timeout_s=settings.request_timeout_s,
    )
    admission = Admission(settings.max_concurrent_requests)
    rehearsal = _rehearsal(service, rehearsals)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        await service.start()
        rehearsing = asyncio.create_task(rehearsal.run())
        try:
            yield
        finally:
            rehearsing.cancel()
            await asyncio.wait((rehearsing,))
            await service.close()
            await loader.close()

    app = FastAPI(
        # Requests are checked by msgspec, which FastAPI's generated pages would know nothing of;
        # docs/api.md is the description.
        openapi_url=None,
        routes=[*Routes(service, rehearsal, admission, metrics).table(), rehearsal.route],
        exception_handlers={
            TriptychError: handle_triptych_error,
            HTTPException: handle_http_error,
            Exception: handle_bug,
        },
        lifespan=lifespan,
    )
    edge = Edge(app, admission, settings.keys, rehearsal.path)
    return Gateway(edge, admission, service, metrics, rehearsal)


def _rehearsal(service: ChatService, rounds: int) -> Rehearsal:
    """Through all that requests go through, but for the metrics."""
    unseen = GatewayMetrics()
    return Rehearsal(
        ChatEndpoint(replace(service, metrics=unseen), Admission(1), unseen),
        service.model_name,
        service.ready,
        rounds=rounds,
        pictures=service.max_images > 0,
    )
