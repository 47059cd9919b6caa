"""Redis may be unreachable, slow, full or wrong: never an exception, never a wrong embedding."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest

from services.common.embedding import STORED_HEADER_BYTES, EmbeddingSpec, digest, pack_header
from services.common.embedding_cache import RedisCache, StoredEntry
from services.common.seals import NO_SEAL
from tests.noise import PATIENCE_S, async_least, timed
from tests.ports import free_port
from tests.redis_server import RedisServer, redis_server  # noqa: F401

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
SPEC = EmbeddingSpec("float32", 2, 70_000, 4)  # over two ranges
ENTRY = b"triptych:embedding:" + KEY
FROZEN_BOUND_S = 0.05  # of the design


@pytest.fixture
async def cache(redis_server: RedisServer) -> AsyncIterator[RedisCache]:  # noqa: F811
    cache = RedisCache(redis_server.url, ttl_s=60, timeout_s=PATIENCE_S)
    yield cache
    await cache.close()


@pytest.fixture
async def open_cache() -> AsyncIterator[Callable[..., RedisCache]]:
    caches: list[RedisCache] = []

    def make(url: str, timeout_s: float = 0.02) -> RedisCache:
        caches.append(RedisCache(url, ttl_s=60, timeout_s=timeout_s))
        return caches[-1]

    yield make
    for cache in caches:
        await cache.close()


def body(seed: int = 0, spec: EmbeddingSpec = SPEC) -> bytes:
    return np.random.default_rng(seed).normal(size=spec.shape).astype(np.float32).tobytes()


async def load(cache: RedisCache, key: bytes = KEY) -> bytes | None:
    """What a reader gets: the bytes, or a miss."""
    found = await cache.header(key)
    if found is None:
        return None
    into = memoryview(bytearray(found.spec.size_bytes))
    return bytes(into) if await cache.read(key, found, into) else None


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - state of a library, without an event
            await asyncio.sleep(0.01)


async def test_what_is_written_is_read(cache: RedisCache, redis_server: RedisServer) -> None:  # noqa: F811
    data = body()
    assert await load(cache) is None
    assert await cache.write(KEY, SPEC, digest(data), data)
    assert await load(cache) == data
    assert await load(cache, OTHER) is None
    with redis_server.client() as client:
        assert 0 < client.ttl(ENTRY) <= 60
    assert (cache.counters.hits, cache.counters.misses, cache.counters.corrupt) == (1, 2, 0)


@pytest.mark.parametrize("position", [0, 8, 40, 44, 60, STORED_HEADER_BYTES + len(NO_SEAL), -1])
async def test_a_flipped_bit_is_a_miss_and_deleted(
    cache: RedisCache,
    redis_server: RedisServer,  # noqa: F811
    position: int,
) -> None:
    data = body()
    value = bytearray(pack_header(KEY, SPEC, digest(data)) + NO_SEAL + data)
    value[position] ^= 0x10
    with redis_server.client() as client:
        client.set(ENTRY, bytes(value))
    found = await cache.header(KEY)
    if found is not None and found.spec == SPEC:
        assert await load(cache) is None
    elif found is not None:  # another spec than expected: the caller's comparison refuses it
        return
    assert cache.counters.corrupt >= 1
    assert redis_server.keys() == []


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
        misses = cache.counters.misses
        assert await load(cache) is None, name
        assert cache.counters.misses == misses + 1, name
    with redis_server.client() as client:
        client.delete(ENTRY)
        client.rpush(ENTRY, "a list")
    assert await load(cache) is None
    assert cache.available and redis_server.keys() == []


async def test_evicted_between_header_and_body(
    cache: RedisCache,
    redis_server: RedisServer,  # noqa: F811
) -> None:
    data = body()
    await cache.write(KEY, SPEC, digest(data), data)
    found = await cache.header(KEY)
    assert found
    redis_server.flush()
    assert not await cache.read(KEY, found, memoryview(bytearray(SPEC.size_bytes)))
    assert cache.counters.misses == 1 and cache.counters.corrupt == 0


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
    assert not await cache.write(KEY, SPEC, digest(data), data)
    assert await cache.try_lock(KEY, b"me", 1.0)  # Redis does not answer
    assert cache.counters.skipped >= 2
    redis_server.start()
    await until(lambda: cache.available)
    assert await cache.write(KEY, SPEC, digest(data), data)
    assert await load(cache) == data


async def test_never_started(open_cache: Callable[..., RedisCache]) -> None:
    cache = open_cache(f"redis://127.0.0.1:{free_port()}/0")
    assert await load(cache) is None
    assert not cache.available and cache.counters.errors == 1


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
        assert await hasty.try_lock(KEY, b"me", 1.0)
        assert await load(hasty) is None
        await hasty.unlock(KEY, b"me")

    async def first_and_next() -> float:
        await until(lambda: hasty.available)
        redis_server.freeze()
        first = await timed(whole_request())
        assert not hasty.available
        skipped = hasty.counters.skipped
        await whole_request()
        assert hasty.counters.skipped >= skipped + 4  # the breaker is open: nothing is sent
        redis_server.thaw()
        return first

    assert await async_least(first_and_next, FROZEN_BOUND_S) < FROZEN_BOUND_S
    await until(lambda: hasty.available)
    assert await load(cache) == data


async def test_frozen_before_the_first_connection(
    redis_server: RedisServer,  # noqa: F811
    open_cache: Callable[..., RedisCache],
) -> None:
    redis_server.freeze()

    async def first_load() -> float:
        return await timed(load(open_cache(redis_server.url)))

    assert await async_least(first_load, FROZEN_BOUND_S) < FROZEN_BOUND_S
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
    found = await cache.header(KEY)
    assert found
    into = memoryview(bytearray(SPEC.size_bytes))

    async def read() -> float:
        hasty = open_cache(redis_server.url)
        assert await hasty.ping(PATIENCE_S)
        redis_server.freeze()
        seconds = await timed(hasty.read(KEY, found, into))
        redis_server.thaw()
        assert not hasty.available
        return seconds

    assert await async_least(read, FROZEN_BOUND_S) < FROZEN_BOUND_S


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

        assert await async_least(first_load, FROZEN_BOUND_S) < FROZEN_BOUND_S
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
        while await reader.read(1000) and answer:
            writer.write(answer)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        cache = open_cache(f"redis://127.0.0.1:{port}/0")
        data = body()
        assert await load(cache) is None
        into = memoryview(bytearray(SPEC.size_bytes))
        assert not await cache.read(KEY, StoredEntry(SPEC, digest(data)), into)
        await cache.write(KEY, SPEC, digest(data), data)
        await cache.try_lock(KEY, b"me", 1.0)
        await cache.unlock(KEY, b"me")
        await cache.close()
        for writer in writers:
            writer.close()


async def test_full_redis_is_counted(open_cache: Callable[..., RedisCache]) -> None:
    with RedisServer("--maxmemory", "1mb", "--maxmemory-policy", "noeviction") as server:
        cache = open_cache(server.url, timeout_s=PATIENCE_S)
        data = body()
        assert not await cache.write(KEY, SPEC, digest(data), data)
        assert cache.counters.errors == 1 and cache.available
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
    assert cache.counters.corrupt == 0


async def test_one_lock_has_one_owner(cache: RedisCache) -> None:
    assert await cache.try_lock(KEY, b"a", 5.0)
    assert not await cache.try_lock(KEY, b"b", 5.0)
    await cache.unlock(KEY, b"b")  # not b's to give back
    assert not await cache.try_lock(KEY, b"b", 5.0)
    await cache.unlock(KEY, b"a")
    assert await cache.try_lock(KEY, b"b", 0.05)
    await asyncio.sleep(0.2)
    assert await cache.try_lock(KEY, b"a", 5.0)  # expired


async def test_a_late_loop_is_not_a_late_redis(
    redis_server: RedisServer,  # noqa: F811
    open_cache: Callable[..., RedisCache],
) -> None:
    """A reply that lies in the socket counts, however long this process was busy."""
    cache = open_cache(redis_server.url, timeout_s=0.2)
    data = body()
    await cache.connect()
    await cache.write(KEY, SPEC, digest(data), data)
    task = asyncio.create_task(cache.header(KEY))
    for _ in range(3):
        await asyncio.sleep(0)
    time.sleep(1.0)  # noqa: ASYNC251 - the point of the test
    assert await task is not None and cache.available


async def test_a_burst_shares_a_few_connections(
    redis_server: RedisServer,  # noqa: F811
    open_cache: Callable[..., RedisCache],
) -> None:
    cache = open_cache(redis_server.url, timeout_s=PATIENCE_S)
    data = body()
    await cache.write(KEY, SPEC, digest(data), data)
    found = await asyncio.gather(*(cache.header(KEY) for _ in range(300)))
    assert None not in found and cache.available
    bodies = await asyncio.gather(*(load(cache) for _ in range(20)))
    assert set(bodies) == {data}
    with redis_server.client() as client:
        assert client.info("clients")["connected_clients"] <= 8 + 4 + 2


async def test_a_frozen_redis_costs_a_burst_one_timeout(
    redis_server: RedisServer,  # noqa: F811
    open_cache: Callable[..., RedisCache],
) -> None:
    bound_s = 2 * FROZEN_BOUND_S  # 200 coroutines are work as well

    async def burst() -> float:
        cache = open_cache(redis_server.url)
        assert await cache.ping(PATIENCE_S)
        redis_server.freeze()
        start = time.monotonic()
        assert set(await asyncio.gather(*(load(cache) for _ in range(200)))) == {None}
        seconds = time.monotonic() - start
        redis_server.thaw()
        return seconds

    assert await async_least(burst, bound_s) < bound_s
