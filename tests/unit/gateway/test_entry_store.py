"""What clients name again later: bounds, time, tenants; in memory and in a real Redis."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from services.common.errors import Unavailable
from services.gateway import entry_store, redis_entry_store
from services.gateway.entry_store import EntryStore, MemoryEntryStore
from services.gateway.redis_entry_store import RedisEntryStore
from tests.noise import PATIENCE_S
from tests.redis_server import RedisServer

ROOM = 4000  # of one tenant; all together have twice as much
ENTRY = b"x" * 1000  # three of them fit


@pytest.fixture(scope="module")
def server():
    with RedisServer() as server:
        yield server


@pytest.fixture(params=["memory", "redis"])
async def store(request, server) -> AsyncIterator[EntryStore]:
    if request.param == "memory":
        found = MemoryEntryStore(ROOM, 2 * ROOM)
    else:
        server.flush()
        found = RedisEntryStore(server.url, ROOM, 2 * ROOM)
    yield found
    await found.close()


async def names(store: EntryStore, tenant: str) -> str:
    """Of the entries `a` to `f` those that are there; all of them are used by that."""
    return "".join([n for n in "abcdef" if await store.get(tenant, n) is not None])


async def test_an_entry_is_its_tenants_alone(store):
    assert await store.put("t", "a", b"one")
    assert await store.put("", "a", b"anonymous")
    assert await store.get("t", "a") == b"one"
    assert await store.get("", "a") == b"anonymous"
    assert await store.get("u", "a") is None
    assert not await store.delete("u", "a")
    assert await store.put("t", "a", b"two")
    assert await store.get("t", "a") == b"two"
    assert await store.delete("t", "a") and not await store.delete("t", "a")
    assert await store.get("t", "a") is None
    assert await store.get("", "a") == b"anonymous"


async def test_a_tenants_least_recently_used_entries_make_room(store):
    for name in "abc":
        assert await store.put("t", name, ENTRY)
        await asyncio.sleep(0.002)  # Redis counts milliseconds
    assert await store.get("t", "a") == ENTRY
    assert await store.put("t", "d", ENTRY)
    assert await names(store, "t") == "acd"
    assert not await store.put("t", "e", ENTRY * 4)
    assert await names(store, "t") == "acd"


async def test_where_all_are_full_the_largest_tenant_makes_room(store):
    for tenant, some in (("t", "abc"), ("u", "abc"), ("v", "a")):
        for name in some:
            assert await store.put(tenant, name, ENTRY)
            await asyncio.sleep(0.002)
    found = sorted([await names(store, tenant) for tenant in "tuv"])
    assert found == ["a", "abc", "bc"]
    assert await names(store, "v") == "a"


async def test_what_is_put_counts_as_its_tenants_where_room_is_short(store):
    """A tenant whose new entry makes it the largest makes room itself."""
    for tenant, name, size in (
        ("u", "a", 1400),
        ("u", "b", 1400),
        ("v", "a", 1250),
        ("t", "a", 1000),
    ):
        assert await store.put(tenant, name, bytes(size))
    assert await store.put("t", "b", bytes(2000))
    assert [await names(store, tenant) for tenant in "tuv"] == ["b", "ab", "a"]


async def test_nothing_is_left_of_what_has_gone(server):
    store = RedisEntryStore(server.url, ROOM, 2 * ROOM)
    server.flush()
    for name in "abcdef":
        await store.put("t", name, ENTRY)
    for name in "abcdef":
        await store.delete("t", name)
    assert server.keys() == [f"{redis_entry_store.PREFIX}@sizes".encode()]
    with server.client() as client:
        assert client.hgetall(f"{redis_entry_store.PREFIX}@sizes") == {b"@": b"0"}
    await store.close()


async def test_an_hour_after_its_last_use_an_entry_is_gone():
    now = 0.0
    store = MemoryEntryStore(clock=lambda: now)
    await store.put("t", "a", b"x")
    await store.put("t", "b", b"x")
    now = entry_store.LIFETIME_S - 1
    assert await store.get("t", "a") == b"x"
    now += 2
    assert await names(store, "t") == "a"
    now += entry_store.LIFETIME_S + 1
    assert await names(store, "t") == ""
    assert store.num_bytes == 0


async def test_the_same_in_redis(server):
    server.flush()
    store = RedisEntryStore(server.url)
    a, b = f"{redis_entry_store.PREFIX}t/a", f"{redis_entry_store.PREFIX}t/b"
    with server.client() as client:
        for name, key in (("a", a), ("b", b)):
            await store.put("t", name, b"x")
            assert client.pttl(key) > 1000 * (entry_store.LIFETIME_S - PATIENCE_S)
            client.expire(key, 100)
        assert await store.get("t", "a") == b"x"
        assert client.pttl(a) > 1000 * (entry_store.LIFETIME_S - PATIENCE_S)
        assert client.pttl(b) <= 100_000
        client.pexpire(b, 0)
    assert await store.get("t", "b") is None
    assert await store.get("t", "a") == b"x"
    brief = RedisEntryStore(server.url, lifetime_s=0.001)
    await asyncio.sleep(0.01)
    await brief.put("u", "c", b"x")  # takes away what others have left
    await brief.close()
    with server.client() as client:
        assert client.zrange(f"{redis_entry_store.PREFIX}@used", 0, -1) == [b"u/c"]
        assert client.zrange(f"{redis_entry_store.PREFIX}@tenants", 0, -1) == [b"u"]
    await store.close()


async def test_a_redis_that_is_away_keeps_nothing_and_is_asked_again():
    with RedisServer() as server:
        store = RedisEntryStore(server.url, pause_s=0.05)
        assert await store.put("t", "a", b"x")
        server.stop()
        assert not await store.put("t", "b", b"x")
        with pytest.raises(Unavailable):
            await store.get("t", "a")
        server.start()
        await asyncio.sleep(0.06)
        assert await store.put("t", "b", b"x") and await store.get("t", "b") == b"x"
        await store.close()
