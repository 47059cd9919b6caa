"""A bounded queue of events for one gateway, which merges events while the gateway reads slowly."""

import asyncio
from collections import deque

from services.common.pb import decoder_pb2 as pb
from services.decoder.engine.messages import Logprobs, PromptLogprobs

# A gateway that reads nothing for ten seconds at 30,000 tokens/s stays below this estimated size.
MAX_QUEUED_BYTES = 32 << 20
# The same for a model that makes a vector of each token. Of 320 numbers, 12 full steps of 8,192
# tokens stay below this size.
_MAX_QUEUED_VECTOR_BYTES = 128 << 20
# Estimated size from which a message takes no further tokens, and largest size of the arrays that
# are added to it at once. Together they are far below gRPC's limit (`rpc.MAX_MESSAGE_BYTES`).
_MESSAGE_BYTES = 8 << 20
# Estimated bytes of the parts of a message.
_EVENT_BYTES = 100
_TOKEN_BYTES = 8
_BARE_TOKEN_BYTES = 16
_LOGPROBS_BYTES = 100


def usual_queued_bytes(task: str) -> int:
    """Returns the largest size of an outbox for a model with this task (`ModelSpec.task`)."""
    return _MAX_QUEUED_VECTOR_BYTES if task == "token_embed" else MAX_QUEUED_BYTES


class Outbox:
    """Events of one stream, in order per sequence.

    While the writer keeps up, each engine step becomes one message, or several if it is large.
    While the writer falls behind, the tokens of a sequence are merged into one event, so that the
    queue grows by a few bytes per token. The writer sees new events after `flush`.

    Args:
        max_queued_bytes: see `is_full`.

    Attributes:
        takes_bare_tokens: True if the gateway reads tokens outside of events, which costs a third
            of the time.
    """

    def __init__(self, max_queued_bytes: int = MAX_QUEUED_BYTES) -> None:
        self._max_queued_bytes = max_queued_bytes
        self._flushed_bytes = 0  # bytes that the writer could take at the last flush
        self._complete: deque[tuple[pb.GenerateEvents, int]] = deque()  # earlier messages, bytes
        self._message = pb.GenerateEvents()
        self._complete_bytes = self._message_bytes = 0
        self._open: dict[int, pb.SequenceEvent] = {}
        self._bare: tuple[list[int], list[int]] = ([], [])  # ids of sequences, and their tokens
        self._is_behind = False  # flushed events wait for the writer
        self._wake = asyncio.Event()
        self._closed = False
        self.takes_bare_tokens = False

    @property
    def is_full(self) -> bool:
        """Returns whether the gateway has left more bytes unread than `max_queued_bytes`, as
        estimated at the last `flush`. What was added since then does not count, because the writer
        could not see it.
        """
        return self._flushed_bytes > self._max_queued_bytes

    def add_token(self, sequence_id: int, token_id: int) -> None:
        """Adds a single new token of a sequence, without logprobs."""
        if not self.takes_bare_tokens or self._is_behind or sequence_id in self._open:
            self.add_tokens(sequence_id, [token_id], [])
            return
        self._count(_BARE_TOKEN_BYTES)
        sequence_ids, token_ids = self._bare
        sequence_ids.append(sequence_id)
        token_ids.append(token_id)

    def add_tokens(self, sequence_id: int, token_ids: list[int], logprobs: list[Logprobs]) -> None:
        """Adds new tokens of a sequence.

        Args:
            sequence_id: the gateway's id of the sequence.
            token_ids: the new tokens.
            logprobs: log probabilities of each token. Empty if the request wants none.
        """
        self._count(_TOKEN_BYTES * len(token_ids))
        event = self._event(sequence_id)
        event.token_ids.extend(token_ids)
        for found in logprobs:
            event.logprobs.add(
                logprob=found.logprob,
                top_token_ids=found.top_token_ids,
                top_logprobs=found.top_logprobs,
            )
            self._message_bytes += _LOGPROBS_BYTES + 2 * _TOKEN_BYTES * len(found.top_token_ids)

    def add_prompt_logprobs(self, sequence_id: int, found: PromptLogprobs) -> None:
        """Adds log probabilities of tokens of a sequence's prompt, or vectors of these tokens if
        the model is one for search. Large arrays are divided.
        """
        arrays = found.logprobs, found.ranks, found.top_token_ids, found.top_logprobs
        count = len(found.ranks) // 4
        sizes = [len(array) // count for array in arrays]
        most = max(1, _MESSAGE_BYTES // sum(sizes))
        for first in range(0, count, most):
            last = min(first + most, count)
            parts = [array[first * n : last * n] for array, n in zip(arrays, sizes, strict=True)]
            self._count(sum(map(len, parts)))
            self._event(sequence_id).prompt_logprobs.add(
                start=found.start + first,
                logprobs=parts[0],
                ranks=parts[1],
                top_token_ids=parts[2],
                top_logprobs=parts[3],
            )

    def add_vector(self, sequence_id: int, vector: bytes) -> None:
        """Adds the result of a sequence of a model for search, with which the sequence ends."""
        self._count(len(vector))
        self._event(sequence_id).vector = vector

    def add_start(self, sequence_id: int, started: pb.Started) -> None:
        """Adds the times up to the first token, which must have been added just before."""
        self._event(sequence_id).started.CopyFrom(started)

    def add_predicted(self, sequence_id: int, accepted: int, rejected: int) -> None:
        """Adds numbers of tokens of the client's prediction; the event must have tokens."""
        event = self._event(sequence_id)
        event.accepted_tokens += accepted
        event.rejected_tokens += rejected

    def add_hand_over(self, sequence_id: int) -> None:
        """Asks the gateway to continue a sequence at another decoder."""
        self._event(sequence_id).leaving = True

    def add_end(self, sequence_id: int, end: pb.Finished | pb.Failed) -> None:
        """Adds the last event of a sequence."""
        event = self._event(sequence_id)
        if isinstance(end, pb.Finished):
            event.finished.CopyFrom(end)
        else:
            event.failed.CopyFrom(end)
        del self._open[sequence_id]

    def discard_tokens(self, reason: pb.Failed) -> None:
        """Drops the queued tokens and keeps the last events. A sequence whose tokens are dropped
        has not finished as far as the gateway can tell, so `reason` replaces its finish event.
        """
        message = pb.GenerateEvents()
        for former in (*(each for each, _ in self._complete), self._message):
            for event in former.events:
                if event.WhichOneof("end"):
                    failed = event.failed if event.HasField("failed") else reason
                    message.events.add(sequence_id=event.sequence_id, failed=failed)
        self._complete.clear()
        self._complete_bytes = 0
        self._message = message
        self._open.clear()
        self._bare = ([], [])
        self._message_bytes = _EVENT_BYTES * len(message.events)

    def flush(self) -> None:
        """Wakes the writer, if any events are queued."""
        self._flushed_bytes = self._queued_bytes
        if self._flushed_bytes:
            self._is_behind = True
            self._wake.set()

    def close(self) -> None:
        """Ends the queue: `take` returns the queued events, and None afterwards."""
        self._closed = True
        self._wake.set()

    async def take(self) -> pb.GenerateEvents | None:
        """Waits for events and returns the oldest of them as one message, usually all.

        Returns:
            The message. None once the outbox is closed and empty.
        """
        while not self._queued_bytes:
            if self._closed:
                return None
            self._wake.clear()
            await self._wake.wait()
        if not self._complete:
            self._complete_message()
        message, num_bytes = self._complete.popleft()
        self._complete_bytes -= num_bytes
        self._flushed_bytes = self._queued_bytes
        self._is_behind = self._flushed_bytes > 0
        return message

    @property
    def _queued_bytes(self) -> int:
        return self._complete_bytes + self._message_bytes

    def _count(self, num_bytes: int) -> None:
        """Counts bytes that are added next, to a new message if the last one is large."""
        if self._message_bytes >= _MESSAGE_BYTES:
            self._complete_message()
        self._message_bytes += num_bytes

    def _complete_message(self) -> None:
        """Adds no further events to the last message."""
        sequence_ids, token_ids = self._bare
        if sequence_ids:
            self._message.sequence_ids.extend(sequence_ids)
            self._message.token_ids.extend(token_ids)
            self._bare = ([], [])
        self._complete.append((self._message, self._message_bytes))
        self._complete_bytes += self._message_bytes
        self._message, self._message_bytes = pb.GenerateEvents(), 0
        self._open.clear()

    def _event(self, sequence_id: int) -> pb.SequenceEvent:
        event = self._open.get(sequence_id)
        if event is None:
            event = self._message.events.add(sequence_id=sequence_id)
            self._open[sequence_id] = event
            self._message_bytes += _EVENT_BYTES
        return event
