"""The embedding source: one fetch per image, references and failures, with a fake encoder."""

import asyncio
import contextlib
import random
import time
from typing import cast

import pytest
from prometheus_client import CollectorRegistry, Counter

from services.common.embeddings.arena import Arena, ArenaEntry
from services.common.embeddings.embedding import EmbeddingSpec, digest
from services.common.embeddings.embedding_cache import RedisCache
from services.common.embeddings.redis_tier import RedisTier
from services.common.embeddings.store import EmbeddingStore, Tier
from services.common.errors import InvalidImage, InvalidRequest
from services.decoder.images.embedding_fetch import EncoderFailed, EncoderFetcher
from services.decoder.images.embedding_source import EmbeddingSource, ImageRequest
from services.decoder.images.encoders_tier import EncodersTier, Fetch
from services.decoder.metrics import DecoderMetrics
from tests.cases import cases
from tests.fake_fetch import FAULTS, FakeFetchServicer, embedding_bytes, serve_fetch
from tests.noise import PATIENCE_S, turns, until
from tests.store_state import num_unfinished

PAGE = 4096
KEYS = [bytes([n]) * 32 for n in range(8)]


class Counts(DecoderMetrics):
    """What was counted, by label."""

    def __init__(self) -> None:
        super().__init__(CollectorRegistry())

    found = property(lambda self: counted(self.hits))
    missed = property(lambda self: counted(self.misses))
    failed = property(lambda self: counted(self.fetch_errors))


def counted(counter: Counter) -> dict[str, int]:
    samples = (sample for metric in counter.collect() for sample in metric.samples)
    totals = [sample for sample in samples if sample.name.endswith("_total") and sample.value]
    return {label: int(total.value) for total in totals for label in total.labels.values()}


class FakeCache:
    def __init__(self) -> None:
        self.entries: dict[bytes, tuple[EmbeddingSpec, bytes]] = {}
        self.broken = False

    async def read(self, key, spec, into):
        stored, data = self.entries.get(key, (None, b""))
        if stored != spec:
            return None
        into[:] = bytes(len(data)) if self.broken else data
        return None if self.broken else digest(data)


def spec_of(num_tokens: int) -> EmbeddingSpec:
    return EmbeddingSpec("bfloat16", 2, num_tokens, 8)


class World:
    """A source between an arena, a cache and two encoders."""

    def __init__(
        self,
        pages: int = 16,
        standstill_s: float = PATIENCE_S,
        takeover_s: float = 1.0,
    ) -> None:
        self.arena = Arena(pages * PAGE)
        self.cache = FakeCache()
        self.observer = Counts()
        self.servicers = [FakeFetchServicer(), FakeFetchServicer()]
        self.addresses: list[str] = []
        self.fetcher = EncoderFetcher()
        cache = cast(RedisCache, self.cache)
        tiers: list[Tier[Fetch]] = [RedisTier(cache), EncodersTier(self.fetcher, self.observer)]
        self.store = EmbeddingStore(self.arena, tiers, self.observer.hits, self.observer.misses)
        self.source = EmbeddingSource(self.store, self.observer, standstill_s, takeover_s)
        self.held: list[ArenaEntry] = []
        self._exit = contextlib.AsyncExitStack()

    async def __aenter__(self) -> "World":
        for servicer in self.servicers:
            self.addresses.append(await self._exit.enter_async_context(serve_fetch(servicer)))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.source.close()
        await self._exit.aclose()

    def request(self, number: int, num_tokens: int = 10, encoder: int = 0) -> ImageRequest:
        for servicer in self.servicers:
            servicer.sizes[KEYS[number]] = num_tokens
        return ImageRequest(KEYS[number], spec_of(num_tokens), self.addresses[encoder])

    async def obtain(self, *requests: ImageRequest) -> list[ArenaEntry]:
        found: list[ArenaEntry] = []

        async for entry in self.source.obtain(requests):
            assert entry.committed and entry.references > 0
            found.append(entry)
            self.held.append(entry)
        for entry in found:
            assert bytes(self.arena.view(entry)) == embedding_bytes(entry.key, entry.spec)
        return found

    def release_all(self) -> None:
        held, self.held = self.held, []
        for entry in held:
            self.source.release(entry)

    def assert_unreferenced(self) -> None:
        assert all(e.references == 0 and e.committed for e in self.arena.entries)
        assert not num_unfinished(self.store) and not self.arena.has_claims


async def test_a_new_image_comes_from_the_encoder_and_then_from_memory():
    async with World() as world:
        await world.obtain(world.request(1))
        await world.obtain(world.request(1))
        assert world.servicers[0].num_calls == 1
        assert world.observer.found == {"encoder": 1, "memory": 1}
        assert world.observer.missed == {"memory": 1, "redis": 1}
        world.release_all()
        world.assert_unreferenced()


async def test_the_cache_spares_the_encoder():
    async with World() as world:
        request = world.request(1)
        world.cache.entries[KEYS[1]] = (request.spec, embedding_bytes(KEYS[1], request.spec))
        await world.obtain(request)
        assert world.servicers[0].num_calls == 0
        assert world.observer.found == {"redis": 1}


@pytest.mark.parametrize("lie", ["body", "spec"])
async def test_a_cache_that_lies_is_a_miss(lie):
    async with World() as world:
        request = world.request(1)
        data = embedding_bytes(KEYS[1], request.spec)
        world.cache.entries[KEYS[1]] = (spec_of(9) if lie == "spec" else request.spec, data)
        world.cache.broken = lie == "body"
        await world.obtain(request)
        assert world.observer.found == {"encoder": 1}
        assert world.observer.missed["redis"] == 1


async def test_many_sequences_with_one_image_cause_one_fetch():
    async with World() as world:
        world.servicers[0].gate.clear()
        tasks = [asyncio.create_task(world.obtain(world.request(1))) for _ in range(20)]
        await until(lambda: world.servicers[0].num_calls == 1)
        world.servicers[0].gate.set()
        await asyncio.gather(*tasks)
        assert world.servicers[0].num_calls == 1
        assert world.held[0].references == 20
        world.release_all()
        world.assert_unreferenced()


@pytest.mark.parametrize("fault", FAULTS)
async def test_an_encoder_that_fails_is_named_and_leaves_nothing_behind(fault):
    async with World(standstill_s=0.3 if fault.startswith("hang") else PATIENCE_S) as world:
        world.servicers[0].fault = fault
        with pytest.raises(EncoderFailed) as failure:
            await world.obtain(world.request(1))
        assert failure.value.encoder_address == world.addresses[0]
        assert failure.value.code == "embedding_unavailable"
        await until(lambda: world.arena.used_bytes == 0)
        world.assert_unreferenced()
        assert sum(world.observer.failed.values()) == 1
        # Another encoder, or the same one recovered, has it.
        world.source.standstill_s = PATIENCE_S
        await world.obtain(world.request(1, encoder=1))


async def test_a_slow_encoder_that_says_that_it_works_is_waited_for():
    """Also for an image that the gateway has not sent it yet."""
    async with World(standstill_s=3.0) as world:
        servicer = world.servicers[0]
        servicer.words = {KEYS[1]: True, KEYS[2]: False}
        began = time.monotonic()
        obtaining = asyncio.create_task(world.obtain(world.request(1), world.request(2)))
        await until(lambda: time.monotonic() - began > 4.0)
        assert not obtaining.done() and servicer.num_words > 2
        del servicer.words[KEYS[1]]
        await until(lambda: num_unfinished(world.store) == 1)
        servicer.words.clear()
        await obtaining
        assert servicer.num_calls == 2 and not world.observer.failed
        world.release_all()
        world.assert_unreferenced()


async def test_an_encoder_that_only_lives_is_not_waited_for():
    async with World(standstill_s=1.5) as world:
        world.servicers[0].words = {KEYS[1]: False}
        with pytest.raises(EncoderFailed, match="in time"):
            await world.obtain(world.request(1))
        assert world.servicers[0].num_words > 0 and world.observer.failed == {"unavailable": 1}


async def test_an_encoder_that_falls_silent_is_noticed_while_another_works():
    async with World(standstill_s=2.0) as world:
        silent, slow = world.servicers
        slow.words = {KEYS[2]: True}
        silent.fault = "hangs in the middle"
        with pytest.raises(EncoderFailed) as failure:
            await world.obtain(world.request(1), world.request(2, encoder=1))
        assert failure.value.encoder_address == world.addresses[0]


async def test_an_image_that_cannot_be_encoded_is_the_callers_fault():
    async with World() as world:
        world.servicers[0].fault = "invalid image"
        with pytest.raises(InvalidImage, match="truncated"):
            await world.obtain(world.request(1))


async def test_an_encoder_that_is_not_there_is_named():
    async with World() as world:
        request = ImageRequest(KEYS[1], spec_of(4), "127.0.0.1:1")
        with pytest.raises(EncoderFailed) as failure:
            await world.obtain(request)
        assert failure.value.encoder_address == "127.0.0.1:1"


async def test_a_sequence_of_another_encoder_does_not_wait_for_one_that_hangs():
    async with World(standstill_s=PATIENCE_S, takeover_s=0.2) as world:
        world.servicers[0].fault = "hangs in the middle"
        first = asyncio.create_task(world.obtain(world.request(1)))
        await until(lambda: world.servicers[0].num_calls == 1)
        second = asyncio.create_task(world.obtain(world.request(1, encoder=1)))
        third = asyncio.create_task(world.obtain(world.request(1, encoder=1)))
        await asyncio.gather(first, second, third)
        assert [s.num_calls for s in world.servicers] == [1, 1]
        world.release_all()
        world.assert_unreferenced()


async def test_a_takeover_that_fails_leaves_the_first_encoder_to_its_sequence():
    async with World(takeover_s=0.2) as world:
        world.servicers[0].gate.clear()
        world.servicers[1].fault = "nan"
        first = asyncio.create_task(world.obtain(world.request(1)))
        await until(lambda: world.servicers[0].num_calls == 1)
        with pytest.raises(EncoderFailed) as failure:
            await world.obtain(world.request(1, encoder=1))
        assert failure.value.encoder_address == world.addresses[1]
        world.servicers[0].gate.set()
        await first
        world.release_all()
        world.assert_unreferenced()


async def test_a_sequence_of_another_encoder_is_not_failed_by_the_first():
    async with World() as world:
        world.servicers[0].gate.clear()
        world.servicers[0].fault = "error"
        first = asyncio.create_task(world.obtain(world.request(1)))
        await until(lambda: world.servicers[0].num_calls == 1)
        second = asyncio.create_task(world.obtain(world.request(1, encoder=1)))
        await asyncio.sleep(0)
        world.servicers[0].gate.set()
        with pytest.raises(EncoderFailed):
            await first
        await second
        assert world.servicers[1].num_calls == 1
        world.release_all()
        world.assert_unreferenced()


async def test_a_cancelled_waiter_affects_no_other_and_the_last_one_ends_the_fetch():
    async with World() as world:
        servicer = world.servicers[0]
        servicer.gate.clear()
        tasks = [asyncio.create_task(world.obtain(world.request(1))) for _ in range(3)]
        await until(lambda: servicer.num_calls == 1)
        tasks[0].cancel()
        await asyncio.gather(tasks[0], return_exceptions=True)
        assert servicer.num_cancelled == 0
        servicer.gate.set()
        await asyncio.gather(*tasks[1:])
        world.release_all()

        servicer.gate.clear()
        tasks = [asyncio.create_task(world.obtain(world.request(2))) for _ in range(3)]
        await until(lambda: servicer.num_calls == 2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: servicer.num_cancelled == 1)
        await until(lambda: not num_unfinished(world.store))
        world.assert_unreferenced()
        servicer.gate.set()
        await world.obtain(world.request(2))


async def test_a_sequence_that_joins_a_fetch_being_cancelled_gets_the_image():
    async with World() as world:
        world.servicers[0].gate.clear()
        first = asyncio.create_task(world.obtain(world.request(1)))
        await until(lambda: world.servicers[0].num_calls == 1)
        first.cancel()
        world.servicers[0].gate.set()
        second = asyncio.create_task(world.obtain(world.request(1)))
        await second
        with pytest.raises(asyncio.CancelledError):
            await first


async def test_without_room_sequences_wait_in_order():
    async with World(pages=2) as world:
        await world.obtain(world.request(1), world.request(2))
        order: list[int] = []

        async def want(number: int, *images: int) -> None:
            await world.obtain(*(world.request(image) for image in images))
            order.append(number)

        tasks = [
            asyncio.create_task(want(0, 3, 4)),
            asyncio.create_task(want(1, 1)),  # there is room for this one, but another is first
        ]
        await turns()
        assert order == []
        first, second = world.held
        world.held = []
        world.source.release(second)
        await turns()
        assert order == []
        world.source.release(first)
        await until(lambda: order == [0])
        world.release_all()
        await asyncio.gather(*tasks)
        assert order == [0, 1]
        world.release_all()
        world.assert_unreferenced()


async def test_a_cancelled_waiter_for_room_lets_the_next_one_pass():
    async with World(pages=2) as world:
        await world.obtain(world.request(1))
        big = asyncio.create_task(world.obtain(world.request(2), world.request(3)))
        small = asyncio.create_task(world.obtain(world.request(4)))
        await asyncio.sleep(0.01)
        assert not small.done()
        big.cancel()
        await small
        await asyncio.gather(big, return_exceptions=True)
        world.release_all()
        world.assert_unreferenced()


async def test_what_does_not_fit_at_all_is_refused_at_once():
    async with World(pages=2) as world:
        with pytest.raises(InvalidRequest, match="room for 8192"):
            await world.obtain(world.request(1), world.request(2), world.request(3))
        with pytest.raises(InvalidRequest, match="room for 8192"):
            await world.obtain(world.request(1, num_tokens=1000))


async def test_a_size_that_is_not_the_images_is_refused():
    async with World() as world:
        await world.obtain(world.request(1, num_tokens=10))
        with pytest.raises(InvalidRequest, match="10 tokens, not 11"):
            await world.obtain(world.request(2), world.request(1, num_tokens=11))
        world.release_all()
        world.assert_unreferenced()


async def test_least_recently_used_images_make_room():
    async with World(pages=2) as world:
        for number in (1, 2, 1, 3):
            await world.obtain(world.request(number))
            world.release_all()
        await world.obtain(world.request(1))
        assert world.observer.found == {"encoder": 3, "memory": 2}


@pytest.mark.thorough
async def test_what_fits_into_an_empty_arena_is_had_wherever_the_last_ones_lie():
    """What is there already may lie amid the only room for the rest."""
    rng = random.Random(0)
    tokens = {number: 128 * pages for number, pages in enumerate((1, 1, 2, 2, 3, 4, 5))}
    async with World(pages=8) as world:
        for _ in range(cases(15, 40)):
            numbers, room = [], 8
            for number in rng.sample(sorted(tokens), 4):
                if tokens[number] // 128 <= room:
                    numbers.append(number)
                    room -= tokens[number] // 128
            async with asyncio.timeout(PATIENCE_S):
                await world.obtain(*(world.request(n, tokens[n]) for n in numbers))
            world.release_all()
        world.assert_unreferenced()
        assert world.observer.found["memory"] > 0


async def test_unused_channels_are_closed():
    async with World() as world:
        await world.obtain(world.request(1))
        assert world.fetcher.num_channels == 1
        world.fetcher.idle_s = 0.02
        await world.obtain(world.request(2))
        await until(lambda: not world.fetcher.num_channels)
        await world.obtain(world.request(3))


async def test_a_caller_cancelled_twice_leaves_nothing_behind():
    async with World() as world:
        world.servicers[0].gate.clear()
        for turns in range(12):
            task = asyncio.create_task(world.obtain(world.request(1), world.request(2)))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await until(lambda: not num_unfinished(world.store))
            assert world.arena.used_bytes == 0
