"""`python -m services.encoder`: the front process. No torch here; the engine process has it."""

import asyncio
import logging
import signal
import sys
from contextlib import AsyncExitStack, suppress

import grpc.aio
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH
from grpc_health.v1.health import aio as aio_health  # pyright: ignore[reportAttributeAccessIssue]
from grpc_reflection.v1alpha import reflection

from services.common.allocator import keep_freed_memory
from services.common.arena import Arena
from services.common.collector import settle_collector
from services.common.embedding import ITEM_BYTES, EmbeddingSpec
from services.common.embedding_cache import RedisCache
from services.common.engine_process import ChannelClosed, EngineDied, EngineProcess
from services.common.families import read_spec
from services.common.model_spec import ModelSpecError
from services.common.rpc import create_server
from services.common.settings import SettingsError
from services.common.telemetry import serve_metrics, setup_logging
from services.encoder.embeddings import Embeddings
from services.encoder.engine.messages import EngineMessage, EngineReady
from services.encoder.engine_client import EngineClient
from services.encoder.memory_tier import MemoryTier
from services.encoder.metrics import EncoderMetrics
from services.encoder.redis_writer import RedisWriter
from services.encoder.service import SERVICE, Description, EncoderServicer, add_to_server
from services.encoder.settings import EncoderSettings
from services.encoder.shared_tier import SharedTier

_ENGINE_MODULE = "services.encoder.engine_main"
_WRITES_GRACE_S = 2.0
_SERVICES = ("", SERVICE, reflection.SERVICE_NAME)


def main() -> int:
    """Serves until a signal or the engine's end; the exit status says which."""
    try:
        settings = EncoderSettings.from_environment()
        setup_logging("encoder", settings.log_level)
        _ = read_spec(settings.model).vision_part  # a text model is refused here
    except (SettingsError, ModelSpecError) as error:
        print(f"encoder: {error}", file=sys.stderr)
        return 2
    keep_freed_memory()
    try:
        uvloop.run(serve(settings))
    except EngineDied as error:
        logging.error("%s", error)
        return 1
    return 0


async def serve(settings: EncoderSettings) -> None:
    """Starts the engine, serves, and drains on SIGTERM or SIGINT.

    Raises:
        EngineDied: the engine ended by itself.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    async with AsyncExitStack() as stack:
        memory = MemoryTier(Arena(settings.cache_bytes))
        stack.push_async_callback(memory.close)
        process: EngineProcess[EngineMessage] = await EngineProcess.start(
            _ENGINE_MODULE, settings.model_dump_json(), memory.arena, EngineMessage
        )
        stack.push_async_callback(process.stop)
        ready = await _first_message(process, stopping)
        if ready is not None:
            await _serve_engine(settings, memory, process, ready, stopping, stack)


async def _first_message(
    process: EngineProcess[EngineMessage], stopping: asyncio.Event
) -> EngineReady | None:
    """The engine's greeting; None: a signal came first."""
    receiving = asyncio.ensure_future(process.channel.receive())
    stop = asyncio.ensure_future(stopping.wait())
    await asyncio.wait((receiving, stop), return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if not receiving.done():
        receiving.cancel()
        return None
    try:
        message = receiving.result()
    except ChannelClosed:
        raise EngineDied("the engine ended while it started; its log says why") from None
    assert isinstance(message, EngineReady)
    return message


async def _serve_engine(
    settings: EncoderSettings,
    memory: MemoryTier,
    process: EngineProcess[EngineMessage],
    ready: EngineReady,
    stopping: asyncio.Event,
    stack: AsyncExitStack,
) -> None:
    metrics = EncoderMetrics()
    await asyncio.to_thread(memory.arena.map_resident)
    engine = EngineClient(process.channel, metrics.observe_batch)
    shared = writer = None
    if settings.redis_url:
        cache = RedisCache(
            settings.redis_url, ttl_s=settings.cache_ttl_s, timeout_s=settings.redis_timeout_s
        )
        stack.push_async_callback(cache.close)
        await cache.connect()
        shared = SharedTier(cache, memory)
        writer = RedisWriter(cache, memory, metrics.redis_writes_dropped)
        metrics.export_redis(cache.counters)
    description = describe(ready, settings)
    embeddings = Embeddings(
        like=description.like, merge_size=ready.merge_size, memory=memory, engine=engine,
        shared=shared, writer=writer, metrics=metrics,
        max_queued_patches=settings.max_queued_patches,
    )  # fmt: skip
    settle_collector()
    serve_metrics(metrics.registry, settings.host, settings.metrics_port)
    engine_run = asyncio.create_task(engine.run())
    server, healthy = await build_server(EncoderServicer(description, embeddings, metrics))
    port = server.add_insecure_port(f"{settings.host}:{settings.port}")
    await server.start()
    logging.info("serving %s on %s:%d", ready.model_name, settings.host, port)
    stop = asyncio.create_task(stopping.wait())
    await asyncio.wait((stop, engine_run), return_when=asyncio.FIRST_COMPLETED)
    await healthy.enter_graceful_shutdown()
    died = engine_run.done()
    await server.stop(0.5 if died else settings.shutdown_grace_s)
    if writer is not None and not died:
        await writer.drain(_WRITES_GRACE_S)
    await embeddings.close()
    engine.shut_down()
    for task in (stop, engine_run):
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    if died:
        raise EngineDied("the engine ended; its log says why")


def describe(ready: EngineReady, settings: EncoderSettings) -> Description:
    """What this encoder serves: the largest image is what arena and queue can hold."""
    row_bytes = ready.num_features * ready.hidden * ITEM_BYTES[ready.dtype]
    arena_patches = settings.cache_bytes // row_bytes * ready.merge_size**2
    return Description(
        model_name=ready.model_name,
        key_prefix=ready.key_prefix,
        like=EmbeddingSpec(ready.dtype, ready.num_features, 0, ready.hidden),
        merge_size=ready.merge_size,
        max_image_patches=min(arena_patches, settings.max_queued_patches),
    )


async def build_server(
    servicer: EncoderServicer,
) -> tuple[grpc.aio.Server, aio_health.HealthServicer]:
    """The server with its servicer, health (serving) and reflection; no port yet."""
    server = create_server()
    add_to_server(servicer, server)
    healthy = aio_health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    reflection.enable_server_reflection((SERVICE, HEALTH, _SERVICES[-1]), server)
    for name in _SERVICES:
        await healthy.set(name, health_pb2.HealthCheckResponse.SERVING)
    return server, healthy


if __name__ == "__main__":
    sys.exit(main())
