"""Builds the gateway from its settings: one ASGI application, and the parts that its server drives.

`__main__` calls `create_gateway` once. Settings or a model that cannot be served raise there,
before the port is open; the services behind it are dialled when the application starts.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from services.common.checkpoint_fingerprint import checkpoint_fingerprint
from services.common.errors import TriptychError
from services.common.families import read_spec
from services.common.model_spec import ModelSpec
from services.common.process.pod_limits import memory_limit_bytes
from services.common.security.credentials import Credentials
from services.common.settings import SettingsError
from services.gateway.chat import ChatService
from services.gateway.clients.decoders import DecoderPool
from services.gateway.clients.encoders import EncoderPool
from services.gateway.clients.pods import Dialling
from services.gateway.clients.served_model import ServedModel
from services.gateway.endpoints.chat_endpoint import ChatEndpoint
from services.gateway.endpoints.operations import scope_of
from services.gateway.endpoints.routes import Routes
from services.gateway.endpoints.surfaces import create_surfaces
from services.gateway.http.exchange import handle_bug, handle_http_error, handle_triptych_error
from services.gateway.http.middleware import Middleware, with_cors
from services.gateway.http.same_site import SameSite, is_loopback, served_hosts
from services.gateway.kept import MAX_BYTES, MAX_TENANT_BYTES, Kept, MemoryKept
from services.gateway.kept_redis import RedisKept
from services.gateway.media.images import ImageReader, MediaLoader
from services.gateway.media.web_media import WebMedia
from services.gateway.metrics import GatewayMetrics
from services.gateway.prompts.chat_template import ChatTemplate
from services.gateway.prompts.prompt import PromptBuilder
from services.gateway.sampling import SamplingDefaults
from services.gateway.settings import GatewaySettings
from services.gateway.tenancy.admission import Admission, max_held_bytes
from services.gateway.tenancy.leases import Leases
from services.gateway.tenancy.tenants import Keyring
from services.gateway.tenancy.usage import Quotas
from services.gateway.tokenizer.tokenizer import ModelTokenizer
from services.gateway.warm_up import WarmUp

log = logging.getLogger(__name__)

# After this many calls the interpreter has specialized the code of most paths.
WARM_UP_ROUNDS = 8
# Of the memory for requests, what clients name again later takes an eighth at most.
_KEPT_PART = 8


@dataclass(frozen=True, slots=True)
class Gateway:
    """The application, and the parts of it that its server uses."""

    app: ASGIApp
    admission: Admission
    keyring: Keyring
    service: ChatService
    metrics: GatewayMetrics
    warm_up: WarmUp


def create_gateway(settings: GatewaySettings, *, warm_up_rounds: int = WARM_UP_ROUNDS) -> Gateway:
    """Builds everything; connects nothing before the application starts.

    Args:
        settings: of the service.
        warm_up_rounds: at most, before the gateway is ready; 0: no warm-up.

    Raises:
        ModelSpecError: the model directory cannot be served.
        SettingsError: the model takes images and no encoder address is set, or a file of keys,
            certificates or tokens cannot be read, or there are no keys where they are needed.
    """
    keyring = _keyring(settings)
    spec, max_images = read_spec(settings.model), settings.max_images_per_request
    if spec.vision is not None and not settings.encoders:
        raise SettingsError(
            f"GATEWAY_ENCODER_ADDRESSES: needed, because {spec.architecture} takes images"
        )
    tokenizer = ModelTokenizer.from_directory(spec.directory)
    template = ChatTemplate.from_directory(spec.directory, tokenizer.added)
    metrics = GatewayMetrics()
    leases = _leases(settings, metrics)
    quotas = Quotas(leases)
    held_bytes = max_held_bytes(settings.memory_bytes or memory_limit_bytes())
    kept, held_bytes = _kept(settings, held_bytes)
    admission = Admission(settings.max_concurrent_requests, held_bytes, quotas)
    web = WebMedia(
        settings.max_image_bytes,
        allow_private=settings.allow_private_media_hosts,
    )
    loader = MediaLoader(settings.max_image_bytes, web, settings.allowed_media_dir)
    images = None
    if spec.vision is not None:
        images = ImageReader(loader, spec.vision.geometry, settings.max_source_pixels, kept)
    encoders, decoders = _pools(settings, spec, metrics)
    service = ChatService(
        model_name=settings.served_model_name or spec.name,
        tokenizer=tokenizer,
        prompts=PromptBuilder(spec, tokenizer, template, max_images=max_images),
        images=images,
        defaults=SamplingDefaults.of_model(spec),
        encoders=encoders,
        decoders=decoders,
        metrics=metrics,
        request_timeout_s=settings.request_timeout_s,
        ignores_unknown_fields=settings.unknown_fields == "ignore",
    )
    warm_up = _warm_up(service, warm_up_rounds, images=max_images > 0)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        async with _running(service, leases, loader, kept, warm_up):
            yield

    beside = create_surfaces(service, admission, metrics, spec.directory, kept)
    routes = Routes(
        service, lambda: warm_up.done, admission, metrics, beside.endpoints, beside.routes,
        settings.others,
    )  # fmt: skip
    app = _application([*routes.table(), warm_up.route], lifespan)
    middleware: ASGIApp = Middleware(
        app, routes.endpoints, admission, keyring, quotas, warm_up.path, scope_of
    )
    middleware = _same_site(middleware, settings, needs_key=not keyring.is_open)
    return Gateway(
        with_cors(middleware, settings.cors_origins), admission, keyring, service, metrics, warm_up
    )


@asynccontextmanager
async def _running(
    service: ChatService, leases: Leases, loader: MediaLoader, kept: Kept, warm_up: WarmUp
) -> AsyncGenerator[None]:
    await service.start()
    leases.start()
    warming_up = asyncio.create_task(warm_up.run())
    try:
        yield
    finally:
        warming_up.cancel()
        await asyncio.wait((warming_up,))
        await leases.close()
        await service.close()
        await loader.close()
        await kept.close()


def _same_site(app: ASGIApp, settings: GatewaySettings, *, needs_key: bool) -> ASGIApp:
    is_served = served_hosts(settings.host, settings.served_hosts, needs_key=needs_key)
    if is_served is None:
        return app
    origins = settings.cors_origins if is_loopback(settings.host) else None
    return SameSite(app, is_served, origins)


def _leases(settings: GatewaySettings, metrics: GatewayMetrics) -> Leases:
    leases = Leases(
        settings.redis_url, settings.replicas, password_file=settings.redis_password_file
    )
    metrics.limits_divided.set_function(lambda: leases.divided_by)
    return leases


def _kept(settings: GatewaySettings, held_bytes: int) -> tuple[Kept, int]:
    """What clients name again later, and how many bytes it leaves to requests."""
    if settings.redis_url:
        kept = RedisKept(settings.redis_url, password_file=settings.redis_password_file)
        return kept, held_bytes
    if settings.replicas > 1:
        log.warning(
            "previous_response_id and uuid find what this gateway has answered, not what others "
            "have: set GATEWAY_REDIS_URL"
        )
    num_bytes = min(MAX_BYTES, held_bytes // _KEPT_PART)
    return MemoryKept(MAX_TENANT_BYTES, num_bytes), held_bytes - num_bytes


def _keyring(settings: GatewaySettings) -> Keyring:
    private = is_loopback(settings.host)
    keyring = Keyring(settings.keys, settings.api_keys_file, is_private=private)
    if keyring.is_open and not private and not settings.allow_anonymous:
        raise SettingsError(
            f"without API keys, everybody who reaches {settings.host}:{settings.port} would be "
            "served: set GATEWAY_API_KEYS or GATEWAY_API_KEYS_FILE (`triptych key` makes keys), or "
            "GATEWAY_ALLOW_ANONYMOUS=true"
        )
    return keyring


def _pools(
    settings: GatewaySettings, spec: ModelSpec, metrics: GatewayMetrics
) -> tuple[EncoderPool, DecoderPool]:
    """A text model has no encoders; addresses that are set are not used."""
    served = _served_model(spec)
    dialling = Dialling(
        Credentials.from_settings(settings).shown,
        lambda reason: metrics.peers_refused.labels(reason).inc(),
    )
    addresses = settings.encoders if spec.vision is not None else ()
    encoders = EncoderPool(addresses, served, dialling)
    decoders = DecoderPool(settings.decoders, served, dialling)
    for kind, pool in (("encoder", encoders), ("decoder", decoders)):
        if kind == "encoder" and spec.vision is None:
            continue  # none is missing
        metrics.healthy_pods.labels(kind).set_function(pool.num_healthy)
    metrics.picker_gauges.model_name = settings.served_model_name or spec.name
    metrics.picker_gauges.load = decoders.load
    return encoders, decoders


def _served_model(spec: ModelSpec) -> ServedModel:
    fingerprint = checkpoint_fingerprint(spec.directory)
    return ServedModel(
        fingerprint,
        spec.text.vocab_size,
        spec.text.hidden_size,
        0 if spec.vision is None else spec.vision.tower.num_features,
        is_own=bool(fingerprint),
    )


def _application(
    routes: list[BaseRoute], lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]]
) -> FastAPI:
    return FastAPI(
        # msgspec checks requests, so FastAPI's own document would be empty; `openapi` makes
        # one from the same types.
        openapi_url=None,
        routes=routes,
        exception_handlers={
            TriptychError: handle_triptych_error,
            HTTPException: handle_http_error,
            Exception: handle_bug,
        },
        lifespan=lifespan,
    )


def _warm_up(service: ChatService, rounds: int, *, images: bool) -> WarmUp:
    """The warm-up of the same service, with metrics that are not exported."""
    unused = GatewayMetrics()
    return WarmUp(
        ChatEndpoint(replace(service, metrics=unused), Admission(1), unused),
        service.model_name,
        service.ready,
        rounds=rounds,
        images=images and service.images is not None,
    )
