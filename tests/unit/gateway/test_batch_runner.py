"""The runner of batches with an endpoint of the test: turns of tenants at a limit, and batches that
end without running.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from services.common.errors import RateLimited
from services.gateway.batches.batch_files import LIFETIME_S, BatchFiles, new_id
from services.gateway.batches.batch_runner import BatchRunner, RunnerBounds
from services.gateway.batches.batch_store import BatchRecord, BatchStore
from services.gateway.batches.line_caller import LineAnswer
from services.gateway.batches.redis_state import RedisState
from services.gateway.batches.state import MemoryState, State
from services.gateway.metrics import GatewayMetrics
from services.gateway.tenancy.admission import Admission
from services.gateway.tenancy.leases import Leases
from services.gateway.tenancy.tenants import Identity, Limits, Tenant
from services.gateway.tenancy.usage import counting
from tests.noise import PATIENCE_S
from tests.redis_server import RedisServer

CHAT = "/v1/chat/completions"
QUICK = RunnerBounds(tick=0.01, retry=0.01, last_retry=0.05, lease=PATIENCE_S, max_lines=8)
TOKENS = 4000  # of each line


class Tenants:
    """Keys of all tenants. The tenant `limited` has 10,000 tokens a minute."""

    def of_tenant(self, name: str) -> Identity | None:
        if name == "unknown":
            return None
        limits = Limits(tokens_per_minute=10_000) if name == "limited" else Limits()
        return Identity(Tenant(name, limits, shares_caches=False))


class Decoders:
    """Decoders without load."""

    def loads(self) -> list[Any]:
        return []


class Service:
    """Service of one model.

    Args:
        model_name: name of the model.
        is_ready: whether a decoder is there.
    """

    def __init__(self, model_name: str, *, is_ready: bool = True) -> None:
        self.model_name = model_name
        self.decoders = Decoders()
        self._is_ready = is_ready

    def ready(self) -> bool:
        return self._is_ready


class Endpoint:
    """The endpoint of all lines. A line loads its image, and is charged then.

    Args:
        leases: leases of the tenants' limits.

    Attributes:
        blocked: tenants whose lines wait.
        answered: custom ids of the lines that were answered.
        num_refused: number of lines that were refused.
    """

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self.blocked: set[str] = set()
        self.answered: list[tuple[str, str]] = []
        self.num_refused = 0

    async def call(self, identity: Identity, path: str, body: bytes, request_id: str) -> LineAnswer:
        tenant = replace(identity.tenant, is_background=True)
        while tenant.name in self.blocked:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        try:
            async with counting(self._leases, tenant) as usage:
                await asyncio.sleep(0.002)
                await usage.charge(TOKENS, 1, 0)
        except RateLimited as error:
            self.num_refused += 1
            return LineAnswer(429, b"{}", error)
        self.answered.append((tenant.name, json.loads(body)["name"]))
        return LineAnswer(200, b"{}")


class Gateways(AsyncExitStack):
    """Gateways with one state. `start` makes another one."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self.leases = Leases()
        self.endpoint = Endpoint(self.leases)
        self._state = state
        self.store = self._new_store()
        self.push_async_callback(self.store.close)

    def _new_store(self) -> BatchStore:
        return BatchStore(self._state, BatchFiles(self._state, 1 << 20), QUICK.lease)

    def start(self, model: str = "m", *, is_ready: bool = True) -> BatchRunner:
        made: tuple[Any, ...] = (
            self._new_store(), self.endpoint, Tenants(), Service(model, is_ready=is_ready),
            Admission(100), self.leases, GatewayMetrics(), QUICK,
        )  # fmt: skip
        runner = BatchRunner(*made)
        runner.start()
        self.push_async_callback(runner.close)
        return runner

    async def send(self, tenant: str, num_lines: int, window_s: int = 3600) -> str:
        """Creates a batch, and returns its name."""
        lines = b"".join(
            json.dumps(
                {"custom_id": f"{n}", "method": "POST", "url": CHAT, "body": {"name": f"{n}"}}
            ).encode()
            + b"\n"
            for n in range(num_lines)
        )
        file = await self.store.files.put(tenant, "lines.jsonl", lines, LIFETIME_S)
        now = int(time.time())
        record = BatchRecord(
            new_id("batch_"), CHAT, "m", file.id, "1h", "", None, now, now + window_s
        )
        await self.store.create(tenant, record)
        return record.id

    async def end_of(self, tenant: str, batch_id: str) -> BatchRecord:
        async def has_ended() -> bool:
            return not (await self.store.get(tenant, batch_id)).is_open

        await until(has_ended)
        return await self.store.get(tenant, batch_id)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.fixture(params=["memory", "redis"])
async def gateways(
    request: pytest.FixtureRequest, redis_server: RedisServer
) -> AsyncIterator[Gateways]:
    state = MemoryState() if request.param == "memory" else RedisState(redis_server.url)
    async with Gateways(state) as made:
        yield made


async def test_a_tenant_at_its_limit_leaves_the_turns_to_others() -> None:
    """Its refused lines wait for the next minute without a turn, and half of its limit is free."""
    async with Gateways(MemoryState()) as gateways:
        runner, endpoint = gateways.start(), gateways.endpoint
        limited = await gateways.send("limited", 100)

        async def is_refused() -> bool:
            return endpoint.num_refused > 2 * QUICK.max_lines

        await until(is_refused)
        free = await gateways.send("free", 100)
        assert (await gateways.end_of("free", free)).completed == 100
        assert (await gateways.store.get("limited", limited)).completed == 1
        (running,) = runner._running
        assert len(running.lines) <= QUICK.max_lines
        # Only one of its lines tries again at a time.
        assert running.turns.limit == 1
        identity = Tenants().of_tenant("limited")
        assert identity is not None
        async with counting(gateways.leases, identity.tenant) as usage:
            await usage.charge(TOKENS + 1000, 1, 0)


async def test_a_tenant_whose_lines_were_refused_is_answered_later() -> None:
    async with Gateways(MemoryState()) as gateways:
        gateways.start()
        limited = await gateways.send("limited", 20)

        async def is_refused() -> bool:
            return gateways.endpoint.num_refused > 2 * QUICK.max_lines

        await until(is_refused)
        quota = gateways.leases.quota(Tenant("limited", Limits(), shares_caches=False))

        async def has_ended() -> bool:
            quota.tokens.__init__(time.monotonic, 0.001)  # The minute is over.
            return not (await gateways.store.get("limited", limited)).is_open

        await until(has_ended)
        assert sorted(name for _, name in gateways.endpoint.answered) == sorted(map(str, range(20)))
        assert (await gateways.store.get("limited", limited)).completed == 20


@pytest.mark.parametrize("where", ["same gateway", "another gateway", "without decoders"])
async def test_a_queued_batch_ends_while_the_first_one_runs(gateways: Gateways, where: str) -> None:
    """It is cancelled, or its completion window ends."""
    gateways.endpoint.blocked = {"t"}
    gateways.start()
    first = await gateways.send("t", 30)

    async def runs() -> bool:
        return (await gateways.store.get("t", first)).status == "in_progress"

    await until(runs)
    if where != "same gateway":
        gateways.start(is_ready=where != "without decoders")
    cancelled, expired = await gateways.send("t", 3), await gateways.send("t", 3, window_s=0)
    await gateways.store.cancel("t", cancelled)
    assert (await gateways.end_of("t", cancelled)).status == "cancelled"
    record = await gateways.end_of("t", expired)
    assert (record.status, record.failed) == ("expired", 3)
    assert await gateways.store._state.members("active:t") == [first]
    assert await runs()
    gateways.endpoint.blocked.clear()
    assert (await gateways.end_of("t", first)).completed == 30
    assert sorted(gateways.endpoint.answered) == sorted(("t", str(n)) for n in range(30))
    assert await gateways.store._state.members("stops") == []


async def test_many_batches_that_run_do_not_keep_one_from_its_end(gateways: Gateways) -> None:
    runner = gateways.start()
    tenants = {f"t{number}" for number in range(16)}
    gateways.endpoint.blocked = tenants
    for tenant in tenants:
        await gateways.send(tenant, 1)

    async def all_run() -> bool:
        return len(runner.names) == len(tenants)

    await until(all_run)
    late = await gateways.send("late", 3, window_s=0)
    assert (await gateways.end_of("late", late)).status == "expired"
    assert await all_run()


@pytest.mark.parametrize("tenant", ["t", "unknown"])
async def test_a_batch_of_a_model_that_nobody_serves_ends(gateways: Gateways, tenant: str) -> None:
    """Its own gateways may be the only ones with the keys of its tenant."""
    gateways.start("other")
    waiting = await gateways.send(tenant, 3)
    cancelled, expired = await gateways.send(tenant, 3), await gateways.send(tenant, 3, window_s=0)
    await gateways.store.cancel(tenant, cancelled)
    assert (await gateways.end_of(tenant, cancelled)).status == "cancelled"
    assert (await gateways.end_of(tenant, expired)).status == "expired"
    assert (await gateways.store.get(tenant, waiting)).status == "validating"
    assert not gateways.endpoint.answered


async def test_a_gateway_that_dies_while_it_ends_a_batch_costs_nothing(gateways: Gateways) -> None:
    """The lease of a batch that it was about to end is given to another gateway later."""
    batch = await gateways.send("t", 3, window_s=0)
    lease = await gateways.store.claim_stopped()
    assert lease is not None and await gateways.store.claim_stopped() is None
    await gateways.store.start(lease, 3)
    await gateways.store.add(lease, "errors", [(0, b'{"custom_id": "0"}\n')])
    gateways.start()
    await gateways.store._state.transact((), [("del", f"lease:t/{batch}")])  # Its time is over.
    record = await gateways.end_of("t", batch)
    assert (record.status, record.failed) == ("expired", 3)


async def test_a_batch_that_has_ended_is_not_claimed(gateways: Gateways) -> None:
    """Another gateway ends it between the look at the list and the claim."""
    await gateways.send("t", 1, window_s=0)
    store = gateways.store
    name = (await store._state.members("open:m"))[0]
    lease = await store.claim_stopped()
    assert lease is not None
    await store.end(lease, "expired", "expired_at")
    assert await store._claim(name, "open:m") is None
    assert await store._claim(name, "stops", is_stopped=True) is None
    assert await store._state.get(f"lease:{name}") is None


@pytest.mark.parametrize("window_s", [3600, 0])
async def test_an_evicted_batch_leaves_all_lists(gateways: Gateways, window_s: int) -> None:
    batch = await gateways.send("t", 1, window_s)
    store = gateways.store
    await store._state.transact((), [("del", f"batch:t/{batch}")])
    assert await store.claim("m", ()) is None
    assert await store.claim_stopped() is None
    for listed in ("batches:t", "active:t", "open:m", "stops"):
        assert await store._state.members(listed) == []
