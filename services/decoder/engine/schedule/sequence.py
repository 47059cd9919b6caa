"""A sequence: the state of one generation. Pure Python."""

from array import array
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
import numpy.typing as npt

from services.decoder.engine.messages import AddSequence, ImageSpan
from services.decoder.engine.schedule.drafts import Drafts
from services.decoder.engine.schedule.fair_queue import Flow


class SequenceState(Enum):
    """The state of a sequence: WAITING → RUNNING → FINISHED, and back to WAITING if preempted."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """The state of one generation: tokens, KV blocks, progress.

    Attributes:
        message: the front's request for the sequence.
        sequence_id: id of the sequence, from the message.
        token_ids: int32 ids of the prompt, then of the completion tokens known so far.
        num_prompt_tokens: length of the prompt.
        positions: int32 `[3, num_prompt_tokens]`. None if each token's position is its index on
            all three axes.
        image_offsets: byte offset in the arena by image key, while the embedding is there.
        images_read: keys of embeddings that were released after they were read. The sequence needs
            them again if it is preempted.
        tenant: tenant of the request, from the message.
        row: index in the runner's tables while the sequence is RUNNING, else -1.
        block_table: ids of the KV blocks, in order.
        capacity: number of tokens that fit into the blocks of the block table.
        num_computed_tokens: number of tokens whose keys and values are in the cache, or will be
            when the steps in flight are done, if each of these steps yields as many tokens as it
            may.
        num_cached_tokens: number of prompt tokens found in the prefix cache at the first admission.
        num_in_flight: number of steps that sample for the sequence and whose tokens have not
            arrived.
        checkpoint: slot of the recurrent state that the row starts from; -1 if it starts at zero.
        checkpoints: numbers of tokens after which a checkpoint of the state is wanted, ascending.
        num_sent_blocks: number of entries of the block table that the runner has.
        plans_ahead: True if the next step may be planned while the last token is in flight. The
            token's mask, if there is a grammar, then arrives while the step is computed.
        num_masked: number of completion tokens before the token of the last mask; -1 if no mask has
            arrived.
        token_mask: int32 words of the mask for the next token; empty if every token is allowed.
            None if no mask has arrived.
        draft_masks: masks for the tokens behind each of the first drafts, like `token_mask`.
        drafts: drafts of the sequence. None if there is no speculation.
        max_length: number of tokens, prompt included, at which the sequence ends by length.
        stop_ids: the message's stop token ids as a set.
        num_scored: number of prompt tokens behind the first whose logprobs were sent.
        block_hashes: hashes of the leading full blocks, as far as they were computed.
        num_registered_blocks: number of leading blocks that are registered in the prefix cache.
        arrival: number of the arrival, which orders waiting sequences within a tenant.
        flow: the sequences of the request. None if the model generates text.
        admission: number of the last admission; the latest admission is preempted first.
        last_prefill_step: number of the last step that may read the sequence's images.
        received_at, first_scheduled_at, first_token_at: `time.monotonic()` of these events, 0
            before they happen.
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
    draft_masks: list[npt.NDArray[np.int32]] = field(default_factory=list[npt.NDArray[np.int32]])
    drafts: Drafts | None = None
    num_preemptions: int = 0
    max_length: int = 0
    stop_ids: frozenset[int] = field(init=False)
    num_scored: int = 0
    block_hashes: list[bytes] = field(default_factory=list[bytes])
    num_registered_blocks: int = 0
    arrival: int = 0
    flow: Flow | None = None
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
        self.token_ids.frombytes(message.generated_token_ids)  # tokens that another decoder made
        self.plans_ahead = not message.token_masks
        self.stop_ids = frozenset(message.sampling.stop_token_ids)

    @property
    def num_generated(self) -> int:
        """Number of completion tokens whose ids are known."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def needs_scores(self) -> bool:
        """True if logprobs of prompt tokens are still wanted.

        Each prompt token then has to be computed, even if its keys and values are cached.
        """
        wanted = self.message.sampling.prompt_logprobs is not None
        return wanted and self.num_scored < self.num_prompt_tokens - 1

    @property
    def awaits_mask(self) -> bool:
        """True if the next token cannot be sampled before a mask arrives."""
        return self.message.token_masks and self.token_mask is None

    @property
    def known_drafts(self) -> list[int]:
        """Drafts behind the last known token. Empty if further tokens are in flight."""
        return [] if self.drafts is None or self.num_in_flight else self.drafts.proposed

    def missing_image(self, start: int) -> ImageSpan | None:
        """Returns the first image that ends behind `start` and has not arrived, or None."""
        for span in self.message.images:
            if span.offset + span.num_tokens > start and span.key not in self.image_offsets:
                return span
        return None

    def num_ready_tokens(self, start: int) -> int:
        """Returns the end of the tokens that can be computed now, if all before `start` are.

        The end is the first placeholder at or after `start` whose image has not arrived. It is the
        last token if the mask for the next token has not arrived.
        """
        if (span := self.missing_image(start)) is not None:
            return max(span.offset, start)
        if self.awaits_mask:
            return max(len(self.token_ids) - 1, start)
        return len(self.token_ids)
