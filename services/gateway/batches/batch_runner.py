"""Runs the batches of which this gateway has the leases.

Any gateway of the model runs any batch, one of each tenant at a time. A batch whose gateway ends or
drains is continued by another gateway, behind the results that are stored. A line whose call fails
because the server is busy or its tenant is at a limit is tried again until the batch expires.
"""

import asyncio
import logging
import random
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field, replace

from services.common.errors import (
    AdapterUnavailable,
    DeadlineExceeded,
    NotFound,
    Overloaded,
    RateLimited,
    TriptychError,
    Unavailable,
)
from services.gateway.batches.batch_lines import (
    check_lines,
    lines_of,
    parse_line,
    result_of,
    result_without_answer,
)
from services.gateway.batches.batch_store import (
    ERRORS,
    OUTPUT,
    BatchRecord,
    BatchStore,
    Lease,
    LeaseLost,
    LineError,
)
from services.gateway.batches.line_caller import LineCaller
from services.gateway.batches.line_turns import BatchTurns, LineTurn, LineTurns
from services.gateway.metrics import GatewayMetrics
from services.gateway.request.chat import ChatService
from services.gateway.tenancy.admission import Admission
from services.gateway.tenancy.leases import Leases
from services.gateway.tenancy.tenants import Identity, Keyring

log = logging.getLogger(__name__)

_MAX_BATCHES = 16
_MAX_STOPPED = 4  # batches with a reason to stop that are claimed at a time, beyond those above
# Calls of a line that may fail because of lost services or the deadline. Two decoders may end in
# each of them.
_MAX_FAILURES = 3
# Gateways that may end, one after the other, while they run a batch and before a line of it ends.
_MAX_CLAIMS = 8
_ERRORS_AT_ONCE = 64  # errors of lines that are given up, stored in one transaction
# Errors of calls that were refused for a reason that passes. An `AdapterUnavailable` becomes a
# `ModelNotFound` if no decoder comes back with the adapter in time.
_HARMLESS = (Overloaded, RateLimited, AdapterUnavailable)
_STORE_TRIES = 8  # times that a result is sent to the state, some seconds apart
_GIVEN_UP = {
    "expired": ("batch_expired", "the batch's completion window was over before the line ran"),
    "cancelled": ("batch_cancelled", "the batch was cancelled before the line ran"),
}


@dataclass(frozen=True, slots=True)
class RunnerBounds:
    """Periods of the runner in seconds, and its bound.

    Attributes:
        tick: between two looks at new batches, leases and loads.
        sweep: between two removals of what has expired.
        retry: before the first retry of a line. It doubles up to `last_retry`.
        last_retry: before later retries.
        lease: after which the batches of a gateway that has ended are run by others.
        max_lines: most lines that a gateway runs at a time. A batch has at most as many lines that
            run or wait for a retry.
    """

    tick: float = 0.5
    sweep: float = 60.0
    retry: float = 0.5
    last_retry: float = 15.0
    lease: float = 15.0
    max_lines: int = 128


@dataclass(eq=False, slots=True)
class _Running:
    """A batch that this gateway runs.

    Attributes:
        record: the batch, as it was at the last renewal.
        turns: turns of its lines.
        stop: reason to stop: `cancelled`, `expired`, `full`, `no key`, `lost` or `draining`. Empty
            if none.
        is_waiting: true while no further line begins because the files of all tenants together
            take all bytes that they may take.
    """

    lease: Lease
    record: BatchRecord
    turns: BatchTurns
    stop: str = ""
    is_waiting: bool = False
    lines: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])
    task: asyncio.Task[None] | None = None


class _Stopped(Exception):
    """The batch has a reason to stop."""


class BatchRunner:
    """The batches that this gateway runs.

    Args:
        store: batches of all tenants.
        caller: caller of the gateway's endpoints.
        keyring: API keys, which say whether a tenant may still generate, and its limits.
        service: service that answers requests, with its clients of decoders.
        admission: owner of the admission slots, which says whether the gateway drains.
        leases: leases of the tenants' limits.
        metrics: metrics of the gateway.
        bounds: periods of the runner, and its bound.

    Attributes:
        store: batches of all tenants.
    """

    def __init__(
        self,
        store: BatchStore,
        caller: LineCaller,
        keyring: Keyring,
        service: ChatService,
        admission: Admission,
        leases: Leases,
        metrics: GatewayMetrics,
        bounds: RunnerBounds,
    ) -> None:
        self.store = store
        self._caller = caller
        self._keyring = keyring
        self._service = service
        self._admission = admission
        self._leases = leases
        self._metrics = metrics
        self._turns = LineTurns(bounds.max_lines)
        self._bounds = bounds
        self._running: list[_Running] = []
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._swept_at = time.monotonic()
        metrics.batch_lines_running.set_function(lambda: self._turns.num_running)

    @property
    def names(self) -> Collection[str]:
        """Names of the batches that this gateway runs."""
        return [running.record.id for running in self._running]

    def start(self) -> None:
        """Starts to look for batches. Waits for nothing."""
        self._closing = False
        self._task = asyncio.create_task(self._look())

    async def close(self) -> None:
        """Stops all batches. Other gateways can continue them at once."""
        # The task is not cancelled: some libraries lose a cancellation that comes with a reply.
        self._closing = True
        self.wake()
        if self._task is not None:
            await asyncio.wait({self._task})
        await self._stop_all("draining")
        await self.store.close()

    def wake(self) -> None:
        """Looks for batches now, because there is a new one or one was cancelled."""
        self._wake.set()

    async def _look(self) -> None:
        while not self._closing:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._bounds.tick):
                    await self._wake.wait()
            self._wake.clear()
            try:
                if self._admission.draining:
                    await self._stop_all("draining")
                    continue
                loads = self._service.decoders.loads()
                self._turns.adapt(
                    sum(load.num_waiting for load in loads),
                    sum(load.num_running for load in loads),
                )
                await self._renew()
                await self._claim()
                if time.monotonic() - self._swept_at > self._bounds.sweep:
                    self._swept_at = time.monotonic()
                    await self.store.sweep()
            except TriptychError as error:
                error.without_frames()  # The state has said why in the log.
            except Exception:
                log.exception("looking for batches failed")

    async def _renew(self) -> None:
        for running in list(self._running):
            try:
                running.record = await self.store.renew(running.lease)
            except LeaseLost:
                self._stop(running, "lost")
                continue
            await self._decide(running)

    async def _claim(self) -> None:
        # To end a batch needs no decoder, and must not wait for other batches of its tenant.
        while sum(bool(running.stop) for running in self._running) < _MAX_STOPPED:
            lease = await self.store.claim_stopped()
            if lease is None:
                break
            await self._begin(lease)
        if not self._service.ready():
            return
        while len(self._running) < _MAX_BATCHES:
            busy = {running.lease.tenant for running in self._running}
            lease = await self.store.claim(self._service.model_name, busy)
            if lease is None:
                return
            await self._begin(lease)

    async def _begin(self, lease: Lease) -> None:
        with suppress(LeaseLost):
            running = _Running(lease, await self.store.renew(lease), self._turns.of_batch())
            # Otherwise each new batch of a tenant without room would run lines until the next look.
            await self._decide(running)
            self._running.append(running)
            running.task = asyncio.create_task(self._run(running))

    async def _decide(self, running: _Running) -> None:
        """Decides by the record of a batch and by the stored bytes whether the batch stops or
        waits.

        A batch fails if its own tenant's files take too many bytes. If those of all tenants do, it
        waits: others can be the cause, and files are deleted and expire.
        """
        if reason := running.record.reason_to_stop:
            self._stop(running, reason)
            return
        own, shared = await self.store.files.room_for_results(running.lease.tenant)
        if own <= 0:
            self._stop(running, "full")
        elif shared <= 0 and not running.is_waiting:
            log.warning("batch %s waits: all tenants' files are full", running.record.id)
        running.is_waiting = shared <= 0

    def _stop(self, running: _Running, reason: str) -> None:
        running.stop = running.stop or reason
        for line in running.lines:
            line.cancel()

    async def _stop_all(self, reason: str) -> None:
        for running in self._running:
            self._stop(running, reason)
        tasks = [running.task for running in self._running if running.task is not None]
        if tasks:
            await asyncio.wait(tasks)

    async def _run(self, running: _Running) -> None:
        """Runs a batch until its end, or until this gateway has to stop."""
        lease, record = running.lease, running.record
        try:
            faults = await self._check(running)
            if not faults and not running.stop:
                with suppress(_Stopped):
                    await self._run_lines(running)
            while running.lines:
                await asyncio.wait(running.lines)
            match running.stop:
                case "draining":
                    await self.store.release(lease)
                case "lost":
                    log.info("another gateway runs batch %s", record.id)
                case _:
                    await self._end(running, faults)
        except LeaseLost:
            log.info("another gateway runs batch %s", record.id)
        except NotFound as error:  # Redis has evicted it, or somebody else has removed it.
            with suppress(TriptychError, LeaseLost):
                fault = LineError("file_lost", error.message, "input_file_id")
                await self.store.end(lease, "failed", "failed_at", [fault])
        except TriptychError as error:
            log.warning("batch %s is continued later: %s", record.id, error.message)
            with suppress(TriptychError):
                await self.store.release(lease)
        except Exception:
            log.exception("batch %s failed", record.id)
            with suppress(TriptychError, LeaseLost):
                await self._end(running, [LineError("internal_error", "internal error")])
        finally:
            self._running.remove(running)
            self.wake()

    async def _check(self, running: _Running) -> list[LineError]:
        """Returns why a batch fails before a line of it runs. Empty if its lines can run."""
        lease, record = running.lease, running.record
        # A gateway of another model, which ends the batch, may not know the tenant.
        if not running.stop and self._keyring.of_tenant(lease.tenant) is None:
            return [LineError("no_api_key", "the tenant has no valid API key any more")]
        if (await self.store.counts(lease.name))["claims"] > _MAX_CLAIMS:
            message = f"{_MAX_CLAIMS} gateways ended while they ran a line of the batch"
            return [LineError("gateways_lost", message)]
        if record.status != "validating":
            return []
        try:
            file = await self.store.files.input(lease.tenant, record.input_file_id)
            lines = lines_of(self.store.files.read(lease.tenant, file))
            total, faults = await check_lines(lines, record.endpoint)
        except TriptychError as error:
            if isinstance(error, Unavailable):
                raise
            return [LineError("invalid_file", error.message, "input_file_id")]
        if not faults:
            running.record = await self.store.start(lease, total)
            # Another gateway may have cancelled the batch meanwhile. Its record then has no number
            # of lines, without which their results cannot be read.
            running.stop = running.stop or running.record.reason_to_stop
        return faults

    async def _run_lines(self, running: _Running) -> None:
        """Runs the lines that have no result.

        Raises:
            _Stopped: the batch has a reason to stop. Lines may still run.
        """
        lease = running.lease
        done = await self.store.done(lease)
        file = await self.store.files.input(lease.tenant, running.record.input_file_id)
        index = -1
        async for line in lines_of(self.store.files.read(lease.tenant, file)):
            index += 1
            if index in done:
                continue
            while len(running.lines) >= self._bounds.max_lines:
                await asyncio.wait(running.lines, return_when=asyncio.FIRST_COMPLETED)
            turn = LineTurn(running.turns)
            identity = await self._take_turn(running, turn)
            task = asyncio.create_task(self._run_line(running, index, line, identity, turn))
            running.lines.add(task)
            task.add_done_callback(running.lines.discard)
            task.add_done_callback(lambda _, turn=turn: turn.release())
            # When the number of lines doubles, requests need not wait until all have begun.
            await asyncio.sleep(0)
        while running.lines:
            await asyncio.wait(running.lines)
        if running.stop:
            raise _Stopped

    async def _take_turn(self, running: _Running, turn: LineTurn) -> Identity:
        """Takes a turn for a line when its tenant has room for it, and returns the tenant.

        Raises:
            _Stopped: the batch has a reason to stop.
        """
        while True:
            identity = await self._wait_for_room(running)
            await turn.take()
            if self._leases.has_room_for_line(identity.tenant) and not running.stop:
                return identity
            turn.release()  # The lines before it have taken the room.

    async def _wait_for_room(self, running: _Running) -> Identity:
        """Waits until a batch may take more of its tenant's limits, and returns the tenant.

        Batches take one half of a limit, and the tenant's other requests find the rest.

        Raises:
            _Stopped: the batch has a reason to stop.
        """
        while not running.stop:
            identity = self._keyring.of_tenant(running.lease.tenant)
            if identity is None:
                running.stop = "no key"
            elif (
                not running.is_waiting
                and self._service.ready()
                and self._leases.has_room_for_line(identity.tenant)
            ):
                return replace(identity, key_id=running.record.key_id)
            else:
                await asyncio.sleep(self._bounds.tick)
        raise _Stopped

    async def _run_line(
        self, running: _Running, index: int, data: bytes, identity: Identity, turn: LineTurn
    ) -> None:
        """Runs a line until it has a result, and stores the result.

        Args:
            running: the batch.
            index: index of the line.
            data: the line.
            identity: tenant of the batch.
            turn: turn of the line, which is released while the line waits to be tried again, so
                that lines of other batches run meanwhile.
        """
        lease, line = running.lease, parse_line(data)
        line_id = f"batch_req_{lease.batch_id.removeprefix('batch_')}_{index}"
        num_failures, wait_s = 0, self._bounds.retry
        while True:
            answer = await self._caller.call(
                identity, running.record.endpoint, bytes(line.body), line_id
            )
            error = answer.error
            if isinstance(error, _HARMLESS):
                pass
            elif isinstance(error, Unavailable | DeadlineExceeded):
                num_failures += 1
            else:
                break
            if num_failures == _MAX_FAILURES:
                break
            if running.stop:
                return
            self._metrics.batch_lines("retried").inc()
            running.turns.note_refusal()
            turn.release()
            await asyncio.sleep(wait_s * (0.5 + random.random() / 2))
            wait_s = min(2 * wait_s, self._bounds.last_retry)
            try:
                identity = await self._take_turn(running, turn)
            except _Stopped:
                return
        running.turns.note_result()
        is_answer = answer.status == 200
        result = result_of(line_id, line.custom_id, answer.status, line_id, answer.body)
        self._metrics.batch_lines("completed" if is_answer else "failed").inc()
        await self._keep(running, OUTPUT if is_answer else ERRORS, index, result)

    async def _keep(self, running: _Running, kind: str, index: int, result: bytes) -> None:
        """Stores a result. If the state cannot be reached for long, the lease is given up, and the
        next holder of the lease runs the line again.
        """
        for attempt in range(_STORE_TRIES):
            try:
                await self.store.add(running.lease, kind, [(index, result)])
            except LeaseLost:
                self._stop(running, "lost")
            except Unavailable as error:
                error.without_frames()
                await asyncio.sleep(min(self._bounds.retry * 2**attempt, self._bounds.last_retry))
                continue
            return
        self._stop(running, "draining")

    async def _end(self, running: _Running, faults: list[LineError]) -> None:
        lease = running.lease
        reason = "failed" if faults else running.stop or "completed"
        if given_up := _GIVEN_UP.get(reason):
            num_left_out = await self._give_up(running, *given_up)
            if num_left_out:
                message = (
                    f"{num_left_out} lines without an answer are left out of the error file, "
                    "because the files of batches take too many bytes: delete files"
                )
                faults = [LineError("storage_full", message)]
        if running.stop == "full":
            message = "the results of the tenant's batches take too many bytes: delete files"
            faults = [LineError("storage_full", message)]
        elif running.stop == "no key":
            faults = [LineError("no_api_key", "the tenant has no valid API key any more")]
        status = reason if reason in ("completed", *_GIVEN_UP) else "failed"
        await self.store.end(lease, status, f"{status}_at", faults)
        log.info("batch %s is %s", lease.batch_id, status)

    async def _give_up(self, running: _Running, code: str, message: str) -> int:
        """Stores an error for each line that has no result, while there is room for errors.

        Returns:
            The number of lines that have no result because there is no room.
        """
        lease = running.lease
        if not running.record.total:  # The batch was cancelled before its lines were checked.
            return 0
        done = await self.store.done(lease)
        file = await self.store.files.input(lease.tenant, running.record.input_file_id)
        errors: list[tuple[int, bytes]] = []
        index = -1
        async for line in lines_of(self.store.files.read(lease.tenant, file)):
            index += 1
            if index in done:
                continue
            line_id = f"batch_req_{lease.batch_id.removeprefix('batch_')}_{index}"
            custom_id = parse_line(line).custom_id
            errors.append((index, result_without_answer(line_id, custom_id, code, message)))
            if len(errors) == _ERRORS_AT_ONCE:
                if not await self._add_errors(lease, errors):
                    break
                done.update(index for index, _ in errors)
                errors = []
        else:
            if not errors or await self._add_errors(lease, errors):
                return 0
        return running.record.total - len(done)

    async def _add_errors(self, lease: Lease, errors: list[tuple[int, bytes]]) -> bool:
        """Stores errors of lines if there is room for all of them. Returns whether there is."""
        room = min(await self.store.files.room_for_results(lease.tenant))
        if sum(len(error) for _, error in errors) > room:
            return False
        await self.store.add(lease, ERRORS, errors)
        return True
