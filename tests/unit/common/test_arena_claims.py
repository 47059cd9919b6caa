"""Waiting for room in an arena: in order of arrival, nothing lost, nothing stuck."""

import asyncio
import random
from dataclasses import dataclass

import pytest

from services.common.embeddings.arena import Arena, ArenaEntry, Claim
from services.common.embeddings.embedding import EmbeddingSpec
from services.common.embeddings.store import EmbeddingStore
from services.encoder.metrics import EncoderMetrics

PAGE = 4096
PAGES = 8


@dataclass
class Pages(Claim[ArenaEntry]):
    """A claim of some pages."""

    arena: Arena
    key: int
    pages: int

    def attempt(self) -> ArenaEntry | None:
        spec = EmbeddingSpec("float16", 1, self.pages * PAGE // 2, 1)
        return self.arena.try_reserve(self.key.to_bytes(4, "little"), spec)

    def undo(self, result: ArenaEntry) -> None:
        self.arena.release(result)


@dataclass
class Failing(Claim[ArenaEntry]):
    """A claim that waits once, and fails at its second attempt."""

    attempts: int = 0

    def attempt(self) -> ArenaEntry | None:
        self.attempts += 1
        if self.attempts > 1:
            raise ValueError("broken")
        return None

    def undo(self, result: ArenaEntry) -> None:
        raise AssertionError("nothing was granted")


def claim(arena: Arena, key: int, pages: int) -> "asyncio.Task[ArenaEntry]":
    return asyncio.create_task(arena.claim(Pages(arena, key, pages)))


async def turns(number: int = 4) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def test_claims_are_granted_in_order_even_if_a_later_one_would_fit():
    arena = Arena(PAGES * PAGE)
    first = await claim(arena, 0, 6)
    big, small = claim(arena, 1, 6), claim(arena, 2, 1)
    await turns()
    assert not big.done() and not small.done() and arena.has_claims
    arena.release(first)
    assert (await big).references == 1
    await small
    assert not arena.has_claims


async def test_a_cancelled_claim_lets_the_next_one_pass():
    arena = Arena(PAGES * PAGE)
    held = await claim(arena, 0, 6)
    big, small = claim(arena, 1, 6), claim(arena, 2, 1)
    await turns()
    big.cancel()
    await small
    assert held.references == 1 and not arena.has_claims


async def test_a_claim_granted_as_it_is_cancelled_is_undone():
    arena = Arena(PAGES * PAGE)
    held = await claim(arena, 0, 6)
    waiting = claim(arena, 1, 6)
    await turns()
    arena.release(held)  # grants it
    waiting.cancel()  # before it has run
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert arena.used_bytes == 0 and len(arena) == 0


async def test_a_key_that_is_being_written_keeps_no_other_from_its_room():
    """As of an image that is sent again right after its caller has left."""
    arena = Arena(PAGES * PAGE)
    metrics = EncoderMetrics()
    store = EmbeddingStore[None](arena, [], metrics.hits, metrics.misses)
    spec = EmbeddingSpec("float16", 1, PAGE // 2, 1)
    written = await store.reserve(b"a", spec)
    again = asyncio.create_task(store.reserve(b"a", spec))
    other = asyncio.create_task(store.reserve(b"b", spec))
    await turns()
    assert other.done() and not again.done()
    large = claim(arena, 1, PAGES - 1)  # waits for room, and the claim before it goes first
    await turns()
    written.release()
    assert (await again).entry.references == 1 and not large.done()
    (await again).release()
    (await other).release()
    await large


async def test_an_error_ends_its_claim_alone():
    arena = Arena(PAGES * PAGE)
    held = await claim(arena, 0, 6)
    # The first claim to wait is tried when it arrives, the failing one when its turn comes.
    blocked, broken = claim(arena, 1, 6), Failing()
    failing = asyncio.create_task(arena.claim(broken))
    after = claim(arena, 2, 1)
    await turns()
    broken.attempts = 1
    arena.release(held)
    await blocked
    with pytest.raises(ValueError, match="broken"):
        await failing
    await after


async def test_claims_that_come_and_go_at_random_leave_no_byte_behind():
    rng = random.Random(0)
    arena = Arena(PAGES * PAGE)
    granted = 0

    async def use(key: int) -> None:
        nonlocal granted
        entry = await arena.claim(Pages(arena, key, rng.randint(1, PAGES)))
        granted += 1
        assert entry.references == 1
        try:
            await turns(rng.randrange(4))
            if rng.random() < 0.5:
                arena.commit(entry)
        finally:
            arena.release(entry)

    tasks = [asyncio.create_task(use(key)) for key in range(400)]
    for task in rng.sample(tasks, 100):
        await turns(rng.randrange(3))
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    arena.evict_unreferenced()
    assert granted > 250
    assert arena.used_bytes == 0 and len(arena) == 0 and not arena.has_claims
