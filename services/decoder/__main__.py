"""`python -m services.decoder` runs the decoder's front process, which does not import torch.

`DECODER` describes the service, and `service_process` runs it. `DecoderFrontProcess` is the one
place where the front's objects are created and closed. The engine is a process of its own.
"""

import logging
import sys
from typing import Self

from prometheus_client import CollectorRegistry

from services.common.embeddings.arena import Arena
from services.common.embeddings.embedding import EmbeddingSpec
from services.common.embeddings.embedding_cache import RedisCache
from services.common.embeddings.redis_tier import RedisTier
from services.common.embeddings.shared_memory import PAGE_BYTES
from services.common.embeddings.store import EmbeddingStore, Tier
from services.common.families import read_spec
from services.common.families.keys import unknown_keys
from services.common.metrics_registry import new_registry
from services.common.model_spec import ModelSpec
from services.common.process.channel import FrontChannel
from services.common.process.engine_process import EngineProcess
from services.common.process.front_process import FrontProcess, GpuService
from services.common.process.service_process import (
    connect_redis,
    run_service,
    served_fingerprint,
)
from services.common.security.credentials import Credentials
from services.common.tenancy.tenant_capacity import TenantCapacity
from services.common.transport.rpc import Server
from services.decoder.engine.messages import EngineInfo, EngineMessage, Shutdown
from services.decoder.front.adapter_table import AdapterTable
from services.decoder.front.front import DecoderFront
from services.decoder.front.sequence_limit import max_sequences
from services.decoder.front.service import DecoderServicer
from services.decoder.images.embedding_fetch import EncoderFetcher
from services.decoder.images.embedding_source import EmbeddingSource
from services.decoder.images.encoders_tier import EncodersTier, Fetch
from services.decoder.images.known_encoders import KnownEncoders
from services.decoder.images.path_check import PathCheck
from services.decoder.masks.messages import MaskSettings
from services.decoder.masks.processes import MaskProcesses
from services.decoder.masks.rows import SPARE_ROWS
from services.decoder.metrics import DecoderMetrics
from services.decoder.settings import DecoderSettings

log = logging.getLogger(__name__)

_MIN_ARENA_BYTES, _MAX_ARENA_BYTES = 1 << 20, 1 << 30
_LINGER_S = 1.0  # time for the last events of the streams to reach the gateways


class DecoderFrontProcess(FrontProcess[DecoderSettings]):
    """The objects of the decoder's front process.

    Args:
        registry: the decoder's metrics.
        servicer: the decoder's gRPC methods.
        front: the owner of the sequences.
        cache: Redis. None if the settings name none, or if the model takes no images.
        check: check of the ways that embeddings take. None if the model takes no images.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        servicer: DecoderServicer,
        front: DecoderFront,
        cache: RedisCache | None,
        check: PathCheck | None = None,
    ) -> None:
        self.registry = registry
        self.servicer = servicer
        self._front = front
        self._cache = cache
        self._check = check

    @staticmethod
    def arena_bytes(settings: DecoderSettings, spec: ModelSpec) -> int:
        """Returns the size of the arena for images' embeddings."""
        if spec.vision is None:  # a text model has no embeddings, and a mapping cannot be empty
            return PAGE_BYTES
        if settings.kv_cache_bytes is None:
            return _MAX_ARENA_BYTES
        quarter = settings.kv_cache_bytes // 4
        return max(_MIN_ARENA_BYTES, min(quarter, _MAX_ARENA_BYTES))

    @classmethod
    async def create(
        cls,
        settings: DecoderSettings,
        ready: EngineInfo,
        engine: EngineProcess,
        arena: Arena,
        credentials: Credentials,
    ) -> Self:
        """Creates the objects.

        Args:
            settings: settings of the decoder.
            ready: the engine's ready message.
            engine: the engine process.
            arena: arena for images' embeddings, shared with the engine.
            credentials: credentials for calls between services.
        """
        registry = new_registry("decoder")
        cache = None
        fingerprint = await served_fingerprint(settings)
        if ready.num_features:
            cache = await connect_redis(settings, fingerprint, "decoder", registry)
        metrics = DecoderMetrics(registry)
        metrics.engine = engine
        known = KnownEncoders(settings.encoders)
        fetcher = EncoderFetcher(credentials=credentials, known=known)
        # The tiers of the embedding cache after the arena, in the order in which they are asked.
        tiers: list[Tier[Fetch]] = [EncodersTier(fetcher, metrics)]
        if cache is not None:
            tiers.insert(0, RedisTier(cache))
        store = EmbeddingStore(arena, tiers, metrics.hits, metrics.misses)
        source = EmbeddingSource(store, metrics)
        check = None
        if (vision := read_spec(settings.model, settings.task).vision) and ready.num_features:
            like = EmbeddingSpec(ready.dtype, ready.num_features, 0, ready.hidden)
            check = PathCheck(fetcher, known, vision.geometry, like, cache)
            await check.start()
        for key in unknown_keys(settings.model):
            log.warning("%s is an unknown key of the checkpoint and has no effect", key)
        mask_settings = MaskSettings(
            directory=str(settings.model),
            vocab_size=ready.vocab_size,
            end_ids=read_spec(settings.model, settings.task).eos_token_ids,
            num_rows=max_sequences(ready) + SPARE_ROWS,
            max_drafts=ready.max_drafts,
            log_level=settings.log_level,
        )
        channel: FrontChannel[EngineMessage] = engine.channel
        masks = MaskProcesses(mask_settings, engine.links[0], channel, metrics)
        capacity = TenantCapacity(max_sequences(ready))
        adapters = AdapterTable(settings.named_adapters, settings.num_slots, channel)
        front = DecoderFront(ready, channel, source, masks, metrics, capacity, adapters)
        return cls(registry, DecoderServicer(front, fingerprint), front, cache, check)

    @property
    def is_busy(self) -> bool:
        """Returns whether any sequence has not ended."""
        return self._front.is_busy

    @property
    def is_loading(self) -> bool:
        """Returns whether the engine loads an adapter."""
        return self._front.adapters.is_loading

    async def run(self) -> None:
        """Forwards the engine's events until the engine process ends."""
        await self._front.run()

    async def drain(self, server: Server, grace_s: float) -> None:
        """Drains the front, and stops the server after the last events.

        Args:
            server: gRPC server of the decoder.
            grace_s: length of the grace period, in seconds.
        """
        await self._front.drain(grace_s)
        await server.stop(_LINGER_S)

    async def close(self) -> None:
        """Closes the front and the connection to Redis."""
        if self._check is not None:
            await self._check.close()
        await self._front.close()
        if self._cache is not None:
            await self._cache.close()


DECODER = GpuService(
    name="decoder",
    engine_module="services.decoder.engine_main",
    engine_message=EngineMessage,
    shutdown_message=Shutdown(),
    callers=("gateway",),
    settings=DecoderSettings,
    front=DecoderFrontProcess,
    num_links=1,
)

if __name__ == "__main__":
    sys.exit(run_service(DECODER))
