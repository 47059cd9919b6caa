"""The front process of a GPU service, from its settings to its exit status.

It starts the engine process, waits until that is ready, serves gRPC with health checks, and drains
on SIGTERM or SIGINT. Exit status: 0 after a signal, 1 when the engine
process ended by itself, 2 when settings or checkpoint are refused, by either process. A service's
`__main__` calls `run_service` with what tells it from the other one.
"""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import grpc.aio
import msgspec
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from services.common.checkpoint_fingerprint import checkpoint_fingerprint
from services.common.embeddings.arena import Arena
from services.common.embeddings.embedding_cache import RedisCache
from services.common.families import read_spec
from services.common.model_spec import ModelSpec, ModelSpecError
from services.common.process.channel import ChannelClosed, FrontChannel
from services.common.process.engine_process import REFUSED, EngineProcess
from services.common.process.engine_watch import MAX_SILENCE_S, EngineWatch
from services.common.process.pod_limits import raise_descriptor_limit
from services.common.process.process_memory import freeze_gc, raise_malloc_trim_threshold
from services.common.security.credentials import NO_CREDENTIALS, Credentials
from services.common.security.rpc_credentials import PeerCheck
from services.common.security.seals import SealKeys
from services.common.settings import EngineServiceSettings, SettingsError
from services.common.telemetry import serve_metrics, setup_logging
from services.common.tracing import setup_tracing
from services.common.transport.both_transports import listening
from services.common.transport.rpc import Servicer, create_server

log = logging.getLogger(__name__)

_REDIS_TTL_S = 3600  # of what encoders write; decoders only read

SettingsT = TypeVar("SettingsT", bound=EngineServiceSettings)
Result = TypeVar("Result")
StopServer = Callable[[float], Awaitable[None]]  # grace for running calls, in seconds
HealthServicer = Any  # of `grpc_health`, which has no types


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """What a service does in the front process, once the engine is ready.

    Attributes:
        registry: its metrics.
        servicer: its gRPC methods.
        is_busy: whether the engine has work.
        watch_silence: given once, before metrics are served, what returns the seconds since the
            engine last showed that it works.
        run: handles the engine's messages until the engine process has ended.
        drain: lets running requests end for the time given (0 when the engine process has ended),
            stops the server, and cancels what still runs.
        close: releases everything, after `run` has been cancelled.
    """

    registry: CollectorRegistry
    servicer: Servicer
    is_busy: Callable[[], bool]
    watch_silence: Callable[[Callable[[], float]], None]
    run: Callable[[], Coroutine[Any, Any, None]]
    drain: Callable[[StopServer, float], Awaitable[None]]
    close: Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class GpuService(Generic[SettingsT]):
    """What tells one GPU service from another.

    Attributes:
        name: of logs and traces.
        engine_module: run as the engine process.
        engine_message: union of the messages that the engine sends, its ready message included.
        arena_bytes: size of the embedding arena for this model; may refuse the model with
            ModelSpecError.
        create_front: given settings, ready message, channel, arena, the service's credentials and
            ends of the engine's links.
        num_links: of the engine, to processes that the front starts.
    """

    name: str
    engine_module: str
    engine_message: Any  # a type form
    shutdown_message: msgspec.Struct
    callers: tuple[str, ...]
    settings: type[SettingsT]
    arena_bytes: Callable[[SettingsT, ModelSpec], int]
    create_front: Callable[
        [SettingsT, Any, "FrontChannel[Any]", Arena, Credentials, list[socket.socket]],
        Awaitable[Front],
    ]
    num_links: int = 0


def run_service(service: GpuService[SettingsT]) -> int:
    """Runs the process; its exit status."""
    try:
        settings = service.settings.from_environment()
        _check_redis(settings)  # before a model is loaded
        setup_logging(service.name, settings.log_level)
        setup_tracing(service.name)
        credentials = Credentials.from_settings(settings)
        arena_bytes = service.arena_bytes(settings, read_spec(settings.model))
        raise_malloc_trim_threshold()
        raise_descriptor_limit()
        return uvloop.run(serve(service, settings, arena_bytes, credentials))
    except (SettingsError, ModelSpecError) as error:
        print(f"{service.name}: {error}", file=sys.stderr)
        return REFUSED


def _check_redis(settings: EngineServiceSettings) -> None:
    if settings.redis_url:
        try:
            RedisCache(settings.redis_url, ttl_s=1)
        except ValueError:  # its text may show a password
            raise SettingsError(
                f"{settings.prefix}REDIS_URL is no URL of Redis: redis://, rediss:// or unix://, "
                "perhaps with ?socket_timeout= in seconds"
            ) from None
    _seals_of(settings, b"")
    if (path := _redis_password(settings)) is not None:
        try:
            path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"the password of Redis cannot be read: {error}") from None


async def serve(
    service: GpuService[SettingsT],
    settings: SettingsT,
    arena_bytes: int,
    credentials: Credentials = NO_CREDENTIALS,
) -> int:
    """Serves until a signal or the engine's end; the exit status."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    arena = Arena(arena_bytes)
    engine = await EngineProcess.start(
        service.engine_module, settings.model_dump_json(), arena, service.engine_message,
        service.num_links,
    )  # fmt: skip
    try:
        ready = await _unless(stopping, engine.channel.receive())
        if ready is None:
            return 0
        await asyncio.to_thread(arena.prefault)
        front = await service.create_front(
            settings, ready, engine.channel, arena, credentials.shown, engine.links
        )
        freeze_gc()
        watch = EngineWatch(engine, front.is_busy, on_gpu=ready.on_gpu)
        front.watch_silence(lambda: watch.silence_s)
        serve_metrics(front.registry, settings.host, settings.metrics_port)
        watching = asyncio.create_task(_kill_if_it_hangs(engine, watch))
        try:
            return await _serve_front(service, settings, front, engine, stopping, credentials)
        finally:
            watching.cancel()
    except ChannelClosed:
        how = await engine.ended()
        log.critical("the engine process ended (%s) before it was ready; its own log says why", how)
        return REFUSED if engine.process.returncode == REFUSED else 1
    finally:
        engine.channel.send(service.shutdown_message)
        await engine.stop()


async def served_fingerprint(settings: EngineServiceSettings) -> bytes:
    """The fingerprint of what the engine has loaded; empty: of random weights."""
    if settings.load_format == "dummy":
        return b""
    return await asyncio.to_thread(checkpoint_fingerprint, settings.model)


async def connect_redis(
    settings: EngineServiceSettings, fingerprint: bytes, service: str, registry: CollectorRegistry
) -> RedisCache | None:
    """Redis, with its events among a service's metrics; None: there is none."""
    if not settings.redis_url:
        return None
    cache = RedisCache(
        settings.redis_url,
        ttl_s=_REDIS_TTL_S,
        password_file=_redis_password(settings),
        seals=_seals_of(settings, fingerprint),
        service=service,
    )
    await cache.connect()
    registry.register(cache)
    return cache


def _seals_of(settings: EngineServiceSettings, fingerprint: bytes) -> SealKeys | None:
    """What seals embeddings in Redis; None: nothing does."""
    directory = settings.redis_directory
    return None if directory is None else SealKeys(directory / "seal-keys", fingerprint)


def _redis_password(settings: EngineServiceSettings) -> Path | None:
    """The file of Redis' password; None: there is none."""
    path = settings.redis_directory and settings.redis_directory / "password"
    return path if path is not None and path.exists() else None


async def create_service_server(
    servicer: Servicer, *, check: PeerCheck | None = None
) -> tuple[grpc.aio.Server, HealthServicer]:
    """A server with its servicer and health (serving), without a port."""
    server = create_server(check)
    servicer.register(server)
    healths: HealthServicer = cast("Any", health).aio.HealthServicer()
    cast("Any", health_pb2_grpc).add_HealthServicer_to_server(healths, server)
    for name in ("", servicer.SERVICE.full_name, health.SERVICE_NAME):
        await healths.set(name, health_pb2.HealthCheckResponse.SERVING)
    return server, healths


async def _serve_health(servicer: HealthServicer, host: str, port: int) -> grpc.aio.Server:
    """The same health on a port of its own, which asks for no credentials."""
    server = create_server()
    cast("Any", health_pb2_grpc).add_HealthServicer_to_server(servicer, server)
    server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    await server.start()
    return server


async def _serve_front(
    service: GpuService[SettingsT],
    settings: SettingsT,
    front: Front,
    engine: EngineProcess,
    stopping: asyncio.Event,
    credentials: Credentials,
) -> int:
    check = PeerCheck(credentials, service.name, service.callers, front.registry)
    server, health_servicer = await create_service_server(
        front.servicer, check=check if credentials else None
    )
    if credentials.stage != "required":
        log.warning("calls without credentials are served, too, until they are required")
    async with AsyncExitStack() as closing:
        try:
            listens = listening(server, check, credentials, settings.address)
            port = await closing.enter_async_context(listens)
            if settings.health_port:
                healths = await _serve_health(health_servicer, settings.host, settings.health_port)
                closing.push_async_callback(healths.stop, None)
        except (OSError, RuntimeError) as error:  # the latter is gRPC's, with a hint at its own log
            raise SettingsError(str(error).partition(";")[0]) from error
        await server.start()
        where, _, _ = settings.address.rpartition(":")
        named = settings.address if where == "unix" else f"{where}:{port}"
        log.info("serving %s on %s", settings.model.name, named)
        running = asyncio.create_task(front.run())
        await _unless(stopping, asyncio.wait([running]))
        engine_died = running.done()
        await health_servicer.enter_graceful_shutdown()
        await front.drain(server.stop, 0.0 if engine_died else settings.shutdown_grace_s)
        if engine_died:
            error, how = running.exception(), await engine.ended()
            cause = None if isinstance(error, ChannelClosed) else error
            log.critical("the engine process ended (%s); its own log says why", how, exc_info=cause)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await front.close()
    return 1 if engine_died else 0


async def _kill_if_it_hangs(engine: EngineProcess, watch: EngineWatch) -> None:
    await watch.hangs()
    log.critical("the engine process has hung for %g s; ending it", MAX_SILENCE_S)
    if engine.process.returncode is None:
        engine.process.kill()
    engine.channel.close()  # in a driver's call it may outlive the signal


async def _unless(stopping: asyncio.Event, work: Awaitable[Result]) -> Result | None:
    """The result of `work`; None if `stopping` is set first."""
    stop = asyncio.ensure_future(stopping.wait())
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({stop, task}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (stop, task):
            each.cancel()
        await asyncio.gather(stop, task, return_exceptions=True)
