"""The queue of commands to one decoder.

One stream carries the commands of all sequences, and each message takes time. So the messages of a
flood wait here, and tenants take turns.
"""

import asyncio
from dataclasses import dataclass

from services.common.pb import decoder_pb2 as pb
from services.common.tenancy.fair_order import FairOrder

# Cost of a message in addition to its prompt, in bytes of prompt.
_MESSAGE_COST = 4096
_FIRST = -1.0  # place of a cancel, before all submits
# A batch has at most this many commands, so that a submit of a tenant that rarely sends one is soon
# behind those in flight, and it takes no further command once it has this many bytes.
_MAX_BATCH, _BATCH_BYTES = 16, 1 << 20


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A submit that waits.

    Attributes:
        command: the command with the submit.
        place: place in the fair order.
        weight: weight of the tenant.
        cost: cost in the fair order.
    """

    command: pb.GenerateCommand
    place: float
    weight: float
    cost: int


class Commands:
    """Queue of commands for one consumer. Submits wait in the fair order of their tenants, and
    cancels go before all submits.

    Args:
        batches: True if the decoder reads batches of commands.
    """

    def __init__(self, *, batches: bool = False) -> None:
        self._batches = batches
        self._order = FairOrder()
        self._queue: asyncio.PriorityQueue[tuple[float, int]] = asyncio.PriorityQueue()
        self._submits: dict[int, _Waiting] = {}  # waiting submits, by sequence id

    def submit(self, submit: pb.Submit) -> None:
        """Adds a sequence. The message is copied, so that the caller can change it for the next
        sequence.
        """
        cost = _MESSAGE_COST + len(submit.prompt_token_ids) + len(submit.positions)
        weight, background = submit.tenant_weight or 1.0, submit.background
        place = self._order.place(submit.tenant, weight=weight, cost=cost, background=background)
        command = pb.GenerateCommand(submit=submit)
        self._submits[submit.sequence_id] = _Waiting(command, place, weight, cost)
        self._queue.put_nowait((place, submit.sequence_id))

    def cancel(self, sequence_id: int) -> None:
        """Cancels a sequence. A submit that still waits is dropped and not sent, and does not delay
        the tenant's next submits.
        """
        if (waiting := self._submits.pop(sequence_id, None)) is None:
            self._queue.put_nowait((_FIRST, sequence_id))
            return
        tenant, weight, cost = waiting.command.submit.tenant, waiting.weight, waiting.cost
        self._order.refund(tenant, waiting.place, weight=weight, cost=cost)

    async def next(self) -> pb.GenerateCommand:
        """Returns the next command, or a batch of commands if several wait and the decoder reads
        batches. Waits for a command if there is none.
        """
        while (command := self._take(*await self._queue.get())) is None:
            pass
        if not self._batches or self._queue.empty():
            return command
        commands, num_bytes = [command], command.ByteSize()
        while len(commands) < _MAX_BATCH and num_bytes < _BATCH_BYTES and not self._queue.empty():
            if (command := self._take(*self._queue.get_nowait())) is not None:
                commands.append(command)
                num_bytes += command.ByteSize()
        return pb.GenerateCommand(batch=pb.CommandBatch(commands=commands))

    def _take(self, place: float, sequence_id: int) -> pb.GenerateCommand | None:
        """Returns the command of an entry taken from the queue. None for a cancelled submit."""
        if place == _FIRST:
            return pb.GenerateCommand(cancel=pb.Cancel(sequence_id=sequence_id))
        if (waiting := self._submits.pop(sequence_id, None)) is None:
            return None
        self._order.served(place)
        return waiting.command
