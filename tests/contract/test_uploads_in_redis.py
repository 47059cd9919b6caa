"""Uploads of one tenant take no room from others in a Redis that all share."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
import pytest

from services.common.embeddings.embedding import EmbeddingSpec, digest
from services.common.embeddings.embedding_cache import RedisCache
from services.common.errors import NotFound
from services.encoder.front.uploaded_files import UploadedFiles
from services.gateway.redis_entry_store import RedisEntryStore
from tests.cases import first
from tests.noise import PATIENCE_S
from tests.redis_server import RedisServer

MIB = 1 << 20
SPEC = EmbeddingSpec("float32", 4, 64, 1024)  # 1 MiB
SIZE = 3 * MIB // 2  # of a file; eight of them are a tenant's
FILES = "triptych:file:*/*"
NUM_EMBEDDINGS, NUM_FILES, NUM_UPLOADS = 20, 10, 100


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer("--maxmemory", "64mb", "--maxmemory-policy", "volatile-lru") as server:
        yield server


@asynccontextmanager
async def cache_of(server: RedisServer) -> AsyncIterator[RedisCache]:
    cache = RedisCache(server.url, ttl_s=3600, timeout_s=PATIENCE_S)
    try:
        yield cache
    finally:
        await cache.close()


async def found(cache: RedisCache, tenant: str, name: bytes) -> bytes:
    """A file as an encoder finds it that has just started."""
    return await UploadedFiles(cache).get(tenant, name)


def file_of(number: int, size: int) -> bytes:
    return number.to_bytes(8, "little").ljust(size, b"x")


def num_evicted(server: RedisServer) -> int:
    with server.client() as client:
        return client.info("stats")["evicted_keys"]  # type: ignore[index]


async def upload(files: UploadedFiles, tenant: str, first: int, count: int, size: int) -> None:
    """Uploads files, several at a time."""
    names = iter(range(first, first + count))

    async def some() -> None:
        for number in names:
            await files.put(tenant, file_of(number, size))

    await asyncio.gather(*(some() for _ in range(4)))


# Number of tenants, the size of the files of B, and that of the others'. `make test` has each.
TENANTS, SIZES = ((1, 3 * MIB // 4), (4, MIB // 4)), (8 * MIB, 2 * MIB - 8, MIB, 40_000)
UPLOADS = [(*TENANTS[number % 2], size) for number, size in enumerate(SIZES)]
UPLOADS += [(*TENANTS[1 - number % 2], size) for number, size in enumerate(SIZES)]


@pytest.mark.thorough
@pytest.mark.parametrize(("num_tenants", "our_size", "size"), first(4, UPLOADS))
async def test_a_tenants_uploads_push_out_nothing_of_another(
    server: RedisServer, size: int, num_tenants: int, our_size: int
) -> None:
    """Twenty embeddings, ten files and a response of tenant B stay through a hundred uploads of
    other tenants, at two encoders that know nothing of each other. The files of B are its share of
    what files may take.
    """
    data = np.ones(SPEC.shape, np.float32).tobytes()
    keys = [bytes([n]) * 32 for n in range(NUM_EMBEDDINGS)]
    async with AsyncExitStack() as stack:
        caches = [await stack.enter_async_context(cache_of(server)) for _ in range(3)]
        kept = RedisEntryStore(server.url)
        stack.push_async_callback(kept.close)
        encoders = [UploadedFiles(cache) for cache in caches[:2]]
        for key in keys:
            assert await caches[0].write(key, SPEC, digest(data), data)
        ours = [await encoders[0].put("b", file_of(n, our_size)) for n in range(NUM_FILES)]
        assert await kept.put("b", "response", b"answer")
        share = NUM_UPLOADS // num_tenants // len(encoders)
        await asyncio.gather(
            *(
                upload(files, f"a{tenant}", 1000 * (2 * tenant + which), share, size)
                for which, files in enumerate(encoders)
                for tenant in range(num_tenants)
            )
        )
        assert num_evicted(server) == 0
        for number, name in enumerate(ours):
            assert await found(caches[2], "b", name) == file_of(number, our_size)
        into = memoryview(bytearray(SPEC.size_bytes))
        for key in keys:
            assert await caches[2].read(key, SPEC, into) == digest(data)
        assert await kept.get("b", "response") == b"answer"


async def test_a_tenants_last_uploads_are_found_by_every_encoder(server: RedisServer) -> None:
    """A tenant has a quarter of Redis, and its oldest files make room."""
    async with cache_of(server) as cache:
        files = UploadedFiles(cache)
        names = [await files.put("a", file_of(n, SIZE)) for n in range(20)]
        for number, name in [*enumerate(names)][-8:]:
            assert await found(cache, "a", name) == file_of(number, SIZE)
        for name in names[:-8]:
            with pytest.raises(NotFound):
                await found(cache, "a", name)
        # An upload that comes again is its tenant's newest file, and is counted once.
        await files.put("a", file_of(12, SIZE))
        await files.put("a", file_of(20, SIZE))
        assert await found(cache, "a", names[12])
        with pytest.raises(NotFound):
            await found(cache, "a", names[13])
        assert await found(cache, "a", names[14])


async def test_the_tenant_with_the_most_makes_room_for_others(server: RedisServer) -> None:
    async with cache_of(server) as cache:
        files = UploadedFiles(cache)
        names = {
            tenant: [await files.put(tenant, file_of(n, SIZE)) for n in range(6)]
            for tenant in ("a", "b")
        }
        for number in range(4):
            await files.put("c", file_of(number, SIZE))
        left: list[int] = []
        for tenant, theirs in names.items():
            answers = await asyncio.gather(
                *(found(cache, tenant, name) for name in theirs), return_exceptions=True
            )
            left.append(sum(isinstance(answer, bytes) for answer in answers))
        assert left == [4, 4]  # 24 MiB have room for twelve such files


async def test_a_file_that_is_large_for_a_redis_is_not_sent(server: RedisServer) -> None:
    async with cache_of(server) as cache:
        files = UploadedFiles(cache)
        small = await files.put("a", file_of(0, 2 * MIB - 8))
        large = await files.put("a", file_of(1, 2 * MIB))
        assert await files.get("a", large) == file_of(1, 2 * MIB)  # this encoder has it
        assert await found(cache, "a", small)
        with pytest.raises(NotFound):
            await found(cache, "a", large)
        with server.client() as client:
            assert len(client.keys(FILES)) == 1  # type: ignore[arg-type]


async def test_short_files_are_bounded_in_number(server: RedisServer) -> None:
    """A long file would else take the place of so many that Redis stands still meanwhile."""
    async with cache_of(server) as cache:
        await upload(UploadedFiles(cache), "a", 0, 600, 8)
        with server.client() as client:
            assert len(client.keys(FILES)) == 256  # type: ignore[arg-type]


async def test_a_redis_without_a_limit_is_taken_for_one_of_a_gibibyte() -> None:
    with RedisServer() as server:
        async with cache_of(server) as cache:
            files = UploadedFiles(cache)
            for number in range(9):
                await files.put("a", file_of(number, 30 * MIB))
            with server.client() as client:
                assert len(client.keys(FILES)) == 6  # type: ignore[arg-type]


async def test_a_deleted_file_gives_its_room_back(server: RedisServer) -> None:
    async with cache_of(server) as cache:
        files = UploadedFiles(cache)
        names = [await files.put("a", file_of(n, SIZE)) for n in range(8)]
        gone, *others = names
        assert await files.delete("a", gone) and not await files.delete("a", gone)
        assert not await files.delete("b", others[0])
        others.append(await files.put("a", file_of(8, SIZE)))
        for name in others:
            assert await found(cache, "a", name)
            assert await files.delete("a", name)
        with server.client() as client:
            assert client.hgetall("triptych:file:@sizes") == {b"@": b"0"}
            assert client.keys(FILES) == []


@pytest.mark.parametrize("part", ["@sizes", "@used", "@tenants", "@used:*"])
async def test_files_are_kept_although_a_part_of_their_index_was_evicted(
    server: RedisServer, part: str
) -> None:
    """As a Redis of another policy does; what it has forgotten lives for its hour at most."""
    async with cache_of(server) as cache:
        files = UploadedFiles(cache)
        for number in range(8):
            await files.put("a", file_of(number, SIZE))
        with server.client() as client:
            client.delete(*client.keys(f"triptych:file:{part}"))  # type: ignore[misc]
            names = [await files.put("a", file_of(n, SIZE)) for n in range(10, 20)]
            for name in names[-8:]:
                assert await found(cache, "a", name)
            ((_, counted),) = client.zrange("triptych:file:@tenants", 0, -1, withscores=True)  # type: ignore[misc]
        assert 0 < float(counted) <= 16 * MIB
