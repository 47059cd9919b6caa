"""Files that clients upload: by tenant and digest, bounded, in Redis for other encoders."""

import asyncio
import threading
import time

import pytest
from blake3 import blake3

from services.common.errors import NotFound, Overloaded, PayloadTooLarge
from services.encoder.front import uploaded_files
from services.encoder.front.uploaded_files import UploadedFiles


class Cache:
    """Redis, as the files see it."""

    def __init__(self) -> None:
        self.files: dict[bytes, bytes] = {}
        self.is_away = False

    async def read_file(self, name: bytes, max_bytes: int) -> bytes | None:
        data = None if self.is_away else self.files.get(name)
        return None if data is None or len(data) > max_bytes else data

    async def write_file(self, name: bytes, data: bytes, ttl_s: int) -> bool:
        if not self.is_away:
            self.files[name] = data
        return not self.is_away

    async def delete_file(self, name: bytes) -> bool | None:
        return None if self.is_away else self.files.pop(name, None) is not None


async def test_a_tenant_finds_its_own_files_alone():
    files = UploadedFiles(None)
    digest = await files.put("a", b"clip")
    assert digest == blake3(b"clip").digest()
    assert await files.get("a", digest) == b"clip"
    for tenant, name in (("b", digest), ("a", bytes(32)), ("", digest)):
        with pytest.raises(NotFound):
            await files.get(tenant, name)


async def test_another_encoder_finds_a_file_in_redis_and_only_its_tenant():
    cache = Cache()
    digest = await UploadedFiles(cache).put("a", b"clip")
    other = UploadedFiles(cache)
    with pytest.raises(NotFound):
        await other.get("b", digest)
    assert await other.get("a", digest) == b"clip"
    cache.is_away = True
    assert await other.get("a", digest) == b"clip"  # it holds it now


async def test_what_redis_returns_is_checked():
    cache = Cache()
    digest = await UploadedFiles(cache).put("a", b"clip")
    cache.files = dict.fromkeys(cache.files, b"another")
    with pytest.raises(NotFound):
        await UploadedFiles(cache).get("a", digest)


async def test_few_files_are_read_from_redis_at_a_time_and_one_file_once():
    """Nothing counts their bytes until they are there."""
    going, most, names = 0, 0, []

    class Slow(Cache):
        async def read_file(self, name: bytes, max_bytes: int) -> bytes | None:
            nonlocal going, most
            names.append(name)
            going += 1
            most = max(most, going)
            await asyncio.sleep(0.01)
            going -= 1
            return await super().read_file(name, max_bytes)

    cache = Slow()
    kept = {await UploadedFiles(cache).put("a", b"clip %d" % n): n for n in range(4)}
    other = UploadedFiles(cache)
    found = await asyncio.gather(*(other.get("a", digest) for digest in [*kept] * 3))
    assert found == [b"clip %d" % n for n in kept.values()] * 3
    assert most == 2 and len(names) == len(set(names)) == 4


async def test_files_are_written_to_redis_one_at_a_time():
    """Each takes memory there before it has replaced others."""
    going, most = 0, 0

    class Slow(Cache):
        async def write_file(self, name: bytes, data: bytes, ttl_s: int) -> bool:
            nonlocal going, most
            going += 1
            most = max(most, going)
            await asyncio.sleep(0)
            going -= 1
            return await super().write_file(name, data, ttl_s)

    cache = Slow()
    files = UploadedFiles(cache)
    names = await asyncio.gather(*(files.put("a", b"clip %d" % n) for n in range(8)))
    assert most == 1 and len(cache.files) == 8
    assert [await UploadedFiles(cache).get("a", name) for name in names] == [
        b"clip %d" % n for n in range(8)
    ]


async def test_files_of_a_tenant_have_one_owner_in_redis():
    """Redis counts bytes by what stands before the slash."""
    cache = Cache()
    for tenant, data in (("a", b"1"), ("a", b"2"), ("b", b"1"), ("", b"1")):
        await UploadedFiles(cache).put(tenant, data)
    owners = [name.partition(b"/")[0] for name in cache.files]
    assert len(set(cache.files)) == 4
    assert owners[0] == owners[1] and len(set(owners)) == 3


async def test_names_in_redis_say_nothing_of_tenants():
    cache = Cache()
    await UploadedFiles(cache).put("secret-tenant", b"clip")
    (name,) = cache.files
    assert b"secret" not in name and blake3(b"clip").hexdigest().encode() not in name


async def test_a_tenant_has_half_of_the_room_and_the_longest_unused_goes_first():
    files = UploadedFiles(None, max_bytes=40_000)
    first, second = [await files.put("a", letter * 9000) for letter in (b"1", b"2")]
    other = await files.put("b", b"3" * 9000)
    await files.get("a", first)
    third = await files.put("a", b"4" * 9000)
    assert await files.get("a", first) and await files.get("a", third)
    with pytest.raises(NotFound):
        await files.get("a", second)
    await files.put("c", b"5" * 19_000)  # more than is left beside the others
    assert await files.get("b", other)
    with pytest.raises(NotFound):  # of the tenant that had the most
        await files.get("a", first)


async def test_a_file_that_has_no_room_is_refused_and_drops_nothing():
    files = UploadedFiles(None, max_bytes=4000)
    kept = await files.put("a", b"1" * 1700)
    with pytest.raises(PayloadTooLarge, match="at most 2000 bytes"):
        await files.put("a", b"2" * 2000)
    assert await files.get("a", kept)


async def test_a_file_that_has_no_room_here_lies_in_redis():
    cache = Cache()
    files = UploadedFiles(cache, max_bytes=4000)
    large = await files.put("a", b"2" * 2000)
    assert await files.get("a", large) == b"2" * 2000
    cache.is_away = True
    with pytest.raises(PayloadTooLarge):
        await files.put("a", b"3" * 2000)


async def test_many_small_files_take_room_and_no_time():
    files = UploadedFiles(None)
    started = time.process_time()
    names = [await files.put("a", n.to_bytes(2, "little")) for n in range(20_000)]
    assert time.process_time() - started < 5.0
    assert await files.get("a", names[0])
    few = UploadedFiles(None, max_bytes=40_000)
    names = [await few.put("a", n.to_bytes(2, "little")) for n in range(200)]
    with pytest.raises(NotFound):
        await few.get("a", names[0])


async def test_files_expire_after_their_last_use():
    now = [100.0]
    files = UploadedFiles(None, clock=lambda: now[0])
    used, unused = await files.put("a", b"1"), await files.put("a", b"2")
    now[0] += uploaded_files.TTL_S - 1.0
    await files.get("a", used)
    now[0] += 2.0
    assert await files.get("a", used) == b"1"
    with pytest.raises(NotFound):
        await files.get("a", unused)


async def test_delete_forgets_a_file_here_and_in_redis():
    cache = Cache()
    files = UploadedFiles(cache)
    digest = await files.put("a", b"clip")
    assert not await files.delete("b", digest)
    assert await files.delete("a", digest) and not await files.delete("a", digest)
    with pytest.raises(NotFound):
        await files.get("a", digest)


async def test_what_redis_may_still_have_is_not_said_to_be_deleted():
    cache = Cache()
    files = UploadedFiles(cache)
    digest = await files.put("a", b"clip")
    cache.is_away = True
    with pytest.raises(Overloaded) as refused:
        await files.delete("a", digest)
    assert refused.value.retry_after_s
    cache.is_away = False
    assert await files.get("a", digest) == b"clip"
    assert await files.delete("a", digest)


@pytest.mark.parametrize("known", [False, True])
async def test_a_long_file_is_digested_beside_the_event_loop(
    known: bool, monkeypatch: pytest.MonkeyPatch
):
    """Of an upload, and of what Redis returns."""
    threads: list[bool] = []

    class Hasher:
        def __init__(self, data: bytes = b"", **options: object) -> None:
            self._hasher = blake3(**options)
            self.update(data)

        def update(self, data: bytes) -> "Hasher":
            if len(data) > 1 << 20:
                threads.append(threading.current_thread() is threading.main_thread())
            self._hasher.update(data)
            return self

        def digest(self, size: int) -> bytes:
            return self._hasher.digest(size)

        def hexdigest(self) -> str:
            return self._hasher.hexdigest()

    file, cache = bytes(3 << 20), Cache()
    digest = await UploadedFiles(cache).put("a", file)
    monkeypatch.setattr(uploaded_files, "blake3", Hasher)
    if known:
        assert await UploadedFiles(cache).get("a", digest) == file
    else:
        assert await UploadedFiles(cache).put("a", file) == digest
    assert threads == [False]
