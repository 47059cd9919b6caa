"""Containers are read fairly: by the time that a tenant's files take, never by all workers."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable

import pytest

from services.common.embeddings.shared_memory import MemoryAddress, create_memory
from services.common.errors import InvalidVideo
from services.encoder.decoding.clips.questions import Facts
from services.encoder.front.admission import Share
from services.encoder.front.probe_queue import ProbeQueue
from tests.fake_clips import FACTS, FakeClips
from tests.noise import PATIENCE_S


class Bench:
    """A queue over a pool that the test steps, with the test's clock."""

    def __init__(self) -> None:
        self.pool = FakeClips(waits=True)
        self.now_s = 0.0
        self._fds: list[int] = []
        self._queues: list[ProbeQueue] = []
        self._calls: dict[bytes, asyncio.Task[Facts]] = {}

    def queue(self, max_running: int) -> ProbeQueue:
        queue = ProbeQueue(self.pool, max_running, lambda: self.now_s)  # type: ignore[arg-type]
        self._queues.append(queue)
        return queue

    async def ask(self, queue: ProbeQueue, name: bytes, share: Share) -> "asyncio.Task[Facts]":
        """A call for a file, which waits or is read when this returns."""
        fd, memory = create_memory(len(name))
        os.pwrite(fd, name, 0)
        self._fds.append(fd)
        address = MemoryAddress(os.getpid(), fd, memory, len(name))
        call = self._calls[name] = asyncio.create_task(queue.probe(address, share))
        await asyncio.sleep(0)
        return call

    async def begun(self) -> bytes:
        """The file whose reading begins next."""
        return await asyncio.to_thread(self.pool.begun.get, timeout=PATIENCE_S)

    async def end(self, name: bytes, taken_s: float) -> None:
        """The reading of a file ends, which has taken so long."""
        self.now_s += taken_s
        self.pool.finish(name)
        await asyncio.wait((self._calls[name],), timeout=PATIENCE_S)
        await asyncio.sleep(0)

    async def close(self) -> None:
        for call in self._calls.values():
            call.cancel()
        for name in self._calls:
            self.pool.finish(name)
        for queue in self._queues:
            await asyncio.to_thread(queue.close)
        for fd in self._fds:
            os.close(fd)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    await bench.close()


async def order(
    bench: Bench, queue: ProbeQueue, count: int, taken_s: Callable[[bytes], float]
) -> list[bytes]:
    """The next files that are read, one after another; each takes as long as `taken_s` says."""
    found: list[bytes] = []
    for _ in range(count):
        found.append(await bench.begun())
        await bench.end(found[-1], taken_s(found[-1]))
    return found


@pytest.mark.parametrize("max_running", [2, 3])
async def test_a_tenant_never_has_all_workers(bench: Bench, max_running: int) -> None:
    queue, crowd, guest = bench.queue(max_running), Share("crowd"), Share("guest")
    for number in range(12):
        await bench.ask(queue, b"crowd %d" % number, crowd)
    running = {await bench.begun() for _ in range(max_running - 1)}
    assert running == {b"crowd %d" % number for number in range(max_running - 1)}
    call = await bench.ask(queue, b"guest", guest)
    assert await bench.begun() == b"guest"  # which waits for none
    await bench.end(b"guest", 0.1)
    assert call.result() is FACTS
    assert bench.pool.begun.empty()  # its worker stays free for the next newcomer


async def test_one_worker_is_for_all_tenants(bench: Bench) -> None:
    queue = bench.queue(1)
    for number in range(5):
        await bench.ask(queue, b"crowd %d" % number, Share("crowd"))
    assert await bench.begun() == b"crowd 0"
    await bench.ask(queue, b"guest", Share("guest"))
    await bench.end(b"crowd 0", 1.0)
    assert await order(bench, queue, 2, lambda _: 1.0) == [b"guest", b"crowd 1"]


async def test_callers_without_a_key_have_all_workers(bench: Bench) -> None:
    queue = bench.queue(2)
    for number in range(3):
        await bench.ask(queue, b"%d" % number, Share())
    assert {await bench.begun(), await bench.begun()} == {b"0", b"1"}
    assert bench.pool.begun.empty()


@pytest.mark.parametrize(("weight", "turns"), [(1.0, 10), (0.5, 5), (2.0, 20)])
async def test_turns_are_counted_by_the_time_that_they_take(
    bench: Bench, weight: float, turns: int
) -> None:
    """A tenant whose files take a second each has `turns` of them for one of ten seconds."""
    queue, slow, quick = bench.queue(1), Share("slow"), Share("quick", weight)
    for number in range(3):
        await bench.ask(queue, b"slow %d" % number, slow)
    for number in range(50):
        await bench.ask(queue, b"quick %d" % number, quick)
    found = await order(
        bench, queue, 2 * turns + 2, lambda name: 10.0 if name.startswith(b"slow") else 1.0
    )
    places = [place for place, name in enumerate(found) if name.startswith(b"slow")]
    assert len(places) >= 2 and places[0] == 0
    assert places[1] - places[0] - 1 == pytest.approx(turns, abs=1)


async def test_time_that_nobody_else_wanted_is_not_held_against_a_tenant(bench: Bench) -> None:
    """Nor does a tenant save up turns while it is idle."""
    queue = bench.queue(1)
    for number in range(30):
        await bench.ask(queue, b"first %d" % number, Share("first"))
    assert len(await order(bench, queue, 19, lambda _: 5.0)) == 19
    assert await bench.begun() == b"first 19"
    for number in range(10):
        await bench.ask(queue, b"later %d" % number, Share("later"))
    await bench.end(b"first 19", 5.0)
    found = await order(bench, queue, 10, lambda _: 5.0)
    assert 4 <= sum(name.startswith(b"later") for name in found) <= 6


async def test_a_file_that_nobody_waits_for_is_not_read(bench: Bench) -> None:
    queue = bench.queue(1)
    calls = [await bench.ask(queue, b"%d" % number, Share("a")) for number in range(3)]
    assert await bench.begun() == b"0"
    for call in calls[:2]:  # one that is being read, one that waits
        call.cancel()
    await bench.end(b"0", 1.0)
    assert await bench.begun() == b"2"
    await bench.end(b"2", 1.0)
    assert calls[2].result() is FACTS and bench.pool.read == [b"0", b"2"]


async def test_an_error_is_its_callers_and_frees_the_worker(bench: Bench) -> None:
    queue = bench.queue(1)
    call = await bench.ask(queue, b"bad", Share("a"))
    assert await bench.begun() == b"bad"
    await bench.end(b"bad", 1.0)
    with pytest.raises(InvalidVideo, match="corrupt"):
        await call
    await bench.ask(queue, b"good", Share("a"))
    assert await bench.begun() == b"good"
