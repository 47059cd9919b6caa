"""The events of a sequence, which a decoder's client passes on to the sequence's receiver."""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from services.common.errors import EmbeddingUnavailable, TriptychError
from services.common.pb import decoder_pb2 as pb


class TokenEvent(Struct, frozen=True):
    """New tokens of one choice, or the end of the choice.

    Attributes:
        choice: index of the choice in the request.
        token_ids: ids of the new tokens.
        logprobs: log probabilities, one entry per token id. Empty unless the request asks for them.
        started: durations of the stages before the first token, and the number of prompt tokens
            that the decoder had cached. None unless the event has the sequence's first token.
        finish_reason: `stop` or `length` with the last tokens, otherwise None.
        error: error that ended the sequence. No event follows it.
        prompt_logprobs: log probabilities of prompt tokens. They come before the first token.
        vector: float32 result of a model for search, with the only token. Otherwise empty.
        predicted: numbers of tokens of the request's prediction that were accepted and rejected
            since the event before. None if there were none.
        decoder_drains: True if the decoder is shutting down and may end before the sequence does.
    """

    choice: int
    token_ids: Sequence[int] = ()
    logprobs: Sequence[pb.TokenLogprobs] = ()
    started: pb.Started | None = None
    finish_reason: str | None = None
    error: TriptychError | None = None
    prompt_logprobs: Sequence[pb.PromptLogprobs] = ()
    decoder_drains: bool = False
    vector: bytes = b""
    predicted: tuple[int, int] | None = None

    @property
    def is_last(self) -> bool:
        """True if no event of the sequence follows."""
        return self.finish_reason is not None or self.error is not None

    @property
    def only_tokens(self) -> bool:
        """True if the event is about tokens in the middle of a choice and nothing else."""
        others = self.started or self.prompt_logprobs or self.decoder_drains or self.is_last
        return bool(self.token_ids) and not others

    @property
    def is_bare(self) -> bool:
        """True if the event has the ids of tokens in the middle of a choice and nothing else."""
        return self.only_tokens and not self.logprobs and self.predicted is None

    @property
    def num_bytes(self) -> int:
        """Estimate of the memory that the event takes, in bytes."""
        num_bytes = 256 + 40 * len(self.token_ids) + len(self.vector)
        for entry in self.logprobs:
            num_bytes += 64 * (1 + len(entry.top_token_ids))
        return num_bytes


class EventReceiver(Protocol):
    """The receiver of a sequence's events; `Attempts` is one."""

    def receive(self, event: TokenEvent) -> None:
        """Takes an event. Called in the event loop, and must not wait."""
        ...


class EmbeddingLost(EmbeddingUnavailable):
    """A decoder could not get an image's embedding from `encoder_address`."""

    def __init__(self, message: str, encoder_address: str) -> None:
        super().__init__(message)
        self.encoder_address = encoder_address
