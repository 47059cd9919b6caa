"""Builds the gateway from its settings: an ASGI application, and the parts that its server uses.

`__main__` calls `create_gateway` once, which refuses settings or a model that cannot be served
before the port is open. The gateway connects to the other services when the application starts.
"""

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.types import ASGIApp

from services.common.adapter_config import merged_fingerprint
from services.common.checkpoint_fingerprint import checkpoint_fingerprint
from services.common.families import read_spec
from services.common.model_spec import ModelSpec, ModelSpecError
from services.common.pb.decoder_pb2 import SamplingParams
from services.common.process.pod_limits import memory_limit_bytes
from services.common.security.credentials import Credentials
from services.common.settings import SettingsError
from services.common.threads import WorkerThreads
from services.gateway.answers.answer_reader import AnswerReader
from services.gateway.batches.batch_files import BatchFiles
from services.gateway.batches.batch_runner import BatchRunner, RunnerBounds
from services.gateway.batches.batch_store import BatchStore
from services.gateway.batches.line_caller import LineCaller
from services.gateway.batches.redis_state import RedisState
from services.gateway.batches.state import MemoryState, State
from services.gateway.bounds import BodyLimits, Bounds
from services.gateway.clients.decoders import DecoderPool
from services.gateway.clients.encoders import EncoderPool
from services.gateway.clients.pods import PodDialer, PodTimes
from services.gateway.clients.served_model import ServedModel
from services.gateway.clients.uploads import Uploads
from services.gateway.endpoints.surfaces import create_routes
from services.gateway.endpoints.tokenization import TokenizerInfo
from services.gateway.entry_store import MAX_BYTES, MAX_TENANT_BYTES, EntryStore, MemoryEntryStore
from services.gateway.http.audit_log import AuditLog
from services.gateway.http.middleware import Middleware, with_cors
from services.gateway.http.router import Router
from services.gateway.http.same_site import SameSite, is_loopback, served_hosts
from services.gateway.media.embeddings import ClientEmbeddings
from services.gateway.media.images import ImageReader
from services.gateway.media.local_files import LocalFiles
from services.gateway.media.media_loader import MediaLoader
from services.gateway.media.videos import VideoReader
from services.gateway.media.web_media import WebMedia
from services.gateway.metrics import GatewayMetrics
from services.gateway.prompts.chat_template import PLAIN_TEMPLATE, ChatTemplate
from services.gateway.prompts.conversation import ConversationReader
from services.gateway.prompts.prompt import PromptBuilder
from services.gateway.prompts.search_prompts import SearchPrompts
from services.gateway.redis_entry_store import RedisEntryStore
from services.gateway.request.chat import ChatService
from services.gateway.request.drafts import DraftReader
from services.gateway.request.sampling import SamplingReader, check_overrides, model_defaults
from services.gateway.request.search import SearchService
from services.gateway.settings import GatewaySettings
from services.gateway.tenancy.admission import Admission, largest_body, max_held_bytes
from services.gateway.tenancy.leases import Leases
from services.gateway.tenancy.tenants import Keyring
from services.gateway.tokenizer.tokenizer import ModelTokenizer
from services.gateway.vllm_metrics import VllmMetrics

log = logging.getLogger(__name__)

# Stored responses and images take one part in eight of the memory for requests at most.
_STORE_PART = 8
# Without Redis, batches take one part in eight, too: the files of a tenant one part in 32, the
# files and results of all tenants four times as many.
_BATCH_PART, _TENANT_PART = 8, 32


@dataclass(frozen=True, slots=True)
class Gateway:
    """The ASGI application, and the parts that its server uses."""

    app: ASGIApp
    admission: Admission
    service: ChatService
    metrics: GatewayMetrics
    batches: BatchRunner | None


def create_gateway(
    settings: GatewaySettings,
    bounds: Bounds | None = None,
    pod_times: PodTimes | None = None,
    memory_bytes: int | None = None,
    batch_bounds: RunnerBounds | None = None,
) -> Gateway:
    """Builds all parts of the gateway. Nothing is connected before the application starts.

    Args:
        bounds: bounds of requests. Defaults to the bounds of the settings.
        pod_times: periods of the look-ups and health checks of pods. Defaults to `PodTimes()`.
        memory_bytes: memory of the gateway's pod. Defaults to the limit that the kernel names.
        batch_bounds: periods and bound of the runner of batches. Defaults to `RunnerBounds()`.

    Raises:
        ModelSpecError: the model directory cannot be served.
        SettingsError: the model takes images and no encoder address is set, or a file of keys,
            certificates or tokens cannot be read, or there are no keys where they are needed.
    """
    bounds = bounds or settings.bounds
    keyring = _keyring(settings)
    spec = read_spec(settings.model, settings.task)
    if spec.vision is not None and not settings.encoders:
        raise SettingsError(
            f"GATEWAY_ENCODER_ADDRESSES: needed, because {spec.architecture} takes images"
        )
    tokenizer = ModelTokenizer.from_directory(spec.directory)
    template = _template(settings, spec, tokenizer)
    metrics = GatewayMetrics()
    leases = _leases(settings, metrics)
    store, held_bytes = _entry_store(settings, max_held_bytes(memory_bytes or memory_limit_bytes()))
    state, batch_bytes, held_bytes = _batch_state(settings, held_bytes)
    max_body_bytes = _max_body_bytes(settings, held_bytes)
    limits = BodyLimits(max_body_bytes, bounds.body_start_s)
    admission = Admission(bounds.max_concurrent_requests, held_bytes, leases, limits)
    metrics.running.set_function(lambda: admission.num_running)
    encoders, decoders = _pools(settings, spec, metrics, pod_times)
    web = WebMedia(allow_private=settings.allows_private_media)
    loader = MediaLoader(web, _local_files(settings), Uploads(encoders))
    images = _image_reader(settings, spec, bounds, loader, store)
    videos = None
    if spec.vision is not None and spec.vision.video is not None:
        videos = VideoReader(loader, spec.vision.video, bounds, encoders)
    parsers = WorkerThreads(1, "parse")
    prompts = PromptBuilder(spec, tokenizer, template)
    conversations = _conversations(settings, spec, tokenizer, template, bounds)
    service = ChatService(
        model_names=_names(settings, spec),
        tokenizer=tokenizer,
        drafts=DraftReader(conversations, prompts, tokenizer),
        prompts=prompts,
        answers=AnswerReader(spec, tokenizer, template.source, parsers),
        images=images,
        videos=videos,
        sampling=SamplingReader(tokenizer, _sampling_defaults(settings, spec)),
        encoders=encoders,
        decoders=decoders,
        metrics=metrics,
        parsers=parsers,
        request_timeout_s=settings.request_timeout_s,
        ignores_unknown_fields=settings.unknown_fields == "ignore",
    )

    info = TokenizerInfo(spec.directory, template.source)
    search = None
    if spec.search is not None:
        search = SearchService(spec, service, SearchPrompts(spec, tokenizer, bounds))
    audit = AuditLog(metrics, service.model_name)
    router = Router(lifespan=lambda _: _running(service, leases, web, loader, store, runner))
    runner = None
    if batch_bytes:
        batch_bounds = batch_bounds or RunnerBounds()
        batches = BatchStore(state, BatchFiles(state, batch_bytes), batch_bounds.lease)
        runner = BatchRunner(
            batches, LineCaller(router, audit), keyring, service, admission, leases, metrics,
            batch_bounds,
        )  # fmt: skip
    routes = create_routes(
        service, admission, metrics, info, store, settings.others, pod_times, search, runner
    )
    # msgspec checks requests, and `openapi` describes them from the same types, so FastAPI's own
    # validation and document are not used.
    router.add(routes)
    same_site = _same_site(settings, needs_key=not keyring.is_open)
    middleware = Middleware(
        router, same_site, admission, keyring, leases, audit, service.model_name
    )
    app_with_cors = with_cors(middleware, settings.cors_origins)
    return Gateway(app_with_cors, admission, service, metrics, runner)


@asynccontextmanager
async def _running(
    service: ChatService,
    leases: Leases,
    web: WebMedia,
    loader: MediaLoader,
    store: EntryStore,
    runner: BatchRunner | None,
) -> AsyncGenerator[None]:
    await service.start()
    leases.start()
    if runner is not None:
        runner.start()
    try:
        yield
    finally:
        if runner is not None:
            await runner.close()
        await leases.close()
        await service.close()
        web.close()
        loader.close()
        await store.close()


def _local_files(settings: GatewaySettings) -> LocalFiles | None:
    directory = settings.media_directory
    return None if directory is None else LocalFiles(directory)


def _names(settings: GatewaySettings, spec: ModelSpec) -> tuple[str, ...]:
    """Returns the names of the model in requests. Answers have the first."""
    return settings.served_names or (spec.name,)


def _template(
    settings: GatewaySettings, spec: ModelSpec, tokenizer: ModelTokenizer
) -> ChatTemplate:
    file = settings.chat_template
    if spec.search is not None:
        if file is not None:
            raise SettingsError("GATEWAY_CHAT_TEMPLATE: a model for search has its own templates")
        return ChatTemplate(PLAIN_TEMPLATE, {}, tokenizer.added)
    try:
        return ChatTemplate.from_directory(spec.directory, tokenizer.added, file)
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"GATEWAY_CHAT_TEMPLATE: cannot read {file}: {error}") from None
    except ModelSpecError as error:
        if file is None:
            raise
        raise SettingsError(f"GATEWAY_CHAT_TEMPLATE: {file}: {error}") from None


def _conversations(
    settings: GatewaySettings,
    spec: ModelSpec,
    tokenizer: ModelTokenizer,
    template: ChatTemplate,
    bounds: Bounds,
) -> ConversationReader:
    try:
        return ConversationReader(spec, tokenizer, template, bounds, settings.template_defaults)
    except ValueError as error:
        raise SettingsError(f"GATEWAY_DEFAULT_CHAT_TEMPLATE_KWARGS: {error}") from None


def _image_reader(
    settings: GatewaySettings,
    spec: ModelSpec,
    bounds: Bounds,
    loader: MediaLoader,
    store: EntryStore,
) -> ImageReader | None:
    """Makes the reader of images. Returns None if the model has no vision part."""
    if spec.vision is None:
        return None
    width = spec.text.hidden_size * spec.vision.tower.num_features
    embeddings = ClientEmbeddings(width, loader) if settings.embeddings else None
    return ImageReader(loader, spec.vision.geometry, bounds, store, embeddings)


def _sampling_defaults(settings: GatewaySettings, spec: ModelSpec) -> SamplingParams:
    try:
        check_overrides(settings.generation_overrides)
    except ValueError as error:
        raise SettingsError(f"GATEWAY_OVERRIDE_GENERATION_CONFIG: {error}") from None
    return model_defaults(spec, settings.generation_overrides)


def _same_site(settings: GatewaySettings, *, needs_key: bool) -> SameSite | None:
    hosts = served_hosts(settings.host, settings.served_hosts, needs_key=needs_key)
    if hosts is None:
        return None
    origins = settings.cors_origins if is_loopback(settings.host) else None
    return SameSite(hosts, origins)


def _leases(settings: GatewaySettings, metrics: GatewayMetrics) -> Leases:
    leases = Leases(
        settings.redis_url, settings.replicas, password_file=settings.redis_password_file
    )
    metrics.limits_divided.set_function(lambda: leases.divided_by)
    return leases


def _entry_store(settings: GatewaySettings, held_bytes: int) -> tuple[EntryStore, int]:
    """Makes the store of responses and images that later requests can name.

    Returns:
        The store, and the number of bytes that it leaves to requests.
    """
    if settings.redis_url:
        store = RedisEntryStore(settings.redis_url, password_file=settings.redis_password_file)
        return store, held_bytes
    if settings.replicas > 1:
        log.warning(
            "previous_response_id and uuid find the responses and images of this gateway alone, "
            "not those of its replicas: set GATEWAY_REDIS_URL"
        )
    num_bytes = min(MAX_BYTES, held_bytes // _STORE_PART)
    return MemoryEntryStore(MAX_TENANT_BYTES, num_bytes), held_bytes - num_bytes


def _batch_state(settings: GatewaySettings, held_bytes: int) -> tuple[State, int, int]:
    """Makes the state of batches.

    Returns:
        The state, the most bytes of a tenant's files, and the number of bytes that the state leaves
        to requests.
    """
    if settings.redis_url:
        state = RedisState(settings.redis_url, settings.redis_password_file)
        return state, settings.batch_bytes, held_bytes
    if not settings.batch_bytes:
        return MemoryState(), 0, held_bytes
    if settings.replicas > 1:
        log.warning(
            "each gateway knows its own files and batches alone, and loses them when it ends: set "
            "GATEWAY_REDIS_URL"
        )
    num_bytes = min(settings.batch_bytes, held_bytes // _TENANT_PART)
    return MemoryState(), num_bytes, held_bytes - num_bytes * _TENANT_PART // _BATCH_PART


def _max_body_bytes(settings: GatewaySettings, held_bytes: int) -> int:
    """Returns the largest size of a body: the setting, or the size that the memory for requests can
    hold if that is less.
    """
    most = largest_body(held_bytes)
    if most < settings.max_body_bytes:
        log.warning(
            "bodies may have %d bytes, not GATEWAY_MAX_BODY_BYTES (%d): the memory of this gateway "
            "holds no larger body",
            most,
            settings.max_body_bytes,
        )
    return min(most, settings.max_body_bytes)


def _keyring(settings: GatewaySettings) -> Keyring:
    private = is_loopback(settings.host)
    keyring = Keyring(settings.keys, settings.keys_file, is_private=private)
    if keyring.is_open and not private and not settings.is_open:
        raise SettingsError(
            f"without API keys, everybody who reaches {settings.host}:{settings.port} would be "
            "served: set GATEWAY_API_KEYS to keys or file:PATH (`triptych key` makes keys), or "
            "GATEWAY_API_KEYS=none"
        )
    return keyring


def _pools(
    settings: GatewaySettings,
    spec: ModelSpec,
    metrics: GatewayMetrics,
    pod_times: PodTimes | None,
) -> tuple[EncoderPool, DecoderPool]:
    """Makes the pools of pods. The addresses of encoders are ignored if the model has no vision."""
    fingerprint = merged_fingerprint(checkpoint_fingerprint(spec.directory), settings.merge_adapter)
    served = ServedModel(
        fingerprint,
        spec.text.vocab_size,
        spec.text.hidden_size,
        0 if spec.vision is None else spec.vision.tower.num_features,
        is_own=bool(fingerprint),
        task=spec.task,
    )
    dialer = PodDialer(Credentials.from_settings(settings).shown, metrics, pod_times)
    addresses = settings.encoders if spec.vision is not None else ()
    encoders = EncoderPool(addresses, served, dialer)
    decoders = DecoderPool(settings.decoders, served, dialer)
    metrics.healthy_pods.labels("decoder").set_function(lambda: len(decoders.healthy()))
    if spec.vision is not None:
        metrics.healthy_pods.labels("encoder").set_function(lambda: len(encoders.healthy()))
    metrics.registry.register(VllmMetrics(_names(settings, spec)[0], decoders, metrics))
    return encoders, decoders
