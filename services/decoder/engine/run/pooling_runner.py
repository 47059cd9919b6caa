"""The runner of a model for search: its steps return vectors or scores, and sample nothing.

A sequence of such a model ends with the step that computes its last prompt token. The step yields
one meaningless token for the sequence. Scheduling, preemption and the ends of sequences are
therefore as for a chat request with `max_tokens` 1.
"""

import torch
from torch import Tensor

from kernels.sampling import NOT_FINITE
from services.decoder.engine.run.model_runner import ModelRunner, Sampling
from services.decoder.engine.run.pending_step import HostTokens
from services.decoder.engine.run.sampler import Sampled
from services.decoder.engine.run.step_computer import Computed, StepComputer
from services.decoder.engine.run.step_inputs import StepInputs
from services.decoder.engine.step import Step
from services.decoder.models.pooling import Pooler


class PoolingRunner(ModelRunner):
    """A `ModelRunner` that pools where others sample.

    Args:
        computer: the part of the runner that every rank has.
        pooler: the pooler of the model.

    Attributes:
        pooler: the same.
    """

    def __init__(self, computer: StepComputer, pooler: Pooler) -> None:
        # The sampler's counts of tokens would take 4 bytes per row and token of the vocabulary.
        super().__init__(computer, num_sampled=0)
        self.pooler = pooler

    def _stage(self, step: Step) -> tuple[Step, StepInputs, Sampling]:
        return step, self.computer.stage(step.compute), None

    def sample(self, computed: Computed, sampling: Sampling) -> HostTokens:
        """Pools the hidden states of the samples, and starts to copy the results to the host.

        The token of a sample is 0, or `NOT_FINITE` if its result is not finite.
        """
        assert computed.logits is not None
        vectors = self.pooler(computed.logits)
        finite = torch.isfinite(vectors.sum(-1))
        token_ids = torch.where(finite, 0, NOT_FINITE).to(torch.int32)
        return self.readback.tokens(Sampled(token_ids, None), vectors=vectors)

    def _score(self, step: Step, computed: Computed) -> list[tuple[Tensor, ...]]:
        """Pools all tokens of prompts but the last ones, with `token_embed`. The vectors are the
        fourth of the parts of `Scores`. The first three are empty or zero.

        A vector that is not finite spoils the vectors of all later tokens, by attention, and the
        sequence fails with its last token. If the last layer has spoiled only this token, the other
        tokens do not show it, so the gateway looks at all tokens.
        """
        hidden = computed.hidden
        assert hidden is not None
        runs: list[tuple[Tensor, ...]] = []
        for first, count, _ in step.compute.scored.tolist():
            vectors = self.pooler(hidden[first : first + count])
            ranks = torch.zeros(count, dtype=torch.int32, device=vectors.device)
            parts = vectors.new_zeros(count), ranks, ranks[:, None][:, :0], vectors
            runs.append(tuple(map(self.readback.copy, parts)))
        return runs

    @torch.inference_mode()
    def sample_scratch(self, num_rows: int) -> None:
        """Pools meaningless hidden states, as a warm-up."""
        self.pooler(self._scratch(num_rows))

    def _scratch(self, num_rows: int) -> Tensor:
        weight = self.computer.model.embed_tokens.weight
        return torch.zeros((num_rows, weight.shape[1]), dtype=weight.dtype, device=weight.device)
