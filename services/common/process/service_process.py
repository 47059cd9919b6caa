"""Runs the front process of a GPU service, from its settings to its exit status.

The process starts the engine process, waits until the engine is ready, serves gRPC with health
checks, and drains on SIGTERM or SIGINT. A service's `__main__` calls `run_service` with its
`GpuService`. The exit status is

- 0 after a signal,
- 1 if the engine process ended by itself,
- 2 if the settings or the checkpoint are refused, by the front or by the engine.
"""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc.aio
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from services.common.adapter_config import merged_fingerprint
from services.common.checkpoint_fingerprint import checkpoint_fingerprint
from services.common.embeddings.arena import Arena
from services.common.embeddings.embedding_cache import RedisCache
from services.common.families import read_spec
from services.common.metrics_registry import serve_metrics
from services.common.model_spec import ModelSpecError
from services.common.process.channel import ChannelClosed
from services.common.process.engine_process import REFUSED, EngineProcess
from services.common.process.engine_watch import MAX_SILENCE_S, EngineWatch
from services.common.process.front_process import FrontProcess, GpuService, SettingsT
from services.common.process.pod_limits import raise_descriptor_limit
from services.common.process.process_memory import freeze_gc, raise_malloc_trim_threshold
from services.common.security.credentials import NO_CREDENTIALS, Credentials
from services.common.security.rpc_credentials import PeerCheck
from services.common.security.seals import SealKeys
from services.common.settings import EngineServiceSettings, SettingsError
from services.common.telemetry import setup_logging
from services.common.tracing import setup_tracing
from services.common.transport.both_transports import listening
from services.common.transport.rpc import Servicer, create_server

log = logging.getLogger(__name__)

_REDIS_TTL_S = 3600  # time to live of the entries that encoders write; decoders only read

Result = TypeVar("Result")
HealthServicer = Any  # the class of `grpc_health`, which has no types


def run_service(service: GpuService[SettingsT]) -> int:
    """Runs the process and returns its exit status."""
    try:
        settings = service.settings.from_environment()
        # These are checked before a model is loaded, which may take minutes.
        _check_redis(settings)
        _check_ports(settings)
        setup_logging(service.name, settings.log_level)
        setup_tracing(service.name)
        credentials = Credentials.from_settings(settings)
        spec = read_spec(settings.model, settings.wanted_task)
        arena_bytes = service.front.arena_bytes(settings, spec)
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
        except ValueError:  # the text of the error may show a password
            raise SettingsError(
                f"{settings.prefix}REDIS_URL is not a URL of Redis. A URL begins with redis://, "
                "rediss:// or unix:// and may end with ?socket_timeout=SECONDS"
            ) from None
    _seals_of(settings, b"")
    if (path := _redis_password(settings)) is not None:
        try:
            path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"the file with Redis' password cannot be read: {error}") from None


def _check_ports(settings: EngineServiceSettings) -> None:
    """Raises SettingsError if another process listens on a port of the service."""
    ports = {"HEALTH_PORT": settings.health_port, "METRICS_PORT": settings.metrics_port}
    _, _, port = settings.address.rpartition(":")
    if port.isdecimal():  # not a Unix socket
        ports["ADDRESS"] = int(port)
    for name, port in ports.items():
        if not port:
            continue
        try:
            family, kind, *_, address = socket.getaddrinfo(
                settings.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            raise SettingsError(
                f"{settings.prefix}{name}: the service cannot listen on {settings.host}:{port}: "
                f"{error.strerror}"
            ) from error


async def serve(
    service: GpuService[SettingsT],
    settings: SettingsT,
    arena_bytes: int,
    credentials: Credentials = NO_CREDENTIALS,
) -> int:
    """Serves until a signal arrives or the engine ends, and returns the exit status.

    Args:
        arena_bytes: size of the embedding arena.
        credentials: credentials of the service; the default has neither certificates nor a token.
    """
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    arena = Arena(arena_bytes)
    engine = await EngineProcess.start(
        service.engine_module,
        settings.model_dump_json(),
        arena,
        service.engine_message,
        service.num_links,
    )
    try:
        ready = await _unless(stopping, engine.channel.receive())
        if ready is None:
            return 0
        await asyncio.to_thread(arena.prefault)
        front = await service.front.create(settings, ready, engine, arena, credentials.shown)
        freeze_gc()
        watch = EngineWatch(engine, front, on_gpu=ready.on_gpu)
        serve_metrics(front.registry, settings.host, settings.metrics_port)
        watching = asyncio.create_task(_kill_if_hanging(engine, watch))
        try:
            return await _serve_front(service, settings, front, engine, stopping, credentials)
        finally:
            watching.cancel()
    except ChannelClosed:
        status = await engine.exit_status()
        log.critical("the engine process ended (%s) before it was ready; see its own log", status)
        return REFUSED if engine.process.returncode == REFUSED else 1
    finally:
        engine.channel.send(service.shutdown_message)
        await engine.stop()


async def served_fingerprint(settings: EngineServiceSettings) -> bytes:
    """Returns the fingerprint of the checkpoint that the engine has loaded. It is empty if the
    weights are random.
    """
    if settings.load_format == "dummy":
        return b""
    found = await asyncio.to_thread(checkpoint_fingerprint, settings.model)
    return await asyncio.to_thread(merged_fingerprint, found, settings.merge_adapter)


async def connect_redis(
    settings: EngineServiceSettings, fingerprint: bytes, service: str, registry: CollectorRegistry
) -> RedisCache | None:
    """Connects to Redis and exports its events among the service's metrics.

    Returns:
        The cache, or None if the settings name no Redis.
    """
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
    """Returns the keys that seal embeddings in Redis, or None if the settings name no directory."""
    directory = settings.redis_directory
    return None if directory is None else SealKeys(directory / "seal-keys", fingerprint)


def _redis_password(settings: EngineServiceSettings) -> Path | None:
    """Returns the path of the file with Redis' password, or None if there is no such file."""
    path = settings.redis_directory and settings.redis_directory / "password"
    return path if path is not None and path.exists() else None


async def create_service_server(
    servicer: Servicer, *, check: PeerCheck | None = None
) -> tuple[grpc.aio.Server, HealthServicer]:
    """Creates a gRPC server without a port, with its servicer and a health service.

    Args:
        check: check of the callers' credentials. Without it, every call is served.

    Returns:
        The server, and the health servicer, whose status is SERVING.
    """
    server = create_server(check)
    servicer.register(server)
    healths: HealthServicer = cast("Any", health).aio.HealthServicer()
    cast("Any", health_pb2_grpc).add_HealthServicer_to_server(healths, server)
    for name in ("", servicer.SERVICE.full_name, health.SERVICE_NAME):
        await healths.set(name, health_pb2.HealthCheckResponse.SERVING)
    return server, healths


async def _serve_health(servicer: HealthServicer, host: str, port: int) -> grpc.aio.Server:
    """Serves the health checks on a second port, which asks for no credentials."""
    server = create_server()
    cast("Any", health_pb2_grpc).add_HealthServicer_to_server(servicer, server)
    server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    await server.start()
    return server


async def _serve_front(
    service: GpuService[SettingsT],
    settings: SettingsT,
    front: FrontProcess[SettingsT],
    engine: EngineProcess,
    stopping: asyncio.Event,
    credentials: Credentials,
) -> int:
    check = PeerCheck(credentials, service.name, service.callers, front.registry)
    server, health_servicer = await create_service_server(
        front.servicer, check=check if credentials else None
    )
    if credentials.stage != "required":
        log.warning("calls without credentials are served until peer_credentials is 'required'")
    async with AsyncExitStack() as closing:
        try:
            listens = listening(server, check, credentials, settings.address)
            port = await closing.enter_async_context(listens)
            if settings.health_port:
                healths = await _serve_health(health_servicer, settings.host, settings.health_port)
                closing.push_async_callback(healths.stop, None)
        except (OSError, RuntimeError) as error:  # gRPC's RuntimeError ends with a hint at its log
            raise SettingsError(str(error).partition(";")[0]) from error
        await server.start()
        host, _, _ = settings.address.rpartition(":")
        address = settings.address if host == "unix" else f"{host}:{port}"
        log.info("serving %s on %s", settings.model.name, address)
        running = asyncio.create_task(front.run())
        await _unless(stopping, asyncio.wait([running]))
        engine_died = running.done()
        await health_servicer.enter_graceful_shutdown()
        await front.drain(server, 0.0 if engine_died else settings.shutdown_grace_s)
        if engine_died:
            error, status = running.exception(), await engine.exit_status()
            cause = None if isinstance(error, ChannelClosed) else error
            log.critical("the engine process ended (%s); see its own log", status, exc_info=cause)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await front.close()
    return 1 if engine_died else 0


async def _kill_if_hanging(engine: EngineProcess, watch: EngineWatch) -> None:
    await watch.wait_until_hanging()
    log.critical("the engine process did not answer for %g s and is killed", MAX_SILENCE_S)
    if engine.process.returncode is None:
        engine.process.kill()
    # A process inside a call of the device driver may outlive the signal.
    engine.channel.close()


async def _unless(stopping: asyncio.Event, work: Awaitable[Result]) -> Result | None:
    """Returns the result of `work`, or None if `stopping` is set first."""
    stop = asyncio.ensure_future(stopping.wait())
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({stop, task}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (stop, task):
            each.cancel()
        await asyncio.gather(stop, task, return_exceptions=True)
