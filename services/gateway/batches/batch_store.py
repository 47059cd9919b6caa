"""The batches of all tenants: their records, their results, and the leases of the gateways that run
them.

A gateway runs a batch while it has the batch's lease, which it renews all the time. If the gateway
ends, the lease ends some seconds later, and another gateway continues behind the results that are
stored. Each result is stored only while the lease is held, and only once for each line.
"""

import os
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from services.common.errors import InvalidRequest, NotFound, RateLimited
from services.gateway.batches.batch_files import (
    ENDS,
    LIFETIME_S,
    BatchFiles,
    FileRecord,
    bytes_writes,
    file_writes,
    new_id,
)
from services.gateway.batches.state import Check, State, Write

# Most batches of a tenant that have not ended, and most batches of a tenant that are stored.
MAX_OPEN, MAX_STORED = 100, 1000
OPEN_STATUSES = frozenset(("validating", "in_progress", "finalizing", "cancelling"))
OUTPUT, ERRORS = "output", "errors"
_NUM_WRITES = 128  # of a transaction
_COUNTS = ("completed", "failed", "output_bytes", "errors_bytes", "claims")
# Sorted set of the batches of all models that have not ended, by the Unix time at which they have
# to stop: the end of the completion window, or 0 for a batch that was cancelled.
_STOPS = "stops"


class LineError(Struct):
    """The reason why a batch has failed, with the number of the line if there is one."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchRecord(Struct, omit_defaults=True):
    """A batch, as it is stored.

    Attributes:
        id: name of the batch.
        endpoint: path to which all its lines are sent.
        model: first name of the model of the gateways that may run it.
        input_file_id: name of the file with its lines.
        window: `completion_window` of the request, such as `24h`.
        key_id: public name of the API key that has created it.
        metadata: the client's own fields.
        created_at: Unix time at which it was created, in seconds; the other times alike.
        expires_at: Unix time at which lines that have not ended are given up.
        status: its state in OpenAI's words.
        total: number of its lines. 0 until they are checked.
        times: Unix time of each state that it has reached, by the name of the field in the API.
        output_file_id: name of the file with the answers. None if there is none.
        error_file_id: name of the file with the failed lines. None if there is none.
        faults: reasons why it has failed.
        completed: number of answered lines, once it has ended; see `counts`.
        failed: number of failed lines, once it has ended.
        results_s: seconds for which the files of its results are stored.
    """

    id: str
    endpoint: str
    model: str
    input_file_id: str
    window: str
    key_id: str
    metadata: dict[str, str] | None
    created_at: int
    expires_at: int
    status: str = "validating"
    total: int = 0
    times: dict[str, int] = {}
    output_file_id: str | None = None
    error_file_id: str | None = None
    faults: list[LineError] = []
    completed: int = 0
    failed: int = 0
    results_s: int = LIFETIME_S

    @property
    def is_open(self) -> bool:
        """True until the batch has ended."""
        return self.status in OPEN_STATUSES

    @property
    def reason_to_stop(self) -> str:
        """The reason to stop an open batch: `cancelled` or `expired`. Empty if there is none."""
        if self.status == "cancelling":
            return "cancelled"
        return "expired" if time.time() >= self.expires_at else ""


_decoder = msgspec.json.Decoder(BatchRecord)


@dataclass(slots=True)
class Lease:
    """A batch that this gateway runs.

    Attributes:
        tenant: name of the batch's tenant.
        batch_id: name of the batch.
        token: value of the lease, which no other gateway has.
    """

    tenant: str
    batch_id: str
    token: bytes

    @property
    def name(self) -> str:
        return f"{self.tenant}/{self.batch_id}"

    @property
    def check(self) -> Check:
        """The condition that the lease is still held."""
        return Check(f"lease:{self.name}", self.token)

    @property
    def free(self) -> Check:
        """The condition that no gateway has a lease on the batch."""
        return Check(f"lease:{self.name}", None)


class LeaseLost(Exception):
    """Another gateway runs the batch now."""


class BatchStore:
    """The batches of all tenants.

    Args:
        state: state of the batches.
        files: files of the batches.
        lease_s: seconds after which the batches of a gateway that has ended are run by others.
    """

    def __init__(self, state: State, files: BatchFiles, lease_s: float) -> None:
        self._state = state
        self.files = files
        self._lease_ms = round(lease_s * 1e3)

    async def create(self, tenant: str, record: BatchRecord) -> None:
        """Stores a new batch, which a gateway then runs.

        Raises:
            RateLimited: the tenant has too many batches that have not ended.
        """
        open_names = set(await self._state.members(f"active:{tenant}"))
        if len(open_names) >= MAX_OPEN:
            raise RateLimited(
                f"{MAX_OPEN} batches have not ended, and no more may wait: cancel some, or wait",
                retry_after_s=60,
            )
        ended = [name for name in await self.names(tenant) if name not in open_names]
        for old in ended[: max(0, len(ended) - MAX_STORED + 1)]:
            await self.expire(tenant, old)
        name = f"{tenant}/{record.id}"
        await self._state.transact(
            (),
            [
                ("set", f"batch:{name}", msgspec.json.encode(record)),
                ("zadd", f"batches:{tenant}", record.created_at, record.id),
                ("zadd", f"active:{tenant}", record.created_at, record.id),
                ("zadd", f"open:{record.model}", record.created_at, name),
                ("zadd", _STOPS, record.expires_at, name),
            ],
        )

    async def get(self, tenant: str, batch_id: str) -> BatchRecord:
        """Returns a tenant's batch, with the counts of its lines.

        Raises:
            NotFound: the tenant has no such batch.
        """
        found = await self._find(tenant, batch_id)
        if found is None:
            raise NotFound(f"No such Batch object: {batch_id[:100]}", param="id")
        record = found[0]
        if record.is_open:
            counts = await self.counts(f"{tenant}/{batch_id}")
            record.completed, record.failed = counts["completed"], counts["failed"]
        return record

    async def names(self, tenant: str) -> list[str]:
        """Returns the names of a tenant's batches, the oldest first."""
        return await self._state.members(f"batches:{tenant}")

    async def uses(self, tenant: str, file_id: str) -> str | None:
        """Returns the name of an open batch that reads a file. None if there is none."""
        return (await self._inputs(tenant)).get(file_id)

    async def counts(self, name: str) -> dict[str, int]:
        """Returns the counts of a batch that has not ended: numbers of lines and of bytes."""
        found = await self._state.values(f"counts:{name}", _COUNTS)
        return {key: int(value or 0) for key, value in zip(_COUNTS, found, strict=True)}

    async def cancel(self, tenant: str, batch_id: str) -> BatchRecord:
        """Begins to cancel a batch. The gateway that has its lease, or any gateway, ends the batch.

        Raises:
            NotFound: the tenant has no such batch.
            InvalidRequest: the batch has ended.
        """
        while True:
            record = await self.get(tenant, batch_id)
            if not record.is_open:
                raise InvalidRequest(f"Cannot cancel a batch with status '{record.status}'.")
            if record.status == "cancelling":
                return record
            if await self._change(tenant, batch_id, status="cancelling", at="cancelling_at"):
                return await self.get(tenant, batch_id)

    async def claim(self, model: str, busy: Collection[str]) -> Lease | None:
        """Takes the lease of the oldest batch that no gateway runs. None if there is none.

        Args:
            model: name of this gateway's model.
            busy: tenants of which this gateway runs a batch.
        """
        for name in await self._state.members(f"open:{model}"):
            tenant = name.rpartition("/")[0]
            if tenant not in busy and (lease := await self._claim(name, f"open:{model}")):
                return lease
        return None

    async def claim_stopped(self) -> Lease | None:
        """Takes the lease of a batch that has a reason to stop and that no gateway runs.

        The batch may be of any model, because no gateway of its model may be left, and of any
        tenant, because other batches of the tenant may run for days.

        Returns:
            The lease. None if there is no such batch.
        """
        for name in await self._state.members(_STOPS, time.time()):
            if lease := await self._claim(name, _STOPS, is_stopped=True):
                return lease
        return None

    async def _claim(self, name: str, listed: str, *, is_stopped: bool = False) -> Lease | None:
        """Takes the lease of a batch. Returns None if a gateway has it.

        Args:
            name: names of the tenant and of the batch.
            listed: key of the sorted set that lists the batch.
            is_stopped: true to take the lease only if the batch has a reason to stop.
        """
        if await self._state.get(f"lease:{name}") is not None:
            return None
        tenant, _, batch_id = name.rpartition("/")
        found = await self._find(tenant, batch_id)
        if found is None:  # Redis has evicted the record.
            writes: list[Write] = [
                ("zrem", listed, name),
                ("zrem", _STOPS, name),
                ("zrem", f"active:{tenant}", batch_id),
                ("zrem", f"batches:{tenant}", batch_id),
                ("del", f"counts:{name}"),
            ]
            await self._state.transact([Check(f"batch:{name}", None)], writes)
            return None
        record, data = found
        if is_stopped and not record.reason_to_stop:
            return None
        lease = Lease(tenant, batch_id, os.urandom(16))
        # The gateway that had the lease may have ended the batch since the list was read. A batch
        # that has ended is left alone: to end it twice would lose its results.
        is_taken = record.is_open and await self._state.transact(
            [lease.free, Check(f"batch:{name}", data)],
            [self._renewal(lease), ("hincrby", f"counts:{name}", "claims", 1)],
        )
        return lease if is_taken else None

    async def renew(self, lease: Lease) -> BatchRecord:
        """Extends a lease, and returns the batch.

        Raises:
            LeaseLost: another gateway runs the batch.
        """
        await self._hold(lease, [self._renewal(lease)])
        found = await self._find(lease.tenant, lease.batch_id)
        if found is None:
            raise LeaseLost
        return found[0]

    async def release(self, lease: Lease) -> None:
        """Gives up a lease, so that another gateway continues at once."""
        with suppress(LeaseLost):
            await self._hold(
                lease,
                [("del", lease.check.key), ("hincrby", f"counts:{lease.name}", "claims", -1)],
            )

    async def start(self, lease: Lease, total: int) -> BatchRecord:
        """Notes that all lines of a batch are valid, and how many there are."""
        while True:
            record = await self.renew(lease)
            if record.status != "validating":
                return record
            await self._change(
                lease.tenant, lease.batch_id, lease, status="in_progress", at="in_progress_at",
                total=total,
            )  # fmt: skip

    async def done(self, lease: Lease) -> set[int]:
        """Returns the indices of the lines that have a result."""
        found = [await self._state.fields(f"{kind}:{lease.name}") for kind in (OUTPUT, ERRORS)]
        return {int(index) for indices in found for index in indices}

    async def add(self, lease: Lease, kind: str, results: Sequence[tuple[int, bytes]]) -> None:
        """Stores results of lines, unless the lines have results already.

        Args:
            kind: `OUTPUT` for answers, `ERRORS` for failures.
            results: index and result of each line.

        Raises:
            LeaseLost: another gateway runs the batch.
        """
        for first in range(0, len(results), _NUM_WRITES):
            some = results[first : first + _NUM_WRITES]
            checks = [Check(f"{each}:{lease.name}", None, str(index)) for index, _ in some
                      for each in (OUTPUT, ERRORS)]  # fmt: skip
            counts, num_bytes = f"counts:{lease.name}", sum(len(line) for _, line in some)
            writes: list[Write] = [
                ("hset", f"{kind}:{lease.name}", str(index), line) for index, line in some
            ]
            count = "completed" if kind == OUTPUT else "failed"
            writes += [
                ("hincrby", counts, count, len(some)),
                ("hincrby", counts, f"{kind}_bytes", num_bytes),
                ("hset", counts, "claims", "1"),
                *bytes_writes(lease.tenant, num_bytes),
            ]
            if await self._state.transact([lease.check, *checks], writes):
                continue
            # A reply of Redis may have been lost, and the results may be stored already.
            if await self._state.get(lease.check.key) != lease.token:
                raise LeaseLost
            if len(some) > 1:
                for each in some:
                    await self.add(lease, kind, [each])

    async def end(
        self, lease: Lease, status: str, at: str, faults: Sequence[LineError] = ()
    ) -> None:
        """Ends a batch: makes the files of its results, and gives up the lease.

        Raises:
            LeaseLost: another gateway runs the batch.
        """
        name, tenant, now = lease.name, lease.tenant, int(time.time())
        while True:
            found = await self._find(tenant, lease.batch_id)
            if found is None:
                raise LeaseLost
            record, data = found
            counts = await self.counts(name)
            record.status, record.faults = status, list(faults)
            record.completed, record.failed = counts["completed"], counts["failed"]
            record.times = {"finalizing_at": now, **record.times, at: now}
            writes: list[Write] = []
            for kind, num in ((OUTPUT, record.completed), (ERRORS, record.failed)):
                if not num:
                    continue
                file = FileRecord(
                    new_id("file-"), counts[f"{kind}_bytes"], now, now + record.results_s,
                    f"{record.id}_{kind}.jsonl", "batch_output", results=f"{kind}:{name}",
                    num_lines=record.total,
                )  # fmt: skip
                writes += file_writes(tenant, file)
                if kind == OUTPUT:
                    record.output_file_id = file.id
                else:
                    record.error_file_id = file.id
            writes += [
                ("set", f"batch:{name}", msgspec.json.encode(record)),
                ("zrem", f"open:{record.model}", name),
                ("zrem", f"active:{tenant}", record.id),
                ("zrem", _STOPS, name),
                ("zadd", ENDS, now + LIFETIME_S, f"batch:{name}"),
                ("del", f"counts:{name}"),
                ("del", lease.check.key),
            ]
            if await self._state.transact([lease.check, Check(f"batch:{name}", data)], writes):
                return
            await self._hold(lease, [])

    async def expire(self, tenant: str, batch_id: str) -> None:
        """Removes the record of a batch that has ended. The files of its results remain."""
        name = f"{tenant}/{batch_id}"
        await self._state.transact(
            (),
            [
                ("del", f"batch:{name}"),
                ("zrem", f"batches:{tenant}", batch_id),
                ("zrem", ENDS, f"batch:{name}"),
            ],
        )

    async def sweep(self) -> None:
        """Removes some of the files and batches whose time is over."""
        inputs: dict[str, dict[str, str]] = {}  # by tenant
        num_removed = 0
        for end in await self._state.members(ENDS, time.time()):
            kind, _, name = end.partition(":")
            tenant, _, name = name.rpartition("/")
            if kind == "batch":
                await self.expire(tenant, name)
            else:
                # No new batch can read a file whose time is over: one look at a tenant suffices.
                if tenant not in inputs:
                    inputs[tenant] = await self._inputs(tenant)
                if name in inputs[tenant]:
                    continue
                await self.files.expire(tenant, name)
                await self._state.transact((), [("zrem", ENDS, end)])
            num_removed += 1
            if num_removed == _NUM_WRITES:
                return

    async def close(self) -> None:
        """Closes the connections of the state."""
        await self._state.close()

    async def _inputs(self, tenant: str) -> dict[str, str]:
        """Returns the files that a tenant's open batches read, each with the name of a batch."""
        found: dict[str, str] = {}
        for name in await self._state.members(f"active:{tenant}"):
            if (batch := await self._find(tenant, name)) is not None:
                found.setdefault(batch[0].input_file_id, name)
        return found

    def _renewal(self, lease: Lease) -> Write:
        return ("set", lease.check.key, lease.token, self._lease_ms)

    async def _hold(self, lease: Lease, writes: Sequence[Write]) -> None:
        if not await self._state.transact([lease.check], writes):
            raise LeaseLost

    async def _find(self, tenant: str, batch_id: str) -> tuple[BatchRecord, bytes] | None:
        data = await self._state.get(f"batch:{tenant}/{batch_id}")
        return None if data is None else (_decoder.decode(data), data)

    async def _change(
        self,
        tenant: str,
        batch_id: str,
        lease: Lease | None = None,
        *,
        status: str,
        at: str,
        total: int | None = None,
    ) -> bool:
        """Changes the state of a batch. Returns False, and changes nothing, if another gateway has
        changed the batch meanwhile.
        """
        found = await self._find(tenant, batch_id)
        if found is None:
            return False
        record, data = found
        record.status, record.times = status, {**record.times, at: int(time.time())}
        record.total = record.total if total is None else total
        checks = [Check(f"batch:{tenant}/{batch_id}", data)]
        if lease is not None:
            checks.append(lease.check)
        name = f"{tenant}/{batch_id}"
        writes: list[Write] = [("set", f"batch:{name}", msgspec.json.encode(record))]
        if status == "cancelling":
            writes.append(("zadd", _STOPS, 0, name))
        return await self._state.transact(checks, writes)


async def check_input(files: BatchFiles, tenant: str, file_id: str) -> FileRecord:
    """Returns the file that a new batch names.

    Raises:
        InvalidRequest: the tenant has no such file, or the file has results of a batch.
    """
    try:
        record = await files.get(tenant, file_id)
    except NotFound as error:
        raise InvalidRequest(error.message, param="input_file_id") from None
    if record.purpose != "batch":
        raise InvalidRequest(
            "the file was not uploaded with purpose 'batch'", param="input_file_id"
        )
    return record
