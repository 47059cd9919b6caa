"""The `step.PendingStep` of a device: a launched step whose results are copied to pinned memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kernels.sampling.sampling import SamplingInputs
from services.decoder.engine.messages import Logprobs
from services.decoder.engine.run.sampler import Sampled, SampledLogprobs
from services.decoder.engine.step import Int32Array, Scores, StepOutput

_NO_TOKENS = torch.empty(0, dtype=torch.int32)

# What a step sampled, on its way to the host; called once, it waits for the copies. Token ids
# `[B]`, and `StepOutput.logprobs`.
HostTokens = Callable[[], tuple[Int32Array, dict[int, list[Logprobs]]]]


class Readback:
    """Copies to pinned memory that do not stop the device; on a CPU there is nothing to copy.

    Token ids have buffers and events of their own, used again when their step was read. Other
    copies are rare: torch's allocator keeps and reuses their memory.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._num_rows = num_rows
        self._free: list[tuple[Tensor, torch.cuda.Event]] = []

    def tokens(self, sampled: Sampled | None, sampling: SamplingInputs | None = None) -> HostTokens:
        """A step's tokens; None: it has none, and is over when they would be there."""
        token_ids = _NO_TOKENS if sampled is None else sampled.token_ids
        logprobs = None if sampled is None else sampled.logprobs
        if not self._cuda:
            return lambda: (token_ids.numpy(), _logprobs(logprobs, sampling))
        if logprobs is not None:
            parts = (logprobs.chosen, logprobs.top_ids, logprobs.top)
            logprobs = SampledLogprobs(*map(self.copy, parts))
        buffer, event = taken = self._free.pop() if self._free else self._made()
        ids = buffer[: len(token_ids)]
        ids.copy_(token_ids, non_blocking=True)
        event.record()

        def wait() -> tuple[Int32Array, dict[int, list[Logprobs]]]:
            event.synchronize()
            self._free.append(taken)
            return ids.numpy().copy(), _logprobs(logprobs, sampling)

        return wait

    def mark(self) -> torch.cuda.Event | None:
        """An event after everything launched so far; None on a CPU."""
        if not self._cuda:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def copy(self, values: Tensor) -> Tensor:
        """A tensor on the host, when what is launched next is done."""
        if not self._cuda:
            return values
        target = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        return target.copy_(values, non_blocking=True)

    def _made(self) -> tuple[Tensor, torch.cuda.Event]:
        buffer = torch.empty(self._num_rows, dtype=torch.int32, pin_memory=True)
        return buffer, torch.cuda.Event()


@dataclass(slots=True)
class DevicePendingStep:
    """A launched step.

    Attributes:
        tokens: its samples; None: not sampled yet, because masks arrive while it is computed.
        scores: the parts of `Scores`, on the host when `tokens` are.
        put: of a step without samples: takes a mask and its place in `SampleStep.late`.
        launch: launches its sampling; its logits are valid until the next step.
        computed: happens when they are there; None: they are.
    """

    tokens: HostTokens | None
    scores: Sequence[tuple[Tensor, ...]] = ()
    put: Callable[[int, Int32Array], None] | None = None
    launch: Callable[[], HostTokens] | None = None
    computed: torch.cuda.Event | None = None
    _output: StepOutput | None = field(default=None, init=False)

    def is_computed(self) -> bool:
        return self.computed is None or self.computed.query()

    def put_mask(self, index: int, mask: Int32Array) -> None:
        assert self.put is not None
        self.put(index, mask)

    def sample(self) -> None:
        assert self.launch is not None
        self.tokens = self.launch()

    def result(self) -> StepOutput:
        """The step's tokens and scores, once they are there."""
        if self._output is None:
            assert self.tokens is not None, "the step's masks have not arrived"
            ids, logprobs = self.tokens()
            scores = [Scores(*(part.numpy() for part in found)) for found in self.scores]
            ones = np.ones(len(ids), np.int32)
            self._output = StepOutput(ids[:, None], ones, logprobs, scores)
        return self._output


def _logprobs(
    found: SampledLogprobs | None, inputs: SamplingInputs | None
) -> dict[int, list[Logprobs]]:
    """`StepOutput.logprobs`."""
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
