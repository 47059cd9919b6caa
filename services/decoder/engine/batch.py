"""A step's work as the scheduler decides it and the runner executes it. Pure Python.

Scheduling is one step ahead of sampling: when step n+1 is planned, the tokens of step n are still
on the device. So a plan never needs a sampled token's id: a decode chunk says only "the token that
this row sampled last", which the runner keeps on the device, one per row.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from services.decoder.engine.messages import Logprobs
from services.decoder.engine.sequence import Sequence


@dataclass(slots=True)
class Chunk:
    """One sequence's part of a step: its tokens [start, start + length) are computed.

    Attributes:
        sequence: its `row` is a place in the runner's per-sequence tables, held from admission to
            end or preemption; its `block_table` covers start + length tokens.
        start: tokens whose keys and values are in the cache already.
        length: tokens to compute now, at least 1.
        from_device: the one input token is the row's last sampled one (a decode chunk); otherwise
            the ids are `sequence.token_ids[start : start + length]`.
        samples: the chunk reaches the last token of the sequence, so a token is sampled from it.
        generated: tokens sampled for this sequence before this step, in flight ones included;
            counts min_tokens and drives the seeded draw.
    """

    sequence: Sequence
    start: int
    length: int
    from_device: bool
    samples: bool
    generated: int


@dataclass(slots=True)
class Batch:
    """One step: decode chunks first, then prefill chunks."""

    chunks: list[Chunk]
    num_tokens: int


@dataclass(slots=True)
class StepOutput:
    """What a step sampled, in the order of the batch's chunks that sample.

    A non-finite row of logits makes its `token_ids` entry -1: that sequence fails, its batch-mates
    do not.
    """

    token_ids: Seq[int]
    logprobs: dict[int, Logprobs]  # by index into token_ids, only where asked for


class PendingStep(Protocol):
    """A step that was launched."""

    def result(self) -> StepOutput:
        """Waits for the step's ids, which were copied to the host without stopping the device."""
        ...


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """What a runner serves and how much; constant for its life."""

    model_name: str
    dtype: str
    num_features: int  # of an image's embedding
    hidden: int
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int  # block ids 0 .. num_blocks - 1 are the scheduler's
    max_num_sequences: int  # rows 0 .. max_num_sequences - 1
    max_batched_tokens: int


class Runner(Protocol):
    """The only owner of a device."""

    @property
    def info(self) -> RunnerInfo:
        """Sizes and names."""
        ...

    def start_sequence(self, sequence: Sequence) -> None:
        """A sequence was given its row (at admission and after a preemption): fill its tables."""
        ...

    def execute(self, batch: Batch) -> PendingStep:
        """Launches one step and returns without waiting for the device."""
        ...
