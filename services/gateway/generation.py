"""The gateway's own words for what a decoder does: no protobuf, no text."""

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from services.common.errors import TriptychError
from services.gateway.mrope import Int32s

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen; the fields are those of proto/decoder.proto."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int = 16
    min_tokens: int = 0
    top_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """A run of placeholders and the encoder that was asked for its embedding."""

    key: bytes
    offset: int
    num_tokens: int
    encoder_address: str


@dataclass(frozen=True, slots=True)
class Generation:
    """One sequence to generate."""

    request_id: str
    token_ids: Int32s
    positions: Int32s | None
    position_delta: int
    images: tuple[PlacedImage, ...]
    sampling: Sampling
    cache_salt: bytes
    timeout_s: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one token and of the most likely ones."""

    logprob: float
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Started:
    """How a sequence came to its first token; times in seconds."""

    num_cached_tokens: int
    queue_s: float
    transfer_s: float
    prefill_s: float


@dataclass(frozen=True, slots=True)
class Finished:
    """A sequence's good end."""

    reason: str  # "stop" or "length"


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """New tokens of one choice, and perhaps its end.

    Attributes:
        choice: which of the request's sequences.
        end: None while it goes on.
        start: with the first tokens.
    """

    choice: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    end: Finished | TriptychError | None
    start: Started | None = None


class Mailbox(Generic[Item]):
    """Items from many, taken by one, all that are there at a time.

    Unbounded here: a sequence brings at most `max_tokens` tokens and one end.
    """

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Item) -> None:
        """Adds an item; never waits."""
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[Item]:
        """All items at hand, at least one. For one caller at a time."""
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        items = list(self._items)
        self._items.clear()
        return items
