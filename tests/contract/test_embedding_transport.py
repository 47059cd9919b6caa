"""From a real encoder front to a decoder's embedding source, through shared memory and gRPC."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from services.common.embeddings.arena import Arena, ArenaEntry
from services.common.embeddings.shared_memory import host_identity
from services.common.embeddings.store import EmbeddingStore, Tier
from services.common.pb import encoder_pb2 as pb
from services.common.transport.rpc import create_channel
from services.decoder.images.embedding_fetch import EncoderFailed, EncoderFetcher
from services.decoder.images.embedding_source import EmbeddingSource, ImageRequest
from services.decoder.images.encoders_tier import EncodersTier, Fetch
from services.decoder.metrics import DecoderMetrics
from services.encoder.front import redis_tier
from tests.contract.encoder_pod import LIKE, Pod, embedding_of, key_of, run_pod
from tests.noise import PATIENCE_S
from tests.redis_server import RedisServer, redis_server  # noqa: F401
from tests.store_state import num_unfinished, num_waiters
from tests.stubs import EncoderStub

GRID = (1, 96, 100)  # 1.2 MiB: two chunks, and two blocks of the digest
SPEC = replace(LIKE, num_tokens=96 * 100 // 4)


class Reader:
    """The decoder's side."""

    def __init__(self, *, shared_memory: bool = True, host: bytes = b"") -> None:
        self.arena = Arena(8 << 20)
        self.registry = CollectorRegistry()
        self.fetcher = EncoderFetcher(shared_memory=shared_memory, host=host or host_identity())
        metrics = DecoderMetrics(self.registry)
        tiers: list[Tier[Fetch]] = [EncodersTier(self.fetcher, metrics)]
        store = EmbeddingStore(self.arena, tiers, metrics.hits, metrics.misses)
        self.source = EmbeddingSource(store, metrics)

    async def get(self, image: bytes, address: str) -> bytes:
        """The embedding's bytes; nothing is held afterwards."""
        found: list[ArenaEntry] = []
        request = ImageRequest(key_of(image, GRID), SPEC, address)
        try:
            async for entry in self.source.obtain([request]):
                found.append(entry)
            return bytes(self.arena.view(found[0]))
        finally:
            for entry in found:
                self.source.release(entry)

    def fetched_bytes(self, path: str) -> float:
        name = "triptych_decoder_embedding_fetch_bytes_total"
        return self.registry.get_sample_value(name, {"path": path}) or 0.0

    def errors(self, kind: str) -> float:
        name = "triptych_decoder_embedding_fetch_errors_total"
        return self.registry.get_sample_value(name, {"kind": kind}) or 0.0


@contextlib.asynccontextmanager
async def reading(*, shared_memory: bool = True, host: bytes = b"") -> AsyncIterator[Reader]:
    reader = Reader(shared_memory=shared_memory, host=host)
    try:
        yield reader
    finally:
        await reader.source.close()


@pytest.fixture
async def pod() -> AsyncIterator[Pod]:
    async with run_pod(max_image_patches=1 << 14) as pod:
        yield pod


@pytest.fixture
async def reader() -> AsyncIterator[Reader]:
    async with reading() as reader:
        yield reader


async def until(condition) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - state without an event
            await asyncio.sleep(0.002)


def is_unreferenced(pod: Pod) -> bool:
    return all(entry.references == 0 for entry in pod.store.arena.entries)


def num_shared_fetches(pod: Pod) -> float:
    (metric,) = pod.metrics.shared_fetches.collect()
    return next(s.value for s in metric.samples if s.name.endswith("_total"))


async def test_on_one_host_embeddings_come_through_shared_memory(pod: Pod, reader: Reader):
    await pod.encode(b"image", GRID)
    assert await reader.get(b"image", pod.address) == pod.expected(b"image", GRID)
    assert (reader.fetched_bytes("shm"), reader.fetched_bytes("grpc")) == (SPEC.size_bytes, 0)
    assert num_shared_fetches(pod) == 1
    await until(lambda: is_unreferenced(pod))


async def test_both_ways_give_the_same_bytes(pod: Pod, reader: Reader):
    await pod.encode(b"image", GRID)
    async with reading(shared_memory=False) as other:
        assert await reader.get(b"image", pod.address) == await other.get(b"image", pod.address)
        assert (other.fetched_bytes("shm"), other.fetched_bytes("grpc")) == (0, SPEC.size_bytes)
    await until(lambda: is_unreferenced(pod))


async def test_another_host_gets_chunks(pod: Pod):
    await pod.encode(b"image", GRID)
    async with reading(host=b"another") as reader:
        assert await reader.get(b"image", pod.address) == pod.expected(b"image", GRID)
        assert (reader.fetched_bytes("shm"), reader.fetched_bytes("grpc")) == (0, SPEC.size_bytes)
    assert num_shared_fetches(pod) == 0


@pytest.mark.parametrize("lie", ["name", "fd"])
async def test_memory_that_cannot_be_opened_is_tried_once(
    pod: Pod, reader: Reader, lie: str, caplog: pytest.LogCaptureFixture
):
    """Another container, no permission, a pid that was reused."""
    arena = pod.store.arena
    fd = arena.fd
    setattr(arena, lie, {"name": "triptych-other", "fd": 999_999}[lie])
    for image in (b"one", b"two"):
        await pod.encode(image, GRID)
        assert await reader.get(image, pod.address) == pod.expected(image, GRID)
    arena.fd = fd
    assert (reader.fetched_bytes("shm"), reader.fetched_bytes("grpc")) == (0, 2 * SPEC.size_bytes)
    assert len([r for r in caplog.records if "over gRPC from now on" in r.message]) == 1
    await until(lambda: is_unreferenced(pod))


async def test_a_restarted_encoder_is_read_from_its_new_memory(reader: Reader):
    memories = set()
    for image in (b"one", b"two"):
        async with run_pod(max_image_patches=1 << 14) as pod:
            await pod.encode(image, GRID)
            assert await reader.get(image, pod.address) == pod.expected(image, GRID)
            # Whatever port the next one gets, it is taken for this one.
            memory = reader.fetcher.memory_of(pod.address)
            assert memory is not None
            memories.add(memory)
    assert len(memories) == 2 and reader.fetched_bytes("shm") == 2 * SPEC.size_bytes


@pytest.mark.parametrize("place", [0, SPEC.size_bytes // 2, SPEC.size_bytes - 1])
async def test_shared_bytes_that_are_wrong_are_unavailable(pod: Pod, reader: Reader, place: int):
    await pod.encode(b"image", GRID)
    entry = pod.store.arena.get(key_of(b"image", GRID))
    assert entry is not None
    await pod.store.digests.of(entry)
    pod.store.arena.memory[entry.offset + place] ^= 1
    with pytest.raises(EncoderFailed, match="digest does not match") as failure:
        await reader.get(b"image", pod.address)
    assert failure.value.kind == "corrupt" and failure.value.code == "embedding_unavailable"
    assert reader.errors("corrupt") == 1 and reader.arena.used_bytes == 0
    await until(lambda: is_unreferenced(pod))


async def test_shared_values_that_are_not_finite_are_unavailable(pod: Pod, reader: Reader):
    await pod.encode(b"image", GRID)
    entry = pod.store.arena.get(key_of(b"image", GRID))
    assert entry is not None
    pod.store.arena.memory[entry.offset : entry.offset + 4] = b"\x00\x00\x80\x7f"
    with pytest.raises(EncoderFailed, match="not finite"):
        await reader.get(b"image", pod.address)
    assert reader.arena.used_bytes == 0


async def test_many_images_at_once(pod: Pod, reader: Reader):
    images = [b"%d" % n for n in range(20)]  # more than either arena holds
    for image in images:
        await pod.encode(image, GRID)
    found = await asyncio.gather(*(reader.get(image, pod.address) for image in images))
    assert found == [pod.expected(image, GRID) for image in images]
    await until(lambda: is_unreferenced(pod))


async def test_a_reader_that_waits_for_the_encode_is_woken(pod: Pod, reader: Reader):
    pod.engine.gate.clear()
    encoding = asyncio.ensure_future(pod.encode(b"image", GRID))
    getting = asyncio.create_task(reader.get(b"image", pod.address))
    await until(lambda: num_waiters(pod.store, key_of(b"image", GRID)) == 2)
    pod.engine.gate.set()
    assert await getting == pod.expected(b"image", GRID)
    await encoding


async def test_a_reader_that_names_no_host_gets_no_shared_memory(pod: Pod):
    await pod.encode(b"image", GRID)
    assert await pod.fetch(b"image", GRID) == pod.expected(b"image", GRID)
    assert num_shared_fetches(pod) == 0


async def test_an_entry_stays_while_it_is_read_and_no_longer(pod: Pod):
    await pod.encode(b"image", GRID)
    entry = pod.store.arena.get(key_of(b"image", GRID))
    assert entry is not None
    await pod.store.digests.of(entry)
    await until(lambda: entry.references == 0)
    request = pb.FetchRequest(image_key=entry.key, reader_host=host_identity())
    call = pod.stub.Fetch(request, timeout=PATIENCE_S)
    parts = [await call.read() for _ in range(4)]
    assert [part.WhichOneof("part") for part in parts] == ["header", "shared", "ready", "trailer"]
    await asyncio.sleep(0.05)
    assert entry.references == 1
    call.cancel()
    await until(lambda: entry.references == 0)


async def test_writes_to_redis_wait_for_readers(
    redis_server: RedisServer,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(redis_tier, "_UNREAD_TIMEOUT_S", 60.0)
    async with run_pod(redis_server.url, max_image_patches=1 << 14) as pod:
        key = key_of(b"image", GRID)
        call = pod.stub.Fetch(pb.FetchRequest(image_key=key, reader_host=host_identity()))
        await pod.encode(b"image", GRID)
        for _ in range(4):
            await call.read()
        await asyncio.sleep(0.05)
        assert pod.cache is not None and pod.cache.counters["writes"] == 0
        call.cancel()
        await until(lambda: pod.cache.counters["writes"] == 1)


# Two processes.

READ_AND_HANG = """
import asyncio, sys
from services.common.pb import encoder_pb2 as pb
from services.common.transport.rpc import create_channel
from services.common.embeddings.shared_memory import host_identity
from tests.stubs import EncoderStub

async def main():
    stub = EncoderStub(create_channel(sys.argv[1]))
    key = bytes.fromhex(sys.argv[2])
    call = stub.Fetch(pb.FetchRequest(image_key=key, reader_host=host_identity()))
    for _ in range(4):
        await call.read()
    print("read", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def start(*arguments: str) -> tuple[asyncio.subprocess.Process, str]:
    """A Python process and its first line."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    return process, (await asyncio.wait_for(process.stdout.readline(), PATIENCE_S)).decode().strip()


@contextlib.asynccontextmanager
async def encoder_process(*arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    process, address = await start("-m", "tests.contract.serve_encoder", *arguments)
    try:
        yield process, address
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def encode_at(address: str, image: bytes) -> None:
    async with create_channel(address) as channel:
        grid = pb.Grid(t=GRID[0], h=GRID[1], w=GRID[2])
        request = pb.EncodeRequest(image_key=key_of(image, GRID), image=image, grid=grid)
        await EncoderStub(channel).Encode(request, timeout=PATIENCE_S)


async def test_two_processes_share_memory(reader: Reader):
    async with encoder_process() as (_, address):
        for image in (b"one", b"two"):
            await encode_at(address, image)
            assert await reader.get(image, address) == embedding_of(image, SPEC)
    assert reader.fetched_bytes("shm") == 2 * SPEC.size_bytes
    assert reader.fetched_bytes("grpc") == 0


async def test_an_encoder_that_dies_while_it_is_read_is_unavailable(reader: Reader):
    async with encoder_process("hang") as (process, address):
        await encode_at(address, b"image")
        getting = asyncio.create_task(reader.get(b"image", address))
        fetcher = reader.fetcher
        await until(lambda: fetcher.memory_of(address) is not None)
        await asyncio.sleep(0.05)  # copied; the digest is still to come
        assert not getting.done()
        process.kill()
        with pytest.raises(EncoderFailed) as failure:
            await getting
        assert failure.value.encoder_address == address and failure.value.kind == "unavailable"
        # The memory of the dead encoder is unmapped.
        assert fetcher.num_channels == 1 and fetcher.memory_of(address) is None
    assert reader.arena.used_bytes == 0 and not num_unfinished(reader.source.store)
    async with encoder_process() as (_, address):
        await encode_at(address, b"image")
        assert await reader.get(b"image", address) == embedding_of(b"image", SPEC)


async def test_a_decoder_that_dies_holds_no_entry(pod: Pod):
    await pod.encode(b"image", GRID)
    entry = pod.store.arena.get(key_of(b"image", GRID))
    assert entry is not None
    process, line = await start("-c", READ_AND_HANG, pod.address, entry.key.hex())
    assert line == "read"
    await until(lambda: entry.references == 1)
    os.kill(process.pid, signal.SIGKILL)
    await until(lambda: entry.references == 0)
    await process.wait()
