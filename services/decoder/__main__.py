"""`python -m services.decoder`: the front process. No torch here; the engine process has it."""

import logging
import socket
import sys
from functools import partial

from prometheus_client import CollectorRegistry

from services.common.embeddings.arena import Arena
from services.common.embeddings.shared_memory import PAGE_BYTES
from services.common.families import read_spec
from services.common.families.keys import unknown_keys
from services.common.model_spec import ModelSpec
from services.common.process.channel import FrontChannel
from services.common.process.service_process import (
    Front,
    GpuService,
    StopServer,
    connect_redis,
    run_service,
    served_fingerprint,
)
from services.common.security.credentials import Credentials
from services.common.tenancy.tenant_room import TenantRoom
from services.decoder.engine.messages import EngineInfo, EngineMessage, Shutdown
from services.decoder.front.front import DecoderFront, max_live
from services.decoder.front.service import DecoderServicer
from services.decoder.images.embedding_fetch import EncoderFetcher
from services.decoder.images.embeddings import EmbeddingSource
from services.decoder.images.known_encoders import KnownEncoders
from services.decoder.masks.messages import MaskSettings
from services.decoder.masks.processes import MaskProcesses
from services.decoder.masks.rows import SPARE_ROWS
from services.decoder.metrics import DecoderMetrics
from services.decoder.settings import DecoderSettings

log = logging.getLogger(__name__)

_MIN_ARENA_BYTES, _MAX_ARENA_BYTES = 1 << 20, 1 << 30
# For the last events of a stream, once they are written, to reach the gateway.
_LINGER_S = 1.0


def arena_bytes(settings: DecoderSettings, spec: ModelSpec) -> int:
    """The arena's size: a text model has no embeddings, and a mapping cannot be empty."""
    if spec.vision is None:
        return PAGE_BYTES
    if settings.kv_cache_bytes is None:
        return _MAX_ARENA_BYTES
    quarter = settings.kv_cache_bytes // 4
    return max(_MIN_ARENA_BYTES, min(quarter, _MAX_ARENA_BYTES))


async def create_front(
    settings: DecoderSettings,
    ready: EngineInfo,
    channel: "FrontChannel[EngineMessage]",
    arena: Arena,
    credentials: Credentials,
    links: list[socket.socket],
) -> Front:
    """Wires the objects of the front process; connects to Redis if the model takes images."""
    registry = CollectorRegistry()
    cache = None
    fingerprint = await served_fingerprint(settings)
    if ready.num_features:
        cache = await connect_redis(settings, fingerprint, "decoder", registry)
    metrics = DecoderMetrics(registry)
    fetcher = EncoderFetcher(credentials=credentials, known=KnownEncoders(settings.encoders))
    source = EmbeddingSource(arena, fetcher, cache, metrics)
    for key in unknown_keys(settings.model):
        log.warning("%s is not known, and has no effect here", key)
    mask_settings = MaskSettings(
        directory=str(settings.model),
        vocab_size=ready.vocab_size,
        end_ids=read_spec(settings.model).eos_token_ids,
        num_rows=max_live(ready) + SPARE_ROWS,
        log_level=settings.log_level,
    )
    masks = partial(MaskProcesses, mask_settings, links[0], channel, metrics)
    front = DecoderFront(ready, channel, source, masks, metrics, TenantRoom(max_live(ready)))

    async def drain(stop_server: StopServer, grace_s: float) -> None:
        await front.drain(grace_s)
        await stop_server(_LINGER_S)

    async def close() -> None:
        await front.close()
        if cache is not None:
            await cache.close()

    return Front(
        registry=registry,
        servicer=DecoderServicer(front, fingerprint),
        is_busy=lambda: front.is_busy,
        watch_silence=partial(setattr, metrics, "silence_s"),
        run=front.run,
        drain=drain,
        close=close,
    )


DECODER = GpuService(
    name="decoder",
    engine_module="services.decoder.engine_main",
    engine_message=EngineMessage,
    shutdown_message=Shutdown(),
    callers=("gateway",),
    settings=DecoderSettings,
    arena_bytes=arena_bytes,
    create_front=create_front,
    num_links=1,
)

if __name__ == "__main__":
    sys.exit(run_service(DECODER))
