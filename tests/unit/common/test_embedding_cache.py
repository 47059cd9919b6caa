"""Redis may be unreachable, slow, full or wrong: never an exception, never a wrong embedding."""

import asyncio
import os
import select
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import numpy as np
import pytest

from services.common.embeddings import embedding_cache
from services.common.embeddings.breaker import Breaker
from services.common.embeddings.embedding import (
    STORED_HEADER_BYTES,
    EmbeddingSpec,
    digest,
    pack_header,
)
from services.common.embeddings.embedding_cache import RedisCache
from services.common.security.seals import NO_SEAL
from tests.noise import PATIENCE_S, async_least, timed
from tests.ports import free_port
from tests.redis_server import RedisServer, redis_server  # noqa: F401

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
SPEC = EmbeddingSpec("float32", 2, 70_000, 4)  # over two ranges
ENTRY = b"triptych:embedding:" + KEY
# Longer than by default, so that one differs from two by more than what a busy machine adds.
TIMEOUT_S = 0.2
ONE_TIMEOUT_S = 0.35


@pytest.fixture
async def cache(redis_server: RedisServer) -> AsyncIterator[RedisCache]:  # noqa: F811
    cache = RedisCache(redis_server.url, ttl_s=60, timeout_s=PATIENCE_S)
    yield cache
    await cache.close()


@pytest.fixture
async def open_cache() -> AsyncIterator[Callable[..., RedisCache]]:
    caches: list[RedisCache] = []

    def make(url: str, timeout_s: float = TIMEOUT_S) -> RedisCache:
        caches.append(RedisCache(url, ttl_s=60, timeout_s=timeout_s))
        return caches[-1]

    yield make
    for cache in caches:
        await cache.close()


def body(seed: int = 0, spec: EmbeddingSpec = SPEC) -> bytes:
    return np.random.default_rng(seed).normal(size=spec.shape).astype(np.float32).tobytes()


async def load(cache: RedisCache, key: bytes = KEY) -> bytes | None:
    """What a reader gets: the bytes, or a miss."""
    into = memoryview(bytearray(SPEC.size_bytes))
    found = await cache.read(key, SPEC, into)
    assert found in (None, digest(into))
    return None if found is None else bytes(into)


@asynccontextmanager
async def before_body(
    redis_server: RedisServer,  # noqa: F811
    act: Callable[[], None],
) -> AsyncIterator[str]:
    """Yields the URL of a proxy that acts once, between an entry's header and its body."""
    num_ranges = 0

    async def forward(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counts: bool
    ) -> None:
        nonlocal num_ranges
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                if counts and b"GETRANGE" in data:
                    num_ranges += 1
                    if num_ranges == 2:
                        act()
                writer.write(data)
                await writer.drain()
        writer.close()

    connections: list[asyncio.Task[None]] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.append(task)
        from_redis, to_redis = await asyncio.open_connection("127.0.0.1", redis_server.port)
        await asyncio.gather(
            forward(reader, to_redis, counts=True), forward(from_redis, writer, counts=False)
        )

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
    await asyncio.gather(*connections)


async def until_used(cache: RedisCache) -> None:
    """Until a command that tried has had an answer."""
    async with asyncio.timeout(PATIENCE_S):
        while not cache.available:
            await cache.has(KEY, SPEC)
            await asyncio.sleep(0.01)


async def test_what_is_written_is_read(cache: RedisCache, redis_server: RedisServer) -> None:  # noqa: F811
    data = body()
    assert await load(cache) is None and not await cache.has(KEY, SPEC)
    assert await cache.write(KEY, SPEC, digest(data), data)
    assert await load(cache) == data and await cache.has(KEY, SPEC)
    assert await load(cache, OTHER) is None
    with redis_server.client() as client:
        assert 0 < client.ttl(ENTRY) <= 60
    assert cache.counters | {"hits": 2, "misses": 3, "writes": 1} == cache.counters
    assert sum(cache.counters.values()) == 6


@pytest.mark.parametrize("position", [0, 8, 40, 44, 60, STORED_HEADER_BYTES + len(NO_SEAL), -1])
async def test_a_flipped_bit_is_a_miss_until_the_entry_is_written_anew(
    cache: RedisCache,
    redis_server: RedisServer,  # noqa: F811
    position: int,
) -> None:
    data = body()
    value = bytearray(pack_header(KEY, SPEC, digest(data)) + NO_SEAL + data)
    value[position] ^= 0x10
    with redis_server.client() as client:
        client.set(ENTRY, bytes(value))
    assert await load(cache) is None
    assert (cache.counters["corrupt"], cache.counters["misses"]) == (1, 1)
    assert await cache.write(KEY, SPEC, digest(data), data)
    assert await load(cache) == data


async def test_other_contents_are_misses(
    cache: RedisCache,
    redis_server: RedisServer,  # noqa: F811
) -> None:
    data = body()
    nan = np.full(SPEC.shape, np.nan, np.float32).tobytes()
    values = {
        "another key's entry": pack_header(OTHER, SPEC, digest(data)) + NO_SEAL + data,
        "truncated": (pack_header(KEY, SPEC, digest(data)) + NO_SEAL + data)[:-1],
        "no body": pack_header(KEY, SPEC, digest(data)) + NO_SEAL,
        "no seal": pack_header(KEY, SPEC, digest(data)),
        "random": os.urandom(1000),
        "short": b"x",
        "not finite": pack_header(KEY, SPEC, digest(nan)) + NO_SEAL + nan,
    }
    for name, value in values.items():
        with redis_server.client() as client:
            client.set(ENTRY, value)
        misses = cache.counters["misses"]
        assert await load(cache) is None, name
        assert cache.counters["misses"] == misses + 1, name
    with redis_server.client() as client:
        client.delete(ENTRY)
        client.rpush(ENTRY, "a list")
    assert await load(cache) is None and not await cache.has(KEY, SPEC)
    assert cache.available
    whole = body()
    assert await cache.write(KEY, SPEC, digest(whole), whole) and await load(cache) == whole


async def test_evicted_between_header_and_body(
    cache: RedisCache,
    redis_server: RedisServer,  # noqa: F811
    open_cache: Callable[..., RedisCache],
) -> None:
    data = body()
    await cache.write(KEY, SPEC, digest(data), data)
    async with before_body(redis_server, redis_server.flush) as url:
        reader = open_cache(url, timeout_s=PATIENCE_S)
        assert await load(reader) is None
        assert reader.counters["misses"] == 1
        assert not reader.counters["corrupt"] and not reader.counters["errors"]
        await reader.close()


async def test_stopped_is_skipped_then_comes_back(
    redis_server: RedisServer,  # noqa: F811
    open_cache: Callable[..., RedisCache],
) -> None:
    cache = open_cache(redis_server.url, timeout_s=PATIENCE_S)
    data = body()
    await cache.write(KEY, SPEC, digest(data), data)
    redis_server.stop()
    assert await timed(load(cache)) < PATIENCE_S  # refused, which is known at once
    assert not cache.available
    async with asyncio.timeout(PATIENCE_S):
        while not cache.counters["skipped"]:  # a late command is a trial, and finds no Redis
            assert not await cache.write(KEY, SPEC, digest(data), data)
    redis_server.start()
    await until_used(cache)
    assert await cache.write(KEY, SPEC, digest(data), data)
    assert await load(cache) == data


async def test_never_started(open_cache: Callable[..., RedisCache]) -> None:
    cache = open_cache(f"redis://127.0.0.1:{free_port()}/0")
    assert await load(cache) is None
    assert not cache.available and cache.counters["errors"] == 1


async def test_frozen_costs_one_timeout(
    cache: RedisCache,
    redis_server: RedisServer,  # noqa: F811
    open_cache: Callable[..., RedisCache],
) -> None:
    hasty = open_cache(redis_server.url)
    data = body()
    await cache.write(KEY, SPEC, digest(data), data)

    async def whole_request() -> None:
        assert await load(hasty) is None
        assert not await hasty.has(KEY, SPEC)
        assert await load(hasty) is None

    async def first_and_next() -> float:
        await until_used(hasty)
        redis_server.freeze()
        first = await timed(whole_request())
        assert not hasty.available
        skipped = hasty.counters["skipped"]
        for _ in range(100):
            await load(hasty)
        assert hasty.counters["skipped"] >= skipped + 90  # all but one or two
        redis_server.thaw()
        return first

    assert await async_least(first_and_next, ONE_TIMEOUT_S) < ONE_TIMEOUT_S
    await until_used(hasty)
    assert await load(cache) == data


async def test_frozen_before_the_first_connection(
    redis_server: RedisServer,  # noqa: F811
    open_cache: Callable[..., RedisCache],
) -> None:
    redis_server.freeze()

    async def first_load() -> float:
        return await timed(load(open_cache(redis_server.url)))

    assert await async_least(first_load, ONE_TIMEOUT_S) < ONE_TIMEOUT_S
    redis_server.thaw()


async def test_connecting_at_the_start_spares_the_first_request_of_it(
    cache: RedisCache,
    redis_server: RedisServer,  # noqa: F811
) -> None:
    def connections() -> int:
        with redis_server.client() as client:
            return int(client.info("stats")["total_connections_received"])  # type: ignore[index]

    await cache.connect()
    before = connections()
    assert await load(cache) is None
    assert connections() == before + 1  # the one that asks


async def test_connecting_to_an_unreachable_redis_is_no_error(
    open_cache: Callable[..., RedisCache], caplog: pytest.LogCaptureFixture
) -> None:
    away = open_cache(f"redis://127.0.0.1:{free_port()}")
    await away.connect()
    assert "Redis does not answer" in caplog.text
    assert away.available  # the first command will find out


async def test_frozen_between_header_and_body(
    cache: RedisCache,
    redis_server: RedisServer,  # noqa: F811
    open_cache: Callable[..., RedisCache],
) -> None:
    data = body()
    await cache.write(KEY, SPEC, digest(data), data)

    async def read() -> float:
        async with before_body(redis_server, redis_server.freeze) as url:
            hasty = open_cache(url)
            await hasty.connect()
            seconds = await timed(load(hasty))
            redis_server.thaw()
            assert not hasty.available
            await hasty.close()
        return seconds

    assert await async_least(read, ONE_TIMEOUT_S) < ONE_TIMEOUT_S


async def test_black_hole(open_cache: Callable[..., RedisCache]) -> None:
    """A peer that accepts and never says a word."""
    writers: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: writers.append(writer), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        caches: list[RedisCache] = []

        async def first_load() -> float:
            caches.append(open_cache(f"redis://127.0.0.1:{port}/0"))
            return await timed(load(caches[-1]))

        assert await async_least(first_load, ONE_TIMEOUT_S) < ONE_TIMEOUT_S
        assert not caches[-1].available
        for cache in caches:
            await cache.close()
        for writer in writers:
            writer.close()


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00\xff" * 50, b":7\r\n", b"*1\r\n:1\r\n", b""],
    ids=["http", "binary", "integer", "list", "hang-up"],
)
async def test_garbage_protocol(open_cache: Callable[..., RedisCache], answer: bytes) -> None:
    writers: list[asyncio.StreamWriter] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with suppress(ConnectionError):
            while await reader.read(1000) and answer:
                writer.write(answer)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        url = f"redis://127.0.0.1:{port}/0"
        data = body()
        for _ in range(3):
            # Each has a cache of its own: the breaker of one that failed would skip the others.
            reading, asking, writing = open_cache(url), open_cache(url), open_cache(url)
            assert await load(reading) is None
            assert not await asking.has(KEY, SPEC)
            await writing.write(KEY, SPEC, digest(data), data)
            for cache in (reading, asking, writing):
                await cache.close()
        for writer in writers:
            writer.close()


async def test_full_redis_is_counted(open_cache: Callable[..., RedisCache]) -> None:
    with RedisServer("--maxmemory", "1mb", "--maxmemory-policy", "noeviction") as server:
        cache = open_cache(server.url, timeout_s=PATIENCE_S)
        data = body()
        assert not await cache.write(KEY, SPEC, digest(data), data)
        assert cache.counters["errors"] == 1 and cache.available
        assert await load(cache) is None
        await cache.close()


async def test_a_cancelled_command_leaves_no_reply_for_the_next(
    cache: RedisCache,
    redis_server: RedisServer,  # noqa: F811
) -> None:
    bodies = {bytes([n]) * 32: body(n) for n in range(8)}
    for key, data in bodies.items():
        await cache.write(key, SPEC, digest(data), data)
    for turn in range(20):
        victims = [asyncio.create_task(load(cache, key)) for key in bodies]
        await asyncio.sleep(0.0005 * turn)
        for victim in victims:
            victim.cancel()
        await asyncio.gather(*victims, return_exceptions=True)
        for key, data in bodies.items():
            assert await load(cache, key) == data
    assert cache.counters["corrupt"] == 0


def test_an_open_breaker_lets_one_command_try_after_each_pause() -> None:
    now = 100.0
    breaker = Breaker()
    assert breaker.lets_through(now)
    for _ in range(200):
        breaker.failed(now, now)  # all that were under way
    tries: list[float] = []
    for _ in range(400):
        now += 0.01
        if breaker.lets_through(now):  # and is cancelled, or fails
            tries.append(round(now - 100.0, 2))
            breaker.failed(now, now)
    assert tries == [0.05, 0.15, 0.35, 0.75, 1.55, 2.55, 3.55]
    breaker.answered(now)
    assert breaker.lets_through(now) and breaker.lets_through(now) and not breaker.is_open
    breaker.failed(now - 0.01, now)  # sent before Redis answered another one
    assert not breaker.is_open
    breaker.failed(now + 0.01, now)
    assert breaker.is_open


async def test_a_late_loop_is_not_a_late_redis(
    cache: RedisCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reply that lies in the socket counts, however long this process was busy."""
    data = body()
    assert await cache.write(KEY, SPEC, digest(data), data)
    assert await cache.has(KEY, SPEC)  # over the connection that is kept from here on
    monkeypatch.setattr(cache, "_timeout_s", 0.2)
    monkeypatch.setattr(embedding_cache, "_GRACE_S", PATIENCE_S)  # of 2 ms, noise may take all
    connection = next(iter(cache._redis.connection_pool._available_connections))
    task = asyncio.create_task(cache.has(KEY, SPEC))
    for _ in range(3):
        await asyncio.sleep(0)
    # The loop is busy until the reply is there, and beyond the timeout.
    sock = connection._writer.get_extra_info("socket")
    assert select.select([sock.fileno()], [], [], PATIENCE_S)[0]
    time.sleep(0.3)  # noqa: ASYNC251 - the point of the test
    assert await task and cache.available


async def test_a_burst_shares_a_few_connections(
    redis_server: RedisServer,  # noqa: F811
    open_cache: Callable[..., RedisCache],
) -> None:
    cache = open_cache(redis_server.url, timeout_s=PATIENCE_S)
    data = body()
    await cache.write(KEY, SPEC, digest(data), data)
    assert all(await asyncio.gather(*(cache.has(KEY, SPEC) for _ in range(300))))
    assert cache.available
    bodies = await asyncio.gather(*(load(cache) for _ in range(20)))
    assert set(bodies) == {data}
    with redis_server.client() as client:
        assert (
            client.info("clients")["connected_clients"] <= 8 + 1 + 1
        )  # of the writer and of this test


async def test_a_frozen_redis_costs_a_burst_one_timeout(
    redis_server: RedisServer,  # noqa: F811
    open_cache: Callable[..., RedisCache],
) -> None:
    async def burst() -> float:
        cache = open_cache(redis_server.url)
        await cache.connect()
        redis_server.freeze()
        start = time.monotonic()
        assert not any(await asyncio.gather(*(cache.has(KEY, SPEC) for _ in range(200))))
        seconds = time.monotonic() - start
        redis_server.thaw()
        return seconds

    assert await async_least(burst, ONE_TIMEOUT_S) < ONE_TIMEOUT_S


async def test_a_file_is_written_to_its_end_although_its_caller_leaves(
    cache: RedisCache,
    redis_server: RedisServer,  # noqa: F811
) -> None:
    """Callers that leave would else have any number of files under way to Redis."""
    assert await cache.write_file(b"t/first", b"1", 60)
    redis_server.freeze()
    leaving = asyncio.create_task(cache.write_file(b"t/second", b"2", 60))
    await asyncio.sleep(0)  # the thread has its work
    leaving.cancel()
    await asyncio.wait({leaving}, timeout=0.1)
    assert not leaving.done()
    redis_server.thaw()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert await cache.read_file(b"t/second", 1) == b"2"


async def test_files_are_kept_beside_embeddings(
    cache: RedisCache,
    redis_server: RedisServer,  # noqa: F811
) -> None:
    data = bytes(range(256)) * 10_000  # of three ranges
    assert await cache.read_file(b"n" * 64, len(data)) is None
    assert await cache.write_file(b"n" * 64, data, 60)
    assert await cache.read_file(b"n" * 64, len(data)) == data
    assert await cache.read_file(b"n" * 64, len(data) - 1) is None
    with redis_server.client() as client:
        assert 50 < client.ttl(b"triptych:file:" + b"n" * 64) <= 60
    assert await cache.delete_file(b"n" * 64) and not await cache.delete_file(b"n" * 64)
    assert await cache.write_file(b"n" * 64, data, 60)
    redis_server.stop()
    assert await cache.delete_file(b"n" * 64) is None
    assert not await cache.write_file(b"n" * 64, data, 60)
    assert await cache.read_file(b"n" * 64, len(data)) is None
    redis_server.start()
