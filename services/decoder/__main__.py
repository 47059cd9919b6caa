"""`python -m services.decoder`: settings → arena → engine → front → gRPC server."""

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Callable

import grpc.aio
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from services.common.allocator import keep_freed_memory
from services.common.arena import Arena
from services.common.channel import ChannelClosed
from services.common.collector import settle_collector
from services.common.embedding_cache import RedisCache
from services.common.engine_process import EngineProcess
from services.common.pb import decoder_pb2_grpc as pb_grpc
from services.common.rpc import create_server
from services.common.settings import SettingsError
from services.common.telemetry import serve_metrics, setup_logging
from services.decoder.embedding_fetch import EncoderFetcher
from services.decoder.embedding_source import EmbeddingSource
from services.decoder.engine.messages import EngineInfo, EngineMessage, Shutdown
from services.decoder.front import DecoderFront
from services.decoder.metrics import DecoderMetrics, RedisCollector
from services.decoder.service import SERVICE_NAME, DecoderServicer
from services.decoder.settings import DecoderSettings

log = logging.getLogger("services.decoder")

ENGINE_MODULE = "services.decoder.engine_main"
_HEALTH_NAMES = ("", SERVICE_NAME)
# The decoder only reads, so nothing lives by this.
_REDIS_TTL_S = 3600
# After the last event of a stream is written, for it to reach the gateway.
_LINGER_S = 1.0


async def serve(settings: DecoderSettings, engine_module: str = ENGINE_MODULE) -> int:
    """Runs the service until SIGTERM, SIGINT or the engine's end; the exit status."""
    stopped = _stop_signal()
    arena = Arena(settings.embedding_cache_bytes)
    engine: EngineProcess[EngineMessage] = await EngineProcess.start(
        engine_module, settings.model_dump_json(), arena, EngineMessage
    )
    cache = None
    if settings.redis_url:
        cache = RedisCache(
            settings.redis_url, ttl_s=_REDIS_TTL_S, timeout_s=settings.redis_timeout_s
        )
    try:
        ready = await _until(stopped, engine.channel.receive())
        if ready is None:
            return 0
        assert isinstance(ready, EngineInfo)
        registry = CollectorRegistry()
        metrics = DecoderMetrics(registry)
        if cache is not None:
            registry.register(RedisCollector(lambda: cache.counters))
            await cache.connect()
        if ready.num_features:  # a text model never writes to the arena
            await asyncio.to_thread(arena.map_resident)
        fetcher = EncoderFetcher(shared_memory=settings.shared_memory)
        source = EmbeddingSource(arena, fetcher, cache, metrics)
        front = DecoderFront(ready, engine.channel, source, metrics)
        settle_collector()
        serve_metrics(registry, settings.host, settings.metrics_port)
        return await _serve_front(settings, front, stopped)
    except ChannelClosed:
        log.critical("the engine ended before it was ready; its own message says why")
        return 1
    finally:
        with contextlib.suppress(ChannelClosed, RuntimeError):
            engine.channel.send(Shutdown())
        await engine.stop()
        if cache is not None:
            await cache.close()


async def _serve_front(
    settings: DecoderSettings, front: DecoderFront, stopped: asyncio.Event
) -> int:
    server, set_health = _build_server(front)
    port = server.add_insecure_port(f"{settings.host}:{settings.port}")
    await server.start()
    await set_health(health_pb2.HealthCheckResponse.SERVING)
    log.info(
        "serving %s on %s:%d", front.engine.model_name, settings.host, port,
        extra={"fields": {"max_model_len": front.engine.max_model_len,
                          "num_blocks": front.engine.num_blocks}},
    )  # fmt: skip
    engine_ended = asyncio.create_task(front.run())
    status = 0
    try:
        await _until(stopped, asyncio.shield(engine_ended))
    except ChannelClosed:
        log.critical("the engine is gone: all its sequences have failed")
        status = 1
    except Exception:
        log.critical("the front failed", exc_info=True)
        status = 1
    await set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
    await front.drain(settings.shutdown_grace_s if status == 0 else 0.0)
    await server.stop(_LINGER_S)
    engine_ended.cancel()
    await asyncio.gather(engine_ended, return_exceptions=True)
    await front.close()
    return status


def _build_server(
    front: DecoderFront,
) -> tuple[grpc.aio.Server, Callable[[int], "asyncio.Future[list[None]]"]]:
    """The server, and what sets all its health names to one status."""
    server = create_server()
    pb_grpc.add_DecoderServicer_to_server(DecoderServicer(front), server)
    checker = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
    health_pb2_grpc.add_HealthServicer_to_server(checker, server)
    reflection.enable_server_reflection(
        (SERVICE_NAME, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
         reflection.SERVICE_NAME),
        server,
    )  # fmt: skip

    def set_health(status: int) -> "asyncio.Future[list[None]]":
        return asyncio.gather(*(checker.set(name, status) for name in _HEALTH_NAMES))

    return server, set_health


def _stop_signal() -> asyncio.Event:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    return stopped


async def _until(stopped: asyncio.Event, work):  # noqa: ANN001, ANN202
    """The result of `work`, or None if `stopped` came first."""
    waiter = asyncio.create_task(stopped.wait())
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({waiter, task}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (waiter, task):
            each.cancel()
        await asyncio.gather(waiter, task, return_exceptions=True)


def main() -> int:
    """Reads the settings and runs the service; the exit status."""
    try:
        settings = DecoderSettings.from_environment()
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    setup_logging("decoder", settings.log_level)
    keep_freed_memory()
    return uvloop.run(serve(settings))


if __name__ == "__main__":
    sys.exit(main())
