"""Admission control: a slot for each request, quotas of tenants, and a bound on all held bytes.

A request's memory is counted from its first byte on (`request_memory`). The request takes a slot
once its body has arrived, so that connections that send nothing refuse nobody. Both are returned at
its end. The server drains all slots at shutdown, and then ends the requests that still run. A full
or draining gateway refuses at once with `Overloaded`; there is no queue here. If there are several
tenants, a part of the slots is for tenants that have less than their share of the slots.
"""

import asyncio
from types import TracebackType

from services.common.errors import Overloaded, Unavailable
from services.common.tenancy.tenant_capacity import TenantCapacity
from services.gateway.bounds import MEMORY_PER_BODY_BYTE, BodyLimits
from services.gateway.tenancy.leases import Leases
from services.gateway.tenancy.request_memory import MemoryBudget, RequestMemory
from services.gateway.tenancy.slot import Slot
from services.gateway.tenancy.tenants import Tenant, bound_tenant
from services.gateway.tenancy.usage import Usage, counting

MAX_HELD_BYTES = 4 << 30
# Memory of the process without requests: tokenizer, libraries and memory that allocators retain.
_PROCESS_BYTES = 384 << 20
# Memory of a connection whose body arrives: the server's objects and its buffer.
_CONNECTION_BYTES = 64 << 10


def max_held_bytes(memory_bytes: int) -> int:
    """Returns the bytes that all requests together may hold.

    384 MiB of the pod's memory are left to the process itself. Requests never need more than
    `MAX_HELD_BYTES`.

    Args:
        memory_bytes: memory limit of the pod.
    """
    return min(MAX_HELD_BYTES, max(memory_bytes - _PROCESS_BYTES, memory_bytes // 4))


def largest_body(max_held_bytes: int) -> int:
    """Returns the size of the largest body that fits into memory while no other request runs.

    Args:
        max_held_bytes: bytes that all requests together may hold.
    """
    for_one = MemoryBudget(max_held_bytes).max_large_bytes - _CONNECTION_BYTES
    return for_one // MEMORY_PER_BODY_BYTE


class Admission:
    """Counts running requests. Only the event loop's thread uses it.

    Attributes:
        memory: memory for all requests.
        body_limits: limits of each request's body.
        draining: true if the gateway is about to end and clients should use another gateway.
        blocks: timeouts of the running blocks of `until_ended`.
        ended: true once `end_all` was called.
    """

    def __init__(
        self,
        max_requests: int,
        max_held_bytes: int = MAX_HELD_BYTES,
        leases: Leases | None = None,
        body_limits: BodyLimits | None = None,
    ) -> None:
        self.memory = MemoryBudget(max_held_bytes)
        self.body_limits = body_limits or BodyLimits()
        self._leases = leases or Leases()
        self._running = TenantCapacity(max_requests)
        self._idle = asyncio.Event()
        self._idle.set()
        self.blocks: set[asyncio.Timeout] = set()  # running blocks of `until_ended`
        self.ended = False
        self.draining = False
        self._refuses = False

    @property
    def num_running(self) -> int:
        """Number of requests that hold a slot."""
        return self._running.used

    @property
    def held_bytes(self) -> int:
        """Number of bytes that running requests hold."""
        return self.memory.held_bytes

    def request_memory(self) -> RequestMemory:
        """Begins to count a request's memory, which the caller has to free.

        Raises:
            Overloaded: no slot is free for the request, running requests hold too much memory, or
                new requests are refused.
        """
        self._check_capacity(bound_tenant())
        memory = RequestMemory(self.memory)
        memory.add(_CONNECTION_BYTES)
        return memory

    def slot(self, memory: RequestMemory) -> "SlotBlock":
        """Returns a block for an `async with`, which holds a slot of the bound tenant.

        Args:
            memory: memory of the request, from `request_memory`.
        """
        return SlotBlock(self, memory)

    async def take_slot(self, tenant: Tenant) -> Usage:
        """Takes a slot, which `release_slot` returns.

        Raises:
            Overloaded: no slot is free, or new requests are refused.
            RateLimited: the tenant has as many requests as it may have.
        """
        self._check_capacity(tenant)
        self._running.take(tenant.name, 1)
        self._idle.clear()
        try:
            return await counting(self._leases, tenant).__aenter__()
        except BaseException:
            self._release(tenant)
            raise

    def release_slot(self, slot: Slot) -> None:
        """Returns a slot, and what its request has taken of the tenant's limits."""
        try:
            slot.usage.end()
        finally:
            self._release(slot.tenant)

    def _release(self, tenant: Tenant) -> None:
        self._running.release(tenant.name, 1)
        if not self.num_running:
            self._idle.set()

    def _check_capacity(self, tenant: Tenant) -> None:
        if self._refuses:
            raise Overloaded("the server is shutting down", retry_after_s=1)
        if not self._running.allows(tenant.name, 1):
            raise Overloaded("too many requests are running", retry_after_s=1)

    def until_ended(self, timeout_s: float | None = None) -> "UntilEnded":
        """Returns a block for an `async with`, which runs until it ends, its time is over or
        `end_all` is called.

        Args:
            timeout_s: seconds that the block may take. None if there is no limit.
        """
        return UntilEnded(self, timeout_s)

    def end_all(self) -> None:
        """Ends all requests that still run, each with an error of its own."""
        self.ended = True
        for block in self.blocks:
            block.reschedule(asyncio.get_running_loop().time())

    async def drain(self, grace_s: float) -> bool:
        """Refuses new requests, and waits for the running requests.

        Args:
            grace_s: seconds to wait.

        Returns:
            Whether all running requests have ended within the grace.
        """
        self.draining = self._refuses = True
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


class SlotBlock:
    """A block in which a request holds its slot. It is a class because the event loop registers
    each asynchronous generator, which takes longer than all that the block does.

    Args:
        admission: the admission control.
        memory: memory of the request.

    Raises:
        Overloaded: no slot is free, or new requests are refused.
        RateLimited: the tenant has as many requests as it may have.
    """

    def __init__(self, admission: Admission, memory: RequestMemory) -> None:
        self._admission = admission
        self._memory = memory

    async def __aenter__(self) -> Slot:
        tenant = bound_tenant()
        usage = await self._admission.take_slot(tenant)
        self._slot = Slot(tenant, usage, self._memory)
        return self._slot

    async def __aexit__(self, *_: object) -> None:
        self._admission.release_slot(self._slot)


class UntilEnded:
    """A block that ends when its time is over or `Admission.end_all` is called.

    It is a class because an asynchronous generator would take half as long again.

    Args:
        admission: the admission control.
        timeout_s: seconds that the block may take. None if there is no limit.

    Raises:
        Unavailable: `end_all` was called.
        TimeoutError: the time is over.
    """

    def __init__(self, admission: Admission, timeout_s: float | None) -> None:
        self._admission = admission
        self._timeout = asyncio.timeout(0 if admission.ended else timeout_s)

    def extend(self, end_s: float) -> None:
        """Moves the end of the block's time to `end_s` on the event loop's clock, unless `end_all`
        was called.
        """
        if not self._admission.ended:
            self._timeout.reschedule(end_s)

    async def __aenter__(self) -> "UntilEnded":
        await self._timeout.__aenter__()
        self._admission.blocks.add(self._timeout)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._admission.blocks.discard(self._timeout)
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError:
            if not self._admission.ended:
                raise
            raise Unavailable("the server is shutting down", retry_after_s=1) from None
