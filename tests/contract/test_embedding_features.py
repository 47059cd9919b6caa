"""An embedding read feature by feature while the tower still computes it."""

import asyncio
import random

import grpc.aio
import pytest

from services.common.errors import EmbeddingUnavailable, TriptychError
from services.common.geometry import Unit
from services.common.pb import encoder_pb2 as pb
from services.decoder.images.embedding_fetch import EncoderFailed
from services.encoder.engine.messages import Source
from services.encoder.front.source_store import Work
from tests.cases import cases
from tests.contract.encoder_pod import Pod, key_of
from tests.contract.test_embedding_transport import (
    GRID,
    SPEC,
    Reader,
    is_unreferenced,
    pod,
    reader,
    reading,
    until,
)
from tests.store_state import num_lookups, num_unfinished

__all__ = ["pod", "reader"]

KEY = key_of(b"image", GRID)
FEATURE_BYTES = SPEC.size_bytes // SPEC.num_features  # cuts a block of the digest in two


def has_last_feature(pod: Pod, reader: Reader, image: bytes) -> bool:
    """Whether the feature that is computed first has reached the reader's own memory."""
    key = key_of(image, GRID)
    entry = next((entry for entry in reader.arena.entries if entry.key == key), None)
    if entry is None or entry.committed:
        return False
    there = bytes(reader.arena.view(entry)[FEATURE_BYTES:])
    return there == pod.expected(image, GRID)[FEATURE_BYTES:]


@pytest.mark.parametrize("shared_memory", [True, False])
async def test_a_feature_is_sent_while_the_next_is_computed(pod: Pod, *, shared_memory: bool):
    pod.engine.feature_gate.clear()
    encoding = asyncio.ensure_future(pod.encode(b"image", GRID))
    async with reading(shared_memory=shared_memory) as first, reading() as second:
        getting = [asyncio.create_task(r.get(b"image", pod.address)) for r in (first, second)]
        for each in (first, second):
            await until(lambda r=each: has_last_feature(pod, r, b"image"))
        assert not encoding.done() and not any(get.done() for get in getting)
        pod.engine.feature_gate.set()
        expected = pod.expected(b"image", GRID)
        assert await asyncio.gather(*getting) == [expected, expected]
        assert (await encoding).source == pb.EncodeResponse.SOURCE_COMPUTED
        assert first.fetched_bytes("shm" if shared_memory else "grpc") == SPEC.size_bytes
    await until(lambda: is_unreferenced(pod))
    assert not num_unfinished(pod.store)


@pytest.mark.parametrize("shared_memory", [True, False])
async def test_an_encode_that_fails_midway_is_unavailable(pod: Pod, *, shared_memory: bool):
    pod.engine.late_errors[b"image"] = ("internal_error", "the embedding is not finite")
    pod.engine.feature_gate.clear()
    encoding = asyncio.ensure_future(pod.encode(b"image", GRID))
    async with reading(shared_memory=shared_memory) as reader:
        getting = asyncio.create_task(reader.get(b"image", pod.address))
        await until(lambda: has_last_feature(pod, reader, b"image"))
        pod.engine.feature_gate.set()
        with pytest.raises(EncoderFailed, match="not finite"):
            await getting
        with pytest.raises(grpc.aio.AioRpcError):
            await encoding
        assert reader.arena.used_bytes == 0
        await until(lambda: pod.store.arena.used_bytes == 0)
        assert not num_unfinished(pod.store)
        pod.engine.late_errors.clear()
        await pod.encode(b"image", GRID)
        assert await reader.get(b"image", pod.address) == pod.expected(b"image", GRID)


async def test_a_reader_that_is_cancelled_midway_affects_no_other(pod: Pod, reader: Reader):
    pod.engine.feature_gate.clear()
    encoding = asyncio.ensure_future(pod.encode(b"image", GRID))
    getting = asyncio.create_task(reader.get(b"image", pod.address))
    await until(lambda: has_last_feature(pod, reader, b"image"))
    getting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await getting
    await until(lambda: reader.arena.used_bytes == 0)
    pod.engine.feature_gate.set()
    await encoding
    assert await reader.get(b"image", pod.address) == pod.expected(b"image", GRID)
    assert len(pod.engine.jobs) == 1
    await until(lambda: is_unreferenced(pod))


async def test_an_encode_without_waiters_is_cancelled_after_a_feature(pod: Pod):
    pod.engine.feature_gate.clear()
    encoding = asyncio.ensure_future(pod.encode(b"image", GRID))
    async with reading() as reader:
        getting = asyncio.create_task(reader.get(b"image", pod.address))
        await until(lambda: has_last_feature(pod, reader, b"image"))
        encoding.cancel()
        getting.cancel()
        await asyncio.gather(getting, return_exceptions=True)
    await until(lambda: bool(pod.engine.cancelled))
    pod.engine.feature_gate.set()
    await until(lambda: pod.store.arena.used_bytes == 0)
    assert not num_unfinished(pod.store)


async def test_a_reader_that_is_cancelled_twice_holds_nothing(pod: Pod):
    """As gRPC does it now and then."""
    pod.engine.feature_gate.clear()
    encoding = asyncio.ensure_future(pod.encode(b"image", GRID))
    entered = asyncio.Event()

    async def read() -> None:
        async with pod.embeddings.reading(key_of(b"image", GRID), 10.0) as held:
            assert held.lookup is not None
            entered.set()
            await asyncio.Event().wait()

    reading = asyncio.create_task(read())
    await entered.wait()
    for _ in range(2):
        reading.cancel()
        await asyncio.sleep(0)
    await asyncio.gather(reading, return_exceptions=True)
    pod.engine.feature_gate.set()
    await encoding
    await until(lambda: is_unreferenced(pod))


@pytest.mark.parametrize("attempt", range(4))
@pytest.mark.parametrize("turns", range(6))
async def test_a_reader_that_comes_as_the_work_fails_holds_nothing(
    pod: Pod, turns: int, attempt: int
):
    """After each number of turns of the event loop: memory that has been released is another
    image's.
    """
    arena = pod.store.arena
    pod.engine.feature_gate.clear()
    pod.engine.late_errors[b"image"] = ("internal_error", "made to fail")
    encoding = asyncio.ensure_future(pod.embeddings.encode(KEY, Work(Source(b"image"), Unit(GRID))))
    await until(lambda: bool(num_unfinished(pod.store)))

    async def read() -> None:
        async with pod.embeddings.reading(KEY, 0.05) as reading:
            assert arena.has(reading.entry)
            async for _ in reading.ranges():
                pass

    pod.engine.feature_gate.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    with pytest.raises(EmbeddingUnavailable):
        await asyncio.create_task(read())
    with pytest.raises(TriptychError, match="made to fail"):
        await encoding
    await until(lambda: len(arena) == 0)
    assert arena.used_bytes == 0 and not num_unfinished(pod.store)


async def come_and_go(
    pod: Pod, readers: list[Reader], rng: random.Random, outcomes: dict[str, int]
) -> None:
    """Encodes and reads one of a few images; sometimes it fails late, or the caller cancels."""
    image, reader = b"%d" % rng.randrange(40), rng.choice(readers)
    if rng.random() < 0.15:
        pod.engine.late_errors[image] = ("internal_error", "made to fail")
    else:
        pod.engine.late_errors.pop(image, None)
    encoding = asyncio.ensure_future(pod.encode(image, GRID))
    getting = asyncio.create_task(reader.get(image, pod.address))
    if rng.random() < 0.4:
        await asyncio.sleep(0.04 * rng.random())
        getting.cancel()
    if rng.random() < 0.2:
        encoding.cancel()
    try:
        assert await getting == pod.expected(image, GRID)
        outcomes["read"] += 1
    except asyncio.CancelledError:
        outcomes["gone"] += 1
    except EncoderFailed:
        outcomes["failed"] += 1
    await asyncio.gather(encoding, return_exceptions=True)


@pytest.mark.thorough
async def test_readers_that_come_and_go_leave_nothing_behind(pod: Pod):
    rng, outcomes = random.Random(7), {"read": 0, "gone": 0, "failed": 0}
    pod.engine.feature_delay_s = 0.01
    readers = [Reader(shared_memory=bool(number % 2)) for number in range(4)]

    async def repeat() -> None:
        for _ in range(cases(12, 25)):
            await come_and_go(pod, readers, rng, outcomes)

    await asyncio.gather(*(repeat() for _ in range(16)))
    assert min(outcomes.values()) > cases(3, 10)
    for each in readers:
        await each.source.close()
        assert not num_unfinished(each.source.store)
        assert all(entry.references == 0 for entry in each.arena.entries)
    await until(lambda: is_unreferenced(pod))
    assert not num_unfinished(pod.store) and not num_lookups(pod.store)
