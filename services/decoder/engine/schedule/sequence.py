"""Sequence: the state of one generation. Pure Python."""

from array import array
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
import numpy.typing as npt

from services.decoder.engine.messages import AddSequence, ImageSpan


class SequenceState(Enum):
    """WAITING → RUNNING → FINISHED, and back to WAITING when preempted."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """One generation: its tokens, its KV blocks, its progress.

    Attributes:
        message: what the front asked for.
        sequence_id: the message's.
        token_ids: prompt, then the completion tokens known so far; int32.
        num_prompt_tokens: length of the prompt.
        positions: int32 `[3, num_prompt_tokens]`, or None: the token's index on each axis.
        image_offsets: image key → byte offset in the arena, while the embedding is there.
        images_read: keys of embeddings that were released after they were read; needed again if
            the sequence is preempted.
        tenant: whose it is.
        row: index in the runner's tables while RUNNING, else -1.
        block_table: ids of the KV blocks, in order.
        capacity: tokens that the block table has room for.
        num_computed_tokens: tokens whose keys and values are in the cache or will be when the
            steps in flight are done, if each yields as many as it may.
        num_cached_tokens: prompt tokens found in the prefix cache at the first admission.
        num_in_flight: steps that sample for the sequence and whose tokens have not arrived.
        checkpoint: slot of the recurrent state that the row starts from; -1: zero.
        checkpoints: after how many tokens the state is to be kept, ascending.
        num_sent_blocks: entries of the block table that were sent to the runner.
        plans_ahead: the next step may be planned while the last token is in flight, whose mask, if
            there is one, then arrives while the step is computed.
        num_masked: tokens before the one that the last mask was for; -1: none has come.
        token_mask: the mask for the next token, int32 words; empty: every token is allowed.
        max_length: tokens, prompt included, at which the sequence ends by length.
        stop_ids: those of the message as a set.
        num_scored: prompt tokens, but the first, whose logprobs were sent.
        block_hashes: hashes of the leading full blocks, as far as they were computed.
        num_registered_blocks: leading blocks that were registered in the prefix cache.
        arrival: order of arrival, which is the order of waiting within a tenant.
        admission: order of the last admission; the latest is preempted first.
        last_prefill_step: the last step that may read the sequence's images.
        received_at, first_scheduled_at, first_token_at: `time.monotonic()`, 0 where not yet.
    """

    message: AddSequence
    sequence_id: int = field(init=False)
    token_ids: "array[int]" = field(init=False)
    num_prompt_tokens: int = field(init=False)
    positions: npt.NDArray[np.int32] | None = None
    tenant: str = field(init=False)
    state: SequenceState = SequenceState.WAITING
    image_offsets: dict[bytes, int] = field(default_factory=dict[bytes, int])
    images_read: list[bytes] = field(default_factory=list[bytes])
    row: int = -1
    block_table: list[int] = field(default_factory=list[int])
    capacity: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_in_flight: int = 0
    checkpoint: int = -1
    checkpoints: tuple[int, ...] = ()
    num_sent_blocks: int = 0
    plans_ahead: bool = field(init=False)
    num_masked: int = -1
    token_mask: npt.NDArray[np.int32] | None = None
    num_preemptions: int = 0
    max_length: int = 0
    stop_ids: frozenset[int] = field(init=False)
    num_scored: int = 0
    block_hashes: list[bytes] = field(default_factory=list[bytes])
    num_registered_blocks: int = 0
    arrival: int = 0
    admission: int = 0
    last_prefill_step: int = 0
    received_at: float = 0.0
    first_scheduled_at: float = 0.0
    first_token_at: float = 0.0

    def __post_init__(self) -> None:
        message = self.message
        self.sequence_id, self.tenant = message.sequence_id, message.tenant
        self.token_ids = array("i", message.prompt_token_ids)  # little-endian, as GPUs' hosts
        self.num_prompt_tokens = len(self.token_ids)
        if message.positions:
            self.positions = np.frombuffer(message.positions, dtype="<i4").reshape(3, -1)
        self.token_ids.frombytes(message.generated_token_ids)  # as if it had been preempted
        self.plans_ahead = not message.token_masks
        self.stop_ids = frozenset(message.sampling.stop_token_ids)

    @property
    def num_generated(self) -> int:
        """Completion tokens whose ids are known."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def needs_scores(self) -> bool:
        """Whether logprobs of the prompt are still wanted: each of its tokens has to be computed,
        cached or not.
        """
        wanted = self.message.sampling.prompt_logprobs is not None
        return wanted and self.num_scored < self.num_prompt_tokens - 1

    @property
    def awaits_mask(self) -> bool:
        """Whether the next token cannot be sampled before a mask arrives."""
        return self.message.token_masks and self.token_mask is None

    def missing_image(self, start: int) -> ImageSpan | None:
        """The first image at or after `start`, or across it, that has not arrived."""
        for span in self.message.images:
            if span.offset + span.num_tokens > start and span.key not in self.image_offsets:
                return span
        return None

    def num_ready_tokens(self, start: int) -> int:
        """The index before which all tokens can be computed, given that those before `start` are.

        It is that of the first placeholder, at or after `start`, of an image that has not arrived,
        or that of the last token if the mask for the next one has not.
        """
        if (span := self.missing_image(start)) is not None:
            return max(span.offset, start)
        if self.awaits_mask:
            return max(len(self.token_ids) - 1, start)
        return len(self.token_ids)
