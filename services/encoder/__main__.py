"""`python -m services.encoder`: the front process. No torch here; the engine process has it.

`ENCODER` is what tells this service from the decoder; `service_process` runs it, and decides the
exit status. `create_front` is the one place where the front's objects are created and closed.
"""

import asyncio
import socket
import sys

from services.common.embeddings.arena import Arena
from services.common.embeddings.embedding import ITEM_BYTES, EmbeddingSpec
from services.common.embeddings.fetch_wire import DTYPES
from services.common.families import read_spec
from services.common.model_spec import ModelSpec, VisionSpec
from services.common.pb import encoder_pb2 as pb
from services.common.process.channel import FrontChannel
from services.common.process.pod_limits import memory_limit_bytes
from services.common.process.service_process import (
    Front,
    GpuService,
    StopServer,
    connect_redis,
    run_service,
    served_fingerprint,
)
from services.common.security.credentials import Credentials
from services.common.transport.rpc import PROTOCOL
from services.encoder.decoding.clips.clip_pool import PROBE_BYTES, ClipPool
from services.encoder.decoding.clips.held_videos import HeldVideos
from services.encoder.engine.messages import EngineMessage, EngineReady, Shutdown
from services.encoder.front.admission import Admission
from services.encoder.front.brought import BroughtEmbeddings
from services.encoder.front.embeddings import Embeddings
from services.encoder.front.engine_client import EngineClient
from services.encoder.front.kept_files import MAX_BYTES, KeptFiles
from services.encoder.front.media_service import MediaServicer
from services.encoder.front.memory_tier import MemoryTier
from services.encoder.front.redis_tier import RedisTier
from services.encoder.metrics import EncoderMetrics
from services.encoder.settings import EncoderSettings

# Files of images in work, which front and engine both hold, and as many that arrive: a sixteenth of
# the pod's memory, and at least one image of the largest size that a call may have.
_QUEUED_SHARE, _MIN_QUEUED_BYTES = 16, 64 << 20
_MAX_IMAGE_PATCHES = 1 << 20  # before merging
_MAX_QUEUED_PATCHES = 1 << 21  # refused at once beyond; a clip of a minute has 48,000
# Files of videos that are kept for a while: a sixteenth of the pod's memory.
_HELD_SHARE, _MAX_HELD_BYTES = 16, 512 << 20
_PROBES = 2  # videos whose containers are read at a time
_WRITES_GRACE_S = 2.0
_FAILED_CALLS_GRACE_S = 2.0  # for calls whose error is on its way when the engine has died


def arena_bytes(settings: EncoderSettings, spec: ModelSpec) -> int:
    """The arena's size; a text model is refused here, before a process starts."""
    _ = spec.vision_part
    return settings.cache_bytes


async def create_front(
    settings: EncoderSettings,
    ready: EngineReady,
    channel: "FrontChannel[EngineMessage]",
    arena: Arena,
    credentials: Credentials,
    _links: list[socket.socket],
) -> Front:
    """Wires the objects of the front process; connects to Redis."""
    metrics = EncoderMetrics()
    engine = EngineClient(channel, metrics.observe_batch)
    memory = MemoryTier(arena)
    fingerprint = await served_fingerprint(settings)
    cache = await connect_redis(settings, fingerprint, "encoder", metrics.registry)
    redis = RedisTier(cache, memory, metrics.redis_writes_dropped) if cache else None
    vision = read_spec(settings.model).vision_part
    max_bytes = max(_MIN_QUEUED_BYTES, memory_limit_bytes() // _QUEUED_SHARE)
    embeddings = Embeddings(
        like=EmbeddingSpec(ready.dtype, ready.num_features, 0, ready.hidden),
        geometry=vision.geometry, memory=memory, engine=engine, redis=redis,
        admission=Admission(_MAX_QUEUED_PATCHES), metrics=metrics, max_queued_bytes=max_bytes,
    )  # fmt: skip
    max_held = memory_limit_bytes() // _HELD_SHARE
    pool = ClipPool(_PROBES, memory_bytes=_PROBES * PROBE_BYTES)
    videos = HeldVideos(pool, min(_MAX_HELD_BYTES, max_held))
    brought = BroughtEmbeddings(memory, embeddings.announce)
    files = KeptFiles(cache, min(MAX_BYTES, max_held))
    servicer = MediaServicer(
        describe(ready, settings, vision, fingerprint), embeddings, metrics, videos, brought,
        files, takes_videos=vision.video is not None, max_read_bytes=max_bytes,
    )  # fmt: skip

    async def drain(stop_server: StopServer, grace_s: float) -> None:
        await servicer.drain(grace_s)  # the server answers health checks meanwhile
        await stop_server(_FAILED_CALLS_GRACE_S)
        if redis is not None:
            await redis.drain(_WRITES_GRACE_S if grace_s else 0.0)
        await embeddings.close()

    async def close() -> None:
        if cache is not None:
            await cache.close()
        await asyncio.to_thread(videos.close)
        await memory.close()

    return Front(
        registry=metrics.registry,
        servicer=servicer,
        is_busy=lambda: engine.is_busy,
        watch_silence=metrics.silence.set_function,
        run=engine.run,
        drain=drain,
        close=close,
    )


def describe(
    ready: EngineReady, settings: EncoderSettings, vision: VisionSpec, fingerprint: bytes
) -> pb.DescribeEncoderResponse:
    """What this encoder serves. Arena and queue bound the largest image."""
    row_bytes = ready.num_features * ready.hidden * ITEM_BYTES[ready.dtype]
    arena_patches = settings.cache_bytes // row_bytes * vision.geometry.patches_per_token
    return pb.DescribeEncoderResponse(
        model_name=ready.model_name,
        key_prefix=ready.key_prefix,
        dtype=DTYPES[ready.dtype],
        num_features=ready.num_features,
        hidden=ready.hidden,
        max_image_patches=min(arena_patches, _MAX_IMAGE_PATCHES),
        fingerprint=fingerprint,
        protocol=PROTOCOL,
    )


ENCODER = GpuService(
    name="encoder",
    engine_module="services.encoder.engine_main",
    engine_message=EngineMessage,
    shutdown_message=Shutdown(),
    callers=("gateway", "decoder"),
    settings=EncoderSettings,
    arena_bytes=arena_bytes,
    create_front=create_front,
)

if __name__ == "__main__":
    sys.exit(run_service(ENCODER))
