"""The `step.PendingStep` of a device: a launched step whose results are copied to pinned memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.sampling.sampling import SamplingInputs
from services.decoder.engine.messages import Logprobs
from services.decoder.engine.prompt_scores import PromptScores
from services.decoder.engine.sampler import SampledLogprobs
from services.decoder.engine.step import Int32Array, Scores, StepOutput


class HostTokens(NamedTuple):
    """What a step sampled, on the host as soon as `event` has happened (None: it has)."""

    token_ids: Tensor  # [B] int32
    logprobs: SampledLogprobs | None
    sampling: SamplingInputs | None  # whose logprobs they are
    event: torch.cuda.Event | None


class LateSampling(NamedTuple):
    """The sampling of a step whose masks arrive while it is computed.

    Attributes:
        computed: happens when the logits are there; None: they are.
        put: takes the place of a mask in `Step.late`, and the mask.
        sample: launches the sampling; its logits are valid until the next step.
    """

    computed: torch.cuda.Event | None
    put: Callable[[int, Int32Array], None]
    sample: Callable[[], HostTokens]


@dataclass(slots=True)
class DevicePendingStep:
    """A launched step.

    Attributes:
        tokens: its samples; None: not sampled yet.
        late: samples it; None: it was sampled when it was launched.
        scores: logprobs of prompt tokens, on the host when `tokens` are.
    """

    tokens: HostTokens | None
    late: LateSampling | None = None
    scores: Sequence[PromptScores] = ()
    _output: StepOutput | None = field(default=None, init=False)

    def is_computed(self) -> bool:
        """See `step.PendingStep`."""
        computed = None if self.late is None else self.late.computed
        return computed is None or computed.query()

    def put_mask(self, index: int, mask: Int32Array) -> None:
        """See `step.PendingStep`."""
        if self.late is None:
            raise RuntimeError("the step has no late masks")
        self.late.put(index, mask)

    def sample(self) -> None:
        """See `step.PendingStep`."""
        if self.late is None:
            raise RuntimeError("the step has no late masks")
        self.tokens = self.late.sample()

    def result(self) -> StepOutput:
        """The step's tokens and scores, once they are there."""
        if self._output is None:
            if self.tokens is None:
                raise RuntimeError("the step's masks have not arrived")
            token_ids, _, _, event = self.tokens
            if event is not None:
                event.synchronize()
            ids = token_ids.numpy()
            scores = [Scores(*(part.numpy() for part in found)) for found in self.scores]
            ones = np.ones(len(ids), np.int32)
            self._output = StepOutput(ids[:, None], ones, _logprobs(self.tokens), scores)
        return self._output


def _logprobs(tokens: HostTokens) -> dict[int, list[Logprobs]]:
    """`StepOutput.logprobs`."""
    inputs, found = tokens.sampling, tokens.logprobs
    if found is None or inputs is None:
        return {}
    chosen, top_ids, top = found.chosen.tolist(), found.top_ids.tolist(), found.top.tolist()
    named = inputs.logprob_ids
    num_ranked = len(top_ids[0]) - (0 if named is None else named.shape[1])
    logprobs: dict[int, list[Logprobs]] = {}
    for place, (index, count) in enumerate(
        zip(inputs.logprob_rows, inputs.logprob_counts, strict=True)
    ):
        ids, values = top_ids[place][:count], top[place][:count]
        if named is not None:
            wanted = inputs.logprob_named[place]
            for i in range(num_ranked, num_ranked + wanted):
                if top_ids[place][i] not in ids:
                    ids.append(top_ids[place][i])
                    values.append(top[place][i])
        logprobs[index] = [Logprobs(chosen[place], ids, values)]
    return logprobs
