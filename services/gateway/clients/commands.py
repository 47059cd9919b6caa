"""Commands on their way to one decoder.

One stream carries those of all sequences, one message after another, and a message costs so much
that a flood's have to wait. Tenants take turns here too.
"""

import asyncio
import heapq

from services.common.pb import decoder_pb2 as pb
from services.common.tenancy.fair_order import FairOrder

# What a message costs besides its prompt, in bytes of prompt.
_MESSAGE_COST = 4096


class Commands:
    """Submits wait in fair order of their tenants; cancels go before them. For one consumer."""

    def __init__(self) -> None:
        self._order = FairOrder()
        self._heap: list[tuple[float, int]] = []  # places and sequence ids
        self._submits: dict[int, pb.GenerateCommand] = {}  # those that wait, by sequence id
        self._cancels: list[int] = []
        self._arrived = asyncio.Event()

    def submit(self, submit: pb.Submit) -> None:
        """Adds a sequence, with its id. The message is copied: callers use it for the next one."""
        cost = _MESSAGE_COST + len(submit.prompt_token_ids) + len(submit.positions)
        place = self._order.place(submit.tenant, weight=submit.tenant_weight or 1.0, cost=cost)
        self._submits[submit.sequence_id] = pb.GenerateCommand(submit=submit)
        heapq.heappush(self._heap, (place, submit.sequence_id))
        self._arrived.set()

    def cancel(self, sequence_id: int) -> None:
        """Cancels a sequence. The decoder never hears of one that still waits here."""
        if self._submits.pop(sequence_id, None) is None:
            self._cancels.append(sequence_id)
            self._arrived.set()

    async def next(self) -> pb.GenerateCommand:
        """The next command, as soon as there is one."""
        while True:
            if self._cancels:
                return pb.GenerateCommand(cancel=pb.Cancel(sequence_id=self._cancels.pop()))
            while self._heap:
                place, sequence_id = heapq.heappop(self._heap)
                self._order.served(place)
                command = self._submits.pop(sequence_id, None)
                if command is not None:
                    return command
            self._arrived.clear()
            await self._arrived.wait()
