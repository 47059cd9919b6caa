"""A model runner whose model drafts tokens with a layer for multi-token prediction."""

import torch

from kernels.sampling.sampling import SamplingInputs
from services.decoder.engine.run.drafter import Drafter
from services.decoder.engine.run.model_runner import ModelRunner
from services.decoder.engine.run.pending_step import DevicePendingStep, HostTokens
from services.decoder.engine.run.sampler import Sampled
from services.decoder.engine.run.step_computer import StepComputer
from services.decoder.engine.step import Step


class DraftingRunner(ModelRunner):
    """A `ModelRunner` that drafts tokens behind the sampled ones.

    Args:
        computer: the part of the runner that every rank has.
        drafter: drafts tokens; the computer's steps go through it.

    Attributes:
        drafter: see above.
    """

    def __init__(self, computer: StepComputer, drafter: Drafter) -> None:
        super().__init__(computer)
        self.drafter = drafter
        self._drafts = False

    def execute(self, step: Step) -> DevicePendingStep:
        self._drafts = step.compute.num_head_drafts > 0
        return super().execute(step)

    def _read(self, sampled: Sampled, sampling: SamplingInputs | None) -> HostTokens:
        """Starts to copy sampled tokens to the host, and launches drafts behind them.

        The host reads the tokens while the device drafts.
        """
        tokens = super()._read(sampled, sampling)
        if self._drafts:
            tokens.drafts = self.readback.drafts(self.drafter.draft(sampled.token_ids))
        return tokens

    @torch.inference_mode()
    def sample_scratch(self, num_rows: int) -> None:
        super().sample_scratch(num_rows)
        self.drafter.draft_groups(num_rows)
