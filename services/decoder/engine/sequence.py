"""Sequence: the state of one generation. Pure Python."""

from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
import numpy.typing as npt

from services.decoder.engine.messages import ImageSpan, SamplingParams


class SequenceState(Enum):
    """WAITING → RUNNING → FINISHED, and back to WAITING when preempted."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """One generation: its tokens, its place in the cache, its progress.

    Attributes:
        sequence_id: unique for the life of the engine.
        token_ids: prompt, then the completion tokens known so far.
        num_prompt_tokens: length of the prompt.
        positions: int32 `[3, num_prompt_tokens]`, or None: 0.. on each axis.
        position_delta: token i of the completion, at index j of `token_ids`, has position
            j + position_delta on each axis.
        images: placeholder spans, by offset.
        image_offsets: image key → byte offset in the arena, once the embedding is there.
        row: place in the runner's tables while RUNNING, else -1.
        block_table: ids of the KV blocks, in order.
        num_computed_tokens: tokens whose keys and values are in the cache or will be when the
            steps in flight are done.
        num_in_flight: tokens sampled on the device whose ids have not come back.
    """

    sequence_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    positions: npt.NDArray[np.int32] | None
    position_delta: int
    images: list[ImageSpan]
    sampling: SamplingParams
    cache_salt: bytes = b""
    state: SequenceState = SequenceState.WAITING
    image_offsets: dict[bytes, int] = field(default_factory=dict)
    row: int = -1
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_in_flight: int = 0
    num_preemptions: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence, those in flight included."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_generated(self) -> int:
        """Completion tokens, those in flight included."""
        return self.num_tokens - self.num_prompt_tokens
