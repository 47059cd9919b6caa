"""A model runner whose model drafts tokens with a layer for multi-token prediction."""

from services.decoder.engine.run.drafter import Drafter
from services.decoder.engine.run.model_runner import ModelRunner, Sampling
from services.decoder.engine.run.pending_step import DevicePendingStep, HostTokens
from services.decoder.engine.run.step_computer import Computed, StepComputer
from services.decoder.engine.step import Step


class DraftingRunner(ModelRunner):
    """A `ModelRunner` that drafts tokens behind the sampled ones.

    Args:
        computer: the part of the runner that every rank has.
        drafter: drafts tokens; the computer's steps go through it.
    """

    def __init__(self, computer: StepComputer, drafter: Drafter) -> None:
        super().__init__(computer)
        self._drafter = drafter
        self._num_drafts = 0

    def execute(self, step: Step) -> DevicePendingStep:
        compute = step.compute
        for row, start, count in compute.block_updates.tolist():
            self._drafter.note_blocks(row, start + count)
        for started in compute.row_starts:
            if started.checkpoint >= 0:
                self._drafter.start_row(started.row, started.checkpoint)
        self._num_drafts = step.sample.num_head_drafts
        return super().execute(step)

    def sample(self, computed: Computed, sampling: Sampling) -> HostTokens:
        tokens = super().sample(computed, sampling)
        if self._num_drafts:
            found = self._drafter.draft(tokens.sampled, self._num_drafts)
            tokens.drafts = self.readback.copy(found)
        return tokens
