"""`python -m services.encoder` runs the encoder's front process, which does not import torch.

`ENCODER` describes the service, and `service_process` runs it. `EncoderFrontProcess` is the one
place where the front's objects are created and closed. The engine is a process of its own.
"""

import asyncio
import sys
from typing import Self

from services.common.embeddings.arena import Arena
from services.common.embeddings.embedding import ITEM_BYTES, EmbeddingSpec
from services.common.embeddings.embedding_cache import RedisCache
from services.common.embeddings.fetch_wire import DTYPES
from services.common.embeddings.store import EmbeddingStore, Tier
from services.common.families import read_spec
from services.common.model_spec import ModelSpec, VisionSpec
from services.common.pb import encoder_pb2 as pb
from services.common.process.engine_process import EngineProcess
from services.common.process.front_process import FrontProcess, GpuService
from services.common.process.pod_limits import memory_limit_bytes
from services.common.process.service_process import (
    connect_redis,
    run_service,
    served_fingerprint,
)
from services.common.security.credentials import Credentials
from services.common.transport.rpc import PROTOCOL, Server
from services.encoder.decoding.clips.clip_pool import PROBE_BYTES, ClipPool
from services.encoder.engine.messages import EngineMessage, EngineReady, Shutdown
from services.encoder.front.admission import Admission
from services.encoder.front.client_embeddings import ClientEmbeddings
from services.encoder.front.embeddings import Embeddings
from services.encoder.front.engine_client import EngineClient
from services.encoder.front.probe_queue import ProbeQueue
from services.encoder.front.redis_tier import WritableRedisTier
from services.encoder.front.service import EncoderServicer
from services.encoder.front.source_store import SourceStore, Work
from services.encoder.front.tower_tier import TowerTier
from services.encoder.front.uploaded_files import MAX_BYTES, UploadedFiles
from services.encoder.front.video_store import VideoStore
from services.encoder.metrics import EncoderMetrics
from services.encoder.settings import EncoderSettings

# Files of images in work, which front and engine both hold, and as many that arrive: a sixteenth of
# the pod's memory, and at least one image of the largest size that a call may have.
_QUEUED_SHARE, _MIN_QUEUED_BYTES = 16, 64 << 20
# Bytes of the files that are stored in case their embeddings are needed again.
_MAX_SOURCES_BYTES = 256 << 20
_MAX_IMAGE_PATCHES = 1 << 20  # before merging
_MAX_QUEUED_PATCHES = 1 << 21  # refused at once beyond; a clip of a minute has 48,000
# Bytes of the stored files of videos: a sixteenth of the pod's memory.
_VIDEO_SHARE, _MAX_VIDEO_BYTES = 16, 512 << 20
_PROBES = 2  # videos whose containers are read at a time
_WRITES_GRACE_S = 2.0
_FAILED_CALLS_GRACE_S = 2.0  # for calls whose error is on its way when the engine has died


class EncoderFrontProcess(FrontProcess[EncoderSettings]):
    """The objects of the encoder's front process.

    Args:
        metrics: the encoder's metrics.
        servicer: the encoder's gRPC methods.
        engine: client of the engine process.
        store: embeddings that are stored or computed now.
        cache: Redis. None if the settings name none.
        redis: tier of the embeddings in Redis. None without `cache`.
        videos: files of videos that clients have sent.
    """

    def __init__(
        self,
        metrics: EncoderMetrics,
        servicer: EncoderServicer,
        engine: EngineClient,
        store: EmbeddingStore[Work],
        cache: RedisCache | None,
        redis: WritableRedisTier | None,
        videos: VideoStore,
    ) -> None:
        self.registry = metrics.registry
        self.servicer = self._encoder_servicer = servicer
        self._engine = engine
        self._store = store
        self._cache = cache
        self._redis = redis
        self._videos = videos

    @staticmethod
    def arena_bytes(settings: EncoderSettings, spec: ModelSpec) -> int:
        _ = spec.vision_part  # refuses a text model before a process starts
        return settings.cache_bytes

    @classmethod
    async def create(
        cls,
        settings: EncoderSettings,
        ready: EngineReady,
        engine: EngineProcess,
        arena: Arena,
        credentials: Credentials,
    ) -> Self:
        metrics = EncoderMetrics()
        metrics.silence.set_function(lambda: engine.silence_s)
        metrics.cache_bytes.set_function(lambda: arena.used_bytes)
        client = EngineClient(engine.channel, metrics)
        fingerprint = await served_fingerprint(settings)
        cache = await connect_redis(settings, fingerprint, "encoder", metrics.registry)
        redis = WritableRedisTier(cache, arena, metrics.redis_writes_dropped) if cache else None
        vision = read_spec(settings.model).vision_part
        max_bytes = max(_MIN_QUEUED_BYTES, memory_limit_bytes() // _QUEUED_SHARE)
        sources = SourceStore(min(_MAX_SOURCES_BYTES, max_bytes))
        admission = Admission(_MAX_QUEUED_PATCHES)
        tower = TowerTier(client, admission, metrics, sources, max_queued_bytes=max_bytes)
        # The tiers of the embedding cache after the arena, in the order in which they are asked.
        tiers: list[Tier[Work]] = [redis, tower] if redis else [tower]
        store = EmbeddingStore(arena, tiers, metrics.hits, metrics.misses)
        embeddings = Embeddings(
            like=EmbeddingSpec(ready.dtype, ready.num_features, 0, ready.hidden),
            geometry=vision.geometry,
            store=store,
            sources=sources,
        )
        max_stored = memory_limit_bytes() // _VIDEO_SHARE
        pool = ClipPool(_PROBES, memory_bytes=_PROBES * PROBE_BYTES)
        videos = VideoStore(ProbeQueue(pool, _PROBES), min(_MAX_VIDEO_BYTES, max_stored))
        client_embeddings = ClientEmbeddings(embeddings)
        files = UploadedFiles(cache, min(MAX_BYTES, max_stored))
        servicer = EncoderServicer(
            describe(ready, settings, vision, fingerprint),
            embeddings,
            metrics,
            videos,
            client_embeddings,
            files,
            takes_videos=vision.video is not None,
            max_read_bytes=max_bytes,
        )
        return cls(metrics, servicer, client, store, cache, redis, videos)

    @property
    def is_busy(self) -> bool:
        return self._engine.is_busy

    async def run(self) -> None:
        await self._engine.run()

    async def drain(self, server: Server, grace_s: float) -> None:
        await self._encoder_servicer.drain(grace_s)  # the server answers health checks meanwhile
        await server.stop(_FAILED_CALLS_GRACE_S)
        if self._redis is not None:
            await self._redis.drain(_WRITES_GRACE_S if grace_s else 0.0)
        await self._store.close()

    async def close(self) -> None:
        if self._cache is not None:
            await self._cache.close()
        await asyncio.to_thread(self._videos.close)
        await self._store.unmap()


def describe(
    ready: EngineReady, settings: EncoderSettings, vision: VisionSpec, fingerprint: bytes
) -> pb.DescribeEncoderResponse:
    """Describes what this encoder serves. The largest image is bounded by arena and queue."""
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
        adapters=ready.adapters,
    )


ENCODER = GpuService(
    name="encoder",
    engine_module="services.encoder.engine_main",
    engine_message=EngineMessage,
    shutdown_message=Shutdown(),
    callers=("gateway", "decoder"),
    settings=EncoderSettings,
    front=EncoderFrontProcess,
)

if __name__ == "__main__":
    sys.exit(run_service(ENCODER))
