"""The ends of batches, by runners with a fake endpoint and one state: what is given up, what has
no room, what expires and what is lost.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from starlette.requests import Request

from services.common.errors import InvalidRequest
from services.gateway.batches.batch_files import (
    LIFETIME_S,
    BatchFiles,
    FileRecord,
    bytes_writes,
    file_writes,
    new_id,
)
from services.gateway.batches.batch_runner import BatchRunner, RunnerBounds
from services.gateway.batches.batch_store import BatchRecord, BatchStore
from services.gateway.batches.line_caller import LineAnswer
from services.gateway.batches.state import Check, MemoryState, Write
from services.gateway.endpoints.batch_routes import BatchRoutes
from services.gateway.forms.batches import BatchRequest
from services.gateway.metrics import GatewayMetrics
from services.gateway.tenancy.admission import Admission
from services.gateway.tenancy.leases import Leases
from services.gateway.tenancy.tenants import Identity, Limits, Tenant, bind_identity
from tests.noise import PATIENCE_S

MODEL, CHAT, TENANT = "m", "/v1/chat/completions", "tenant"
MIB = 1 << 20


class _Keyring:
    def of_tenant(self, name: str) -> Identity:
        return Identity(Tenant(name, Limits(), shares_caches=False))


class _Caller:
    """Answers lines, the first `num_answered` of them at once and the others never."""

    def __init__(self, num_answered: int) -> None:
        self.num_answered = num_answered
        self.num_calls = 0

    async def call(self, *_: object) -> LineAnswer:
        self.num_calls += 1
        if self.num_calls > self.num_answered:
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        return LineAnswer(200, b'{"ok":true}')


class _Freezing(MemoryState):
    """The state as a gateway sees it that freezes in the middle of giving up lines.

    Args:
        state: state that other gateways see, too.
        num_writes: number of transactions with errors of lines after which every call hangs.
    """

    def __init__(self, state: MemoryState, num_writes: int) -> None:
        super().__init__()
        self._texts, self._hashes, self._sets = state._texts, state._hashes, state._sets
        self._num_left = num_writes
        self.is_frozen = asyncio.Event()

    async def transact(self, checks: Sequence[Check], writes: Sequence[Write]) -> bool:
        if any(write[0] == "hset" and write[1].startswith("errors:") for write in writes):
            self._num_left -= 1
        if self._num_left < 0:
            self.is_frozen.set()
        if self.is_frozen.is_set():
            await asyncio.Event().wait()
        return await super().transact(checks, writes)


class _Gateway:
    """A gateway's runner of batches."""

    def __init__(
        self,
        state: MemoryState,
        *,
        num_answered: int = 0,
        max_bytes: int = MIB,
        tick_s: float = 0.01,
    ) -> None:
        self.caller = _Caller(num_answered)
        self.state = state
        self.store = BatchStore(state, BatchFiles(state, max_bytes), PATIENCE_S)
        self.files = self.store.files
        service: Any = SimpleNamespace(
            model_name=MODEL, ready=lambda: True, decoders=SimpleNamespace(loads=list)
        )
        caller: Any = self.caller
        keyring: Any = _Keyring()
        self.runner = BatchRunner(
            self.store, caller, keyring, service, Admission(100), Leases(), GatewayMetrics(),
            RunnerBounds(tick=tick_s),
        )  # fmt: skip

    async def send(self, data: bytes, tenant: str = TENANT) -> BatchRecord:
        """Uploads a file, and creates a batch of its lines."""
        return await self.create(await self.files.put(tenant, "l.jsonl", data, LIFETIME_S), tenant)

    async def create(self, file: FileRecord, tenant: str = TENANT) -> BatchRecord:
        now = int(time.time())
        record = BatchRecord(
            id=new_id("batch_"), endpoint=CHAT, model=MODEL, input_file_id=file.id, window="24h",
            key_id="", metadata=None, created_at=now, expires_at=now + 86400,
        )  # fmt: skip
        await self.store.create(tenant, record)
        self.runner.wake()
        return record

    async def stop(self, record: BatchRecord, status: str) -> None:
        """Cancels a batch whose lines run, or ends its completion window."""
        if status == "cancelled":
            await self.store.cancel(TENANT, record.id)
        else:
            found = await self.store.get(TENANT, record.id)
            found.expires_at = 1
            data = msgspec.json.encode(found)
            await self.state.transact((), [("set", f"batch:{TENANT}/{record.id}", data)])
        self.runner.wake()

    async def reach(self, record: BatchRecord, num_completed: int) -> None:
        """Waits until a batch runs and has a number of answers."""

        async def reached() -> bool:
            found = await self.store.get(TENANT, record.id)
            return found.status == "in_progress" and found.completed >= num_completed

        await until(reached)

    async def end(self, record: BatchRecord, tenant: str = TENANT) -> BatchRecord:
        """Waits until a batch has ended, and returns it."""

        async def ended() -> bool:
            return not (await self.store.get(tenant, record.id)).is_open

        await until(ended)
        return await self.store.get(tenant, record.id)

    async def content(self, file_id: str | None) -> list[dict[str, Any]]:
        """Reads a file of results, which has the size that its record says."""
        if file_id is None:
            return []
        file = await self.files.get(TENANT, file_id)
        data = b"".join([piece async for piece in self.files.read(TENANT, file)])
        assert len(data) == file.num_bytes
        return [json.loads(line) for line in data.splitlines()]

    async def expire_input(self, record: BatchRecord) -> None:
        """Ends the time of a batch's input file."""
        file = await self.files.get(TENANT, record.input_file_id)
        file.expires_at = 1
        await self.state.transact((), file_writes(TENANT, file))
        await self.store.sweep()

    async def bytes_of(self, tenant: str) -> int:
        """Returns the counted bytes of a tenant."""
        (found,) = await self.state.values("bytes", [f"/{tenant}"])
        return int(found or 0)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def lines(count: int) -> bytes:
    found = [{"custom_id": f"{n}", "method": "POST", "url": CHAT, "body": {}} for n in range(count)]
    return b"".join(json.dumps(line).encode() + b"\n" for line in found)


@pytest.mark.parametrize("status", ["cancelled", "expired"])
async def test_lines_that_are_given_up_keep_within_the_bound(status: str) -> None:
    """The error file takes what fits, the record says how many lines are left out, and others can
    still upload.
    """
    gateway = _Gateway(MemoryState(), num_answered=10, max_bytes=100_000)
    gateway.runner.start()
    file = await gateway.files.put(TENANT, "l.jsonl", lines(1000), LIFETIME_S)
    for number in range(3):
        record = await gateway.create(file)
        await gateway.reach(record, 0 if number else 10)
        await gateway.stop(record, status)
        ended = await gateway.end(record)
        assert ended.status == status
        answered = await gateway.content(ended.output_file_id)
        errors = await gateway.content(ended.error_file_id)
        assert (len(answered), len(errors)) == (ended.completed, ended.failed)
        assert len(answered) == (0 if number else 10) and len(errors) < 990
        assert bool(errors) == (number == 0)
        assert all(each["error"]["code"] == f"batch_{status}" for each in errors)
        (fault,) = ended.faults
        assert fault.code == "storage_full"
        assert fault.message.startswith(f"{1000 - len(answered) - len(errors)} lines")
        assert await gateway.bytes_of(TENANT) <= 200_000
    assert await gateway.files.put("other", "l.jsonl", lines(100), LIFETIME_S)
    await gateway.runner.close()


async def test_a_tenant_with_all_its_bytes_leaves_room_for_uploads_of_others() -> None:
    gateway = _Gateway(MemoryState(), max_bytes=100_000)
    await gateway.state.transact((), bytes_writes(TENANT, 200_000))
    assert await gateway.files.put("other", "l.jsonl", bytes(90_000), LIFETIME_S)


async def test_a_batch_waits_while_the_files_of_all_tenants_are_full() -> None:
    """The batch does not fail, and goes on when there is room."""
    gateway = _Gateway(MemoryState(), num_answered=1000)
    record, other = [await gateway.send(lines(100), tenant) for tenant in (TENANT, "second")]
    await gateway.state.transact((), bytes_writes("others", 4 * MIB))
    gateway.runner.start()
    await gateway.reach(record, 0)
    for _ in range(20):
        await asyncio.sleep(0.01)
        assert (await gateway.store.get(TENANT, record.id)).status == "in_progress"
    assert gateway.caller.num_calls == 0
    await gateway.stop(record, "cancelled")
    cancelled = await gateway.end(record)
    assert (cancelled.status, cancelled.failed) == ("cancelled", 0)
    assert cancelled.faults[0].code == "storage_full"
    await gateway.state.transact((), bytes_writes("others", -MIB))
    ended = await gateway.end(other, "second")
    assert (ended.status, ended.completed) == ("completed", 100)
    await gateway.runner.close()


async def test_a_new_batch_of_a_full_tenant_runs_no_line() -> None:
    gateway = _Gateway(MemoryState(), num_answered=1000)
    record = await gateway.send(lines(100))
    await gateway.state.transact((), bytes_writes(TENANT, 2 * MIB))
    gateway.runner.start()
    ended = await gateway.end(record)
    assert (ended.status, ended.faults[0].code) == ("failed", "storage_full")
    assert gateway.caller.num_calls == 0
    await gateway.runner.close()


async def test_another_gateway_goes_on_giving_up_lines() -> None:
    """The first gateway is killed after it has stored a part of the errors."""
    state = MemoryState()
    frozen = _Freezing(state, 3)
    first, second = _Gateway(frozen, num_answered=5), _Gateway(state)
    first.runner.start()
    record = await first.send(lines(1000))
    await first.reach(record, 5)
    await second.store.cancel(TENANT, record.id)
    async with asyncio.timeout(PATIENCE_S):
        await frozen.is_frozen.wait()
    assert (await second.store.get(TENANT, record.id)).failed == 192
    await state.transact((), [("del", f"lease:{TENANT}/{record.id}")])
    second.runner.start()
    ended = await second.end(record)
    assert (ended.status, ended.faults) == ("cancelled", [])
    found = [await second.content(name) for name in (ended.output_file_id, ended.error_file_id)]
    assert [len(each) for each in found] == [5, 995]
    assert {line["custom_id"] for each in found for line in each} == {str(n) for n in range(1000)}
    assert second.caller.num_calls == 0
    await second.runner.close()


async def test_the_event_loop_has_turns_while_lines_are_given_up() -> None:
    gateway = _Gateway(MemoryState())
    gateway.runner.start()
    record = await gateway.send(lines(5000))
    await gateway.reach(record, 0)
    seen = [0]
    await gateway.stop(record, "cancelled")
    while (found := await gateway.store.get(TENANT, record.id)).is_open:
        seen.append(found.failed)
        await asyncio.sleep(0)
    assert found.failed == 5000
    seen.append(5000)
    assert max(after - before for before, after in pairwise(seen)) <= 128
    await gateway.runner.close()


async def test_a_batch_whose_input_expires_is_continued() -> None:
    """The file is there until the batch has ended, and clients see that it has expired."""
    state = MemoryState()
    first, second = _Gateway(state, num_answered=20), _Gateway(state, num_answered=1000)
    first.runner.start()
    record = await first.send(lines(100))
    await first.reach(record, 20)
    await first.runner.close()
    await second.expire_input(record)
    assert not await second.files.all(TENANT)
    second.runner.start()
    ended = await second.end(record)
    assert (ended.status, ended.completed) == ("completed", 100)
    await second.store.sweep()
    assert not [key for key in state._texts if key.startswith("piece:")]
    await second.runner.close()


async def test_expired_files_are_removed_behind_many_that_batches_read() -> None:
    gateway = _Gateway(MemoryState(), max_bytes=1 << 30)
    for number in range(130):
        record = await gateway.send(lines(1), f"tenant-{number % 2}")
        file = await gateway.files.get(f"tenant-{number % 2}", record.input_file_id)
        file.expires_at = 1
        await gateway.state.transact((), file_writes(f"tenant-{number % 2}", file))
    unused = await gateway.files.put(TENANT, "l.jsonl", lines(1), LIFETIME_S)
    unused.expires_at = 2
    await gateway.state.transact((), file_writes(TENANT, unused))
    await gateway.store.sweep()
    pieces = [key for key in gateway.state._texts if key.startswith("piece:")]
    assert len(pieces) == 130 and not [key for key in pieces if unused.id in key]


@pytest.mark.parametrize("status", ["cancelled", "expired"])
async def test_a_batch_whose_input_has_expired_gives_up_its_lines(status: str) -> None:
    gateway = _Gateway(MemoryState(), num_answered=20)
    gateway.runner.start()
    record = await gateway.send(lines(100))
    await gateway.reach(record, 20)
    await gateway.expire_input(record)
    await gateway.stop(record, status)
    ended = await gateway.end(record)
    assert (ended.status, ended.completed, ended.failed) == (status, 20, 80)
    await gateway.runner.close()


async def test_a_file_that_expires_before_its_batch_is_checked() -> None:
    gateway = _Gateway(MemoryState(), num_answered=20)
    record = await gateway.send(lines(10))
    await gateway.expire_input(record)
    gateway.runner.start()
    assert (await gateway.end(record)).status == "completed"
    await gateway.runner.close()


async def test_a_batch_that_is_cancelled_during_its_validation_runs_no_line() -> None:
    """Another gateway cancels it, and this one does not look again before the validation ends."""
    gateway = _Gateway(MemoryState(), num_answered=1 << 30, tick_s=PATIENCE_S)
    record = await gateway.send(lines(5000))
    gateway.runner.start()
    async with asyncio.timeout(PATIENCE_S):
        while not gateway.runner.names:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert (await gateway.store.get(TENANT, record.id)).status == "validating"
    await gateway.store.cancel(TENANT, record.id)
    ended = await gateway.end(record)
    assert (ended.status, ended.total, ended.completed) == ("cancelled", 0, 0)
    assert ended.output_file_id is None and gateway.caller.num_calls == 0
    await gateway.runner.close()


async def test_a_line_with_deep_nesting_is_named() -> None:
    gateway = _Gateway(MemoryState())
    gateway.runner.start()
    deep = b'{"custom_id":"deep","method":"POST","url":"%b","body":{"messages":%b%b}}' % (
        CHAT.encode(), b"[" * 5000, b"]" * 5000,
    )  # fmt: skip
    ended = await gateway.end(await gateway.send(lines(3) + deep))
    assert [(fault.code, fault.line) for fault in ended.faults] == [("invalid_json_line", 4)]
    await gateway.runner.close()


async def test_a_batch_that_redis_has_evicted_is_not_listed() -> None:
    gateway = _Gateway(MemoryState())
    ids = sorted([(await gateway.send(lines(3))).id for _ in range(4)], reverse=True)
    for evicted in ids[1:3]:
        await gateway.state.transact((), [("del", f"batch:{TENANT}/{evicted}")])
    bind_identity(_Keyring().of_tenant(TENANT))
    routes = BatchRoutes(gateway.runner, "generate")
    found: list[str] = []
    query = "limit=1"
    for has_more in (True, False):
        request = Request({"type": "http", "query_string": query.encode(), "headers": []})
        page = json.loads(bytes((await routes.batches(request)).body))
        found += [each["id"] for each in page["data"]]
        assert page["has_more"] == has_more
        query = f"limit=1&after={page['last_id']}"
    assert found == [ids[0], ids[3]]


@pytest.mark.parametrize(
    ("task", "endpoint"),
    [("rank", CHAT), ("token_embed", CHAT), ("token_embed", "/v1/embeddings"), ("embed", CHAT)],
)
def test_a_model_takes_no_batch_that_it_cannot_serve(task: Any, endpoint: str) -> None:
    with pytest.raises(InvalidRequest, match="endpoints of this model") as refused:
        BatchRoutes(None, task)._check(BatchRequest("file-1", endpoint, "24h"))
    assert refused.value.param == "endpoint"
