"""A gateway's stream, and the sequences that it has submitted."""

import asyncio
from dataclasses import dataclass, field

from services.common.spans import Span
from services.decoder.front.adapter_table import LoadedAdapter
from services.decoder.front.outbox import Outbox

# Most tokens of a batch's line that the front keeps until it sends them. Nobody reads them as they
# come, and each message costs gateway and front time that a request may wait for.
_MAX_KEPT_TOKENS = 16


@dataclass(slots=True, eq=False)
class Stream:
    """The stream of one gateway, which is one `Generate` call.

    Attributes:
        outbox: queue of events for the gateway.
        sequences: the gateway's sequences that are not reported yet, by the id that the
            gateway has given each of them.
        half_closed: True once the gateway has said that it submits no more sequences.
    """

    outbox: Outbox
    sequences: "dict[int, FrontSequence]" = field(default_factory=dict[int, "FrontSequence"])
    half_closed: bool = False


@dataclass(slots=True, eq=False)
class FrontSequence:
    """A sequence, from its submission to the engine's last event about it.

    Attributes:
        number: number of the sequence in this decoder, which front and engine use.
        sequence_id: id that the gateway has given the sequence, unique within the stream.
        stream: stream of the gateway that submitted the sequence.
        submitted_at: time of the submission, as `time.time()`.
        first_token_at: time of the first token, as `time.time()`. 0 before the first token.
        num_generated: number of tokens that this decoder has generated.
        max_generated: largest number of tokens that this decoder may generate.
        deadline: timer that ends the sequence. None if the request has no time limit.
        reported: True once the sequence's last event is in the outbox, or once another sequence
            has taken its id.
        tenant: name of the request's tenant. Empty if the request has no API key.
        adapter: adapter of the sequence. None for the base model alone.
        background: True if the sequence is the line of a batch.
        kept_tokens: tokens that are sent later. Empty if the sequence is not in the background.
    """

    number: int
    sequence_id: int
    stream: Stream
    request_id: str
    span: Span
    submitted_at: float
    first_token_at: float = 0.0
    num_generated: int = 0
    max_generated: int = 0
    deadline: asyncio.TimerHandle | None = None
    reported: bool = False
    tenant: str = ""
    adapter: LoadedAdapter | None = None
    background: bool = False
    kept_tokens: list[int] = field(default_factory=list[int])

    def keep(self, token_ids: list[int]) -> bool:
        """Keeps new tokens. Returns whether they are to be kept longer, because they are few."""
        self.kept_tokens += token_ids
        return len(self.kept_tokens) < _MAX_KEPT_TOKENS

    def send_kept(self) -> None:
        """Puts the tokens that are kept into the outbox of the stream."""
        if self.kept_tokens:
            self.stream.outbox.add_tokens(self.sequence_id, self.kept_tokens, [])
            self.kept_tokens = []
