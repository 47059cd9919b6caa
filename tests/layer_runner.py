"""A fake device whose model drafts tokens itself, and which finds the ids of drafts by itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import numpy as np

from services.decoder.engine.schedule.draft_pace import DraftPace
from services.decoder.engine.step import ComputeStep, Step
from tests.fake_runner import VOCAB_SIZE, FakePending, FakeRunner, Reference


@dataclass
class LayerRunner(FakeRunner):
    """A `FakeRunner` with a layer that drafts behind the samples of a step.

    As on a GPU, a step that was launched before the host knew its drafts finds their ids among the
    drafts of the step before. The host gets the drafts of a step behind its tokens.

    Attributes:
        right: probability that a draft is right.
        num_sources: number of drafts whose ids the host did not know when their step was launched.
        copies: False if the device copies no ids to such steps, for controls of tests.
    """

    right: float = 0.8
    num_sources: int = 0
    copies: bool = True
    _draw: Random = field(default_factory=lambda: Random(0))
    _drafts: np.ndarray | None = None

    def execute(self, step: Step) -> FakePending:
        compute = step.compute
        if compute.draft_sources is not None:
            rows = compute.rows[compute.draft_sources[:, 0]]
            for row in rows.tolist():
                message = self.messages[self._starts[row].sequence_id]
                assert not (message.token_masks or message.sampling.has_penalties)
        return super().execute(step)

    def run_oldest(self) -> None:
        step, starts, tables, pending = self._queue[0]
        compute = step.compute
        if (sources := compute.draft_sources) is not None and self.copies:
            assert self._drafts is not None
            ids = self._drafts[sources[:, 1], sources[:, 2]]
            assert (ids >= 0).all(), "a draft for which the row had no block"
            compute.token_ids = compute.token_ids.copy()
            compute.token_ids[sources[:, 0] - compute.num_from_device] = ids
            self.num_sources += len(sources)
        super().run_oldest()
        if compute.num_head_drafts:
            assert pending.output is not None
            sampled = pending.output.token_ids[:, 0].tolist()
            capacities = [self.info.block_size * len(table) for table in tables]
            numbers = [start.sequence_id for start in starts]
            pending.made = self._drafts = self._made(compute, sampled, numbers, capacities)

    def _made(
        self, compute: ComputeStep, sampled: list[int], numbers: list[int], capacities: list[int]
    ) -> np.ndarray:
        """Returns the drafts `[G, num_head_drafts]` behind a step.

        Args:
            compute: the step.
            sampled: `[B]`, the sampled tokens.
            numbers: `[S]`, id of each chunk's sequence.
            capacities: `[S]`, number of tokens for which the chunk's row has blocks.
        """
        made: list[list[int]] = []
        samples, first = compute.samples.tolist(), 0
        rows = compute.rows.tolist()
        while first < len(samples):
            chunk = samples[first]
            count = sum(1 for each in samples[first:] if rows[each] == rows[chunk])
            end = int(compute.starts[chunk] + compute.lengths[chunk])
            accepted = 0
            while accepted + 1 < count:  # drafts, each of which is a chunk of one token
                draft = compute.token_ids[samples[first + 1 + accepted] - compute.num_from_device]
                if draft != sampled[first + accepted]:
                    break
                accepted += 1
            message = self.messages[numbers[chunk]]
            alone = self._references.setdefault(numbers[chunk], Reference(message))
            drafts: list[int] = []
            for place in range(compute.num_head_drafts):
                draft = alone.token(end + accepted + 1 + place)
                if self._draw.random() >= self.right:
                    draft = (draft + 1) % VOCAB_SIZE
                drafts.append(draft if end - 1 + accepted + place < capacities[chunk] else -1)
            made.append(drafts)
            first += count
        return np.array(made, np.int32)


class RandomPace(DraftPace):
    """Lets the layer draft behind a share of steps."""

    def __init__(self, share: float, seed: int) -> None:
        super().__init__()
        self._share, self._random = share, Random(seed)

    def drafts(self, tokens: float) -> bool:
        return self._random.random() < self._share
