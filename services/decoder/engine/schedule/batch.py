"""A batch: the plan of one step, and its conversion to the arrays of a `Step`.

The scheduler makes a batch of chunks, one per sequence. The engine converts the batch to a `Step`
and gives that to the runner. A `Step` has only arrays. The engine keeps the batch, whose chunks
refer to their sequences, and appends each of the step's tokens to its sequence when the tokens
arrive. Pure Python and numpy, without torch.
"""

from dataclasses import dataclass, field

import numpy as np

from services.decoder.engine.schedule.chunk import Chunk, counts_of, draft_sources, known_tokens
from services.decoder.engine.schedule.sequence import Sequence
from services.decoder.engine.schedule.step_cost import StepLoad
from services.decoder.engine.step import (
    ComputeStep,
    Int32Array,
    Int64Array,
    RowSampling,
    RowStart,
    SampleStep,
    Step,
)


@dataclass(slots=True)
class Batch:
    """The plan of a step.

    Attributes:
        chunks: chunks of different sequences: first those `from_device`, then other decodes, then
            prompts. A batch without chunks is not launched.
        num_tokens: the most tokens that the step computes, drafts included.
        admitted: sequences that were given a row since the last launched step.
        extended: sequences that were given a block since the last launched step.
        late: chunks whose token masks have not arrived when the step is launched.
        scored: chunks with prompt tokens whose logprobs are wanted. `to_step` fills the list.
        load: the step's work, for predicting its time. None if no prompt waits.
        launched_at: time of the launch, by the engine's clock.
        num_drafts: number of drafts. A batch with drafts has no prompts.
        num_head_drafts: see `ComputeStep.num_head_drafts`.
        may_have_adapters: False if no sequence has an adapter, so that `to_step` looks for none.
        has_loads: True if the step copies blocks from the host, whose time is not that of its load.
        is_next_late: True if the next step has prompts, and the host launched it only after the
            device had computed this one.
    """

    chunks: list[Chunk]
    num_tokens: int
    admitted: list[Sequence] = field(default_factory=list[Sequence])
    extended: list[Sequence] = field(default_factory=list[Sequence])
    late: list[Chunk] = field(default_factory=list[Chunk])
    scored: list[Chunk] = field(default_factory=list[Chunk])
    load: StepLoad | None = None
    launched_at: float = 0.0
    num_drafts: int = 0
    num_head_drafts: int = 0
    may_have_adapters: bool = True
    has_loads: bool = False
    is_next_late: bool = False

    def to_step(self) -> Step:
        """Returns the step as arrays.

        The method notes which entries of block tables the runner gets with this step. If the step
        is not launched after all, `Scheduler.roll_back` has to revert this.

        The code is plain Python per chunk where numpy could do the same. After an idle time, the
        first use of each numpy function takes 10 to 80 µs, and a lone prompt would wait for it.
        """
        chunks = self.chunks
        if self.num_drafts:
            chunks = [part for c in chunks for part in (c.parts if c.drafts else (c,))]
        sampling = chunks
        num_from_device = len(chunks)
        rows = [chunk.sequence.row for chunk in chunks]
        starts = [chunk.start for chunk in chunks]
        # Chunks from the device come first. If the last chunk comes from there, all chunks do.
        if chunks[-1].from_device:
            rows, starts = np.array([rows, starts], np.int64)
            lengths, samples = np.ones_like(rows), np.arange(num_from_device)
        else:
            num_from_device = sum([chunk.from_device for chunk in chunks])
            lengths = [chunk.length for chunk in chunks]
            rows, starts, lengths = np.array([rows, starts, lengths], np.int64)
            sampling = [chunk for chunk in chunks if chunk.samples]
            samples = np.array([i for i, chunk in enumerate(chunks) if chunk.samples], np.int64)
        compute = ComputeStep(rows, starts, lengths, num_from_device, samples)
        compute.has_drafts = self.num_drafts > 0
        if self.may_have_adapters:
            adapters = [chunk.sequence.message.adapter for chunk in chunks]
            if max(adapters) >= 0:
                compute.adapters = np.array(adapters, np.int64)
        compute.num_head_drafts = self.num_head_drafts
        sample = SampleStep()
        if known := chunks[num_from_device:]:
            compute.token_ids, compute.positions = known_tokens(known)
            compute.draft_sources = draft_sources(chunks, num_from_device, compute.token_ids)
            compute.state_saves = _state_saves(known, num_from_device)
            if any(chunk.sequence.message.images for chunk in known):
                compute.images = _image_runs(known, num_from_device)
            if any([chunk.sequence.needs_scores for chunk in known]):
                compute.scored, sample.followers = self._scored_runs(num_from_device)
            if any([chunk.sequence.drafts is not None for chunk in known]):
                sample.draft_counts = counts_of(sampling)
                folds = [(i, c.num_folded) for i, c in enumerate(chunks) if c.num_folded]
                compute.folds = np.array(folds, np.int64) if folds else None
            if masks := _token_masks(sampling, num_from_device):
                sample.masked = np.array([*masks], np.int64)
                sample.token_masks = np.stack([*masks.values()])
        # A decode adds its limit to `self.num_tokens`, but only 1 to `compute.num_tokens`. The two
        # sums differ if a limit is above 1.
        if self.num_tokens > compute.num_tokens:
            compute.limits = np.array([chunk.limit for chunk in sampling], np.int64)
        if self.late:
            sample.late = np.array([i for i, c in enumerate(sampling) if c.is_late], np.int64)
        if self.admitted or self.extended:
            compute.block_updates, compute.block_ids = self._block_updates()
        for s in dict.fromkeys(self.admitted):  # A sequence may have been admitted twice.
            if s.row >= 0:  # If not, the sequence has been preempted or has ended meanwhile.
                start = RowStart(s.row, s.sequence_id, s.message.position_delta, s.checkpoint)
                compute.row_starts.append(start)
                sample.row_starts.append(_row_sampling(s))
        return Step(compute, sample)

    def _scored_runs(self, first: int) -> tuple[Int64Array, Int32Array]:
        """Returns `ComputeStep.scored` and `SampleStep.followers`.

        Args:
            first: number of chunks from the device. Each of them has one token, so the tokens of
                the other chunks begin at this place of the step.
        """
        runs: list[tuple[int, int, int]] = []
        followers: list[int] = []
        for chunk in self.chunks[first:]:
            sequence, start = chunk.sequence, chunk.start
            # The token that follows the last prompt token is a completion token, so it has no
            # prompt logprob.
            end = min(start + chunk.length, sequence.num_prompt_tokens - 1)
            most = sequence.message.sampling.prompt_logprobs
            if most is not None and start < end and sequence.num_scored < end:
                self.scored.append(chunk)
                runs.append((first, end - start, most))
                followers += sequence.token_ids[start + 1 : end + 1]
            first += chunk.length
        return np.array(runs, np.int64).reshape(-1, 3), np.array(followers, np.int32)

    def _block_updates(self) -> tuple[Int64Array, Int32Array]:
        """Returns `ComputeStep.block_updates` and `block_ids`."""
        changed = [s for s in dict.fromkeys(self.admitted + self.extended) if s.row >= 0]
        updates: list[tuple[int, int, int]] = []
        ids: list[int] = []
        for sequence in changed:
            start, end = sequence.num_sent_blocks, len(sequence.block_table)
            updates.append((sequence.row, start, end - start))
            ids += sequence.block_table[start:]
            sequence.num_sent_blocks = end
        return np.array(updates, np.int64).reshape(-1, 3), np.array(ids, np.int32)


def _token_masks(sampling: list[Chunk], first: int) -> dict[int, Int32Array]:
    """Returns the token masks by index in `sampling`. Masks of chunks before `first` are late."""
    return {
        index: mask
        for index in range(first, len(sampling))
        if (mask := sampling[index].token_mask) is not None and len(mask)
    }


def _row_sampling(sequence: Sequence) -> RowSampling:
    prompt, completion = b"", b""
    if sequence.message.sampling.has_penalties:
        count = sequence.num_prompt_tokens
        prompt = sequence.token_ids[:count].tobytes()
        completion = sequence.token_ids[count:].tobytes()
    return RowSampling(
        sequence.row, sequence.message.sampling, sequence.num_prompt_tokens, prompt, completion
    )


def _state_saves(chunks: list[Chunk], first: int) -> Int64Array | None:
    """Returns `ComputeStep.state_saves`. The tokens of the chunks begin at place `first`."""
    saves: list[tuple[int, int]] = []
    for chunk in chunks:
        saves += [(first + tokens - 1 - chunk.start, slot) for tokens, slot in chunk.checkpoints]
        first += chunk.length
    return np.array(saves, np.int64) if saves else None


def _image_runs(chunks: list[Chunk], first: int) -> Int64Array:
    """Returns `ComputeStep.images`. The tokens of the chunks begin at place `first`."""
    runs: list[tuple[int, int, int, int, int]] = []
    for chunk in chunks:
        sequence = chunk.sequence
        for image in sequence.message.images:
            start = max(chunk.start, image.offset)
            stop = min(chunk.start + chunk.length, image.offset + image.num_tokens)
            if start < stop:
                runs.append(
                    (
                        first + start - chunk.start,
                        stop - start,
                        sequence.image_offsets[image.key],
                        image.num_tokens,
                        start - image.offset,
                    )
                )
        first += chunk.length
    return np.array(runs, np.int64).reshape(-1, 5)
