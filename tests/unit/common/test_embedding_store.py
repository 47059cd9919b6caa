"""The embedding store over tiers of a test: order, single flight, memory and failures."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry, Counter

from services.common.embeddings.arena import Arena
from services.common.embeddings.embedding import EmbeddingSpec, digest
from services.common.embeddings.embedding_write import EmbeddingWrite
from services.common.embeddings.store import MEMORY, EmbeddingStore, Lookup, Tier
from services.common.errors import EmbeddingUnavailable, Overloaded, TriptychError
from tests.noise import PATIENCE_S
from tests.store_state import num_lookups, num_unfinished, num_waiters

KEY, OTHER = b"k" * 32, b"o" * 32
SPEC = EmbeddingSpec("float16", 2, 16, 8)


class ListTier(Tier[bytes]):
    """A tier that has the keys of `stored`, waits for `gate`, and notes what happens to it.

    The bytes of an embedding are the lookup's inputs, repeated.
    """

    def __init__(self, name: str, *stored: bytes) -> None:
        self.name = name
        self.stored = set(stored)
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: TriptychError | None = None
        self.refusal: TriptychError | None = None
        self.calls: list[str] = []
        self.got: list[bytes] = []
        self.open: list[Lookup[bytes]] = []

    def begin(self, lookup: Lookup[bytes]) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.open.append(lookup)

    async def find(self, lookup: Lookup[bytes]) -> bool:
        self.calls.append("find")
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.calls.append("cancelled")
            raise
        if self.error is not None:
            raise self.error
        if lookup.key not in self.stored:
            return False
        if lookup.needs_bytes and (write := await lookup.place()) is not None:
            write.view[:] = content(lookup.inputs)
            write.commit()
        return True

    def put(self, write: EmbeddingWrite) -> None:
        self.got.append(bytes(write.view))

    def end(self, lookup: Lookup[bytes], *, succeeded: bool) -> None:
        self.open.remove(lookup)
        self.calls.append("succeeded" if succeeded else "failed")

    async def close(self) -> None:
        self.calls.append("closed")


def content(inputs: bytes) -> bytes:
    return (inputs * SPEC.size_bytes)[: SPEC.size_bytes]


def counts(counter: Counter) -> dict[str, int]:
    samples = (sample for metric in counter.collect() for sample in metric.samples)
    return {s.labels["tier"]: int(s.value) for s in samples if s.name.endswith("_total")}


class World:
    """A store with these tiers."""

    def __init__(self, *tiers: ListTier, pages: int = 4) -> None:
        registry = CollectorRegistry()
        self.hits, self.misses = (
            Counter(name, name, ["tier"], registry=registry) for name in ("hits", "misses")
        )
        self.tiers = tiers
        self.store = EmbeddingStore[bytes](Arena(pages * 4096), tiers, self.hits, self.misses)

    def start(self, key: bytes = KEY, inputs: bytes = b"a", **options: bool) -> Lookup[bytes]:
        return self.store.start(key, SPEC, inputs, **options)

    def stored(self, key: bytes = KEY) -> bytes:
        """The embedding in the arena; empty without one."""
        entry = self.store.arena.get(key)
        return bytes(self.store.arena.view(entry)) if entry else b""

    def assert_at_rest(self) -> None:
        assert not num_lookups(self.store)
        assert not any(tier.open for tier in self.tiers)
        assert all(entry.references == 0 for entry in self.store.arena.entries)


@contextlib.asynccontextmanager
async def world(*tiers: ListTier, pages: int = 4) -> AsyncIterator[World]:
    made = World(*tiers, pages=pages)
    try:
        yield made
        await until(lambda: not num_unfinished(made.store))
        made.assert_at_rest()
    finally:
        await made.store.close()
        await made.store.unmap()


async def until(condition) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - state without an event
            await asyncio.sleep(0.001)


async def test_tiers_are_asked_in_order_and_those_before_get_what_a_later_one_had():
    first, second, third = ListTier("1"), ListTier("2", KEY), ListTier("3", KEY, OTHER)
    async with world(first, second, third) as w:
        assert await w.start().task.join() == "2"
        assert first.got == [content(b"a")] and not second.got and not third.calls[:-1]
        assert await w.start(OTHER, b"b").task.join() == "3"
        assert first.got[1:] == second.got == [content(b"b")] and not third.got
        assert (w.stored(), w.stored(OTHER)) == (content(b"a"), content(b"b"))
        assert counts(w.hits) == {"2": 1, "3": 1} and counts(w.misses) == {"1": 2, "2": 1}


async def test_a_lookup_that_needs_no_bytes_takes_no_memory():
    async with world(ListTier("1"), ListTier("2", KEY)) as w:
        assert await w.start(needs_bytes=False).task.join() == "2"
        assert not w.tiers[0].got and not w.store.arena.used_bytes


async def test_without_a_tier_that_has_it_an_embedding_is_unavailable():
    async with world(ListTier("1"), ListTier("2")) as w:
        with pytest.raises(EmbeddingUnavailable, match="no tier"):
            await w.start().task.join()
        assert [tier.calls for tier in w.tiers] == [["find", "failed"]] * 2


async def test_an_error_of_a_tier_ends_the_lookup_for_all_its_callers():
    first, second = ListTier("1", KEY), ListTier("2", KEY)
    first.error = Overloaded("full", retry_after_s=1)
    async with world(first, second) as w:
        lookup = w.start()
        joined = [lookup.task.join() for _ in range(3)]
        found = await asyncio.gather(*joined, return_exceptions=True)
        assert found == [first.error] * 3
        assert second.calls == ["failed"] and not w.store.arena.used_bytes
        first.error = None
        assert await w.start().task.join() == "1"


async def test_a_refused_lookup_leaves_no_tier_prepared():
    first, second = ListTier("1", KEY), ListTier("2", KEY)
    second.refusal = Overloaded("full", retry_after_s=1)
    async with world(first, second) as w:
        with pytest.raises(Overloaded, match="full"):
            w.start()
        assert w.store.running(KEY) is None
        assert (first.calls, second.calls) == (["failed"], [])


async def test_the_last_caller_to_leave_cancels_the_lookup_and_the_next_one_starts_another():
    tier = ListTier("1", KEY)
    tier.gate.clear()
    async with world(tier) as w:
        lookup = w.start()
        first, second = lookup.task.join(), lookup.task.join()
        await until(lambda: tier.calls == ["find"])
        first.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert w.store.running(KEY) is lookup and num_waiters(w.store, KEY) == 1
        second.cancel()
        await until(lambda: w.store.running(KEY) is None)
        tier.gate.set()
        assert await w.start(inputs=b"b").task.join() == "1"
        assert tier.calls == ["find", "cancelled", "failed", "find", "succeeded"]
        assert w.stored() == content(b"b")


async def test_a_lookup_that_replaces_another_writes_after_it_has_ended():
    """Into the same entry, which a caller of both holds."""
    tier = ListTier("1", KEY)
    tier.gate.clear()
    async with world(tier) as w:
        entry = w.store.arena.try_reserve(KEY, SPEC)
        assert entry is not None
        replaced = w.store.start(KEY, SPEC, b"a", entry=entry).task.join()
        await until(lambda: tier.calls == ["find"])
        lookup = w.store.start(KEY, SPEC, b"b", entry=entry)
        joined = lookup.task.join()
        assert w.store.running(KEY) is lookup
        await until(lambda: tier.calls[1:] == ["cancelled", "failed", "find"])
        assert replaced.cancelled() and entry.references == 2
        tier.gate.set()
        assert await joined == "1"
        assert entry.committed and w.stored() == content(b"b")
        w.store.arena.release(entry)


async def test_a_lookup_without_memory_waits_for_it():
    tier = ListTier("1", KEY, OTHER)
    async with world(tier, pages=1) as w:
        held = await w.store.reserve(OTHER, SPEC)
        joined = w.start().task.join()
        await until(lambda: w.store.arena.has_claims)
        assert not joined.done()
        held.release()
        assert await joined == "1"


async def test_what_an_abandoned_writer_commits_is_not_written_again():
    """As when a cancelled job of an engine completes in spite of that."""
    tier = ListTier("1", KEY)
    async with world(ListTier("0"), tier) as w:
        write = await w.store.reserve(KEY, SPEC)
        joined = w.start(inputs=b"b").task.join()
        await until(lambda: tier.calls == ["find"])
        assert not joined.done()
        write.view[:] = content(b"a")
        write.commit()
        write.release()
        assert await joined == "1"
        assert w.stored() == content(b"a")
        assert w.tiers[0].got == [content(b"a")]


async def test_a_closed_store_has_cancelled_its_lookups_and_closed_its_tiers():
    tier = ListTier("1", KEY)
    tier.gate.clear()
    w = World(tier)
    joined = w.start().task.join()
    await until(lambda: tier.calls == ["find"])
    await w.store.close()
    assert joined.cancelled() and tier.calls[1:] == ["cancelled", "failed", "closed"]
    w.assert_at_rest()
    await w.store.unmap()


# Writing and reading.


async def test_readers_see_each_range_and_the_digest_is_that_of_the_bytes():
    async with world() as w:
        write, size = await w.store.reserve(KEY, SPEC), SPEC.size_bytes
        data = bytes(range(256)) * (size // 256)
        write.view[:] = data
        changed = write.changed
        assert changed is not None and not write.ranges
        write.offer(size // 2, size)
        assert changed.done() and write.ranges == [(size // 2, size)]
        changed = write.changed
        assert changed is not None and not changed.done() and num_unfinished(w.store) == 1
        write.commit()
        assert write.ranges == [(size // 2, size), (0, size // 2)]
        assert changed.done() and write.changed is None
        assert await w.store.digests.of(write.entry) == digest(data)
        await until(lambda: write.entry.references == 1)
        write.release()


async def test_a_given_digest_is_not_computed():
    async with world() as w:
        write = await w.store.reserve(KEY, SPEC)
        write.commit(b"d" * 16)
        assert await write.digest() == b"d" * 16 and not num_unfinished(w.store)
        write.release()


async def test_a_writing_ends_with_its_last_writer():
    """The bytes are void, and the memory is free when the last reader has gone."""
    async with world() as w:
        write = await w.store.reserve(KEY, SPEC)
        write.retain()
        write.offer(0, SPEC.size_bytes // 2)
        write.release()
        assert write.changed is not None and write.try_acquire()
        changed = write.changed
        write.release()
        assert changed.done() and write.changed is None
        assert not write.try_acquire()
        await until(lambda: write.entry.references == 1)
        assert w.store.arena.get(KEY) is None and w.store.arena.used_bytes
        w.store.arena.release(write.entry)
        assert not w.store.arena.used_bytes


async def test_a_complete_embedding_leaves_nothing_to_write():
    async with world() as w:
        write = await w.store.reserve(KEY, SPEC)
        write.commit(b"d" * 16)
        again = await w.store.reserve(KEY, SPEC)
        assert again.entry is write.entry and again.changed is None
        assert again.ranges == [(0, SPEC.size_bytes)] and again.try_acquire()
        w.store.arena.release(again.entry)
        for each in (write, again):
            each.release()
        assert MEMORY not in counts(w.hits)
