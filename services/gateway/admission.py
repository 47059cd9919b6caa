"""Admission control: a slot per request, and a bound on the bytes that all requests hold.

Routes take a slot before they read a request's body, and return it in `finally`; the server drains
all slots at shutdown. A full or draining gateway refuses at once with `Overloaded`; there is no
queue here.
"""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from services.common.errors import Overloaded

MAX_HELD_BYTES = 2 << 30


@dataclass(slots=True)
class Slot:
    """One request's slot. Valid inside the `with` that made it."""

    admission: "Admission"
    held_bytes: int = 0

    def hold(self, num_bytes: int) -> None:
        """Counts bytes that this request keeps in memory.

        Raises:
            Overloaded: all requests together would hold too many.
        """
        self.admission.hold(num_bytes)
        self.held_bytes += num_bytes


class Admission:
    """Counts running requests. Only the event loop's thread uses it."""

    def __init__(self, max_requests: int, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        self._max_requests = max_requests
        self._max_held_bytes = max_held_bytes
        self._held_bytes = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.num_running = 0
        self.draining = False

    @contextmanager
    def slot(self) -> Generator[Slot]:
        """Takes a slot for the duration of a `with`.

        Raises:
            Overloaded: no slot is free, or the gateway is draining.
        """
        if self.draining:
            raise Overloaded("the server is shutting down", retry_after_s=1)
        if self.num_running >= self._max_requests:
            raise Overloaded("too many requests are running", retry_after_s=1)
        self.num_running += 1
        self._idle.clear()
        slot = Slot(self)
        try:
            yield slot
        finally:
            self._held_bytes -= slot.held_bytes
            self.num_running -= 1
            if not self.num_running:
                self._idle.set()

    def hold(self, num_bytes: int) -> None:
        """Counts bytes; they are returned with the slot.

        Raises:
            Overloaded: over the bound.
        """
        if self._held_bytes + num_bytes > self._max_held_bytes:
            raise Overloaded("running requests hold too much data", retry_after_s=1)
        self._held_bytes += num_bytes

    async def drain(self, grace_s: float) -> bool:
        """Refuses new requests and waits for the running ones.

        Returns:
            Whether all ended within the grace period.
        """
        self.draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
