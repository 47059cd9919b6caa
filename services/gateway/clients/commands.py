"""Commands on their way to one decoder.

One stream carries those of all sequences, one message after another, and a message costs so much
that a flood's have to wait. Tenants take turns here too.
"""

import asyncio

from services.common.pb import decoder_pb2 as pb
from services.common.tenancy.fair_order import FairOrder

# What a message costs besides its prompt, in bytes of prompt.
_MESSAGE_COST = 4096
_FIRST = -1.0  # the place of a cancel


class Commands:
    """Submits wait in fair order of their tenants; cancels go before them. For one consumer."""

    def __init__(self) -> None:
        self._order = FairOrder()
        self._queue: asyncio.PriorityQueue[tuple[float, int]] = asyncio.PriorityQueue()
        self._submits: dict[int, pb.GenerateCommand] = {}  # those that wait, by sequence id

    def submit(self, submit: pb.Submit) -> None:
        """Adds a sequence, with its id. The message is copied: callers use it for the next one."""
        cost = _MESSAGE_COST + len(submit.prompt_token_ids) + len(submit.positions)
        place = self._order.place(submit.tenant, weight=submit.tenant_weight or 1.0, cost=cost)
        self._submits[submit.sequence_id] = pb.GenerateCommand(submit=submit)
        self._queue.put_nowait((place, submit.sequence_id))

    def cancel(self, sequence_id: int) -> None:
        """Cancels a sequence. The decoder never hears of one that still waits here."""
        if self._submits.pop(sequence_id, None) is None:
            self._queue.put_nowait((_FIRST, sequence_id))

    async def next(self) -> pb.GenerateCommand:
        """The next command, as soon as there is one."""
        while True:
            place, sequence_id = await self._queue.get()
            if place == _FIRST:
                return pb.GenerateCommand(cancel=pb.Cancel(sequence_id=sequence_id))
            self._order.served(place)
            if (command := self._submits.pop(sequence_id, None)) is not None:
                return command
