"""A real encoder front on a real port, with an engine that a test steps by hand."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import grpc.aio
import numpy as np

from services.common.embeddings.arena import Arena
from services.common.embeddings.embedding import EmbeddingSpec, digest
from services.common.embeddings.embedding_cache import RedisCache
from services.common.embeddings.fetch_wire import DTYPES
from services.common.embeddings.store import EmbeddingStore, Tier
from services.common.geometry import Geometry, Unit
from services.common.images.image_key import image_key
from services.common.pb import encoder_pb2 as pb
from services.common.process.channel import ChannelClosed
from services.common.process.service_process import create_service_server
from services.common.transport.rpc import create_channel, outgoing_metadata
from services.encoder.decoding.clips.clip_pool import ClipPool
from services.encoder.engine.messages import (
    CancelImage,
    EncodeImage,
    EngineMessage,
    FeatureDone,
    FrontMessage,
    ImageDone,
    PlaceImage,
    StageTimes,
)
from services.encoder.front.admission import Admission
from services.encoder.front.client_embeddings import ClientEmbeddings
from services.encoder.front.embeddings import Embeddings
from services.encoder.front.engine_client import EngineClient
from services.encoder.front.probe_queue import ProbeQueue
from services.encoder.front.redis_tier import WritableRedisTier
from services.encoder.front.service import EncoderServicer
from services.encoder.front.source_store import SourceStore, Work
from services.encoder.front.tower_tier import TowerTier
from services.encoder.front.uploaded_files import UploadedFiles
from services.encoder.front.video_store import VideoStore
from services.encoder.metrics import EncoderMetrics
from tests.fake_clips import FakeClips
from tests.noise import PATIENCE_S
from tests.stubs import EncoderStub

GEOMETRY = Geometry(0, 16, 2, 1, 1 << 30)
LIKE = EmbeddingSpec("float32", 2, 0, 64)
PREFIX = b"p" * 32


def embedding_of(image: bytes, spec: EmbeddingSpec) -> bytes:
    """What the fake engine computes for an image: its bytes alone decide."""
    seed = int.from_bytes(digest(image)[:4], "little")
    values = np.random.default_rng(seed).normal(size=spec.shape)
    return values.astype(np.float32).tobytes()


class FakeEngine:
    """The far end of the channel. Jobs wait for `gate`, and after each feature for `feature_gate`;
    `jobs` holds the images that have their place.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.jobs: list[EncodeImage] = []
        self.waiting: dict[int, EncodeImage] = {}  # for their place
        self.cancelled: set[int] = set()
        self.ended: set[int] = set()
        self.gate = asyncio.Event()
        self.gate.set()
        self.feature_gate = asyncio.Event()
        self.feature_gate.set()
        self.feature_delay_s = 0.0
        self.errors: dict[bytes, tuple[str, str]] = {}
        self.late_errors: dict[bytes, tuple[str, str]] = {}
        self._out: asyncio.Queue[EngineMessage | None] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()

    async def receive(self) -> EngineMessage:
        message = await self._out.get()
        if message is None:
            raise ChannelClosed
        return message

    def send(self, *messages: FrontMessage) -> None:
        for message in messages:
            match message:
                case EncodeImage():
                    self.waiting[message.job_id] = message
                case PlaceImage():
                    job = self.waiting.pop(message.job_id)
                    self.jobs.append(job)
                    task = asyncio.create_task(self._encode(job, message.arena_offset))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                case CancelImage() if message.job_id not in self.ended:
                    if self.waiting.pop(message.job_id, None) is None:
                        self.cancelled.add(message.job_id)
                    self._end(ImageDone(message.job_id, error_code="cancelled"))
                case _:
                    pass

    def die(self) -> None:
        self._out.put_nowait(None)

    async def _encode(self, job: EncodeImage, arena_offset: int) -> None:
        await self.gate.wait()
        if job.job_id in self.cancelled:
            return
        if job.source.image in self.errors:
            code, message = self.errors[job.source.image]
            self._end(ImageDone(job.job_id, error_code=code, message=message))
            return
        tokens = job.unit.num_patches // 4
        spec = EmbeddingSpec(LIKE.dtype, LIKE.num_features, tokens, LIKE.hidden)
        data, size = embedding_of(job.source.image, spec), spec.size_bytes // spec.num_features
        for feature in reversed(range(spec.num_features)):  # the merged output comes last
            start = arena_offset + feature * size
            self.arena.memory[start : start + size] = data[feature * size : (feature + 1) * size]
            if feature:
                self._out.put_nowait(FeatureDone([job.job_id], feature))
                await self.feature_gate.wait()
                await asyncio.sleep(self.feature_delay_s)
                if job.job_id in self.cancelled:
                    return
        if job.source.image in self.late_errors:
            code, message = self.late_errors[job.source.image]
            self._end(ImageDone(job.job_id, error_code=code, message=message))
            return
        self._end(ImageDone(job.job_id, StageTimes(0.1, 0.2, 0.3)))

    def _end(self, done: ImageDone) -> None:
        self.ended.add(done.job_id)
        self._out.put_nowait(done)


@dataclass
class Pod:
    """One encoder: its insides for looking at, and a client's stub."""

    engine: FakeEngine
    embeddings: Embeddings
    store: EmbeddingStore[Work]
    admission: Admission
    metrics: EncoderMetrics
    cache: RedisCache | None
    redis: WritableRedisTier | None
    servicer: EncoderServicer
    stub: EncoderStub
    channel: grpc.aio.Channel
    address: str
    calls: list[grpc.aio.Call] = field(default_factory=list)

    def encode(
        self, image: bytes, grid: tuple[int, int, int] = (1, 8, 8), tenant: str = ""
    ) -> "grpc.aio.UnaryUnaryCall[pb.EncodeRequest, pb.EncodeResponse]":
        request = pb.EncodeRequest(
            image_key=key_of(image, grid),
            image=image,
            grid=pb.Grid(t=grid[0], h=grid[1], w=grid[2]),
            tenant=tenant,
        )
        # Calls that do not say their size count as the largest.
        said = outgoing_metadata(request.ByteSize())
        return self.stub.Encode(request, timeout=PATIENCE_S, metadata=said)

    async def fetch(
        self, image: bytes, grid: tuple[int, int, int] = (1, 8, 8), timeout_s: float = PATIENCE_S
    ) -> bytes:
        """The whole embedding, checked as a decoder checks it."""
        call = self.stub.Fetch(pb.FetchRequest(image_key=key_of(image, grid)), timeout=timeout_s)
        header = trailer = None
        data = bytearray()
        try:
            async for part in call:
                match part.WhichOneof("part"):
                    case "header":
                        header = part.header
                    case "chunk":
                        assert header is not None
                        end = part.chunk.offset + len(part.chunk.data)
                        data.extend(bytes(max(0, end - len(data))))
                        data[part.chunk.offset : end] = part.chunk.data
                    case "trailer":
                        trailer = part.trailer
        finally:
            # gRPC does not, when the reader is cancelled just as the request has been sent.
            call.cancel()
        assert header is not None and trailer is not None
        assert header.image_key == key_of(image, grid)
        assert len(data) == header.num_features * header.num_tokens * header.hidden * 4
        assert trailer.digest == digest(bytes(data))
        return bytes(data)

    def expected(self, image: bytes, grid: tuple[int, int, int] = (1, 8, 8)) -> bytes:
        return embedding_of(image, self.embeddings.spec_of(Unit(grid)))

    async def flush_writes(self) -> None:
        assert self.redis is not None
        await self.redis.drain(PATIENCE_S)


def key_of(image: bytes, grid: tuple[int, int, int] = (1, 8, 8)) -> bytes:
    return image_key(PREFIX, image, unit=Unit(grid), salt=b"")


@asynccontextmanager
async def run_pod(
    redis_url: str = "",
    *,
    arena_bytes: int = 8 << 20,
    max_queued_patches: int = 1 << 16,
    max_image_patches: int = 4096,
    redis_timeout_s: float = PATIENCE_S,
    max_read_bytes: int = 256 << 20,
    takes_videos: bool = True,
    clips: ClipPool | FakeClips | None = None,
    max_probes: int = 1,
    report_s: float = 2.0,
    max_sources_bytes: int = 256 << 20,
    files: UploadedFiles | None = None,
) -> AsyncIterator[Pod]:
    arena = Arena(arena_bytes)
    engine = FakeEngine(arena)
    metrics = EncoderMetrics()
    client = EngineClient(cast("Any", engine), metrics, min_streamed_bytes=1 << 20)
    cache = redis = None
    if redis_url:
        cache = RedisCache(redis_url, ttl_s=60, timeout_s=redis_timeout_s, service="encoder")
        redis = WritableRedisTier(cache, arena, metrics.redis_writes_dropped)
        metrics.registry.register(cache)
    admission, sources = Admission(max_queued_patches), SourceStore(max_sources_bytes)
    tower = TowerTier(client, admission, metrics, sources)
    tiers: list[Tier[Work]] = [redis, tower] if redis else [tower]
    store = EmbeddingStore(arena, tiers, metrics.hits, metrics.misses)
    embeddings = Embeddings(
        like=LIKE, geometry=GEOMETRY, store=store, sources=sources, report_s=report_s
    )
    running = asyncio.create_task(client.run())
    description = pb.DescribeEncoderResponse(
        model_name="tiny", key_prefix=PREFIX, dtype=DTYPES[LIKE.dtype],
        num_features=LIKE.num_features, hidden=LIKE.hidden, max_image_patches=max_image_patches,
    )  # fmt: skip
    pool = cast("ClipPool", clips or ClipPool(1, memory_bytes=0))
    videos = VideoStore(ProbeQueue(pool, max_probes), max_bytes=1 << 30)
    client_embeddings = ClientEmbeddings(embeddings)
    servicer = EncoderServicer(
        description, embeddings, metrics, videos, client_embeddings, files or UploadedFiles(cache),
        takes_videos=takes_videos, max_read_bytes=max_read_bytes,
    )  # fmt: skip
    server, _ = await create_service_server(servicer)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    channel = create_channel(address)
    stub = EncoderStub(channel)
    try:
        yield Pod(
            engine,
            embeddings,
            store,
            admission,
            metrics,
            cache,
            redis,
            servicer,
            stub,
            channel,
            address,
        )
    finally:
        await channel.close()
        await server.stop(None)
        if redis is not None:
            await redis.drain(1.0)
        await asyncio.to_thread(videos.close)
        await store.close()
        engine.die()
        await running
        if cache is not None:
            await cache.close()
        await asyncio.sleep(0)
        await store.unmap()
