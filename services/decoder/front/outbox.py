"""Events queued for one gateway: bounded, and merged while the gateway reads slowly."""

import asyncio

from services.common.pb import decoder_pb2 as pb
from services.decoder.engine.messages import Logprobs, PromptLogprobs

# Roughly bytes. A gateway that reads nothing for ten seconds at 30,000 tokens/s stays below it.
MAX_WEIGHT = 32 << 20
_EVENT_WEIGHT = 100
_TOKEN_WEIGHT = 8
_BARE_TOKEN_WEIGHT = 16
_LOGPROBS_WEIGHT = 100


class Outbox:
    """Events of one stream, in order per sequence.

    While the writer keeps up, each engine step becomes one message. While it does not, a sequence's
    tokens are merged into one event, so that the queue grows by a few bytes per token. The writer
    sees additions after `flush`.

    Attributes:
        takes_bare_tokens: the gateway reads tokens without an event, which cost a third.
    """

    def __init__(self) -> None:
        self._weight = 0  # of what is queued; each event and token has some
        self._message = pb.GenerateEvents()
        self._open: dict[int, pb.SequenceEvent] = {}
        self._bare: tuple[list[int], list[int]] = ([], [])  # sequence ids, their tokens
        self._is_behind = False  # what was flushed is not taken
        self._wake = asyncio.Event()
        self._closed = False
        self.takes_bare_tokens = False

    @property
    def is_full(self) -> bool:
        """Whether the gateway has left more unread than it may."""
        return self._weight > MAX_WEIGHT

    def add_token(self, sequence_id: int, token_id: int) -> None:
        """Adds a sequence's new token, about which there is nothing else to say."""
        if not self.takes_bare_tokens or self._is_behind or sequence_id in self._open:
            self.add_tokens(sequence_id, [token_id], [])
            return
        sequence_ids, token_ids = self._bare
        sequence_ids.append(sequence_id)
        token_ids.append(token_id)
        self._weight += _BARE_TOKEN_WEIGHT

    def add_tokens(self, sequence_id: int, token_ids: list[int], logprobs: list[Logprobs]) -> None:
        """Adds a sequence's new tokens."""
        event = self._event(sequence_id)
        event.token_ids.extend(token_ids)
        self._weight += _TOKEN_WEIGHT * len(token_ids)
        for found in logprobs:
            event.logprobs.add(
                logprob=found.logprob,
                top_token_ids=found.top_token_ids,
                top_logprobs=found.top_logprobs,
            )
            self._weight += _LOGPROBS_WEIGHT + 2 * _TOKEN_WEIGHT * len(found.top_token_ids)

    def add_prompt_logprobs(self, sequence_id: int, found: PromptLogprobs) -> None:
        """Adds logprobs of tokens of a sequence's prompt."""
        self._event(sequence_id).prompt_logprobs.add(
            start=found.start,
            logprobs=found.logprobs,
            ranks=found.ranks,
            top_token_ids=found.top_token_ids,
            top_logprobs=found.top_logprobs,
        )
        self._weight += 2 * (len(found.logprobs) + len(found.top_token_ids))

    def add_start(self, sequence_id: int, started: pb.Started) -> None:
        """Adds the times up to the first token, which was added last."""
        self._event(sequence_id).started.CopyFrom(started)

    def add_leaving(self, sequence_id: int) -> None:
        """Says that a sequence should be continued elsewhere."""
        self._event(sequence_id).leaving = True

    def add_end(self, sequence_id: int, end: pb.Finished | pb.Failed) -> None:
        """Adds a sequence's last event."""
        event = self._event(sequence_id)
        if isinstance(end, pb.Finished):
            event.finished.CopyFrom(end)
        else:
            event.failed.CopyFrom(end)
        del self._open[sequence_id]

    def discard_tokens(self, reason: pb.Failed) -> None:
        """Drops queued tokens; last events stay. A sequence whose tokens are dropped has not
        finished as far as the gateway can tell, so its good end becomes `reason`.
        """
        message = pb.GenerateEvents()
        for event in self._message.events:
            if event.WhichOneof("end"):
                failed = event.failed if event.HasField("failed") else reason
                message.events.add(sequence_id=event.sequence_id, failed=failed)
        self._message = message
        self._open.clear()
        self._bare = ([], [])
        self._weight = _EVENT_WEIGHT * len(message.events)

    def flush(self) -> None:
        """Wakes the writer."""
        if self._weight:
            self._is_behind = True
            self._wake.set()

    def close(self) -> None:
        """Nothing more will be added: `take` returns what is queued, then None."""
        self._closed = True
        self._wake.set()

    async def take(self) -> pb.GenerateEvents | None:
        """Waits for events; returns all that are queued as one message, None at the end."""
        while not self._weight:
            if self._closed:
                return None
            self._wake.clear()
            await self._wake.wait()
        message, self._message = self._message, pb.GenerateEvents()
        sequence_ids, token_ids = self._bare
        if sequence_ids:
            message.sequence_ids.extend(sequence_ids)
            message.token_ids.extend(token_ids)
            self._bare = ([], [])
        self._open.clear()
        self._is_behind = False
        self._weight = 0
        return message

    def _event(self, sequence_id: int) -> pb.SequenceEvent:
        event = self._open.get(sequence_id)
        if event is None:
            event = self._message.events.add(sequence_id=sequence_id)
            self._open[sequence_id] = event
            self._weight += _EVENT_WEIGHT
        return event
